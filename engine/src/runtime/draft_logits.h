// The logits of an MTP layer or an EAGLE-3 head for a text. For tests, which compare them with a reference.
#pragma once

#include <filesystem>
#include <vector>

#include "charonia/config.h"
#include "charonia/types.h"

namespace charonia::runtime {

// tokens: the text, at least two. drafted: tokens after it that the model has not computed. settings: with
// speculative_method. Returns [tokens - 1 + drafted, vocab]: row i is for the token after token i + 1. The rows of
// `drafted` have the layer's own hidden states. Throws the errors of an engine with these settings.
std::vector<std::vector<float>> draft_logits(const std::filesystem::path& weights_dir,
                                             const std::vector<TokenId>& tokens, const std::vector<TokenId>& drafted,
                                             Settings settings);

}  // namespace charonia::runtime
