// The hook of structured output: who says which tokens a sequence may sample next.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

namespace charonia {

// Asked before every sample, on a thread that the engine keeps for this, while the step's forward pass runs; so it costs
// a step nothing as long as it is done before the logits are. One object serves one sequence, one call at a time.
class TokenMaskProvider {
 public:
  virtual ~TokenMaskProvider() = default;

  // output: the tokens that the sequence has so far. mask [ceil(vocab_size / 32)], all zero when it comes: bit t % 32 of
  // word t / 32 is to be set for every token t that may follow. No bit at all, or an exception, ends the sequence with an
  // error that has the exception's text.
  virtual void fill(std::span<const std::int32_t> output, std::span<std::uint32_t> mask) = 0;

  // After fill(): where the mask has one token alone, that one and those that are certain to follow it. The engine takes
  // them without a step for each, except where each one's log probability is asked for, or single tokens are banned,
  // preferred or too early (bad_words, logit_bias, min_tokens): then fill() is called as ever.
  virtual std::span<const std::int32_t> forced() const { return {}; }

  // For another sequence of the same request (n, best_of), which begins anew.
  virtual std::unique_ptr<TokenMaskProvider> clone() const = 0;
};

}  // namespace charonia
