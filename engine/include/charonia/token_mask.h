// The interface of structured output: decides which tokens a sequence may sample next.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

namespace charonia {

// Called before every sample, on a separate thread of the engine, while the forward pass runs. It does not delay the
// step if it finishes before the logits are ready. One object serves one sequence; calls are never concurrent.
class TokenMaskProvider {
 public:
  virtual ~TokenMaskProvider() = default;

  // output: the tokens that the sequence has so far, or would have with proposals (see propose()). mask [ceil(vocab_size / 32)], zero on entry: set bit t % 32 of
  // word t / 32 for every token t that may follow. If no bit is set or the call throws, the sequence ends with an error
  // that has the exception's text.
  virtual void fill(std::span<const std::int32_t> output, std::span<std::uint32_t> mask) = 0;

  // After fill(): if the mask allows exactly one token, that token and the tokens that are certain to follow it. The
  // engine accepts them without a step for each. It ignores them if log probabilities are requested, or if single
  // tokens are banned or biased (bad_words, logit_bias, min_tokens); then it calls fill() for every token.
  virtual std::span<const std::int32_t> forced() const { return {}; }

  // For speculation: returns at most `most` tokens that may follow the output. They are tokens that are certain, or
  // `guess` up to the first token that may not follow. After tokens were returned, fill() is called with an output that
  // has some of them at its end, and later with an output that has other tokens instead. Returns no tokens if this is
  // not supported. Called on the engine thread, before fill().
  virtual std::vector<std::int32_t> propose(std::span<const std::int32_t> /*output*/,
                                            std::span<const std::int32_t> /*guess*/, int /*most*/) {
    return {};
  }

  // For another sequence of the same request (n, best_of), which starts from the beginning.
  virtual std::unique_ptr<TokenMaskProvider> clone() const = 0;
};

}  // namespace charonia
