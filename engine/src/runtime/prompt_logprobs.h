// The log probabilities of a prompt's tokens, collected over the steps that compute the prompt.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "charonia/types.h"
#include "ops/step.h"

namespace charonia::runtime {

class PromptLogprobs {
 public:
  // top: how many of the most likely tokens to keep at each position.
  PromptLogprobs(int prompt_tokens, int top);

  // Returns the row for `position`. It reports the next token of the prompt, and the log probabilities and logits that
  // `request` asks for. tokens: the prompt and the output so far.
  static ops::SampleRow row(std::int32_t position, std::span<const TokenId> tokens, const Request& request);
  // Stores the result of the row at `position`. Returns false if the result is already known: after a preemption, a row
  // is computed again.
  bool take(std::int32_t position, const ops::Sampled& sampled);
  // Moves the log probabilities into a result. Does nothing if the prompt is not completely computed.
  void move_to(Result& result);

 private:
  const int top_;
  std::vector<float> logprobs_;  // [prompt_tokens - 1], of the token after each position
  std::vector<std::vector<TokenLogprob>> top_logprobs_;
  std::vector<bool> known_;
  std::int64_t missing_;
};

}  // namespace charonia::runtime
