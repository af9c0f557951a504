// The log probabilities of a prompt's tokens, collected over the steps that compute it.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "charonia/types.h"
#include "ops/step.h"

namespace charonia::runtime {

class PromptLogprobs {
 public:
  // top: most likely tokens at each place.
  PromptLogprobs(int prompt_tokens, int top);

  // What the row at `position`, with `tokens` [prompt and output so far], is to report: the token after it, and the
  // log probabilities and logits that `request` asks for.
  static ops::SampleRow row(std::int32_t position, std::span<const TokenId> tokens, const Request& request);
  // The report of that row. False where it was known: a row that is computed again, after a preemption, says the same
  // again.
  bool take(std::int32_t position, const ops::Sampled& sampled);
  // Moves them into a result. Nothing where the prompt is not computed whole.
  void move_to(Result& result);

 private:
  const int top_;
  std::vector<float> logprobs_;  // [prompt_tokens - 1]: of the token after each position
  std::vector<std::vector<TokenLogprob>> top_logprobs_;
  std::vector<bool> known_;
  std::int64_t missing_;
};

}  // namespace charonia::runtime
