// How an SM's memory is divided between shared memory and L1.
#pragma once

#include <string_view>

namespace charonia::cuda {

// One division for all kernels: an SM has to be empty before it changes, so that neighbours which ask for
// different ones do not overlap. 100, as much shared memory as there is (228 of 256 KB on compute capability 9.0), is
// what lets two blocks of attention or three of a GEMM run on an SM; for a GEMM of few rows it leaves
// 28 KB of L1 for the input. Not measured: CHARONIA_CUDA_CARVEOUT sets another.
inline constexpr int kSharedCarveout = 100;
inline constexpr int kDriversCarveout = -1;  // each kernel's own, as the driver sees fit

// The percentage of shared memory that a value of CHARONIA_CUDA_CARVEOUT asks for; empty: kSharedCarveout. Throws
// Error(invalid_argument) for what is no integer from -1 to 100.
int shared_carveout(std::string_view setting);

}  // namespace charonia::cuda
