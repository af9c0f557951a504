#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "base/text.h"
#include "charonia/error.h"
#include "model/blocks.h"
#include "model/layers.h"

namespace charonia::model {
namespace {

class Attention final : public Block {
 public:
  Attention(const ModelConfig& config, const Shard& shard, std::string prefix, const LayerAttributes& layer)
      : config_(config),
        shard_(shard),
        prefix_(std::move(prefix)),
        layer_(layer),
        shape_(attention_shape(config, shard, layer)) {}

  std::optional<ops::KvLayer> cache() const override {
    return ops::KvLayer{.kind = layer_.window > 0 ? CacheKind::window : CacheKind::full,
                        .kv_heads = shape_.kv_heads,
                        .k_dim = shape_.head_size,
                        .v_dim = shape_.head_size};
  }
  int window() const override { return layer_.window; }

  void plan(Activations& activations) override {
    const auto& types = activations.precision;
    qkv_ = activations.rows(shape_.qkv_size() + gate_size(), types.gemm_out);
    if (config_.qk_norm_rows) squares_ = activations.rows(2, DType::f32);
    attended_ = activations.rows(shape_.q_size(), types.activation);
  }

  void load(WeightLoader& loader) override {
    const auto& files = loader.files;
    const std::int64_t hidden = config_.hidden_units;
    const auto number = cat(".", shard_.rank);
    const auto qkv = prefix_ + "w_qkv" + number, out = prefix_ + "wo";
    cache_layer_ = loader.cache_layer;
    if (config_.qk_norm) load_norms(loader);
    if (loader.fp8_cache && config_.kv_scales != "none" && !shard_.is_mtp) {
      k_scales_ = load_scales(loader, "k_scale.weight");
      v_scales_ = load_scales(loader, "v_scale.weight");
    }
    if (config_.attention_sinks) {
      const auto sinks = files.get_vector(prefix_ + "sinks.weight", config_.head_num);
      sinks_ = loader.vector(std::span(sinks).subspan(static_cast<std::size_t>(shard_.rank * shard_.heads),
                                                      static_cast<std::size_t>(shard_.heads)));
    }
    std::vector<ops::HostMatrix> qkv_bias, out_bias;
    if (config_.attn_bias) qkv_bias = files.get(qkv + ".bias", shape_.projected(), 1);
    // The ranks' outputs are summed, so only rank 0 adds the bias.
    if (config_.attn_output_bias && shard_.rank == 0) out_bias = files.get(out + ".0.bias", hidden, 1);
    const auto inputs = is_head(config_) ? 2 * hidden : hidden;
    std::vector<WeightLoader::Wanted> wanted{{qkv + ".weight", shape_.projected(), inputs}};
    if (config_.attention_gate) {
      const auto gate = prefix_ + "w_gate" + number;
      wanted.push_back({gate + ".weight", shape_.q_size(), hidden});
      if (config_.attn_bias) qkv_bias = stacked(std::move(qkv_bias), files.get(gate + ".bias", shape_.q_size(), 1));
    }
    qkv_weight_ = loader.linear(wanted, qkv_bias);
    out_weight_ = loader.linear({{{out + number + ".weight", hidden, shape_.q_size()}}}, out_bias);
    set_params(loader.tables);
  }

  const ops::Linear* input_weight() const override { return qkv_weight_.get(); }

  void issue(const StepContext& step, const ops::Tensor& out, const ops::Tensor& in) override {
    const auto qkv_gate = step.view(qkv_), attended = step.view(attended_);
    const auto qkv = columns_of(qkv_gate, 0, shape_.qkv_size());
    step.linear(columns_of(qkv_gate, 0, shape_.projected() + gate_size()), in, *qkv_weight_);
    step.ops.rotary_store(qkv, rotary_params(step, qkv), step.cache, cache_layer_, shape_.heads);
    step.ops.attention(attended, qkv, step.cache, cache_layer_, shape_.heads, params_);
    if (config_.attention_gate) {
      step.ops.sigmoid_gate(attended, columns_of(qkv_gate, shape_.qkv_size(), shape_.q_size()));
    }
    step.linear(out, attended, *out_weight_);
  }

 private:
  std::int64_t gate_size() const { return config_.attention_gate ? shape_.q_size() : 0; }

  void load_norms(const WeightLoader& loader) {
    const std::int64_t dim = shape_.head_size;
    const auto load = [&](const char* name, int heads, int first, int count) {
      const auto weight = loader.norm_values(prefix_ + name, config_.qk_norm_rows ? heads * dim : dim);
      if (!config_.qk_norm_rows) return loader.vector(weight);
      return loader.vector(
          std::span(weight).subspan(static_cast<std::size_t>(first * dim), static_cast<std::size_t>(count * dim)));
    };
    const int kv_heads = kv_heads_of(config_, layer_);
    q_norm_ = load("q_norm.weight", config_.head_num, shard_.rank * shape_.heads, shape_.heads);
    if (!shape_.stores) return;
    k_norm_ = load("k_norm.weight", kv_heads, shard_.rank * kv_heads / shard_.ranks, shape_.kv_heads);
  }

  // The scales of an FP8 cache for the KV heads of the rank.
  Vector load_scales(const WeightLoader& loader, const char* name) const {
    const int all = kv_heads_of(config_, layer_);
    auto scales = loader.files.get_vector(prefix_ + name, config_.kv_scales == "head" ? all : 1);
    for (const float scale : scales) {
      if (!(scale > 0 && std::isfinite(scale))) {
        throw Error(ErrorCode::invalid_argument, cat("tensor ", prefix_, name, " has the scale ", scale,
                                                     ": it must be positive and finite; convert the model again"));
      }
    }
    scales.resize(static_cast<std::size_t>(all), scales.front());
    return loader.vector(std::span(scales).subspan(static_cast<std::size_t>(shard_.rank * all / shard_.ranks),
                                                   static_cast<std::size_t>(shape_.kv_heads)));
  }

  void set_params(const PositionTables& tables) {
    const bool local = layer_.rotation == "local";
    const auto& table = local ? tables.local_rotary : tables.rotary;
    rotary_ = {.cos_sin = layer_.rotation == "none" ? nullptr : data(table),
               .rotary_dim = local ? local_rotary_dim(config_) : config_.rotary_embedding,
               .interleaved = config_.rotary_interleaved,
               .q_norm = data(q_norm_),
               .k_norm = data(shape_.stores ? k_norm_ : q_norm_),  // rotary_store() needs both or none
               .norm_eps = config_.norm_eps,
               .norm_after = config_.qk_norm_after_rotary,
               .v_norm = config_.v_norm,
               .v_from_k = shape_.values_are_keys,
               .q_scale = data(tables.q_scales),
               .k_scales = data(k_scales_),
               .v_scales = data(v_scales_)};
    const float scale = config_.attention_scale > 0 ? config_.attention_scale
                                                    : 1.0F / std::sqrt(static_cast<float>(shape_.head_size));
    params_ = {.scale = scale,
               .window = layer_.window,
               .soft_cap = config_.attention_soft_cap,
               .alibi = data(tables.slopes),
               .sinks = data(sinks_),
               .v_scales = data(v_scales_)};
  }

  // If q and k have norms over all heads, issues the sums of their squares.
  ops::RotaryParams rotary_params(const StepContext& step, const ops::Tensor& qkv) const {
    auto out = rotary_;
    if (!config_.qk_norm_rows) return out;
    const auto squares = step.view(squares_);
    const std::int64_t k_size = shape_.kv_size();
    step.ops.qk_squares(squares, qkv, shape_.q_size(), k_size);
    step.sum_ranks(squares);
    out.squares = static_cast<const float*>(squares.data);
    // If ranks share KV heads, the sum counts every KV head equally often, so the mean is right.
    out.q_count = shape_.q_size() * shard_.ranks;
    out.k_count = k_size * shard_.ranks;
    return out;
  }

  const ModelConfig& config_;
  const Shard& shard_;
  std::string prefix_;
  LayerAttributes layer_;
  AttentionShape shape_;
  int cache_layer_ = 0;
  Activations::Part qkv_, squares_, attended_;
  std::unique_ptr<ops::Linear> qkv_weight_, out_weight_;  // q, k, v, and the gate of each q element if there is one
  Vector q_norm_, k_norm_;  // [head_size], or [all heads of the rank]; null if absent
  Vector sinks_;            // [heads of the rank]; null if absent
  Vector k_scales_, v_scales_;  // [KV heads of the rank]; null if absent
  ops::RotaryParams rotary_;
  ops::AttentionParams params_;
};

}  // namespace

std::unique_ptr<Block> make_attention(const ModelConfig& config, const Shard& shard, std::string prefix,
                                      const LayerAttributes& layer) {
  return std::make_unique<Attention>(config, shard, std::move(prefix), layer);
}

}  // namespace charonia::model
