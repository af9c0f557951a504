#include "ops/cpu/process_group.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "base/spin.h"
#include "base/text.h"
#include "charonia/error.h"

namespace charonia::ops {
namespace {

constexpr std::int64_t kLine = 16;              // floats of a cache line
constexpr std::int64_t kSmallElements = 16384;  // fewer elements take less time than waking a thread

std::byte* bytes_of(const Tensor& tensor, std::int64_t row, std::int64_t col) {
  return static_cast<std::byte*>(tensor.data) +
         static_cast<std::size_t>(row * tensor.stride + col) * size_of(tensor.dtype);
}

}  // namespace

ProcessGroup::ProcessGroup(int ranks) : slots_(static_cast<std::size_t>(std::max(ranks, 0))), spin_(spin_limit(ranks)) {
  if (ranks < 1) throw Error(ErrorCode::invalid_argument, cat("a group has ", ranks, " ranks, expected at least 1"));
}

void ProcessGroup::barrier() {
  // Read first: the phase cannot end before this rank has arrived.
  const auto phase = phase_.load();
  if (aborted_) throw_aborted();
  if (arrived_.fetch_add(1) + 1 == ranks()) {
    arrived_.store(0);
    ++phase_;
    phase_.notify_all();
    return;
  }
  const auto over = [&] { return phase_.load(std::memory_order_acquire) != phase; };
  if (!spin(over, spin_)) phase_.wait(phase);
  if (aborted_) throw_aborted();
}

void ProcessGroup::abort(int rank, std::string_view why) noexcept {
  {
    const std::lock_guard lock(mutex_);
    if (aborted_) return;
    try {
      why_ = cat("rank ", rank, ": ", why);
    } catch (...) {
      why_.clear();
    }
    aborted_ = true;
  }
  ++phase_;
  phase_.notify_all();
}

void ProcessGroup::throw_aborted() {
  const std::lock_guard lock(mutex_);
  throw Error(ErrorCode::internal, why_);
}

std::string_view ProcessGroup::name_of(Call call) { return call == Call::all_reduce ? "all_reduce" : "all_gather"; }

void ProcessGroup::meet(int rank, Call call, const Tensor& tensor) {
  slots_[static_cast<std::size_t>(rank)].call = call;
  slots_[static_cast<std::size_t>(rank)].tensor = tensor;
  barrier();
  const auto& first = slots_.front();
  for (const auto& slot : slots_) {
    if (slot.call != first.call || slot.tensor.dtype != first.tensor.dtype || slot.tensor.rows != first.tensor.rows ||
        slot.tensor.cols != first.tensor.cols) {
      // Every rank sees the difference and throws.
      const auto other = &slot - slots_.data();
      throw Error(ErrorCode::internal, cat("the ranks issue different operations: rank 0 ", name_of(first.call),
                                           " of [", first.tensor.rows, ", ", first.tensor.cols, "], rank ", other, " ",
                                           name_of(slot.call), " of [", slot.tensor.rows, ", ", slot.tensor.cols, "]"));
    }
  }
}

void ProcessGroup::all_reduce(int rank, const Tensor& tensor, ThreadPool& pool) {
  if (tensor.dtype != DType::f32) throw Error(ErrorCode::internal, "all_reduce: the tensor must be f32");
  meet(rank, Call::all_reduce, tensor);
  // Each rank sums its own range of elements (whole cache lines) and writes the sums to the tensors of all ranks.
  const std::int64_t elements = tensor.rows * tensor.cols;
  const std::int64_t lines = (elements + kLine - 1) / kLine;
  const auto edge = [&](std::int64_t of) { return std::min(elements, lines * of / ranks() * kLine); };
  const std::int64_t begin = edge(rank), end = edge(rank + 1);
  pool.parallel_for(end - begin, kSmallElements,
                    [&](std::int64_t from, std::int64_t to) { add_share(begin + from, begin + to); });
  barrier();
}

// Elements [begin, end) of the tensors, counted along the rows.
void ProcessGroup::add_share(std::int64_t begin, std::int64_t end) {
  const std::int64_t cols = slots_.front().tensor.cols;
  std::array<float, 512> sum;
  while (begin < end) {
    const std::int64_t row = begin / cols, col = begin % cols;
    const std::int64_t n = std::min({end - begin, cols - col, std::ssize(sum)});
    const auto bytes = static_cast<std::size_t>(n) * sizeof(float);
    std::memcpy(sum.data(), bytes_of(slots_.front().tensor, row, col), bytes);
    for (std::size_t r = 1; r < slots_.size(); ++r) {
      const auto* const other = reinterpret_cast<const float*>(bytes_of(slots_[r].tensor, row, col));
      for (std::int64_t i = 0; i < n; ++i) sum[static_cast<std::size_t>(i)] += other[i];
    }
    for (const auto& slot : slots_) std::memcpy(bytes_of(slot.tensor, row, col), sum.data(), bytes);
    begin += n;
  }
}

void ProcessGroup::all_gather(int rank, const Tensor& out, const Tensor& in, ThreadPool& pool) {
  if (out.dtype != in.dtype || out.rows != in.rows || out.cols != ranks() * in.cols) {
    throw Error(ErrorCode::internal, cat("all_gather: out [", out.rows, ", ", out.cols, "] must be [", in.rows, ", ",
                                         ranks(), " * ", in.cols, "] and of in's type"));
  }
  meet(rank, Call::all_gather, in);
  const auto bytes = static_cast<std::size_t>(in.cols) * size_of(in.dtype);
  const auto grain = std::max<std::int64_t>(1, kSmallElements / std::max<std::int64_t>(1, out.cols));
  pool.parallel_for(out.rows, grain, [&](std::int64_t from, std::int64_t to) {
    for (auto row = from; row < to; ++row) {
      for (std::size_t r = 0; r < slots_.size(); ++r) {
        std::memcpy(bytes_of(out, row, static_cast<std::int64_t>(r) * in.cols), bytes_of(slots_[r].tensor, row, 0),
                    bytes);
      }
    }
  });
  // No rank may change its tensor while another rank still reads it.
  barrier();
}

}  // namespace charonia::ops
