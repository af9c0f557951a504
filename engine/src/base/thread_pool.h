// A pool of threads for loops with independent iterations.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <type_traits>
#include <vector>

namespace charonia {

// The caller takes part in its own loop, so a pool of n threads has n - 1 workers. An idle worker spins for a short
// time (kSpin in the source) and then sleeps, so an idle engine uses no CPU time.
class ThreadPool {
 public:
  explicit ThreadPool(int threads);  // 0: one per available processor
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int size() const { return static_cast<int>(workers_.size()) + 1; }

  // Calls fn(begin, end) for chunks of at most `grain` that cover [0, n). Threads take chunks as they become free. Runs
  // inline if there is one chunk or one thread, or if a loop of this pool already runs (a nested loop, or another
  // caller's). Waits for every chunk that began, then rethrows the first exception of fn. Does not allocate.
  template <class Fn>
  void parallel_for(std::int64_t n, std::int64_t grain, Fn&& fn) {
    using Body = std::remove_reference_t<Fn>;
    run({[](void* body, std::int64_t begin, std::int64_t end) { (*static_cast<Body*>(body))(begin, end); },
         const_cast<void*>(static_cast<const void*>(std::addressof(fn))), n, grain < 1 ? 1 : grain});
  }

 private:
  struct Loop {
    void (*call)(void* body, std::int64_t begin, std::int64_t end) = nullptr;
    void* body = nullptr;
    std::int64_t n = 0, grain = 1;
  };

  void run(const Loop& loop);
  void take_chunks();
  void work();

  std::vector<std::thread> workers_;
  std::mutex caller_;  // held by the thread that runs a loop
  Loop loop_;
  std::exception_ptr error_;
  std::atomic<bool> failed_{false};

  alignas(64) std::atomic<std::int64_t> next_{0};
  // Loop number << 32 | open << 31 | workers inside. A worker enters only an open loop. loop_ changes only while the
  // loop is closed and no worker is inside, so a caller never waits for a worker that was asleep.
  alignas(64) std::atomic<std::uint64_t> gate_{0};
  alignas(64) std::atomic<int> wake_{0};  // changes with every loop; sleeping workers wait on it
  std::atomic<int> sleepers_{0};
  std::atomic<bool> stopping_{false};
};

}  // namespace charonia
