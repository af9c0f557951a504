#include "base/thread_pool.h"

#include <chrono>
#include <utility>

#include "base/spin.h"

#if defined(__linux__)
#include <sched.h>
#endif

namespace charonia {
namespace {

constexpr std::uint64_t kOpen = std::uint64_t{1} << 31;
constexpr std::uint64_t kInside = kOpen - 1;
constexpr std::chrono::microseconds kSpin{50};

thread_local bool inside_loop = false;

int processors() {
#if defined(__linux__)
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) return CPU_COUNT(&set);
#endif
  const auto n = std::thread::hardware_concurrency();
  return n == 0 ? 1 : static_cast<int>(n);
}

}  // namespace

ThreadPool::ThreadPool(int threads) {
  if (threads <= 0) threads = processors();
  workers_.reserve(static_cast<std::size_t>(threads - 1));
  for (int i = 1; i < threads; ++i) workers_.emplace_back([this] { work(); });
}

ThreadPool::~ThreadPool() {
  stopping_ = true;
  ++wake_;
  wake_.notify_all();
  for (auto& worker : workers_) worker.join();
}

void ThreadPool::take_chunks() {
  const Loop loop = loop_;
  inside_loop = true;
  try {
    while (true) {
      const auto begin = next_.fetch_add(loop.grain, std::memory_order_relaxed);
      if (begin >= loop.n) break;
      loop.call(loop.body, begin, begin + loop.grain < loop.n ? begin + loop.grain : loop.n);
    }
  } catch (...) {
    if (!failed_.exchange(true)) error_ = std::current_exception();
    next_.store(loop.n, std::memory_order_relaxed);
  }
  inside_loop = false;
}

void ThreadPool::run(const Loop& loop) {
  if (loop.n <= 0) return;
  if (workers_.empty() || loop.n <= loop.grain || inside_loop) return loop.call(loop.body, 0, loop.n);
  const std::unique_lock lock(caller_, std::try_to_lock);
  if (!lock) return loop.call(loop.body, 0, loop.n);

  loop_ = loop;
  next_.store(0, std::memory_order_relaxed);
  const auto number = (gate_.load(std::memory_order_relaxed) >> 32) + 1;
  gate_.store(number << 32 | kOpen);
  ++wake_;
  if (sleepers_.load() > 0) wake_.notify_all();

  take_chunks();

  gate_.fetch_and(~kOpen);
  const auto empty = [this] { return (gate_.load(std::memory_order_acquire) & kInside) == 0; };
  while (!spin(empty, kSpin)) std::this_thread::yield();
  if (failed_) {
    failed_ = false;
    std::rethrow_exception(std::exchange(error_, nullptr));
  }
}

void ThreadPool::work() {
  std::uint64_t seen = 0;  // number of the last loop that this worker entered
  while (!stopping_) {
    const int ticket = wake_.load();
    auto gate = gate_.load();
    if ((gate & kOpen) != 0 && gate >> 32 != seen) {
      if (!gate_.compare_exchange_weak(gate, gate + 1)) continue;
      seen = gate >> 32;
      take_chunks();
      gate_.fetch_sub(1, std::memory_order_release);
      continue;
    }
    if (spin([&] { return wake_.load(std::memory_order_relaxed) != ticket; }, kSpin)) continue;
    ++sleepers_;
    wake_.wait(ticket);
    --sleepers_;
  }
}

}  // namespace charonia
