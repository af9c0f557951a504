// The engine's configuration. definitions/engine_settings.toml and definitions/model_attributes.toml define every key
// (name, type, default, range, help). The structs, config.ini, environment variables (CHARONIA_<KEY>), Triton's model
// parameters, the command line and the documentation are generated from them.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "charonia/generated/configs.h"

namespace charonia {

using Settings = std::map<std::string, std::string, std::less<>>;

// One configuration key.
struct ConfigField {
  std::string_view key;
  std::string_view kind;  // int | float | bool | string
  std::string_view default_value;
  std::string_view range;  // for people and error messages: ">= 1", "auto | cpu | cuda"
  std::string_view help;
  bool model_attribute;  // true: written by convert, read-only for users
  bool ignored;          // accepted in old files but has no effect; causes a warning
};

// Every key, in the order of config.ini.
std::span<const ConfigField> config_fields();

// Sets keys from text. Throws Error(invalid_argument) with the key, the value and the valid range; for an unknown key,
// with the nearest known key. Returns warnings (ignored keys).
std::vector<std::string> apply_settings(const Settings& settings, EngineConfig& engine, ModelConfig* model = nullptr);

// Reads section [llama] of a config.ini.
Settings read_config_ini(const std::filesystem::path& file);

// CHARONIA_<KEY> for every inference parameter that is set and not empty.
Settings settings_from_environment();

}  // namespace charonia
