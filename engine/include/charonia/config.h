// The engine's configuration. definitions/engine_settings.toml and definitions/model_attributes.toml define every key (name,
// type, default, range, help). The structs, config.ini, the environment (CHARONIA_<KEY>), Triton's model parameters, the
// command line and the documentation all follow from them.
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

// One key as users see it.
struct ConfigField {
  std::string_view key;
  std::string_view kind;  // int | float | bool | string
  std::string_view default_value;
  std::string_view range;  // for humans and messages: ">= 1", "auto | cpu | cuda"
  std::string_view help;
  bool model_attribute;  // true: read-only, written by convert
  bool ignored;          // accepted for old files, without effect; a warning says so
};

// Every key, in the order in which config.ini lists them.
std::span<const ConfigField> config_fields();

// Sets keys from text. Throws Error(invalid_argument) naming key, value and range; an unknown key names the nearest
// known one. Returns warnings (ignored keys).
std::vector<std::string> apply_settings(const Settings& settings, EngineConfig& engine, ModelConfig* model = nullptr);

// Section [llama] of a config.ini.
Settings read_config_ini(const std::filesystem::path& file);

// CHARONIA_<KEY> for every inference parameter that is set and not empty.
Settings settings_from_environment();

}  // namespace charonia
