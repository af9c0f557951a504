// Checks and derived values of a model's configuration.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "base/dtype.h"
#include "charonia/config.h"
#include "model/generated/layer_attributes.h"
#include "ops/operations.h"

namespace charonia::model {

// Throws Error(unsupported or invalid_argument) with key and value if the decoder cannot run this model.
void check_model(const ModelConfig& config);
// The same for the layers.
void check_layers(const ModelConfig& config, std::span<const LayerAttributes> layers);

// The type of activations and of weights that are not quantised. Throws Error(unsupported) if the configuration has
// none.
DType data_type(const ModelConfig& config);

// Columns of the per-layer embeddings of a token: those of all layers.
inline std::int64_t per_layer_columns(const ModelConfig& config) {
  return std::int64_t{config.num_layer} * config.per_layer_embedding;
}

// Whether the model gives embeddings or scores instead of tokens.
inline bool pools(const ModelConfig& config) { return config.model_task != "generate"; }
constexpr int kHeadLayers = 3;  // the layers whose inputs an EAGLE-3 head reads
// Whether the model is an EAGLE-3 head (decoder.h).
inline bool is_head(const ModelConfig& config) { return config.target_hidden_units > 0; }
// The width of a row that the decoder computes for a token: its logits, hidden state or label logits.
std::int64_t output_columns(const ModelConfig& config);

ops::Activation activation_of(const ModelConfig& config);

// Whether the layer's feed-forward is a mixture of experts.
inline bool has_experts(const LayerAttributes& layer) { return layer.ffn == "experts"; }
// The maximum number of columns of a router's output: a logit for each expert (in two halves with router_fp32) and the
// shared expert's gate.
std::int64_t router_columns(const ModelConfig& config);

}  // namespace charonia::model
