// What one of the tensor-parallel ranks computes of a model: attention heads, columns of the feed-forward layer and
// rows of the vocabulary. charonia/weights/tensor_parallel.py splits the weights by the same rules.
#pragma once

#include <cstdint>

#include "charonia/config.h"

namespace charonia::model {

struct Shard {
  int rank = 0, ranks = 1;
  int heads = 0, kv_heads = 0;    // with more ranks than KV heads, several ranks hold the same one
  std::int64_t q_size = 0;        // elements of the rank's q heads
  std::int64_t qkv_size = 0;      // and with its k and v heads
  std::int64_t inter = 0;         // of a dense feed-forward layer; 0: the model has none
  std::int64_t expert_inter = 0;  // of an expert; 0: the model has none
  std::int64_t first_logit = 0;   // token id of the rank's first row of the output layer
  std::int64_t logits = 0;        // and how many it has
  std::int64_t logits_share = 0;  // columns of a rank's part of the gathered logits; the last one may fill fewer

  // Throws Error(invalid_argument), with the numbers, when the model cannot be split so.
  Shard(const ModelConfig& config, int rank, int ranks);
};

}  // namespace charonia::model
