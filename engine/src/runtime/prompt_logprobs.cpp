#include "runtime/prompt_logprobs.h"

#include <algorithm>
#include <utility>

namespace charonia::runtime {

PromptLogprobs::PromptLogprobs(int prompt_tokens, int top)
    : top_(top),
      logprobs_(static_cast<std::size_t>(prompt_tokens) - 1),
      top_logprobs_(top > 0 ? logprobs_.size() : 0),
      known_(logprobs_.size()),
      missing_(static_cast<std::int64_t>(logprobs_.size())) {}

ops::SampleRow PromptLogprobs::row(std::int32_t position, std::span<const TokenId> tokens, const Request& request) {
  ops::SampleRow row;
  row.target = tokens[static_cast<std::size_t>(position) + 1];
  row.logprobs = request.sampling.prompt_logprobs;
  row.logits = request.prompt_logits;
  return row;
}

bool PromptLogprobs::take(std::int32_t position, const ops::Sampled& sampled) {
  const auto at = static_cast<std::size_t>(position);
  if (at >= known_.size() || known_[at]) return false;
  known_[at] = true;
  --missing_;
  logprobs_[at] = sampled.logprob;
  if (top_ > 0) {
    for (const auto& [id, logprob] : sampled.top) top_logprobs_[at].push_back({id, logprob});
  }
  return true;
}

void PromptLogprobs::move_to(Result& result) {
  if (missing_ > 0) return;
  result.prompt_logprobs = std::move(logprobs_);
  result.prompt_top_logprobs = std::move(top_logprobs_);
}

}  // namespace charonia::runtime
