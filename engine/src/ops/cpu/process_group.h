// Collectives between the tensor-parallel ranks of one process, whose tensors are in host memory. Each rank has a
// thread. All threads call the same operations in the same order, and a call returns when all ranks have arrived.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "base/thread_pool.h"
#include "ops/tensor.h"

namespace charonia::ops {

class ProcessGroup {
 public:
  explicit ProcessGroup(int ranks);
  ProcessGroup(const ProcessGroup&) = delete;
  ProcessGroup& operator=(const ProcessGroup&) = delete;

  int ranks() const { return static_cast<int>(slots_.size()); }

  // tensor [rows, cols] f32 = the sum of all ranks' tensors, each element added in rank order: the same bits on every
  // rank and in every run. The calling rank sums its range of the elements with the threads of `pool`.
  void all_reduce(int rank, const Tensor& tensor, ThreadPool& pool);
  // out [rows, ranks * cols] = the ranks' `in` [rows, cols], concatenated along the columns, for any element type.
  void all_gather(int rank, const Tensor& out, const Tensor& in, ThreadPool& pool);
  // Waits until all ranks have arrived: spins for some microseconds, then sleeps.
  void barrier();

  // This rank will not join any more. All ranks that wait, or join later, get Error(internal) with the rank and `why`
  // of the first call. Any thread may call it.
  void abort(int rank, std::string_view why) noexcept;

 private:
  enum class Call : std::uint8_t { all_reduce, all_gather };
  // The call of a rank.
  struct alignas(64) Slot {
    Call call{};
    Tensor tensor;
  };

  static std::string_view name_of(Call call);
  void meet(int rank, Call call, const Tensor& tensor);
  void add_share(std::int64_t begin, std::int64_t end);
  [[noreturn]] void throw_aborted();

  std::vector<Slot> slots_;
  std::chrono::microseconds spin_;
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<std::uint32_t> phase_{0};  // counts barriers; sleeping ranks wait on it
  std::atomic<bool> aborted_{false};
  std::mutex mutex_;
  std::string why_;  // guarded by mutex_
};

}  // namespace charonia::ops
