// The device that computes nothing, as the runtime sees it: for measuring everything around a model.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <vector>

#include "ops/ops.h"

namespace charonia::ops {

struct NullOptions {
  int vocab = 0;                         // of the logits
  std::vector<std::int32_t> words;       // the tokens that it gives, at least one, each in [0, vocab)
  std::chrono::nanoseconds step_time{};  // that a step takes at least; 0: none
};

// The token at a position is one of the words, a function of the seed and the position alone; of the position alone
// where sampling is greedy. No word is given that the row's bans, mask, bias or penalties leave no room for: then it is
// the token that is left with the largest of the logits, which are numbers in [0, 1) by position and id, and 9 more for
// the word. Log probabilities are those of these logits. Temperature, top_k, top_p and min_p change nothing.
// Weights and KV blocks take no memory. A step begins when the one before it is done, as on a GPU.
std::unique_ptr<Ops> make_null_ops(NullOptions options, int ranks = 1, int rank = 0);

}  // namespace charonia::ops
