// The setting `quantization`: the weights that are rounded while they are loaded, and their format (rounded_rows.h).
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "charonia/config.h"
#include "model/manifest.h"

namespace charonia::model {

// Marks the weights of linear layers in the manifest as quantised, in layout `rounded`, and sets weight_type and
// group_size of the model. scheme: fp8 | w8a8 | w8a16 | w4a16, or none, which changes nothing. The embeddings, the
// output layer, norms, routers, gates of shared experts, the gates of delta nets and latents' wkv_b, wk_b and wv_b keep
// their type.
//
// A scale belongs to a row of the whole weight, or to a group of its columns, so every number of ranks gives the same
// weights. Throws Error(unsupported) if the model is already quantised, or if ranks would divide a group.
void round_weights(ModelConfig& model, Manifest& manifest, std::string_view scheme);

// The names of a tensor's ranges of columns in the other ranks, if its columns are divided between ranks.
std::vector<std::string> other_columns(std::string_view name, int ranks);

}  // namespace charonia::model
