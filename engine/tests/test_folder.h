// The folder for the files of a test.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <string>

#include <unistd.h>

namespace charonia::testing {

// A path for the running test, which does not exist yet. Tests run in parallel as processes, also tests of one fixture,
// and some tests are in two programs.
inline std::filesystem::path test_folder() {
  const auto* const info = ::testing::UnitTest::GetInstance()->current_test_info();
  std::string name = std::string(info->test_suite_name()) + "_" + info->name();
  std::ranges::replace(name, '/', '_');
  return std::filesystem::path(::testing::TempDir()) / ("charonia_" + name + "_" + std::to_string(::getpid()));
}

}  // namespace charonia::testing
