// A thread for each of the ranks, which do the same thing together.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>
#include <optional>
#include <string_view>
#include <thread>
#include <vector>

#include "charonia/error.h"

namespace charonia::runtime {

// What an exception says, as an Error, with the rank before its text where there are several.
Error of_rank(std::exception_ptr error, int rank, int ranks);

class RankThreads {
 public:
  using Task = std::function<void(int rank)>;
  // Gets the rank whose task threw, and why.
  using Failed = std::function<void(int rank, std::string_view why)>;

  explicit RankThreads(int ranks);
  ~RankThreads();
  RankThreads(const RankThreads&) = delete;
  RankThreads& operator=(const RankThreads&) = delete;

  // Runs task(rank) for every rank, each always on the same thread but rank 0, which has the caller's, and returns when
  // all have ended. When some threw: `failed` was called on the thread of each, and what the first one threw is thrown
  // here, with the rank before its text where there are several.
  void run(const Task& task, const Failed& failed = nullptr);

 private:
  void work(int rank);
  void run_one(int rank);

  std::chrono::microseconds spin_;
  const Task* task_ = nullptr;          // of the run in progress
  const Failed* failed_ = nullptr;      // of the run in progress
  std::mutex error_mutex_;
  std::optional<Error> error_;          // to be thrown, of the run in progress; under error_mutex_
  std::atomic<std::uint32_t> runs_{0};  // sleepers wait on it
  std::atomic<int> busy_{0};            // ranks that have not ended their task; the caller waits on it
  std::atomic<bool> stopping_{false};
  std::vector<std::thread> threads_;  // of ranks 1, 2, ...
};

}  // namespace charonia::runtime
