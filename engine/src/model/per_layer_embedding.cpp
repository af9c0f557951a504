#include "model/per_layer_embedding.h"

#include <cmath>
#include <numbers>
#include <string>
#include <utility>

#include "model/blocks.h"
#include "model/layers.h"

namespace charonia::model {
namespace {

// Groups [first, first + count) of the inputs' columns.
ops::Tensor groups(const StepContext& step, const Activations::Part& inputs, std::int64_t size, std::int64_t first,
                   std::int64_t count) {
  auto out = step.view(inputs);
  out.data = static_cast<std::byte*>(out.data) + static_cast<std::size_t>(first * size) * size_of(out.dtype);
  out.cols = count * size;
  return out;
}

// All ranks compute the whole block, because its matrices are small.
class PerLayerEmbedding final : public Block {
 public:
  PerLayerEmbedding(const ModelConfig& config, std::string prefix, std::size_t layer, const Activations::Part& inputs)
      : config_(config), prefix_(std::move(prefix)), layer_(static_cast<std::int64_t>(layer)), inputs_(inputs) {}

  void plan(Activations& activations) override {
    gated_ = activations.rows(config_.per_layer_embedding, activations.precision.activation);
  }

  void load(WeightLoader& loader) override {
    const std::int64_t hidden = config_.hidden_units, size = config_.per_layer_embedding;
    gate_ = loader.linear({{{prefix_ + "gate.weight", size, hidden}}}, {});
    projection_ = loader.linear({{{prefix_ + "projection.weight", hidden, size}}}, {});
  }

  const ops::Linear* input_weight() const override { return gate_.get(); }
  bool whole_output() const override { return true; }

  void issue(const StepContext& step, const ops::Tensor& out, const ops::Tensor& in) override {
    const int size = config_.per_layer_embedding;
    const auto gated = step.view(gated_);
    step.linear(groups(step, inputs_, size, layer_, 1), in, *gate_);
    step.announce_linear(*projection_);
    step.ops.gated_activation(gated, groups(step, inputs_, size, layer_, 2), activation_of(config_));
    step.linear(out, gated, *projection_);
  }

 private:
  const ModelConfig& config_;
  std::string prefix_;
  std::int64_t layer_;
  const Activations::Part& inputs_;
  Activations::Part gated_;
  std::unique_ptr<ops::Linear> gate_, projection_;
};

}  // namespace

void PerLayerInputs::load(WeightLoader& loader) {
  const std::int64_t columns = per_layer_columns(config_);
  table_ = loader.embedding({"per_layer_embeddings.weight", config_.per_layer_vocab_size, columns}, true);
  loader.files.drop_pages();
  projection_ = loader.linear({{{"per_layer_projection.weight", columns, config_.hidden_units}}}, {});
  norm_ = loader.norm("per_layer_projection_norm.weight", config_.per_layer_embedding);
}

void PerLayerInputs::issue(const StepContext& step, const ops::Tensor& embedded) const {
  const int size = config_.per_layer_embedding;
  const auto inputs = groups(step, inputs_, size, 1, config_.num_layer);
  step.linear(inputs, embedded, *projection_);
  constexpr float kScale = 1 / std::numbers::sqrt2_v<float>;
  // norm(x / sqrt(hidden)) equals the norm of x with `hidden` times the epsilon.
  step.ops.add_embedding(inputs, *table_,
                         {.weight = data(norm_),
                          .size = size,
                          .eps = config_.norm_eps * static_cast<float>(config_.hidden_units),
                          .scale = kScale,
                          .table_scale = kScale * std::sqrt(static_cast<float>(size))});
}

std::unique_ptr<Block> make_per_layer_embedding(const ModelConfig& config, std::string prefix, std::size_t layer,
                                                const Activations::Part& inputs) {
  return std::make_unique<PerLayerEmbedding>(config, std::move(prefix), layer, inputs);
}

}  // namespace charonia::model
