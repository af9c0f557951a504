// Collectives between ranks whose devices can read each other's memory at the same address: several ranks on one GPU,
// which NCCL does not support, or the emulated device. For tests of tensor parallelism on a machine with one GPU:
// threads wait for each other at every operation.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "ops/cuda/collectives/nccl.h"
#include "ops/cuda/device/runtime.h"

namespace charonia::cuda {

class LocalCollectives final : public ops::NcclGroup {
 public:
  LocalCollectives(int device, int ranks);

  int ranks() const override { return static_cast<int>(ranks_.size()); }
  int ranks_per_device() const override { return ranks(); }
  bool capturable() const override { return false; }
  void all_reduce(Stream& stream, int rank, void* data, DType type, std::int64_t count) override;
  void all_gather(Stream& stream, int rank, void* out, const void* in, std::size_t bytes) override;
  void abort(int rank, std::string_view why) noexcept override;
  void check() override;

 private:
  struct Rank {
    const void* in = nullptr;
    std::unique_ptr<Event> ready, read;  // its input is ready; it has read all inputs
    DeviceMemory shards;                 // used by all_reduce
  };

  // Waits until all ranks have called this equally often. Throws Error(internal) if a rank will not call it.
  void meet();
  void throw_aborted() const;

  std::vector<Rank> ranks_;
  std::mutex mutex_;
  std::condition_variable all_came_;
  int came_ = 0;
  std::uint64_t meetings_ = 0;
  bool aborted_ = false;
  std::string why_;
};

}  // namespace charonia::cuda
