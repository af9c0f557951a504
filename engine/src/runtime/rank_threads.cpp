#include "runtime/rank_threads.h"

#include <exception>
#include <new>
#include <string>
#include <utility>

#include "base/spin.h"
#include "base/text.h"
#include "charonia/error.h"

namespace charonia::runtime {
Error of_rank(std::exception_ptr error, int rank, int ranks) {
  const std::string who = ranks > 1 ? cat("rank ", rank, ": ") : "";
  try {
    std::rethrow_exception(std::move(error));
  } catch (const Error& e) {
    return {e.code(), who + e.what()};
  } catch (const std::bad_alloc&) {
    return {ErrorCode::resource_exhausted, who + "out of memory"};
  } catch (const std::exception& e) {
    return {ErrorCode::internal, who + e.what()};
  }
}

RankThreads::RankThreads(int ranks) : spin_(spin_limit(ranks)) {
  for (int rank = 1; rank < ranks; ++rank) threads_.emplace_back([this, rank] { work(rank); });
}

RankThreads::~RankThreads() {
  stopping_ = true;
  ++runs_;
  runs_.notify_all();
  for (auto& thread : threads_) thread.join();
}

void RankThreads::run(const Task& task, const Failed& failed) {
  task_ = &task;
  failed_ = failed ? &failed : nullptr;
  busy_ = static_cast<int>(threads_.size());
  ++runs_;
  if (!threads_.empty()) runs_.notify_all();
  run_one(0);
  const auto ended = [this] { return busy_.load(std::memory_order_acquire) == 0; };
  if (!spin(ended, spin_)) {
    for (int busy = busy_; busy != 0; busy = busy_) busy_.wait(busy);
  }
  if (error_) throw *std::exchange(error_, std::nullopt);  // all tasks have ended
}

void RankThreads::run_one(int rank) {
  try {
    (*task_)(rank);
  } catch (...) {
    const auto error = of_rank(std::current_exception(), rank, static_cast<int>(threads_.size()) + 1);
    // A copy, because `error` shares its text with error_, which another thread destroys. The standard library counts
    // the owners, so sharing would be safe, but the thread sanitizer does not see this counting.
    const std::string why = error.what();
    {
      const std::lock_guard lock(error_mutex_);
      if (!error_) error_ = error;  // later errors of other ranks are consequences
    }
    if (failed_ != nullptr) (*failed_)(rank, why);
  }
}

void RankThreads::work(int rank) {
  std::uint32_t seen = 0;
  while (true) {
    if (!spin([&] { return runs_.load(std::memory_order_acquire) != seen; }, spin_)) runs_.wait(seen);
    ++seen;
    if (stopping_) return;
    run_one(rank);
    // The last thread to end wakes the caller.
    if (busy_.fetch_sub(1) == 1) busy_.notify_all();
  }
}

}  // namespace charonia::runtime
