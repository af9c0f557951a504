// The kind of each layer of a model, according to its configuration.
#pragma once

#include <cstdint>
#include <string_view>

#include "base/dtype.h"
#include "charonia/config.h"
#include "ops/operations.h"

namespace charonia::model {

// Throws Error(unsupported or invalid_argument) with key and value if the decoder cannot run this model.
void check_model(const ModelConfig& config);

// The type of activations and of weights that are not quantised. Throws Error(unsupported) if the configuration has
// none.
DType data_type(const ModelConfig& config);

ops::Activation activation_of(const ModelConfig& config);

// Whether the layer's feed-forward is a mixture of experts.
bool has_experts(const ModelConfig& config, int layer);
// Whether the layer rotates q and k.
bool has_rotation(const ModelConfig& config, int layer);
// The maximum number of columns of a router's output: a logit for each expert (in two halves with router_fp32) and the
// shared expert's gate.
std::int64_t router_columns(const ModelConfig& config);
// Number of keys that a query of the layer attends to; 0: all.
int window_of(const ModelConfig& config, int layer);

}  // namespace charonia::model
