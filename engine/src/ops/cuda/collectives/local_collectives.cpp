#include "ops/cuda/collectives/local_collectives.h"

#include "base/text.h"
#include "charonia/error.h"
#include "ops/cuda/kernels/collective.h"

namespace charonia::cuda {
LocalCollectives::LocalCollectives(int device, int ranks) : ranks_(static_cast<std::size_t>(ranks)) {
  const OnDevice on(device);
  for (auto& rank : ranks_) {
    rank.ready = std::make_unique<Event>();
    rank.read = std::make_unique<Event>();
  }
}

void LocalCollectives::throw_aborted() const {
  if (aborted_) throw Error(ErrorCode::internal, cat("a collective between ranks was aborted: ", why_));
}

void LocalCollectives::meet() {
  std::unique_lock lock(mutex_);
  throw_aborted();
  const auto meeting = meetings_;
  if (++came_ == ranks()) {
    came_ = 0;
    ++meetings_;
    all_came_.notify_all();
    return;
  }
  all_came_.wait(lock, [&] { return aborted_ || meetings_ != meeting; });
  if (meetings_ == meeting) throw_aborted();
}

void LocalCollectives::abort(int rank, std::string_view why) noexcept {
  try {
    const std::lock_guard lock(mutex_);
    if (aborted_) return;
    aborted_ = true;
    why_ = cat("rank ", rank, ": ", why);
  } catch (...) {  // keep the error without its reason
  }
  all_came_.notify_all();
}

void LocalCollectives::check() {
  const std::lock_guard lock(mutex_);
  throw_aborted();
}

void LocalCollectives::all_gather(Stream& stream, int rank, void* out, const void* in, std::size_t bytes) {
  auto& mine = ranks_[static_cast<std::size_t>(rank)];
  mine.in = in;
  mine.ready->record(stream);
  meet();
  auto* to = static_cast<std::byte*>(out);
  for (const auto& other : ranks_) {
    stream.wait_for(*other.ready, "collective between ranks");
    stream.copy(to, other.in, bytes, "collective between ranks");
    to += bytes;
  }
  mine.read->record(stream);
  meet();
  for (const auto& other : ranks_) stream.wait_for(*other.read, "collective between ranks");
}

void LocalCollectives::all_reduce(Stream& stream, int rank, void* data, DType type, std::int64_t count) {
  const auto bytes = static_cast<std::size_t>(count) * size_of(type);
  auto& shards = ranks_[static_cast<std::size_t>(rank)].shards;
  if (shards.bytes() < bytes * ranks_.size()) {
    stream.wait("collective between ranks");
    shards = DeviceMemory(bytes * ranks_.size(), "the ranks' shards");
  }
  all_gather(stream, rank, shards.data(), data, bytes);
  sum_shards(stream, {data, type, 1, count, count}, shards.data(), ranks());
}

}  // namespace charonia::cuda
