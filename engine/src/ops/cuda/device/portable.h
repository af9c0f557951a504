// The language of the kernels: CUDA C++ that is also plain C++.
//
// The same source is compiled twice. nvcc compiles it to device code. A host compiler compiles it to functions that the
// emulated device (engine/tests/emulator) runs on the CPU: one thread block after another, every thread as a fiber. So
// kernels can be compared with their references on a machine without a GPU. All differences are in the headers
// native_*.h. Each of them has a second implementation in the emulator. The include path selects one.
//
// Kernels use threadIdx, blockIdx, blockDim, gridDim, __syncthreads, __syncwarp, the functions of native_language.h and
// of this header, and
//   CHARONIA_KERNEL(max_threads, min_blocks) void name(const Params p)   for `__global__`, with its launch bounds
//   CHARONIA_DEVICE                                                      for `__device__ inline`
//   CHARONIA_HD (host_device.h)                                          for functions of host and device
//   CHARONIA_SHARED(T, name, [n])                                        for `__shared__ T name[n]`
//   dynamic_shared()                                                     the block's dynamic shared memory
//   cluster_sync(), cluster_rank(), map_shared_rank(p, rank)             for clusters of blocks
// All 32 lanes must call warp functions. A kernel has one argument, a struct by value.
#pragma once

#include <cstddef>
#include <cstdint>

#include "native_language.h"
#include "ops/cuda/device/elements.h"
#include "ops/cuda/device/host_device.h"

namespace charonia::cuda {

inline constexpr int kWarp = 32;
inline constexpr float kLog2E = 1.44269504F;

CHARONIA_DEVICE int lane_id() { return static_cast<int>(threadIdx.x) % kWarp; }
CHARONIA_DEVICE int warp_id() { return static_cast<int>(threadIdx.x) / kWarp; }

// Sums over a warp, in a fixed order; every lane has the result.
CHARONIA_DEVICE float warp_sum(float x) {
  CHARONIA_UNROLL
  for (int mask = kWarp / 2; mask > 0; mask /= 2) x += shuffle_xor(x, mask);
  return x;
}
CHARONIA_DEVICE float warp_max(float x) {
  CHARONIA_UNROLL
  for (int mask = kWarp / 2; mask > 0; mask /= 2) x = fmaxf(x, shuffle_xor(x, mask));
  return x;
}

// Sums over a block of at most 1024 threads (a multiple of 32), in a fixed order; every thread has the result.
// `scratch`: 32 floats of shared memory, which may be reused after the call.
CHARONIA_DEVICE float block_sum(float x, float* scratch) {
  const int warps = static_cast<int>(blockDim.x) / kWarp;
  x = warp_sum(x);
  if (lane_id() == 0) scratch[warp_id()] = x;
  __syncthreads();
  x = warp_sum(lane_id() < warps ? scratch[lane_id()] : 0.0F);
  __syncthreads();
  return x;
}
CHARONIA_DEVICE float block_max(float x, float* scratch) {
  const int warps = static_cast<int>(blockDim.x) / kWarp;
  x = warp_max(x);
  if (lane_id() == 0) scratch[warp_id()] = x;
  __syncthreads();
  x = warp_max(scratch[lane_id() < warps ? lane_id() : 0]);
  __syncthreads();
  return x;
}

}  // namespace charonia::cuda
