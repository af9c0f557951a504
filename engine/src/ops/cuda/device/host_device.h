// For functions that kernels and host code share: index arithmetic, plans, layouts.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define CHARONIA_HD __host__ __device__ inline
#else
#define CHARONIA_HD inline
#endif

namespace charonia::cuda {

CHARONIA_HD constexpr std::int64_t divide_up(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }
CHARONIA_HD constexpr std::int64_t round_up(std::int64_t a, std::int64_t b) { return divide_up(a, b) * b; }

}  // namespace charonia::cuda
