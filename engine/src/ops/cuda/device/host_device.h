// For functions that kernels and host code share: index arithmetic, plans, layouts.
#pragma once

#include <cstdint>

#include "base/dtype.h"

#if defined(__CUDACC__)
#define CHARONIA_HD __host__ __device__ inline
#else
#define CHARONIA_HD inline
#endif

namespace charonia::cuda {

// Whether rows that begin at `data`, `stride` elements apart, can be accessed 16 bytes at a time.
inline bool aligned(const void* data, std::int64_t stride, DType type) {
  return reinterpret_cast<std::uintptr_t>(data) % 16 == 0 &&
         stride * static_cast<std::int64_t>(size_of(type)) % 16 == 0;
}

CHARONIA_HD constexpr std::int64_t divide_up(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }
CHARONIA_HD constexpr std::int64_t round_up(std::int64_t a, std::int64_t b) { return divide_up(a, b) * b; }

}  // namespace charonia::cuda
