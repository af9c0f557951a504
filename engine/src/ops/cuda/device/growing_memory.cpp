#include "ops/cuda/device/growing_memory.h"

namespace charonia::cuda {
namespace {

std::size_t rounded_up(std::size_t bytes, std::size_t multiple) { return (bytes + multiple - 1) / multiple * multiple; }

}  // namespace

GrowingMemory::GrowingMemory(std::size_t regions, std::size_t bytes, std::size_t committed, std::string_view what)
    : regions_(regions), distance_(bytes), committed_(bytes) {
  if (committed < bytes) granularity_ = ReservedMemory::granularity();
  if (granularity_ == 0) {
    memory_ = DeviceMemory(regions * bytes, what);
    return;
  }
  distance_ = rounded_up(bytes, granularity_);
  committed_ = 0;
  memory_ = ReservedMemory(regions * distance_, what);
  commit(committed);
}

void GrowingMemory::commit(std::size_t bytes) {
  if (bytes <= committed_) return;
  auto& memory = std::get<ReservedMemory>(memory_);
  const auto wanted = rounded_up(bytes, granularity_);
  std::size_t done = 0;
  try {
    for (; done < regions_; ++done) memory.commit(done * distance_ + committed_, wanted - committed_);
  } catch (...) {
    for (; done > 0; --done) memory.release_last();
    throw;
  }
  committed_ = wanted;
}

std::byte* GrowingMemory::data() const {
  if (const auto* const whole = std::get_if<DeviceMemory>(&memory_)) return whole->as<std::byte>();
  return std::get<ReservedMemory>(memory_).data();
}

}  // namespace charonia::cuda
