#include "model/memory_needs.h"

#include "model/activations.h"
#include "model/layers.h"
#include "model/rope.h"

namespace charonia::model {
namespace {

// Elements of the weights of all layers, in the weight type, and of the f32 vectors beside them.
struct Elements {
  std::int64_t weights = 0, floats = 0;
};

Elements elements_of(const ModelConfig& config, const Shard& shard) {
  const std::int64_t hidden = config.hidden_units, num_layer = config.num_layer;
  const bool first = shard.rank == 0;  // has the biases of GEMMs that are summed over the ranks
  const auto layers = layers_of(config);
  const std::int64_t experts = config.num_experts;
  Elements out;
  out.weights = num_layer * hidden * (shard.qkv_size + shard.q_size) + layers.dense * 3 * hidden * shard.inter +
                layers.experts * experts * hidden * (3 * shard.expert_inter + 1) +
                (config.vocab_size + shard.logits) * hidden;
  out.floats = num_layer * hidden * (config.post_norms ? 4 : 2) + hidden;
  if (config.qk_norm) out.floats += num_layer * 2 * config.size_per_head;
  if (config.attn_bias) out.floats += num_layer * shard.qkv_size;
  if (config.attn_output_bias && first) out.floats += num_layer * hidden;
  if (config.mlp_bias) out.floats += layers.dense * (2 * shard.inter + (first ? hidden : 0));
  return out;
}

}  // namespace

DeviceSizes sizes_of(const ops::Device& device) {
  return {[&device](DType weight) { return device.precision(weight); },
          [&device](const ops::KvLayout& layout) { return device.kv_block_bytes(layout); },
          [&device](const ops::ExpertsShape& shape, std::int64_t rows) {
            return device.experts_scratch_bytes(shape, rows);
          }};
}

MemoryNeeds memory_needs(const ModelConfig& config, const Shard& shard, const DeviceSizes& sizes,
                         const ops::StepLimits& limits) {
  const auto precision = sizes.precision(weight_dtype(config.weight_type));
  const auto elements = elements_of(config, shard);
  auto floats = static_cast<std::size_t>(elements.floats);
  if (config.logn_length > 0) floats += static_cast<std::size_t>(limits.max_positions);
  if (config.alibi) floats += static_cast<std::size_t>(shard.heads);
  const auto scratch = shard.expert_inter > 0 ? sizes.experts_scratch_bytes(
                                                    experts_shape(config, shard, precision.weight), limits.max_rows)
                                              : 0;
  return {.weights = static_cast<std::size_t>(elements.weights) * size_of(precision.weight) + floats * sizeof(float) +
                     RotaryTables(config, limits.max_positions, limits.max_rows).bytes(),
          .activations = Activations(config, shard, precision, limits, scratch).bytes,
          .kv_block = sizes.kv_block_bytes({.num_layers = config.num_layer,
                                            .kv_heads = shard.kv_heads,
                                            .head_dim = config.size_per_head,
                                            .block_len = limits.block_len,
                                            .dtype = precision.kv,
                                            .quant_bits = limits.kv_quant_bits})};
}

ops::ExpertsShape experts_shape(const ModelConfig& config, const Shard& shard, DType weight) {
  return {.count = config.num_experts,
          .top_k = config.experts_per_token,
          .hidden = config.hidden_units,
          .inter = shard.expert_inter,
          .weight = weight};
}

}  // namespace charonia::model
