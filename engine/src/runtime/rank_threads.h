// One thread for each rank. All ranks run the same task at the same time.
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

// Converts an exception to an Error. With several ranks, the text begins with the rank.
Error of_rank(std::exception_ptr error, int rank, int ranks);

class RankThreads {
 public:
  using Task = std::function<void(int rank)>;
  // Called with the rank whose task threw, and the text of the error.
  using Failed = std::function<void(int rank, std::string_view why)>;

  explicit RankThreads(int ranks);
  ~RankThreads();
  RankThreads(const RankThreads&) = delete;
  RankThreads& operator=(const RankThreads&) = delete;

  // Runs task(rank) for every rank, and returns when all tasks have ended. Rank 0 runs on the caller's thread; every
  // other rank always runs on the same thread. For each task that throws, calls `failed` on the thread of its rank.
  // Then throws the first error, as of_rank() converts it.
  void run(const Task& task, const Failed& failed = nullptr);

 private:
  void work(int rank);
  void run_one(int rank);

  std::chrono::microseconds spin_;
  const Task* task_ = nullptr;          // of the run in progress
  const Failed* failed_ = nullptr;      // of the run in progress
  std::mutex error_mutex_;
  std::optional<Error> error_;          // first error of the run in progress; under error_mutex_
  std::atomic<std::uint32_t> runs_{0};  // number of runs; the threads wait for it to change
  std::atomic<int> busy_{0};            // threads that have not ended their task; the caller waits for 0
  std::atomic<bool> stopping_{false};
  std::vector<std::thread> threads_;  // of ranks 1, 2, ...
};

}  // namespace charonia::runtime
