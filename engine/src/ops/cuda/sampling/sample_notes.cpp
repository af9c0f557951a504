#include "ops/cuda/sampling/sample_notes.h"

#include <algorithm>
#include <exception>

#include "base/text.h"
#include "ops/cuda/kernels/sample.h"

namespace charonia::cuda {

void SampleNotes::take(std::span<const ops::SampleRow> rows, int vocab) {
  vocab_ = vocab;
  masked_.clear();
  errors_.clear();
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const auto& row = rows[i];
    if (row.target >= vocab) {
      errors_[i] = cat("token id ", row.target, " to report is not in [0, ", vocab, ")");
    } else if (row.target < 0 && row.mask != nullptr) {
      masked_.push_back({i, row.mask});
    }
  }
}

std::int32_t SampleNotes::mask_of(std::size_t row) const {
  const auto found = std::ranges::lower_bound(masked_, row, {}, &Masked::row);
  return found == masked_.end() || found->row != row ? -1 : static_cast<std::int32_t>(found - masked_.begin());
}

void SampleNotes::wait(std::uint32_t* to) {
  const auto words = static_cast<std::size_t>(mask_words(vocab_));
  for (const auto& [row, mask] : masked_) {
    try {
      const auto allowed = mask->wait();
      if (allowed.size() == words) {
        std::ranges::copy(allowed, to);
      } else {
        errors_[row] = cat("a token mask of ", allowed.size(), " words for ", vocab_, " tokens: it must have ", words);
      }
    } catch (const std::exception& error) {
      errors_[row] = error.what();
    }
    if (errors_.contains(row)) std::fill_n(to, words, 0);
    to += words;
  }
}

std::string SampleNotes::why_no_token(std::size_t row) const {
  if (const auto found = errors_.find(row); found != errors_.end()) return found->second;
  return cat("no token is left to sample: ", mask_of(row) < 0 ? "" : "the token mask, ",
             "logit_bias, bad_words and min_tokens together ban all of them");
}

}  // namespace charonia::cuda
