// The log of the engine and of its Triton backend. Each event has a text for people and fields for programs.
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

// json: one object a line, {"component": "engine", "message": ..., "request_id": ..., and the event's fields}.
enum class LogFormat { text, json };

struct LogEvent {
  LogLevel level = LogLevel::info;
  std::string message;
  std::string request_id;  // the request's id in the engine; empty if the event belongs to no request
  std::vector<std::pair<std::string, std::variant<std::int64_t, double, std::string>>> fields;
};

// The part of a request id that the log shows. A '#' and the rest only make the id unique.
std::string_view shown_id(std::string_view request_id);

// One line without a line end. Invalid UTF-8 becomes U+FFFD.
std::string to_line(const LogEvent& event, LogFormat format);

// The format of this process, from the environment variable CHARONIA_LOG_FORMAT. Unset or unknown values mean text;
// `charonia serve` and the gateway reject unknown values.
LogFormat log_format();

// Sets the destination of log lines. The default is standard error, with time and level. Must not be called while
// another thread logs.
using LogSink = std::function<void(LogLevel level, const std::string& line)>;
void set_log_sink(LogSink sink);

void log(const LogEvent& event);

}  // namespace charonia
