#include "model/decoder_plan.h"

#include <algorithm>

#include "base/text.h"
#include "model/layers.h"

namespace charonia::model {

DecoderPlan::DecoderPlan(const ModelConfig& model, std::span<const LayerAttributes> layers, const Shard& of_rank,
                         const DeviceRules& rules, const ops::StepLimits& limits)
    : config(model), shard(of_rank), precision(rules.precision(data_type(model))) {
  for (std::size_t i = 0; i < layers.size(); ++i) add_layer(layers[i], i);

  const std::int64_t hidden = config.hidden_units;
  Activations activations(rules, data_type(model), limits);
  residual = activations.rows(hidden, precision.residual);
  delta = activations.rows(hidden, precision.gemm_out);
  normed = activations.rows(hidden, precision.activation);
  if (config.per_layer_embedding > 0) {
    per_layer_inputs = activations.rows(per_layer_columns(config) + config.per_layer_embedding, precision.gemm_out);
  }
  const auto kept = std::max(std::ssize(shard.kept_layers), shard.keeps_hidden ? std::ptrdiff_t{1} : 0);
  if (kept > 0) this->hidden = activations.rows(kept * hidden, DType::f32);
  if (kept > 0) this->kept = activations.kept_rows(kept * hidden, DType::f32);
  if (shard.is_mtp || is_head(config)) {
    previous = activations.rows(hidden, DType::f32);
    joined = activations.rows(2 * hidden, precision.activation);
  }
  if (is_head(config)) {
    this->hidden = config.norm_output ? activations.rows(hidden, DType::f32) : residual;
    const auto read = kHeadLayers * std::int64_t{config.target_hidden_units};
    states = activations.rows(read, DType::f32);
    fused = activations.rows(read, precision.activation);
  }
  kv_layout.block_len = limits.block_len;
  kv_layout.dtype = precision.kv;
  kv_layout.quant_bits = limits.kv_quant_bits;
  std::vector<std::size_t> cache_layers(layers.size());  // by layer
  for (const auto& part : parts) {
    activations.begin_block();
    part.block->plan(activations);
    if (auto cache = part.block->cache()) {
      const int window = part.block->window();
      if (window >= limits.max_positions) cache->kind = CacheKind::full;  // it would free nothing
      if (cache->kind == CacheKind::window) kv_layout.window = std::max(kv_layout.window, window);
      cache_layers[part.layer] = kv_layout.layers.size();
      if (part.kv_source > 0) {
        cache->storage = static_cast<int>(cache_layers[part.layer - static_cast<std::size_t>(part.kv_source)]);
      }
      kv_layout.layers.push_back(*cache);
    }
  }
  activations.begin_block();
  last_residual = activations.logits_rows(hidden, precision.residual);
  last_delta = activations.logits_rows(hidden, precision.gemm_out);
  last_normed = activations.logits_rows(hidden, precision.activation);
  const int gathered = pools(config) ? 1 : shard.ranks;
  logits = activations.logits_rows(is_head(config) ? config.vocab_size : gathered * shard.logits_share, DType::f32);
  if (gathered > 1 || is_head(config)) logits_share = activations.logits_rows(shard.logits_share, DType::f32);
  activation_bytes = activations.bytes();
}

void DecoderPlan::add_layer(const LayerAttributes& layer, std::size_t index) {
  const auto name = cat("layers.", index, "."), forward = name + "feed_forward.";
  const auto attention = name + "attention.";
  parts.push_back({.name = name + "attention",
                   .block = layer.mixer == "short_conv"   ? make_short_conv(config, shard, name + "conv.")
                            : layer.mixer == "delta_net"  ? make_delta_net(config, shard, name + "delta.")
                            : config.latent_size > 0      ? make_latent_attention(config, shard, attention)
                                                          : make_attention(config, shard, attention, layer),
                   .layer = index,
                   .kv_source = layer.kv_source});
  parts.push_back({.name = name + "ffn",
                   .block = has_experts(layer) ? make_experts(config, shard, forward)
                                       : make_mlp(config, shard, forward, shard.inter[index]),
                   .layer = index,
                   .same_input = config.parallel_block});
  if (config.per_layer_embedding > 0) {
    parts.push_back({.name = name + "per_layer",
                     .block = make_per_layer_embedding(config, name + "per_layer.", index, per_layer_inputs),
                     .layer = index,
                     .pre_norm = false});
  }
  if (config.layer_scalars) parts.back().scalar = name + "scalar.weight";
}

}  // namespace charonia::model
