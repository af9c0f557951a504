// Reads ahead into the L2 cache.
#pragma once

#include <cstddef>

#include "ops/cuda/device/runtime.h"

namespace charonia::cuda {

// Requests memory from the first byte on, which other kernels may read at the same time. Needs no result of other work.
void prefetch(Stream& stream, const void* from, std::size_t bytes);

}  // namespace charonia::cuda
