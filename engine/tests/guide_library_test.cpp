// The library of structured output: not there yet, there later, broken, or of another version.
#include "runtime/guide_library.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/file.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <memory>
#include <string>

#include "charonia/error.h"
#include "test_folder.h"
#include "text/token_table.h"

namespace charonia::runtime {
namespace {

namespace fs = std::filesystem;
using State = GuideLibraryStatus::State;

class GuideLibraryTest : public ::testing::Test {
 protected:
  GuideLibraryTest() { fs::create_directories(folder_); }
  ~GuideLibraryTest() override {
    if (lock_ >= 0) ::close(lock_);
    fs::remove_all(folder_);
  }

  void write(const fs::path& file, const std::string& text) { std::ofstream(file) << text; }
  // As who compiles it does.
  void begin_compiling() {
    write(marker_, "build/compiler.log\n");
    lock_ = ::open(marker_.c_str(), O_RDONLY | O_CLOEXEC);
    ASSERT_EQ(::flock(lock_, LOCK_EX | LOCK_NB), 0);
  }
  void end_compiling() {
    ::close(lock_);
    lock_ = -1;
  }
  std::string refused(ErrorCode code) {
    try {
      open_guide_library(file_);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), code);
      return error.what();
    }
    ADD_FAILURE() << "it was opened";
    return {};
  }
  void expect_opens() {
    const text::TokenTable table({"</s>", "a"}, {1, 0}, true);
    const std::unique_ptr<grammar::GuideCompiler> compiler(open_guide_library(file_)(table, 2, {0}, nullptr));
    EXPECT_NE(compiler->compile({GuideType::regex, "a+"}, false), nullptr);
    try {
      compiler->compile({GuideType::regex, "(a"}, false);
      ADD_FAILURE() << "it was compiled";
    } catch (const Error& error) {  // of the other library
      EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
    }
  }
  // What the dynamic linker has opened it knows by the file, so each gets one of its own.
  void give() {
    const auto coming = folder_ / "coming";
    fs::copy_file(guide_library_file(), coming);
    fs::rename(coming, file_);
  }

  const fs::path folder_ = testing::test_folder();
  const fs::path file_ = folder_ / guide_library_file().filename();
  const fs::path marker_ = file_.string() + ".build";

 private:
  int lock_ = -1;
};

TEST_F(GuideLibraryTest, IsPendingWhileItIsCompiledAndOpensWhenItIsThere) {
  EXPECT_EQ(guide_library_status().state, State::there);  // that of the build
  begin_compiling();
  EXPECT_EQ(guide_library_status(file_).state, State::compiling);
  const auto error = refused(ErrorCode::pending);
  EXPECT_NE(error.find("structured output is still being compiled"), std::string::npos) << error;
  EXPECT_NE(error.find("; retry after 20 s"), std::string::npos) << error;
  give();
  EXPECT_EQ(guide_library_status(file_).state, State::there);
  EXPECT_EQ(guide_library_status(file_).problem, "");
  expect_opens();
  end_compiling();
  expect_opens();
}

TEST_F(GuideLibraryTest, WhatFailedNamesTheLog) {
  begin_compiling();
  end_compiling();
  EXPECT_EQ(guide_library_status(file_).state, State::missing);
  EXPECT_EQ(refused(ErrorCode::unsupported),
            "structured output was not compiled to its end: see build/compiler.log on the server. The next make serve "
            "begins anew");
  write(marker_, "");  // interrupted before there was a log
  EXPECT_EQ(refused(ErrorCode::unsupported), "structured output was not compiled to its end. The next make serve begins anew");
}

TEST_F(GuideLibraryTest, WhatIsMissingIsSaid) {
  EXPECT_EQ(guide_library_status(file_).state, State::missing);
  EXPECT_EQ(refused(ErrorCode::unsupported),
            "structured output is missing: there is no libcharonia_grammar.so. Install charonia again");
}

TEST_F(GuideLibraryTest, WhatIsBrokenIsSaidUntilItIsReplaced) {
  write(file_, "half a file");
  const auto error = refused(ErrorCode::unsupported);
  EXPECT_TRUE(error.starts_with("structured output cannot be used: libcharonia_grammar.so: ")) << error;
  EXPECT_NE(error.find("Install charonia again"), std::string::npos) << error;
  EXPECT_EQ(error.find(folder_.string()), std::string::npos) << error;
  fs::remove(file_);
  give();
  expect_opens();
}

TEST_F(GuideLibraryTest, OneOfAnotherVersionIsSaidUntilItIsReplaced) {
  fs::copy_file(CHARONIA_LIBRARY_OF_ANOTHER_VERSION, file_);
  const auto error = refused(ErrorCode::unsupported);
  EXPECT_NE(error.find("libcharonia_grammar.so is of another version"), std::string::npos) << error;
  fs::remove(file_);
  give();
  expect_opens();
}

}  // namespace
}  // namespace charonia::runtime
