#include <string>
#include <utility>
#include <vector>

#include "base/text.h"
#include "model/blocks.h"
#include "model/layers.h"

namespace charonia::model {
namespace {

class Mlp final : public Block {
 public:
  Mlp(const ModelConfig& config, const Shard& shard, std::string prefix, std::int64_t inter)
      : config_(config),
        shard_(shard),
        prefix_(std::move(prefix)),
        inter_(inter),
        activation_(activation_of(config)) {}

  void plan(Activations& activations) override {
    const auto& types = activations.precision;
    gate_up_ = activations.rows(2 * inter_, types.gemm_out);
    gated_ = activations.rows(inter_, types.activation);
  }

  void load(WeightLoader& loader) override {
    const auto& files = loader.files;
    const std::int64_t hidden = config_.hidden_units;
    const std::string number = cat(".", shard_.rank);
    const auto weight = [&](const char* name, std::int64_t n, std::int64_t k) {
      return WeightLoader::Wanted{prefix_ + name + number + ".weight", n, k};
    };
    std::vector<ops::HostMatrix> gate_up_bias, down_bias;
    if (config_.mlp_bias) {
      gate_up_bias = stacked(files.get(prefix_ + "w1" + number + ".bias", inter_, 1),
                             files.get(prefix_ + "w3" + number + ".bias", inter_, 1));
      // The ranks' outputs are summed, so only rank 0 adds the bias.
      if (shard_.rank == 0) down_bias = files.get(prefix_ + "w2.0.bias", hidden, 1);
    }
    gate_up_weight_ = loader.linear({{weight("w1", inter_, hidden), weight("w3", inter_, hidden)}}, gate_up_bias);
    down_weight_ = loader.linear({{weight("w2", hidden, inter_)}}, down_bias);
  }

  const ops::Linear* input_weight() const override { return gate_up_weight_.get(); }

  void issue(const StepContext& step, const ops::Tensor& out, const ops::Tensor& in) override {
    const auto gated = step.view(gated_);
    step.announce_linear(*down_weight_);
    step.gated_linear(gated, step.view(gate_up_), in, *gate_up_weight_, activation_);
    step.linear(out, gated, *down_weight_);
  }

 private:
  const ModelConfig& config_;
  const Shard& shard_;
  std::string prefix_;
  std::int64_t inter_;
  ops::Activation activation_;
  Activations::Part gate_up_, gated_;
  std::unique_ptr<ops::Linear> gate_up_weight_, down_weight_;
};

}  // namespace

std::unique_ptr<Block> make_mlp(const ModelConfig& config, const Shard& shard, std::string prefix, std::int64_t inter) {
  return std::make_unique<Mlp>(config, shard, std::move(prefix), inter);
}

}  // namespace charonia::model
