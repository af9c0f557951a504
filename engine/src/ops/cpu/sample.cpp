#include "ops/cpu/sample.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "base/text.h"
#include "charonia/error.h"
#include "ops/broken_logits.h"

namespace charonia::ops::cpu {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

std::uint64_t mix(std::uint64_t z) {
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9U;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebU;
  return z ^ (z >> 31);
}

// A row whose logits are changed, with the original values.
class Row {
 public:
  Row(std::span<float> logits, const SampleRow& row, SampleScratch& scratch)
      : logits_(logits), row_(row), scratch_(scratch) {}

  void change() {
    scratch_.changed.clear();
    for (const auto& [id, bias] : row_.bias) set(id, logits_[index(id)] + bias);
    for (const auto id : row_.banned) set(id, -kInfinity);
    if (row_.repetition_penalty != 1) {
      begin_counting();
      for (const auto tokens : {row_.prompt, row_.output}) {
        for (const auto id : tokens) {
          if (!count(id)) continue;
          const float logit = logits_[index(id)];
          set(id, logit > 0 ? logit / row_.repetition_penalty : logit * row_.repetition_penalty);
        }
      }
    }
    if (row_.presence_penalty != 0 || row_.frequency_penalty != 0) {
      begin_counting();
      for (const auto id : row_.output) count(id);
      for (const auto id : row_.output) {
        auto& n = scratch_.count[index(id)];
        if (n == 0) continue;
        set(id, logits_[index(id)] - row_.presence_penalty - row_.frequency_penalty * static_cast<float>(n));
        n = 0;
      }
    }
  }

  void require_token(std::int32_t id) const { index(id); }

  void restore() {
    for (auto change = scratch_.changed.rbegin(); change != scratch_.changed.rend(); ++change) {
      logits_[index(change->first)] = change->second;
    }
  }

 private:
  std::size_t index(std::int32_t id) const {
    if (id < 0 || static_cast<std::size_t>(id) >= logits_.size()) {
      throw Error(ErrorCode::internal,
                  cat("a sampling parameter has token id ", id, ", which is not in [0, ", logits_.size(), ")"));
    }
    return static_cast<std::size_t>(id);
  }

  void set(std::int32_t id, float logit) {
    float& at = logits_[index(id)];
    scratch_.changed.emplace_back(id, at);
    at = logit;
  }

  void begin_counting() {
    auto& s = scratch_;
    if (s.seen.size() < logits_.size()) {
      s.seen.resize(logits_.size(), 0);
      s.count.resize(logits_.size(), 0);
    }
    if (++s.mark == 0) {
      std::fill(s.seen.begin(), s.seen.end(), 0);
      s.mark = 1;
    }
  }

  // Returns whether this is the first time.
  bool count(std::int32_t id) {
    const auto i = index(id);
    const bool first = scratch_.seen[i] != scratch_.mark;
    scratch_.seen[i] = scratch_.mark;
    scratch_.count[i] = first ? 1 : scratch_.count[i] + 1;
    return first;
  }

  std::span<float> logits_;
  const SampleRow& row_;
  SampleScratch& scratch_;
};

constexpr std::size_t kMaskBits = 32;

// Returns the logits of the allowed tokens, in order. They are in `memory`.
std::span<const float> keep_allowed(std::span<const float> logits, std::span<const std::uint32_t> mask,
                                    std::vector<float>& memory) {
  const auto n = logits.size();
  if (mask.size() != (n + kMaskBits - 1) / kMaskBits) {
    throw Error(ErrorCode::internal, cat("a token mask of ", mask.size(), " words for ", n, " tokens: it must have ",
                                         (n + kMaskBits - 1) / kMaskBits));
  }
  memory.resize(std::max(memory.size(), n + kMaskBits));
  auto* to = memory.data();
  for (std::size_t w = 0; w < mask.size(); ++w) {
    const float* from = logits.data() + w * kMaskBits;
    const auto left = n - w * kMaskBits;
    auto bits = left < kMaskBits ? mask[w] & ((1U << left) - 1) : mask[w];
    // Copies runs of allowed tokens. A copy of constant size is faster, and the next run overwrites the rest.
    while (bits != 0) {
      const auto first = static_cast<std::size_t>(std::countr_zero(bits));
      const auto run = static_cast<std::size_t>(std::countr_one(bits >> first));
      std::copy_n(from + first, first + kMaskBits <= left ? kMaskBits : run, to);
      to += run;
      bits = first + run < kMaskBits ? bits >> (first + run) << (first + run) : 0;
    }
  }
  return {memory.data(), to};
}

// Returns the token with this index among the allowed tokens. An empty mask allows all.
std::int32_t allowed_token(std::span<const std::uint32_t> mask, std::int32_t index) {
  if (mask.empty()) return index;
  std::size_t w = 0;
  for (int count = 0; (count = std::popcount(mask[w])) <= index; ++w) index -= count;
  auto bits = mask[w];
  for (; index > 0; --index) bits &= bits - 1;
  return static_cast<std::int32_t>(w * kMaskBits) + std::countr_zero(bits);
}

// The n most likely tokens, most likely first.
void find_top(Sampled& out, std::span<const float> logits, int n, double log_sum, std::vector<TokenLogit>& heap) {
  const auto count = std::min(static_cast<std::size_t>(n), logits.size());
  heap.clear();
  if (count == 0) return;
  // A heap of the most likely tokens so far, with the least likely on top. Ids ascend, so an equal logit never replaces
  // an earlier one.
  for (std::size_t i = 0; i < logits.size(); ++i) {
    if (heap.size() == count && logits[i] <= heap.front().logit) continue;
    if (heap.size() == count) {
      std::pop_heap(heap.begin(), heap.end(), is_more_likely);
      heap.pop_back();
    }
    heap.push_back({logits[i], static_cast<std::int32_t>(i)});
    std::push_heap(heap.begin(), heap.end(), is_more_likely);
  }
  std::sort_heap(heap.begin(), heap.end(), is_more_likely);
  for (const auto& c : heap) out.top.emplace_back(c.id, static_cast<float>(static_cast<double>(c.logit) - log_sum));
}

// logits: of the tokens that the mask allows.
float checked_maximum(std::span<const float> logits, std::span<const std::uint32_t> mask, const Kernels& kernels) {
  const float greatest = kernels.maximum(logits.data(), static_cast<std::int64_t>(logits.size()));
  if (std::isnan(greatest) || greatest == kInfinity) {
    const auto at = std::find_if(logits.begin(), logits.end(), [](float x) { return std::isnan(x) || x == kInfinity; });
    const auto index = static_cast<std::int32_t>(at - logits.begin());
    throw Error(ErrorCode::internal, broken_logit(allowed_token(mask, index), *at));
  }
  return greatest;
}

}  // namespace

double random_unit(std::uint64_t seed, std::int64_t position) {
  constexpr std::uint64_t kGamma = 0x9e3779b97f4a7c15U;
  const auto bits = mix(mix(seed + kGamma) + (static_cast<std::uint64_t>(position) + 1) * kGamma);
  return static_cast<double>(bits >> 11) * 0x1p-53;
}

Sampled sample_row(std::span<float> logits, const SampleRow& row, const Kernels& kernels, SampleScratch& scratch) {
  Sampled out;
  float greatest = checked_maximum(logits, {}, kernels);
  double log_sum = 0;
  if (row.logprobs >= 0) {
    log_sum = static_cast<double>(greatest) +
              std::log(kernels.exp_sum(nullptr, logits.data(), greatest, 1, static_cast<std::int64_t>(logits.size())));
    find_top(out, logits, row.logprobs, log_sum, scratch.top);
  }
  const auto report = [&](std::int32_t token) {
    out.token = token;
    if (row.logprobs < 0) return;
    out.logprob = static_cast<float>(static_cast<double>(logits[static_cast<std::size_t>(token)]) - log_sum);
  };

  Row changed(logits, row, scratch);
  if (row.target >= 0) {
    changed.require_token(row.target);
    report(row.target);
    if (row.logits) out.logits.assign(logits.begin(), logits.end());
    return out;
  }
  changed.change();
  std::span<const float> allowed = logits;
  std::span<const std::uint32_t> mask;
  if (row.mask != nullptr) {
    mask = row.mask->wait();
    allowed = keep_allowed(logits, mask, scratch.allowed);
  }
  if (!scratch.changed.empty() || row.mask != nullptr) greatest = checked_maximum(allowed, mask, kernels);
  if (greatest == -kInfinity) {
    throw Error(ErrorCode::invalid_argument,
                cat("no token is left to sample: ", row.mask == nullptr ? "" : "the token mask, ",
                    "logit_bias, bad_words and min_tokens together ban all of them"));
  }
  std::int32_t token = 0;
  if (row.temperature == 0) {
    token = static_cast<std::int32_t>(std::find(allowed.begin(), allowed.end(), greatest) - allowed.begin());
  } else {
    auto& candidates = scratch.candidates;
    candidates.begin(allowed, greatest, row.temperature, kernels);
    if (row.top_k > 0) candidates.keep_top_k(row.top_k);
    if (row.top_p < 1) candidates.keep_top_p(static_cast<double>(row.top_p));
    if (row.min_p > 0) candidates.keep_min_p(row.min_p);
    token = candidates.draw(random_unit(row.seed, row.position));
  }
  token = allowed_token(mask, token);
  if (row.logprobs >= 0) changed.restore();
  report(token);
  return out;
}

}  // namespace charonia::ops::cpu
