// Device memory in equal regions that all grow at their end, with fixed addresses.
#pragma once

#include <cstddef>
#include <string_view>
#include <variant>

#include "ops/cuda/device/runtime.h"

namespace charonia::cuda {

class GrowingMemory {
 public:
  GrowingMemory() = default;
  // `regions` regions of `bytes` bytes each. The first `committed` bytes of each region have memory, zero-filled. If
  // that is the whole region, or if the device cannot reserve addresses without memory, this is one ordinary
  // allocation, and commit() does nothing. Throws Error(resource_exhausted) with the numbers.
  GrowingMemory(std::size_t regions, std::size_t bytes, std::size_t committed, std::string_view what);

  // Provides memory for the first `bytes` of every region. Committed memory keeps its contents. Throws
  // Error(resource_exhausted) and changes nothing if memory runs out.
  void commit(std::size_t bytes);

  std::byte* data() const;
  std::size_t distance() const { return distance_; }  // bytes between regions

 private:
  std::size_t regions_ = 0, distance_ = 0, committed_ = 0, granularity_ = 0;
  std::variant<DeviceMemory, ReservedMemory> memory_;
};

}  // namespace charonia::cuda
