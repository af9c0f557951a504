// What kind each layer of a model is, by its configuration.
#pragma once

#include "charonia/config.h"

namespace charonia::model {

// Throws Error(unsupported or invalid_argument), with key and value, for a model that no decoder can be made of.
void check_model(const ModelConfig& config);

// Whether the layer's feed-forward is a mixture of experts.
bool has_experts(const ModelConfig& config, int layer);
// Keys that a query of the layer sees; 0: all.
int window_of(const ModelConfig& config, int layer);

}  // namespace charonia::model
