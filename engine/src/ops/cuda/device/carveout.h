// The division of an SM's memory between shared memory and L1 cache.
#pragma once

#include <string_view>

namespace charonia::cuda {

// All kernels use the same division. An SM must be empty before its division changes, so kernels with different
// divisions do not overlap. 100, the maximum of shared memory (228 of 256 KB on compute capability 9.0), allows two
// blocks of attention or three of a GEMM per SM. A GEMM with few rows then has 28 KB of L1 cache for its input. Not
// measured. CHARONIA_CUDA_CARVEOUT overrides it.
inline constexpr int kSharedCarveout = 100;
inline constexpr int kDriversCarveout = -1;  // the driver decides for each kernel

// The percentage of shared memory in a value of CHARONIA_CUDA_CARVEOUT; empty: kSharedCarveout. Throws
// Error(invalid_argument) if it is not an integer from -1 to 100.
int shared_carveout(std::string_view setting);

}  // namespace charonia::cuda
