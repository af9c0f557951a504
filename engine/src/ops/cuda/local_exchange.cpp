#include "ops/cuda/local_exchange.h"

#include "base/text.h"
#include "charonia/error.h"
#include "ops/cuda/kernels/exchange.h"

namespace charonia::cuda {
LocalExchange::LocalExchange(int device, int ranks) : ranks_(static_cast<std::size_t>(ranks)) {
  const OnDevice on(device);
  for (auto& rank : ranks_) {
    rank.ready = std::make_unique<Event>();
    rank.read = std::make_unique<Event>();
  }
}

void LocalExchange::throw_aborted() const {
  if (aborted_) throw Error(ErrorCode::internal, cat("an exchange between ranks was given up: ", why_));
}

void LocalExchange::meet() {
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

void LocalExchange::abort(int rank, std::string_view why) noexcept {
  try {
    const std::lock_guard lock(mutex_);
    if (aborted_) return;
    aborted_ = true;
    why_ = cat("rank ", rank, ": ", why);
  } catch (...) {  // without the reason
  }
  all_came_.notify_all();
}

void LocalExchange::resume() {
  const std::lock_guard lock(mutex_);
  aborted_ = false;
  came_ = 0;
}

void LocalExchange::check() {
  const std::lock_guard lock(mutex_);
  throw_aborted();
}

void LocalExchange::all_gather(Stream& stream, int rank, void* out, const void* in, std::size_t bytes) {
  auto& mine = ranks_[static_cast<std::size_t>(rank)];
  mine.in = in;
  mine.ready->record(stream);
  meet();
  auto* to = static_cast<std::byte*>(out);
  for (const auto& other : ranks_) {
    stream.wait_for(*other.ready, "exchange between ranks");
    stream.copy(to, other.in, bytes, "exchange between ranks");
    to += bytes;
  }
  mine.read->record(stream);
  meet();
  for (const auto& other : ranks_) stream.wait_for(*other.read, "exchange between ranks");
}

void LocalExchange::all_reduce(Stream& stream, int rank, void* data, DType type, std::int64_t count) {
  const auto bytes = static_cast<std::size_t>(count) * size_of(type);
  auto& pieces = ranks_[static_cast<std::size_t>(rank)].pieces;
  if (pieces.bytes() < bytes * ranks_.size()) {
    stream.wait("exchange between ranks");
    pieces = DeviceMemory(bytes * ranks_.size(), "the ranks' pieces");
  }
  all_gather(stream, rank, pieces.data(), data, bytes);
  sum_pieces(stream, {data, type, 1, count, count}, pieces.data(), ranks());
}

}  // namespace charonia::cuda
