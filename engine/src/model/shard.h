// The part of a model that one tensor-parallel rank computes: attention heads, columns of the feed-forward layers and
// rows of the vocabulary. charonia/weights/tensor_parallel.py splits a model; this class reads the split from the
// tensors' shapes.
#pragma once

#include <cstdint>
#include <vector>

#include "charonia/config.h"
#include "model/generated/layer_attributes.h"
#include "model/manifest.h"
#include "ops/device.h"

namespace charonia::model {

struct Shard {
  int rank = 0, ranks = 1;
  int heads = 0;                    // attention heads
  std::vector<std::int64_t> inter;  // by layer: columns of its dense feed-forward; 0 if it has experts
  std::int64_t conv_channels = 0;   // of a short convolution; 0 if the model has none
  int delta_k_heads = 0, delta_v_heads = 0;  // of a gated delta net; 0 if the model has none
  std::int64_t expert_inter = 0;  // columns of an expert; 0 if the model has none
  std::int64_t shared_inter = 0;  // columns of the shared expert; 0 if the model has none
  std::int64_t logits = 0;        // rows of the output layer, from token rank * logits_share on. If the model gives
                                  // embeddings or scores: output_columns(), on every rank
  bool is_mtp = false;            // of Manifest::mtp(): the output layer is the model's
  bool keeps_hidden = false;      // an MTP layer reads the hidden states of all rows (decoder.h)
  std::vector<int> kept_layers;   // Manifest::kept_layers()
  std::int64_t logits_share = 0;  // columns of a rank's part of the gathered logits; the last rank may use fewer

  // Throws Error like check_model(), and invalid_argument, with the tensor and its shape, if the ranks' shares do not
  // add up to the model.
  Shard(const ModelConfig& config, const Manifest& manifest, int rank);
};

// The shape of one rank's attention in a layer.
struct AttentionShape {
  int heads = 0, kv_heads = 0;  // with more ranks than KV heads, several ranks hold the same head
  int head_size = 0;
  bool stores = true;  // has keys and values of its own
  bool values_are_keys = false;

  std::int64_t q_size() const { return std::int64_t{heads} * head_size; }
  std::int64_t kv_size() const { return std::int64_t{kv_heads} * head_size; }
  std::int64_t qkv_size() const { return q_size() + (stores ? 2 * kv_size() : 0); }
  std::int64_t projected() const { return qkv_size() - (stores && values_are_keys ? kv_size() : 0); }  // rows of w_qkv
};
AttentionShape attention_shape(const ModelConfig& config, const Shard& shard, const LayerAttributes& layer);
// The KV heads of all ranks, and the elements per head.
int kv_heads_of(const ModelConfig& config, const LayerAttributes& layer);
int head_size_of(const ModelConfig& config, const LayerAttributes& layer);

// The shape of one rank's experts of a layer.
ops::ExpertsShape experts_shape(const ModelConfig& config, const Shard& shard, DType weight);

}  // namespace charonia::model
