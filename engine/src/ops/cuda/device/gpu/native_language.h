// The CUDA implementation of the language of kernels (portable.h).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "ops/cuda/device/elements.h"

#define CHARONIA_KERNEL(max_threads, min_blocks) __global__ __launch_bounds__(max_threads, min_blocks)
#define CHARONIA_DEVICE __device__ __forceinline__
#define CHARONIA_SHARED(type, name, extent) __shared__ type name extent
#define CHARONIA_UNROLL _Pragma("unroll")
#define CHARONIA_PRAGMA(text) _Pragma(#text)
#define CHARONIA_UNROLL_BY(n) CHARONIA_PRAGMA(unroll n)

namespace charonia::cuda {

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

// 2^x with the device's ex2.approx; an error of about 2 units in the last place. exp2f(-infinity) is 0.
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
// Never fused with a following addition.
CHARONIA_DEVICE float multiply_rounded(float a, float b) { return __fmul_rn(a, b); }
CHARONIA_DEVICE float reciprocal_sqrt(float x) { return rsqrtf(x); }

// Loads data that neither this kernel nor earlier kernels of the step write. The compiler may move such a load before
// dependency_wait(), which tests on the emulated device cannot show. streaming: for data that is read once (it does not
// stay in L1).
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

// Loads data that an earlier kernel has written, after dependency_wait(). The data stays in L1 for later reads.
CHARONIA_DEVICE uint4 load_cached(const uint4* p) {
  uint4 v;
  asm volatile("ld.global.ca.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p)
               : "memory");
  return v;
}
// Loads data that other thread blocks of this grid have written, after __threadfence().
template <class T>
CHARONIA_DEVICE T load_l2(const T* p) {
  return __ldcg(p);
}
// Prefetches the 128 bytes around p into the L2 cache.
CHARONIA_DEVICE void prefetch_l2(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }

// Programmatic dependent launch: a kernel may start before the previous kernel in the stream has ended. Every kernel
// must call dependency_wait() before it reads or writes data that another kernel of the step accesses (weights may be
// read before), and may call dependency_trigger() when the next kernel may start.
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

// To FP8. Rounds to nearest, ties to even. Larger magnitudes become the largest number; NaN stays NaN. Compute
// capability 8.9 and newer (DeviceInfo::fp8).
CHARONIA_DEVICE std::uint8_t e4m3_from_float([[maybe_unused]] float x) {
#if __CUDA_ARCH__ >= 890
  std::uint16_t both;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(both) : "f"(0.0F), "f"(x));
  return static_cast<std::uint8_t>(both);
#else
  __trap();
  return 0;
#endif
}

// Bytes i and j of a word, from FP8 to two fp16 elements, which is exact; NaN stays NaN. Compute capability 8.9 and
// newer.
CHARONIA_DEVICE std::uint32_t f16_from_e4m3([[maybe_unused]] std::uint32_t word, [[maybe_unused]] int i,
                                            [[maybe_unused]] int j) {
#if __CUDA_ARCH__ >= 890
  const auto codes =
      static_cast<std::uint16_t>(i == 0 && j == 1 ? word : permute_bytes(word, static_cast<unsigned>(i + 16 * j)));
  std::uint32_t both;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(both) : "h"(codes));
  return both;
#else
  __trap();
  return 0;
#endif
}

// a * b + c for two numbers each. Only for results that the type represents exactly.
template <class T>
CHARONIA_DEVICE std::uint32_t exact_fma2(std::uint32_t a, std::uint32_t b, std::uint32_t c) {
  std::uint32_t d;
  if constexpr (std::is_same_v<T, f16>) {
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  } else {
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  }
  return d;
}

}  // namespace charonia::cuda
