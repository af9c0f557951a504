// The division of an SM's memory between shared memory and L1 cache.
#pragma once

#include <string_view>

#include "base/text.h"
#include "charonia/error.h"

namespace charonia::cuda {

// All kernels use the same division. An SM must be empty before its division changes, so kernels with different
// divisions do not overlap. 100, the maximum of shared memory (228 of 256 KB on compute capability 9.0), allows two
// blocks of attention or three of a GEMM per SM. A GEMM with few rows then has 28 KB of L1 cache for its input. Not
// measured. CHARONIA_CUDA_CARVEOUT overrides it.
inline constexpr int kSharedCarveout = 100;
inline constexpr int kDriversCarveout = -1;  // the driver decides for each kernel

// The percentage of shared memory in a value of CHARONIA_CUDA_CARVEOUT; empty: kSharedCarveout. Throws
// Error(invalid_argument) if it is not an integer from -1 to 100.
inline int shared_carveout(std::string_view setting) {
  if (setting.empty()) return kSharedCarveout;
  const auto percent = parse_number<int>(setting);
  if (!percent || *percent < kDriversCarveout || *percent > 100) {
    throw Error(ErrorCode::invalid_argument,
                cat("CHARONIA_CUDA_CARVEOUT = ", setting,
                    ": give the percentage of shared memory, 0 to 100, or -1 to leave it to the driver"));
  }
  return *percent;
}

}  // namespace charonia::cuda
