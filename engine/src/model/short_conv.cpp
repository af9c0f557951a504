#include <string>
#include <utility>
#include <vector>

#include "base/text.h"
#include "model/blocks.h"

namespace charonia::model {
namespace {

class ShortConv final : public Block {
 public:
  ShortConv(const ModelConfig& config, const Shard& shard, std::string prefix)
      : config_(config), shard_(shard), prefix_(std::move(prefix)) {}

  std::optional<ops::KvLayer> cache() const override {
    return ops::KvLayer{.kind = CacheKind::state, .state_floats = (config_.conv_kernel - 1) * shard_.conv_channels};
  }

  void plan(Activations& activations) override {
    const auto& types = activations.precision;
    inputs_ = activations.rows(3 * shard_.conv_channels, types.gemm_out);
    mixed_ = activations.rows(shard_.conv_channels, types.activation);
  }

  void load(WeightLoader& loader) override {
    const auto& files = loader.files;
    const std::int64_t hidden = config_.hidden_units, channels = shard_.conv_channels;
    const auto number = cat(".", shard_.rank);
    cache_layer_ = loader.cache_layer;
    const auto in = prefix_ + "w_in" + number, out = prefix_ + "w_out", conv = prefix_ + "w_conv" + number;
    std::vector<ops::HostMatrix> in_bias, out_bias;
    if (config_.conv_bias) {
      in_bias = files.get(in + ".bias", 3 * channels, 1);
      // The ranks' outputs are summed, so only rank 0 adds the bias.
      if (shard_.rank == 0) out_bias = files.get(out + ".0.bias", hidden, 1);
      bias_ = loader.vector(files.get_vector(conv + ".bias", channels));
    }
    in_weight_ = loader.linear({{{in + ".weight", 3 * channels, hidden}}}, in_bias);
    out_weight_ = loader.linear({{{out + number + ".weight", hidden, channels}}}, out_bias);
    weight_ = loader.conv(conv + ".weight", channels, config_.conv_kernel);
  }

  const ops::Linear* input_weight() const override { return in_weight_.get(); }

  void issue(const StepContext& step, const ops::Tensor& out, const ops::Tensor& in) override {
    const auto inputs = step.view(inputs_), mixed = step.view(mixed_);
    step.linear(inputs, in, *in_weight_);
    const ops::ShortConvParams how{
        .weight = data(weight_), .bias = data(bias_), .kernel = config_.conv_kernel, .gated = true};
    step.ops.short_conv(mixed, inputs, how, step.cache, cache_layer_);
    step.linear(out, mixed, *out_weight_);
  }

 private:
  const ModelConfig& config_;
  const Shard& shard_;
  std::string prefix_;
  int cache_layer_ = 0;
  Activations::Part inputs_, mixed_;
  std::unique_ptr<ops::Linear> in_weight_, out_weight_;
  Vector weight_;  // [kernel, channels of the rank]
  Vector bias_;    // [channels of the rank]; null if absent
};

}  // namespace

std::unique_ptr<Block> make_short_conv(const ModelConfig& config, const Shard& shard, std::string prefix) {
  return std::make_unique<ShortConv>(config, shard, std::move(prefix));
}

}  // namespace charonia::model
