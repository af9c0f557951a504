#include <algorithm>
#include <array>
#include <cmath>
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
    if (config_.expert_norms) {
      router_in_ = activations.rows(config_.hidden_units, types.activation);
      experts_in_ = activations.rows(config_.hidden_units, types.activation);
      experts_out_ = activations.rows(config_.hidden_units, types.gemm_out);
      sum_ = activations.rows(config_.hidden_units, types.residual);
    }
    scratch_ = activations.experts_scratch(experts_shape(config_, shard_, types.weight));
    if (!shared_) return;
    shared_out_ = activations.rows(config_.hidden_units, types.gemm_out);
    shared_->plan(activations);
  }

  void load(WeightLoader& loader) override {
    if (shared_) shared_->load(loader);
    load_router(loader);
    if (config_.expert_norms) load_norms(loader);
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

  bool whole_output() const override { return config_.expert_norms; }

  void issue(const StepContext& step, const ops::Tensor& out, const ops::Tensor& in) override {
    if (config_.expert_norms) return issue_with_norms(step, out, in);
    auto router = step.view(router_);
    router.cols = router_weight_->out_features();
    step.linear(router, in, *router_weight_);
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
  // out = norm(shared expert of in) + norm(experts of norm(residual)); the router reads the residual with its own norm.
  void issue_with_norms(const StepContext& step, const ops::Tensor& out, const ops::Tensor& in) {
    const auto router = step.view(router_), router_in = step.view(router_in_), experts_in = step.view(experts_in_);
    const auto shared_out = step.view(shared_out_), experts_out = step.view(experts_out_), sum = step.view(sum_);
    const ops::Tensor none{}, unwritten{nullptr, out.dtype, out.rows, out.cols, out.stride};
    const auto norm = [&](const Vector& weight) {
      return ops::NormParams{.weight = data(weight), .eps = config_.norm_eps};
    };
    const auto norm_of_delta = [&](const Vector& weight, float kept) {
      return ops::NormParams{.eps = config_.norm_eps, .delta_weight = data(weight), .residual_scale = kept};
    };
    shared_->issue(step, shared_out, in);
    step.sum_ranks(shared_out);
    step.ops.rms_norm(router_in, step.residual, none, norm(router_norm_));
    step.linear(router, router_in, *router_weight_);
    step.ops.rms_norm(experts_in, step.residual, none, norm(experts_norm_));
    step.ops.experts(experts_out, experts_in, router, *experts_, choice_, activation_, step.at(scratch_));
    step.sum_ranks(experts_out);
    step.ops.rms_norm(unwritten, sum, shared_out, norm_of_delta(shared_post_norm_, 0));
    step.ops.rms_norm(out, sum, experts_out, norm_of_delta(experts_post_norm_, 1));
  }

  void load_norms(const WeightLoader& loader) {
    const std::int64_t hidden = config_.hidden_units;
    auto scales = loader.files.get_vector(prefix_ + "gate_norm.weight", hidden);
    for (auto& scale : scales) scale /= std::sqrt(static_cast<float>(hidden));
    router_norm_ = loader.vector(scales);
    experts_norm_ = loader.norm(prefix_ + "experts_norm.weight", hidden);
    experts_post_norm_ = loader.norm(prefix_ + "experts_post_norm.weight", hidden);
    shared_post_norm_ = loader.norm(prefix_ + "shared_post_norm.weight", hidden);
  }

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
    if (shard_.ranks > 1) router_weight_->keep_order();  // all ranks choose the same experts
    if (config_.expert_scales) {
      expert_scales_ = loader.vector(files.get_vector(prefix_ + "expert_scales.weight", experts));
    }
    choice_ = {.top_k = config_.experts_per_token,
               .renormalize = config_.renormalize_experts,
               .score = config_.router_score == "sigmoid" ? ops::RouterScore::sigmoid : ops::RouterScore::softmax,
               .bias = data(router_bias_),
               .groups = config_.router_groups,
               .top_groups = config_.router_top_groups,
               .norm_min = config_.router_norm_min,
               .scale = config_.router_scale,
               .expert_scale = data(expert_scales_)};
  }

  const ModelConfig& config_;
  const Shard& shard_;
  std::string prefix_;
  ops::Activation activation_;
  Activations::Part router_, scratch_, shared_out_;
  Activations::Part router_in_, experts_in_, experts_out_, sum_;  // with expert_norms
  // Logits of the experts (in two halves if it stays fp32), then the shared expert's gate.
  std::unique_ptr<ops::Linear> router_weight_;
  Vector router_bias_;  // [experts]; null if absent, or if the logits have it
  Vector expert_scales_;  // [experts]; null if absent
  // [hidden], with expert_norms. router_norm_ includes the factor 1 / sqrt(hidden).
  Vector router_norm_, experts_norm_, experts_post_norm_, shared_post_norm_;
  ops::RouterParams choice_;
  std::unique_ptr<ops::Experts> experts_;
  std::unique_ptr<Block> shared_;  // null: no shared expert
};

}  // namespace

std::unique_ptr<Block> make_experts(const ModelConfig& config, const Shard& shard, std::string prefix) {
  return std::make_unique<Experts>(config, shard, std::move(prefix));
}

}  // namespace charonia::model
