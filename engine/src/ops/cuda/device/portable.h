// The language of the kernels: CUDA C++ that is also plain C++.
//
// The same source is compiled twice. nvcc compiles it to device code. A host compiler, with CHARONIA_CUDA_ON_HOST,
// compiles it to functions that the emulated device (host_grid.h) runs on the CPU: one thread block after another,
// every thread as a fiber. So kernels can be compared with their references on a machine without a GPU. All differences
// between the two are in this header and in device/tensor_core.h.
//
// Kernels use threadIdx, blockIdx, blockDim, gridDim, __syncthreads, __syncwarp, the functions below, and
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

#include "ops/cuda/emulated/host_device.h"

#if defined(CHARONIA_CUDA_ON_HOST)
#include "ops/cuda/emulated/host_grid.h"
#else
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#endif

#if defined(CHARONIA_CUDA_ON_HOST)
#define CHARONIA_KERNEL(max_threads, min_blocks) inline
#define CHARONIA_DEVICE inline
#define CHARONIA_SHARED(type, name, extent) \
  typedef type name##_in_shared extent;     \
  auto& name = ::charonia::cuda::host_grid::shared_variable<name##_in_shared>([] {})
#define CHARONIA_UNROLL
#define CHARONIA_UNROLL_BY(n)
#else
#define CHARONIA_KERNEL(max_threads, min_blocks) __global__ __launch_bounds__(max_threads, min_blocks)
#define CHARONIA_DEVICE __device__ __forceinline__
#define CHARONIA_SHARED(type, name, extent) __shared__ type name extent
#define CHARONIA_UNROLL _Pragma("unroll")
#define CHARONIA_PRAGMA(text) _Pragma(#text)
#define CHARONIA_UNROLL_BY(n) CHARONIA_PRAGMA(unroll n)
#endif

namespace charonia::cuda {

inline constexpr int kWarp = 32;

// 16-bit floats in memory. Arithmetic is in float.
struct bf16 {
  std::uint16_t bits;
};
struct f16 {
  std::uint16_t bits;
};

#if defined(CHARONIA_CUDA_ON_HOST)

CHARONIA_DEVICE float to_float(float x) { return x; }
CHARONIA_DEVICE float to_float(bf16 x) { return bf16_to_float(x.bits); }
CHARONIA_DEVICE float to_float(f16 x) { return f16_to_float(x.bits); }
template <class T>
CHARONIA_DEVICE T from_float(float x);
template <>
CHARONIA_DEVICE float from_float<float>(float x) {
  return x;
}
template <>
CHARONIA_DEVICE bf16 from_float<bf16>(float x) {
  return {float_to_bf16(x)};
}
template <>
CHARONIA_DEVICE f16 from_float<f16>(float x) {
  return {float_to_f16(x)};
}

// 2^x with the device's ex2.approx; an error of about 2 units in the last place. exp2f(-infinity) is 0.
CHARONIA_DEVICE float fast_exp2(float x) { return std::exp2(x); }
CHARONIA_DEVICE float fast_divide(float a, float b) { return a / b; }
CHARONIA_DEVICE std::uint32_t mask_or(std::uint32_t x, std::uint32_t mask, std::uint32_t bits) { return (x & mask) | bits; }
CHARONIA_DEVICE std::uint32_t permute_bytes(std::uint32_t x, std::uint32_t selector) {
  std::uint32_t out = 0;
  for (int i = 0; i < 4; ++i) {
    const auto from = selector >> 4 * i & 7U;
    out |= (from < 4 ? x >> 8 * from & 0xffU : 0) << 8 * i;
  }
  return out;
}
CHARONIA_DEVICE float multiply_rounded(float a, float b) { return a * b; }  // never fused with a following addition
CHARONIA_DEVICE float reciprocal_sqrt(float x) { return 1.0F / std::sqrt(x); }

// Loads data that neither this kernel nor earlier kernels of the step write. The compiler may move such a load before
// dependency_wait(), which tests on the emulated device cannot show. streaming: for data that is read once (it does not
// stay in L1).
template <class T>
CHARONIA_DEVICE T load_readonly(const T* p) {
  host_grid::check_aligned(p, alignof(T), "load_readonly");
  return *p;
}
CHARONIA_DEVICE uint4 load_streaming(const uint4* p) {
  host_grid::check_aligned(p, sizeof(uint4), "load_streaming");
  host_grid::note_streaming_load(p, sizeof(uint4));
  return *p;
}
// Loads data that an earlier kernel has written, after dependency_wait(). The data stays in L1 for later reads.
CHARONIA_DEVICE uint4 load_cached(const uint4* p) {
  host_grid::check_aligned(p, sizeof(uint4), "load_cached");
  host_grid::check_waited("load_cached");
  return *p;
}
// Loads data that other thread blocks of this grid have written, after __threadfence().
template <class T>
CHARONIA_DEVICE T load_l2(const T* p) {
  static_assert(sizeof(T) == 16);
  host_grid::check_aligned(p, sizeof(T), "load_l2");
  host_grid::check_waited("load_l2");
  return *p;
}
// Prefetches the 128 bytes around p into the L2 cache.
CHARONIA_DEVICE void prefetch_l2(const void*) {}

// Programmatic dependent launch: a kernel may start before the previous kernel in the stream has ended. Every kernel
// must call dependency_wait() before it reads or writes data that another kernel of the step accesses (weights may be
// read before), and may call dependency_trigger() when the next kernel may start.
CHARONIA_DEVICE void dependency_wait() { host_grid::wait_for_dependency(); }
CHARONIA_DEVICE void dependency_trigger() {}

#else

CHARONIA_DEVICE float to_float(float x) { return x; }
CHARONIA_DEVICE float to_float(bf16 x) { return __uint_as_float(static_cast<unsigned>(x.bits) << 16); }
CHARONIA_DEVICE float to_float(f16 x) { return __half2float(__ushort_as_half(x.bits)); }
template <class T>
CHARONIA_DEVICE T from_float(float x);
template <>
CHARONIA_DEVICE float from_float<float>(float x) {
  return x;
}
template <>
CHARONIA_DEVICE bf16 from_float<bf16>(float x) {
  return {__bfloat16_as_ushort(__float2bfloat16_rn(x))};
}
template <>
CHARONIA_DEVICE f16 from_float<f16>(float x) {
  return {__half_as_ushort(__float2half_rn(x))};
}

CHARONIA_DEVICE float fast_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
CHARONIA_DEVICE float fast_divide(float a, float b) { return __fdividef(a, b); }
// Selects bytes of the result, the lowest first, with the selector's nibbles: 0 to 3 are the bytes of x, 4 is 0.
CHARONIA_DEVICE std::uint32_t permute_bytes(std::uint32_t x, std::uint32_t selector) {
  return __byte_perm(x, 0, selector);
}
// x & mask | bits in one instruction. With two constants the compiler would emit two instructions.
CHARONIA_DEVICE std::uint32_t mask_or(std::uint32_t x, std::uint32_t mask, std::uint32_t bits) {
  std::uint32_t out;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(out) : "r"(x), "r"(mask), "r"(bits));
  return out;
}
CHARONIA_DEVICE float multiply_rounded(float a, float b) { return __fmul_rn(a, b); }
CHARONIA_DEVICE float reciprocal_sqrt(float x) { return rsqrtf(x); }

template <class T>
CHARONIA_DEVICE T load_readonly(const T* p) {
  return __ldg(p);
}
CHARONIA_DEVICE bf16 load_readonly(const bf16* p) { return {__ldg(&p->bits)}; }
CHARONIA_DEVICE f16 load_readonly(const f16* p) { return {__ldg(&p->bits)}; }
CHARONIA_DEVICE uint4 load_streaming(const uint4* p) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
}

CHARONIA_DEVICE uint4 load_cached(const uint4* p) {
  uint4 v;
  asm volatile("ld.global.ca.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p)
               : "memory");
  return v;
}
template <class T>
CHARONIA_DEVICE T load_l2(const T* p) {
  return __ldcg(p);
}
CHARONIA_DEVICE void prefetch_l2(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }

CHARONIA_DEVICE void dependency_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
CHARONIA_DEVICE void dependency_trigger() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Clusters of blocks (Launch::cluster_y; compute capability 9). cluster_sync() is a barrier of all threads of the
// cluster; writes to shared memory before it are visible after it. map_shared_rank() returns the address in the shared
// memory of the block with that rank that corresponds to `own` in this block's dynamic shared memory; that block must
// not have ended.
CHARONIA_DEVICE void cluster_sync() {
#if __CUDA_ARCH__ >= 900
  // Not .aligned, because lanes may arrive separately from a loop with different iteration counts.
  asm volatile("barrier.cluster.arrive;\n\tbarrier.cluster.wait;" ::: "memory");
#else
  __trap();
#endif
}
CHARONIA_DEVICE int cluster_rank() {
  unsigned rank = 0;
#if __CUDA_ARCH__ >= 900
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
  return static_cast<int>(rank);
}
template <class T>
CHARONIA_DEVICE const T* map_shared_rank(const T* own, [[maybe_unused]] int rank) {
#if __CUDA_ARCH__ >= 900
  const T* at;
  asm("mapa.u64 %0, %1, %2;" : "=l"(at) : "l"(own), "r"(rank));
  return at;
#else
  return own;
#endif
}

// The block's dynamic shared memory, aligned to 128 bytes.
CHARONIA_DEVICE unsigned char* dynamic_shared() {
  extern __shared__ __align__(128) unsigned char charonia_dynamic_shared[];
  return charonia_dynamic_shared;
}

CHARONIA_DEVICE float shuffle_xor(float x, int mask) { return __shfl_xor_sync(0xffffffffU, x, mask); }
CHARONIA_DEVICE int shuffle_xor(int x, int mask) { return __shfl_xor_sync(0xffffffffU, x, mask); }
CHARONIA_DEVICE unsigned long long shuffle_xor(unsigned long long x, int mask) {
  return __shfl_xor_sync(0xffffffffU, x, mask);
}
template <class T>
CHARONIA_DEVICE T shuffle_from(T x, int lane) {
  return __shfl_sync(0xffffffffU, x, lane);
}
template <class T>
CHARONIA_DEVICE T shuffle_up(T x, int delta) {  // the lowest `delta` lanes keep their own value
  return __shfl_up_sync(0xffffffffU, x, delta);
}
CHARONIA_DEVICE unsigned ballot(bool x) { return __ballot_sync(0xffffffffU, x); }
CHARONIA_DEVICE bool any_lane(bool x) { return __any_sync(0xffffffffU, x); }

#endif

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
