// Device memory in equal regions that all grow at their end, and whose addresses stay.
#pragma once

#include <cstddef>
#include <string_view>
#include <variant>

#include "ops/cuda/device/runtime.h"

namespace charonia::cuda {

class GrowingMemory {
 public:
  GrowingMemory() = default;
  // `regions` regions of `bytes` each; the first `committed` bytes of each have memory, zero-filled. Where that is all
  // of it, or where the device cannot give addresses without memory, it is one ordinary allocation and commit() has
  // nothing left to do. Throws Error(resource_exhausted) with the numbers.
  GrowingMemory(std::size_t regions, std::size_t bytes, std::size_t committed, std::string_view what);

  // The first `bytes` of every region have memory; what has it keeps its contents. Throws Error(resource_exhausted),
  // changing nothing.
  void commit(std::size_t bytes);

  std::byte* data() const;
  std::size_t distance() const { return distance_; }  // bytes from one region to the next

 private:
  std::size_t regions_ = 0, distance_ = 0, committed_ = 0, granularity_ = 0;
  std::variant<DeviceMemory, ReservedMemory> memory_;
};

}  // namespace charonia::cuda
