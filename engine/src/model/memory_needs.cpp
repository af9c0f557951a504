#include "model/memory_needs.h"

#include "base/text.h"
#include "model/activations.h"
#include "model/layers.h"
#include "model/rope.h"

namespace charonia::model {
DeviceSizes sizes_of(const ops::Device& device) {
  return {[&device](DType weight) { return device.precision(weight); },
          [&device](const ops::KvLayout& layout) { return device.kv_block_bytes(layout); },
          [&device](const ops::ExpertsShape& shape, std::int64_t rows) {
            return device.experts_scratch_bytes(shape, rows);
          }};
}

MemoryNeeds memory_needs(const ModelConfig& config, const Manifest& manifest, const Shard& shard,
                         const DeviceSizes& sizes, const ops::StepLimits& limits) {
  const auto precision = sizes.precision(data_type(config));
  auto elements = manifest.elements(shard.rank);
  // A router that stays fp32 is stored as two halves.
  for (int i = 0; config.router_fp32 && precision.weight != DType::f32 && i < config.num_layer; ++i) {
    if (!has_experts(config, i)) continue;
    const auto& router = manifest.tensor(cat("layers.", i, ".feed_forward.gate.weight"));
    if (router.dtype == DType::f32) elements.matrices += router.rows * router.cols;
  }
  auto floats = static_cast<std::size_t>(elements.vectors);
  if (has_q_scales(config)) floats += static_cast<std::size_t>(limits.max_positions);
  if (config.alibi) floats += static_cast<std::size_t>(shard.heads);
  const auto scratch = shard.expert_inter > 0 ? sizes.experts_scratch_bytes(
                                                    experts_shape(config, shard, precision.weight), limits.max_rows)
                                              : 0;
  return {.weights = static_cast<std::size_t>(elements.matrices) * size_of(precision.weight) +
                     static_cast<std::size_t>(elements.quantised_bytes) + floats * sizeof(float) +
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
