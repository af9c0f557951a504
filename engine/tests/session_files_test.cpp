// Session histories on disk: a file has the current history of the session, or does not exist.
#include "runtime/session_files.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <fstream>
#include <functional>
#include <thread>

#include "base/log.h"
#include "test_folder.h"

namespace charonia::runtime {
namespace {

using Clock = std::chrono::steady_clock;
constexpr std::chrono::seconds kLimit{120};  // only a hang takes so long

class SessionFilesTest : public ::testing::Test {
 protected:
  SessionFilesTest() {
    set_log_sink([this](LogLevel, const std::string&) { ++num_logged_; });
  }
  ~SessionFilesTest() override {
    set_log_sink(nullptr);
    std::filesystem::remove_all(folder_);
  }

  std::unique_ptr<SessionFiles> open(std::chrono::milliseconds removal_delay = std::chrono::hours(1)) const {
    return std::make_unique<SessionFiles>(folder_, "model", 100, removal_delay);
  }
  static std::shared_ptr<const History> history(TokenId last) {
    return std::make_shared<const History>(History{{1, 2, last}, {0}});
  }
  // The file of session "a": its name is the hexadecimal id.
  std::filesystem::path file() const {
    for (const auto& entry : std::filesystem::directory_iterator(folder_)) {
      const auto name = entry.path().filename().string();
      if (name.starts_with("s61.") && name.ends_with(".session")) return entry.path();
    }
    return {};
  }
  // Writes session "a", whose last token is `last`.
  static void write(SessionFiles& files, TokenId last) {
    files.write("a", history(last));
    files.flush();
  }
  static void wait_until(const std::function<bool()>& done) {
    const auto deadline = Clock::now() + kLimit;
    while (!done() && Clock::now() < deadline) std::this_thread::sleep_for(std::chrono::milliseconds(5));
    EXPECT_TRUE(done());
  }
  // The last token of the only session, or -1.
  static TokenId stored(SessionFiles& files, double ttl_s = 1000) {
    std::vector<std::string> warnings;
    const auto all = files.read(ttl_s, warnings);
    return all.size() == 1 ? all.front().history->tokens.back() : -1;
  }

  const std::filesystem::path folder_ = charonia::testing::test_folder();
  std::atomic<int> num_logged_{0};
};

TEST_F(SessionFilesTest, AHistoryThatCannotBeWrittenLeavesNoOlderOne) {
  const auto files = open();
  write(*files, 3);
  const auto place = file();
  auto beside = place;
  beside += ".new";
  for (int time = 1; time <= 2; ++time) {
    std::filesystem::create_directory(beside);  // so that no file can be written there
    for (const TokenId last : {4, 5}) {
      if (last == 5) std::filesystem::create_directory(beside);
      write(*files, last);
      EXPECT_FALSE(std::filesystem::exists(place)) << "it is not the session's history any more";
      EXPECT_FALSE(std::filesystem::exists(beside));
    }
    EXPECT_EQ(num_logged_, time) << "once until something could be written";
    write(*files, 6);
    EXPECT_EQ(stored(*files), 6);
  }
}

TEST_F(SessionFilesTest, OnlyTheUserReadsFilesAndNewFolder) {
  const auto sessions = folder_ / "sessions";
  const auto umask_before = ::umask(0);
  {
    SessionFiles files(sessions, "model", 100, std::chrono::hours(1));
    write(files, 3);
  }
  ::umask(umask_before);
  using std::filesystem::perms;
  EXPECT_EQ(std::filesystem::status(sessions).permissions(), perms::owner_all);
  int num_files = 0;
  for (const auto& entry : std::filesystem::directory_iterator(sessions)) {
    EXPECT_EQ(entry.status().permissions(), perms::owner_read | perms::owner_write) << entry.path();
    ++num_files;
  }
  EXPECT_EQ(num_files, 2) << "the session and the lock";
}

TEST_F(SessionFilesTest, AnErasedSessionsFilesAreRemovedImmediately) {
  const auto files = open();
  write(*files, 3);
  const auto place = file();
  auto beside = place;
  beside += ".new";
  std::ofstream(beside) << "half";
  files->erase("a", true);
  EXPECT_FALSE(std::filesystem::exists(place)) << "before anything is flushed";
  files->flush();
  EXPECT_FALSE(std::filesystem::exists(beside));
  EXPECT_EQ(num_logged_, 0);
  std::filesystem::create_directories(place / "inside");
  files->erase("a", false);
  files->flush();
  EXPECT_EQ(num_logged_, 1) << "it cannot be removed";
}

TEST_F(SessionFilesTest, OneEngineWritesAtATime) {
  auto first = open();
  write(*first, 3);
  const auto second = open();
  std::vector<std::string> warnings;
  EXPECT_EQ(second->read(1000, warnings).size(), 1U) << "it reads";
  ASSERT_EQ(warnings.size(), 1U);
  EXPECT_NE(warnings[0].find("another engine"), std::string::npos) << warnings[0];
  second->erase("a", true);
  second->erase("b", true);
  second->flush();
  EXPECT_EQ(stored(*first), 3) << "it does not remove";
  write(*second, 4);
  EXPECT_EQ(stored(*first), 3) << "nor write";
  // Simulates a child process that was forked while the first engine had the lock, and that is still running.
  const auto child = fork();
  if (child == 0) {
    pause();
    _exit(0);
  }
  first.reset();
  wait_until([&] { return stored(*second) == 4; });  // the first has ended
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
  // An engine with another model has its own files.
  std::vector<std::string> none;
  SessionFiles(folder_, "other", 100).read(1000, none);
  EXPECT_TRUE(none.empty());
}

TEST_F(SessionFilesTest, FilesThatTheClockMakesTooOldAreRemovedLater) {
  {
    const auto files = open();
    write(*files, 3);
    EXPECT_EQ(stored(*files, -1), -1) << "older than that";
  }
  const auto place = file();
  EXPECT_FALSE(place.empty()) << "it may be the clock";
  const auto files = open(std::chrono::milliseconds(1));
  EXPECT_EQ(stored(*files, -1), -1);
  wait_until([&] { return !std::filesystem::exists(place); });
}

TEST_F(SessionFilesTest, EarlierRequestsDoNotChangeFilesThatAnotherEngineContinued) {
  auto first = open();
  for (const auto* id : {"a", "b"}) first->write(id, history(3));
  first->flush();
  auto second = open();
  second->write("a", history(4));
  second->erase("b", false);
  // Times are in seconds.
  std::this_thread::sleep_until(std::chrono::floor<std::chrono::seconds>(std::chrono::system_clock::now()) +
                                std::chrono::seconds(1));
  for (const auto* id : {"a", "b"}) first->write(id, history(5));
  first.reset();
  second.reset();
  std::vector<std::string> warnings;
  const auto all = open()->read(1000, warnings);
  ASSERT_EQ(all.size(), 2U);
  for (const auto& one : all) EXPECT_EQ(one.history->tokens.back(), 5) << one.id;
}

TEST_F(SessionFilesTest, UnreadableFilesAreSkippedAndUnfinishedFilesRemoved) {
  auto files = open();
  write(*files, 3);
  const auto place = file();
  auto unreadable = place, unfinished = place;
  unreadable.replace_filename("x" + place.filename().string());
  unfinished += ".new";
  std::filesystem::create_directory(unreadable);
  std::ofstream(unfinished) << "half";
  open();
  EXPECT_TRUE(std::filesystem::exists(unfinished)) << "it may be about to have its name";
  files.reset();
  files = open(std::chrono::milliseconds(1));
  EXPECT_FALSE(std::filesystem::exists(unfinished));
  std::vector<std::string> warnings;
  EXPECT_TRUE(files->read(-1, warnings).empty());
  ASSERT_EQ(warnings.size(), 1U);
  EXPECT_NE(warnings[0].find(unreadable.string()), std::string::npos) << warnings[0];
  wait_until([&] { return !std::filesystem::exists(place); });  // too old
  EXPECT_TRUE(std::filesystem::exists(unreadable));
}

}  // namespace
}  // namespace charonia::runtime
