// What a device can do at best, for the shares that kernels are given.
#pragma once

#include <cstdint>

#include "ops/cuda/device/runtime.h"

namespace charonia::bench {

// Reads `bytes` (a multiple of 16) at `data`, 16 bytes a thread and access, and keeps nothing. sink: [1], never
// written.
void read_all(cuda::Stream& stream, const cuda::DeviceInfo& device, const void* data, std::int64_t bytes,
              std::uint32_t* sink);

// GEMMs of 16 x 8 x 16 in bf16 (mma.sync) out of registers, on all SMs: what kernels that use this
// instruction can reach. Returns the operations issued, multiplications and additions. sink: [1], never written.
double multiply_in_registers(cuda::Stream& stream, const cuda::DeviceInfo& device, int iterations, float* sink);

}  // namespace charonia::bench
