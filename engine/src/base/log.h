// The log of the engine and of its Triton backend: each event has a text for people and fields for programs.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

namespace charonia {

enum class LogLevel { info, warning, error };

// text is for people. json: one object a line, {"component": "engine", "message": ..., "request_id": ..., its fields}.
enum class LogFormat { text, json };

struct LogEvent {
  LogLevel level = LogLevel::info;
  std::string message;
  std::string request_id;  // as the engine knows it; empty: of no request
  std::vector<std::pair<std::string, std::variant<std::int64_t, double, std::string>>> fields;
};

// What is shown of a request's id: the part from a '#' on only makes it unique.
std::string_view shown_id(std::string_view request_id);

// One line without its end. What is no UTF-8 becomes U+FFFD.
std::string to_line(const LogEvent& event, LogFormat format);

// Of this process: the environment's CHARONIA_LOG_FORMAT, text where it is not set. Whatever else it says is text, too:
// `charonia serve` and the gateway refuse it.
LogFormat log_format();

// Where lines go from now on; at first to standard error, with their time and level. Not while anything is logged.
using LogSink = std::function<void(LogLevel level, const std::string& line)>;
void set_log_sink(LogSink sink);

void log(const LogEvent& event);

}  // namespace charonia
