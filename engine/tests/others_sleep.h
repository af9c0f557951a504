#pragma once

#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>

namespace charonia::testing {

// Waits until all threads of this process sleep, except the calling one. Returns false if one still computes after two
// minutes.
inline bool others_sleep() {
  const auto self = std::to_string(gettid());
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::minutes(2);
  while (std::chrono::steady_clock::now() < deadline) {
    bool sleep = true;
    for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
      std::string line;
      std::getline(std::ifstream(task.path() / "stat"), line);
      const auto name_end = line.rfind(')');  // "tid (name) state ..."
      if (task.path().filename() != self && name_end != std::string::npos) sleep &= line[name_end + 2] == 'S';
    }
    if (sleep) return true;
    std::this_thread::yield();
  }
  return false;
}

}  // namespace charonia::testing
