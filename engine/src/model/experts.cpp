#include <algorithm>
#include <array>
#include <string>
#include <utility>
#include <vector>

#include "base/text.h"
#include "model/blocks.h"
#include "model/layers.h"

namespace charonia::model {
namespace {

class Experts final : public Block {
 public:
  Experts(const ModelConfig& config, const Shard& shard, std::string prefix)
      : config_(config), shard_(shard), prefix_(std::move(prefix)), activation_(activation_of(config)) {
    if (shard.shared_inter > 0) shared_ = make_mlp(config, shard, prefix_ + "shared.", shard.shared_inter);
  }

  void plan(Activations& activations) override {
    const auto& types = activations.precision;
    router_ = activations.rows(router_columns(config_), DType::f32);
    scratch_ = activations.experts_scratch(experts_shape(config_, shard_, types.weight));
    if (!shared_) return;
    shared_out_ = activations.rows(config_.hidden_units, types.gemm_out);
    shared_->plan(activations);
  }

  void load(WeightLoader& loader) override {
    if (shared_) shared_->load(loader);
    load_router(loader);
    const std::int64_t hidden = config_.hidden_units, inter = shard_.expert_inter;
    std::vector<std::array<WeightLoader::Wanted, 3>> wanted;
    for (int e = 0; e < config_.num_experts; ++e) {
      const auto weight = [&](const char* name, std::int64_t n, std::int64_t k) {
        return WeightLoader::Wanted{cat(prefix_, "experts.", e, ".", name, ".", shard_.rank, ".weight"), n, k};
      };
      wanted.push_back({weight("w1", inter, hidden), weight("w3", inter, hidden), weight("w2", hidden, inter)});
    }
    experts_ = loader.experts(wanted, biases(loader), config_.experts_per_token);
  }

  void issue(const StepContext& step, const ops::Tensor& out, const ops::Tensor& in) override {
    auto router = step.view(router_);
    router.cols = router_weight_->out_features();
    step.ops.linear(router, in, *router_weight_);
    ops::SharedExpert shared;
    if (shared_) {
      shared.out = step.view(shared_out_);
      shared_->issue(step, shared.out, in);
    }
    if (config_.shared_expert_gate) {
      --router.cols;
      shared.gate = static_cast<const float*>(router.data) + router.cols;
      shared.gate_stride = router.stride;
    }
    step.ops.experts(out, in, router, *experts_, choice_, activation_, step.at(scratch_), shared);
  }

 private:
  // Of each expert; without data if the model has none.
  std::vector<ops::ExpertBiases> biases(const WeightLoader& loader) const {
    std::vector<ops::ExpertBiases> out(static_cast<std::size_t>(config_.num_experts));
    for (int e = 0; config_.expert_bias && e < config_.num_experts; ++e) {
      const auto bias = [&](const char* name, std::int64_t rows) {
        return loader.bias(cat(prefix_, "experts.", e, ".", name, ".", shard_.rank, ".bias"), rows);
      };
      auto& of_expert = out[static_cast<std::size_t>(e)];
      of_expert.gate = bias("w1", shard_.expert_inter);
      of_expert.up = bias("w3", shard_.expert_inter);
      // The ranks' outputs are summed, so only rank 0 adds the bias.
      if (shard_.rank == 0) of_expert.down = bias("w2", config_.hidden_units);
    }
    return out;
  }

  void load_router(WeightLoader& loader) {
    const auto& files = loader.files;
    const std::int64_t hidden = config_.hidden_units, experts = config_.num_experts;
    auto parts = files.get(prefix_ + "gate.weight", experts, hidden);
    const bool wider = loader.weight != DType::f32 &&
                       std::ranges::any_of(parts, [](const auto& part) { return part.dtype == DType::f32; });
    std::array<MadeMatrix, 2> split;
    if (config_.router_fp32 && wider) {
      split = halves(parts, loader.weight);
      parts = {split[0].matrix(), split[1].matrix()};
    }
    if (config_.shared_expert_gate) {
      parts = stacked(std::move(parts), files.get(prefix_ + "shared_gate.weight", 1, hidden));
    }
    std::vector<ops::HostMatrix> bias;
    if (config_.router_logit_bias) {
      bias.resize(parts.size());
      bias[0] = loader.bias(prefix_ + "gate.bias", experts);
    } else if (config_.router_bias) {
      router_bias_ = loader.vector(files.get_vector(prefix_ + "gate.bias", experts));
    }
    router_weight_ = loader.dense_linear(parts, bias);
    choice_ = {.top_k = config_.experts_per_token,
               .renormalize = config_.renormalize_experts,
               .score = config_.router_score == "sigmoid" ? ops::RouterScore::sigmoid : ops::RouterScore::softmax,
               .bias = data(router_bias_),
               .groups = config_.router_groups,
               .top_groups = config_.router_top_groups,
               .norm_min = config_.router_norm_min,
               .scale = config_.router_scale};
  }

  const ModelConfig& config_;
  const Shard& shard_;
  std::string prefix_;
  ops::Activation activation_;
  Activations::Part router_, scratch_, shared_out_;
  // Logits of the experts (in two halves if it stays fp32), then the shared expert's gate.
  std::unique_ptr<ops::Linear> router_weight_;
  Vector router_bias_;  // [experts]; null if absent, or if the logits have it
  ops::RouterParams choice_;
  std::unique_ptr<ops::Experts> experts_;
  std::unique_ptr<Block> shared_;  // null: no shared expert
};

}  // namespace

std::unique_ptr<Block> make_experts(const ModelConfig& config, const Shard& shard, std::string prefix) {
  return std::make_unique<Experts>(config, shard, std::move(prefix));
}

}  // namespace charonia::model
