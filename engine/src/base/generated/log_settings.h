// Generated from definitions/service_settings.toml by `make generate`; do not edit.
// The log settings that the engine's processes read from the environment.
#pragma once

#include <array>
#include <string_view>

namespace charonia::log_settings {

// True values, ignoring case; all other values are false.
inline constexpr std::array<std::string_view, 6> kTrueWords = {"1", "true", "yes", "on", "t", "y"};

// log every request: one line each in gateway, preprocessing and engine
inline constexpr const char* kAccessLog = "CHARONIA_ACCESS_LOG";

// log format of all processes: lines for people (text), or one JSON object per line (json)
inline constexpr const char* kLogFormat = "CHARONIA_LOG_FORMAT";
inline constexpr std::string_view kLogFormatText = "text";
inline constexpr std::string_view kLogFormatJson = "json";

// with access_log, log the text of prompts and responses; otherwise no log contains it
inline constexpr const char* kLogPrompts = "CHARONIA_LOG_PROMPTS";

}  // namespace charonia::log_settings
