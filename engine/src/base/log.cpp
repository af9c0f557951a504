#include "base/log.h"

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <string_view>

#include "base/generated/log_settings.h"
#include "base/json.h"
#include "base/text.h"

namespace charonia {
namespace {

using nlohmann::ordered_json;

const char* name_of(LogLevel level) {
  switch (level) {
    case LogLevel::info: return "info";
    case LogLevel::warning: return "warning";
    case LogLevel::error: break;
  }
  return "error";
}

// 2026-01-31T12:00:00.000+00:00
std::string now_text() {
  const auto now = std::chrono::system_clock::now();
  const auto seconds = std::chrono::system_clock::to_time_t(now);
  const auto milliseconds =
      std::chrono::duration_cast<std::chrono::milliseconds>(now.time_since_epoch()).count() % 1000;
  std::tm utc{};
  gmtime_r(&seconds, &utc);
  char date[32], text[48];
  std::strftime(date, sizeof date, "%Y-%m-%dT%H:%M:%S", &utc);
  std::snprintf(text, sizeof text, "%s.%03d+00:00", date, static_cast<int>(milliseconds));
  return text;
}

void fill(ordered_json& object, const LogEvent& event) {
  object["component"] = "engine";
  object["message"] = event.message;
  if (!event.request_id.empty()) object["request_id"] = shown_id(event.request_id);
  for (const auto& [name, value] : event.fields) {
    std::visit([&object, &name = name](const auto& held) { object[name] = held; }, value);
  }
}

std::string dumped(const ordered_json& object) {
  return object.dump(-1, ' ', false, ordered_json::error_handler_t::replace);
}

void to_standard_error(const LogEvent& event) {
  std::string line;
  if (log_format() == LogFormat::json) {
    ordered_json object = {{"time", now_text()}, {"level", name_of(event.level)}};
    fill(object, event);
    line = dumped(object);
  } else {
    line = cat("charonia: ", name_of(event.level), ": ", to_line(event, LogFormat::text));
  }
  std::fprintf(stderr, "%s\n", line.c_str());
}

LogSink& sink() {
  static LogSink instance;
  return instance;
}

}  // namespace

std::string_view shown_id(std::string_view request_id) { return request_id.substr(0, request_id.find('#')); }

std::string to_line(const LogEvent& event, LogFormat format) {
  if (format == LogFormat::text) {
    return event.request_id.empty() ? event.message : cat(event.message, " [", shown_id(event.request_id), "]");
  }
  ordered_json object;
  fill(object, event);
  return dumped(object);
}

LogFormat log_format() {
  const char* value = std::getenv(log_settings::kLogFormat);
  const bool json = value != nullptr && value == log_settings::kLogFormatJson;
  return json ? LogFormat::json : LogFormat::text;
}

void set_log_sink(LogSink new_sink) { sink() = std::move(new_sink); }

void log(const LogEvent& event) {
  if (const auto& to = sink()) {
    to(event.level, to_line(event, log_format()));
  } else {
    to_standard_error(event);
  }
}

}  // namespace charonia
