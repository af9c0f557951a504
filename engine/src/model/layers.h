// What kind each layer of a model is, by its configuration.
#pragma once

#include <cstdint>

#include "base/dtype.h"
#include "charonia/config.h"

namespace charonia::model {

// Throws Error(unsupported or invalid_argument), with key and value, for a model that no decoder can be made of.
void check_model(const ModelConfig& config);

// The type of activations and of the weights that are not quantised. Throws Error(unsupported) where none is given.
DType data_type(const ModelConfig& config);

// Whether the layer's feed-forward is a mixture of experts.
bool has_experts(const ModelConfig& config, int layer);
// Whether the layer rotates q and k.
bool has_rotation(const ModelConfig& config, int layer);
// Columns of what a layer's router gives, at most: a logit for each expert, with router_fp32 in two halves, and the
// shared expert's gate.
std::int64_t router_columns(const ModelConfig& config);
// Keys that a query of the layer sees; 0: all.
int window_of(const ModelConfig& config, int layer);

}  // namespace charonia::model
