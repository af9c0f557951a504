// Collectives between the ranks of one process: NCCL, loaded at run time (nccl.cpp), or memory and a barrier on the
// emulated device (LocalCollectives).
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "base/dtype.h"
#include "ops/cuda/device/runtime.h"
#include "ops/cuda/make_cuda_ops.h"

namespace charonia::ops {

// All ranks call the same operations in the same order, each on its own thread and with a stream of its own device.
class NcclGroup {
 public:
  virtual ~NcclGroup() = default;
  virtual int ranks() const = 0;
  virtual int ranks_per_device() const { return 1; }  // ranks that share the memory of a device
  virtual bool capturable() const = 0;                // whether operations can be captured in a graph
  // data [count] = the sum of all ranks' data.
  virtual void all_reduce(cuda::Stream& stream, int rank, void* data, DType type, std::int64_t count) = 0;
  // out [ranks][bytes] = all ranks' in [bytes].
  virtual void all_gather(cuda::Stream& stream, int rank, void* out, const void* in, std::size_t bytes) = 0;

  // As Ops::abort_collectives.
  virtual void abort(int rank, std::string_view why) noexcept = 0;
  // Throws Error(internal) after abort().
  virtual void check() = 0;
};

// Empty if NCCL can be loaded; otherwise the reason why not.
std::string nccl_missing();

}  // namespace charonia::ops
