// Per-layer embeddings (Gemma 4): each token has a further small embedding for every layer.
#pragma once

#include <memory>

#include "charonia/config.h"
#include "model/block.h"

namespace charonia::model {

// Computes the inputs of all layers, once in a step, from the embedding e of each token:
//   input of layer l = (norm(projection e / sqrt(hidden))_l + sqrt(size) * table[id]_l) / sqrt(2)
// The norm is over the `size` elements of a layer. On a GPU, the table stays in host memory, because a step reads only
// the rows of its tokens.
class PerLayerInputs {
 public:
  // inputs: [rows, (layers + 1) * size] GEMM type. The input of layer l is in group l + 1. The layer may overwrite
  // group l, which no later layer reads.
  PerLayerInputs(const ModelConfig& config, const Activations::Part& inputs) : config_(config), inputs_(inputs) {}

  void load(WeightLoader& loader);
  // embedded [rows, hidden] activation type
  void issue(const StepContext& step, const ops::Tensor& embedded) const;

 private:
  const ModelConfig& config_;
  const Activations::Part& inputs_;
  std::unique_ptr<ops::Embedding> table_;  // [per_layer_vocab_size, layers * size]
  std::unique_ptr<ops::Linear> projection_;
  Vector norm_;  // [size]
};

}  // namespace charonia::model
