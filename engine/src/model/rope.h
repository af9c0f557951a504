// Rotary position embedding: the table of cosines and sines.
#pragma once

#include <vector>

#include "charonia/config.h"

namespace charonia::model {

// Inverse frequencies [rotary_embedding / 2], as Hugging Face computes them: theta^(-2i/d), with rope_scaling_type
// llama3 (Llama 3.1): wavelengths above original/low_freq_factor are stretched by rope_factor, those below
// original/high_freq_factor are kept, and those between are blended linearly.
std::vector<float> inverse_frequencies(const ModelConfig& config);

// [positions, rotary_embedding]: in a row the cosines of position * inverse frequency, then the sines.
std::vector<float> rotary_table(const ModelConfig& config, int positions);

}  // namespace charonia::model
