#include "base/log.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <utility>
#include <vector>

#include "base/json.h"

namespace charonia {
namespace {

// Restores the settings.
struct Log : testing::Test {
  Log() { unsetenv("CHARONIA_LOG_FORMAT"); }
  ~Log() override {
    unsetenv("CHARONIA_LOG_FORMAT");
    set_log_sink(nullptr);
  }
};

TEST_F(Log, TextHasTheMessageAndTheShownRequestId) {
  EXPECT_EQ(to_line({LogLevel::info, "loaded", "", {}}, LogFormat::text), "loaded");
  EXPECT_EQ(to_line({LogLevel::info, "ended", "shop-42#chatcmpl-1#0", {}}, LogFormat::text), "ended [shop-42]");
}

TEST_F(Log, JsonEscapesEveryText) {
  const std::string nasty = "quotes \" and \\, a line\nend, a tab\t, a zero byte, \x01, \xc3\xbc";
  const auto line = to_line({LogLevel::error, nasty, "a\"b", {{"count", std::int64_t{7}}, {"ms", 1.5}, {"why", nasty}}},
                            LogFormat::json);
  EXPECT_EQ(line.find('\n'), std::string::npos);
  const auto object = nlohmann::json::parse(line);
  EXPECT_EQ(object["component"], "engine");
  EXPECT_EQ(object["message"], nasty);
  EXPECT_EQ(object["request_id"], "a\"b");
  EXPECT_EQ(object["count"], 7);
  EXPECT_EQ(object["ms"], 1.5);
  EXPECT_EQ(object["why"], nasty);
}

TEST_F(Log, InvalidUtf8IsReplaced) {
  const auto line = to_line({LogLevel::info, "a\xff" "b", "", {}}, LogFormat::json);
  EXPECT_EQ(nlohmann::json::parse(line)["message"], "a\xef\xbf\xbd" "b");
}

TEST_F(Log, LinesGoToTheSinkInTheFormatOfTheEnvironment) {
  std::vector<std::pair<LogLevel, std::string>> lines;
  set_log_sink([&lines](LogLevel level, const std::string& line) { lines.emplace_back(level, line); });
  log({LogLevel::warning, "one", "", {}});
  setenv("CHARONIA_LOG_FORMAT", "json", 1);
  log({LogLevel::error, "two", "id", {}});
  ASSERT_EQ(lines.size(), 2U);
  EXPECT_EQ(lines[0], std::pair(LogLevel::warning, std::string("one")));
  EXPECT_EQ(lines[1].first, LogLevel::error);
  EXPECT_EQ(nlohmann::json::parse(lines[1].second)["request_id"], "id");
}

TEST_F(Log, StandardErrorHasTimeAndLevel) {
  testing::internal::CaptureStderr();
  log({LogLevel::warning, "session_dir: full", "", {}});
  setenv("CHARONIA_LOG_FORMAT", "json", 1);
  log({LogLevel::warning, "session_dir: full", "", {}});
  const auto said = testing::internal::GetCapturedStderr();
  const auto end = said.find('\n');
  EXPECT_EQ(said.substr(0, end), "charonia: warning: session_dir: full");
  const auto object = nlohmann::json::parse(said.substr(end + 1));
  EXPECT_EQ(object["level"], "warning");
  EXPECT_EQ(object["time"].get<std::string>().size(), std::string("2026-01-31T12:00:00.000+00:00").size());
}

}  // namespace
}  // namespace charonia
