#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "base/text.h"
#include "model/blocks.h"

namespace charonia::model {
namespace {

class DeltaNet final : public Block {
 public:
  DeltaNet(const ModelConfig& config, const Shard& shard, std::string prefix)
      : config_(config), shard_(shard), prefix_(std::move(prefix)) {
    how_ = {.k_heads = shard.delta_k_heads,
            .v_heads = shard.delta_v_heads,
            .k_dim = config.delta_k_dim,
            .v_dim = config.delta_v_dim,
            .tiled = config.delta_tiled};
    v_size_ = std::int64_t{how_.v_heads} * how_.v_dim;
    constexpr std::int64_t kLine = 16;  // floats
    const auto columns = (config.conv_kernel - 1) * how_.columns();
    how_.state = (columns + kLine - 1) / kLine * kLine;
  }

  std::optional<ops::KvLayer> cache() const override {
    return ops::KvLayer{.kind = CacheKind::state, .state_floats = how_.state + how_.state_floats()};
  }

  void plan(Activations& activations) override {
    const auto& types = activations.precision;
    inputs_ = activations.rows(how_.columns() + v_size_, types.gemm_out);
    gates_ = activations.rows(std::int64_t{2} * how_.v_heads, DType::f32);
    mixed_ = activations.rows(how_.columns(), types.gemm_out);
    normed_ = activations.rows(v_size_, types.activation);
  }

  void load(WeightLoader& loader) override {
    const std::int64_t hidden = config_.hidden_units;
    const auto number = cat(".", shard_.rank);
    cache_layer_ = loader.cache_layer;
    const auto name = [&](const char* weight) { return prefix_ + weight + number + ".weight"; };
    in_weight_ = loader.linear({{{name("w_qkvz"), how_.columns() + v_size_, hidden}}}, {});
    gates_weight_ = loader.linear({{{name("w_ba"), std::int64_t{2} * how_.v_heads, hidden}}}, {});
    out_weight_ = loader.linear({{{name("w_out"), hidden, v_size_}}}, {});
    conv_ = loader.conv(name("conv_qkv"), how_.columns(), config_.conv_kernel);
    auto decay = of_rank(loader, "a_log.weight");
    for (auto& value : decay) value = config_.delta_decays ? -value : std::exp(value);
    decay_ = loader.vector(decay);
    dt_bias_ = loader.vector(of_rank(loader, "dt_bias.weight"));
    norm_ = loader.vector(loader.files.get_vector(prefix_ + "norm.weight", how_.v_dim));
    how_.decay = data(decay_);
    how_.dt_bias = data(dt_bias_);
  }

  void issue(const StepContext& step, const ops::Tensor& out, const ops::Tensor& in) override {
    const auto inputs = step.view(inputs_), gates = step.view(gates_), mixed = step.view(mixed_);
    const auto normed = step.view(normed_);
    step.linear(inputs, in, *in_weight_);
    step.linear(gates, in, *gates_weight_);
    const ops::ShortConvParams conv{.weight = data(conv_), .kernel = config_.conv_kernel, .silu = true};
    step.ops.short_conv(mixed, columns_of(inputs, 0, how_.columns()), conv, step.cache, cache_layer_);
    step.ops.delta_net(mixed, gates, how_, step.cache, cache_layer_);
    step.ops.gated_norm(normed, columns_of(mixed, how_.columns() - v_size_, v_size_),
                        columns_of(inputs, how_.columns(), v_size_), data(norm_), config_.norm_eps, how_.v_dim);
    step.linear(out, normed, *out_weight_);
  }

 private:
  // The rank's values of a vector [delta_v_heads].
  std::vector<float> of_rank(const WeightLoader& loader, const char* name) const {
    const auto all = loader.files.get_vector(prefix_ + name, config_.delta_v_heads);
    const auto first = all.begin() + std::ptrdiff_t{shard_.rank} * how_.v_heads;
    return {first, first + how_.v_heads};
  }

  const ModelConfig& config_;
  const Shard& shard_;
  std::string prefix_;
  int cache_layer_ = 0;
  ops::DeltaNetParams how_;
  std::int64_t v_size_ = 0;  // elements of the rank's v heads
  Activations::Part inputs_, gates_, mixed_, normed_;
  std::unique_ptr<ops::Linear> in_weight_, gates_weight_, out_weight_;
  Vector conv_;             // [kernel, columns of q, k and v]
  Vector decay_, dt_bias_;  // [v heads of the rank]
  Vector norm_;             // [delta_v_dim]
};

}  // namespace

std::unique_ptr<Block> make_delta_net(const ModelConfig& config, const Shard& shard, std::string prefix) {
  return std::make_unique<DeltaNet>(config, shard, std::move(prefix));
}

}  // namespace charonia::model
