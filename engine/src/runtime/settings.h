// The settings of an engine: config.ini of a weights folder, and overrides, which take precedence.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "charonia/config.h"
#include "charonia/types.h"

namespace charonia::runtime {

struct ResolvedSettings {
  ModelConfig model;    // includes the engine's settings rope_scaling_factor and use_logn_attn
  EngineConfig config;  // session_len is resolved
  SamplingParams default_sampling;  // the model's, or with generation_config = none the engine's
  std::vector<std::string> warnings;
};

// The type of keys and values in the cache, for messages: fp8, int8, int4, or the type of activations.
std::string kv_type(const ModelConfig& model, const EngineConfig& config);

// Throws Error(invalid_argument) naming setting, value and remedy.
ResolvedSettings read_settings(const std::filesystem::path& weights_dir, const Settings& overrides);

}  // namespace charonia::runtime
