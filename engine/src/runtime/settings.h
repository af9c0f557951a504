// What an engine is told: config.ini of a weights folder, with the settings that win over it.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "charonia/config.h"
#include "charonia/types.h"

namespace charonia::runtime {

struct ResolvedSettings {
  ModelConfig model;    // as it is computed: rope_scaling_factor and use_logn_attn are part of it
  EngineConfig config;  // session_len is resolved
  SamplingParams default_sampling;  // of the model, or the engine's own where generation_config = none
  std::vector<std::string> warnings;
};

// Throws Error(invalid_argument) naming setting, value and remedy.
ResolvedSettings read_settings(const std::filesystem::path& weights_dir, const Settings& overrides);

}  // namespace charonia::runtime
