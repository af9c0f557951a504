// The part of a model that one tensor-parallel rank computes: attention heads, columns of the feed-forward layers and
// rows of the vocabulary. charonia/weights/tensor_parallel.py splits a model; this class reads the split from the
// tensors' shapes.
#pragma once

#include <cstdint>

#include "charonia/config.h"
#include "model/manifest.h"
#include "ops/device.h"

namespace charonia::model {

struct Shard {
  int rank = 0, ranks = 1;
  int heads = 0, kv_heads = 0;    // with more ranks than KV heads, several ranks hold the same head; 1 latent
  std::int64_t q_size = 0;        // elements of the rank's q heads
  std::int64_t qkv_size = 0;      // with the rank's k and v heads; 0 with latents
  std::int64_t conv_channels = 0;  // of a short convolution; 0 if the model has none
  std::int64_t inter = 0;         // columns of a dense feed-forward layer; 0 if the model has none
  std::int64_t expert_inter = 0;  // columns of an expert; 0 if the model has none
  std::int64_t shared_inter = 0;  // columns of the shared expert; 0 if the model has none
  std::int64_t logits = 0;        // rows of the output layer, from token rank * logits_share on
  std::int64_t logits_share = 0;  // columns of a rank's part of the gathered logits; the last rank may use fewer

  // Throws Error like check_model(), and invalid_argument, with the tensor and its shape, if the ranks' shares do not
  // add up to the model.
  Shard(const ModelConfig& config, const Manifest& manifest, int rank);
};

// The shape of one rank's experts of a layer.
ops::ExpertsShape experts_shape(const ModelConfig& config, const Shard& shard, DType weight);

}  // namespace charonia::model
