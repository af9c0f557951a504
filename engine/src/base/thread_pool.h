// A pool of threads for loops whose iterations are independent.
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

// The caller takes part in its own loop, so a pool of n threads has n - 1 workers. Workers wait for the next loop with
// a short spin (kSpin in the source) and then sleep, so that an idle engine burns nothing beside the server.
class ThreadPool {
 public:
  explicit ThreadPool(int threads);  // 0: as many as there are processors to run on
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int size() const { return static_cast<int>(workers_.size()) + 1; }

  // Calls fn(begin, end) for chunks of at most `grain` that make up [0, n); chunks go to threads as these become free.
  // Runs inline when there is one piece, one thread, or when a loop of this pool is running already (nested, or of
  // another caller). The first exception of fn is rethrown here after every chunk that had begun has ended. Allocates
  // nothing.
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
  std::mutex caller_;  // held by the thread whose loop runs
  Loop loop_;
  std::exception_ptr error_;
  std::atomic<bool> failed_{false};

  alignas(64) std::atomic<std::int64_t> next_{0};
  // Loop number << 32 | open << 31 | workers inside. A worker enters only an open loop, and loop_ changes only when the
  // loop is closed and nobody is inside; so nobody has to wait for a worker that slept the loop through.
  alignas(64) std::atomic<std::uint64_t> gate_{0};
  alignas(64) std::atomic<int> wake_{0};  // changes with every loop; sleepers wait on it
  std::atomic<int> sleepers_{0};
  std::atomic<bool> stopping_{false};
};

}  // namespace charonia
