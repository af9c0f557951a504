// A device that computes nothing: for measuring everything except the model.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <vector>

#include "ops/ops.h"

namespace charonia::ops {

struct NullOptions {
  int vocab = 0;                         // size of the vocabulary
  std::vector<std::int32_t> words;       // the tokens that it samples, at least one, each in [0, vocab)
  std::chrono::nanoseconds step_time{};  // minimum time of a step
};

// The token at a position is a word from `words`: a function of seed and position, or of the position only with greedy
// sampling. If the row's bans, mask, bias or penalties exclude that word, the token is the remaining one with the
// largest logit. Logits are numbers in [0, 1) by position and id, plus 9 for the word. Log probabilities follow from
// these logits. Temperature, top_k, top_p and min_p have no effect. Weights and KV blocks take no memory. A step begins
// when the previous step is done, as on a GPU.
std::unique_ptr<Ops> make_null_ops(NullOptions options, int ranks = 1, int rank = 0);

}  // namespace charonia::ops
