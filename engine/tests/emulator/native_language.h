// The emulated device's implementation of the language of kernels (portable.h).
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <type_traits>

#include "base/dtype.h"
#include "emulator/host_grid.h"
#include "ops/cuda/device/elements.h"

#define CHARONIA_KERNEL(max_threads, min_blocks) inline
#define CHARONIA_DEVICE inline
#define CHARONIA_SHARED(type, name, extent) \
  typedef type name##_in_shared extent;     \
  auto& name = ::charonia::cuda::host_grid::shared_variable<name##_in_shared>([] {})
#define CHARONIA_UNROLL
#define CHARONIA_UNROLL_BY(n)

namespace charonia::cuda {

// CUDA's names.

struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(16) int4 {
  int x, y, z, w;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};

#define threadIdx (::charonia::cuda::host_grid::place().thread)
#define blockIdx (::charonia::cuda::host_grid::place().block)
#define blockDim (::charonia::cuda::host_grid::place().block_dim)
#define gridDim (::charonia::cuda::host_grid::place().grid_dim)

inline void __syncthreads() { host_grid::sync_block(); }
inline void __syncwarp() { host_grid::sync_warp(); }
inline void cluster_sync() { host_grid::sync_cluster(); }
inline int cluster_rank() { return host_grid::rank_in_cluster(); }
template <class T>
const T* map_shared_rank(const T* own, int rank) {
  return static_cast<const T*>(host_grid::at_rank(own, sizeof(T), rank));
}
inline unsigned char* dynamic_shared() { return host_grid::dynamic_shared_memory(); }

template <class T>
T shuffle_xor(T x, int mask) {
  return host_grid::exchange(x)[(static_cast<int>(host_grid::place().thread.x) % 32) ^ mask];
}
template <class T>
T shuffle_from(T x, int lane) {
  return host_grid::exchange(x)[lane];
}
template <class T>
T shuffle_up(T x, int delta) {
  const int lane = static_cast<int>(host_grid::place().thread.x) % 32;
  return host_grid::exchange(x)[lane >= delta ? lane - delta : lane];
}
inline unsigned ballot(bool x) {
  const auto* lanes = host_grid::exchange(x);
  unsigned out = 0;
  for (unsigned lane = 0; lane < 32; ++lane) out |= static_cast<unsigned>(lanes[lane]) << lane;
  return out;
}
inline bool any_lane(bool x) { return ballot(x) != 0; }

// Fibers are not interrupted, so plain arithmetic is atomic.
template <class T>
T atomicAdd(T* at, T value) {
  host_grid::check_atomic(at, sizeof(T));
  const T old = *at;
  *at = old + value;
  return old;
}
inline void __threadfence() {}

inline unsigned __float_as_uint(float x) { return std::bit_cast<unsigned>(x); }
inline float __uint_as_float(unsigned x) { return std::bit_cast<float>(x); }
inline int __ffs(int x) { return x == 0 ? 0 : std::countr_zero(static_cast<unsigned>(x)) + 1; }
using ::expf;
using ::fabsf;
using ::log1pf;
using ::logf;
using ::tanhf;
using std::exp2f;
using std::fmaf;
using std::fmaxf;
using std::fminf;
using std::max;
using std::min;

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

CHARONIA_DEVICE float fast_exp2(float x) { return std::exp2(x); }
CHARONIA_DEVICE float fast_divide(float a, float b) { return a / b; }
CHARONIA_DEVICE std::uint32_t mask_or(std::uint32_t x, std::uint32_t mask, std::uint32_t bits) {
  return (x & mask) | bits;
}
CHARONIA_DEVICE std::uint32_t permute_bytes(std::uint32_t x, std::uint32_t selector) {
  std::uint32_t out = 0;
  for (int i = 0; i < 4; ++i) {
    const auto from = selector >> 4 * i & 7U;
    out |= (from < 4 ? x >> 8 * from & 0xffU : 0) << 8 * i;
  }
  return out;
}
CHARONIA_DEVICE float multiply_rounded(float a, float b) { return a * b; }
CHARONIA_DEVICE float reciprocal_sqrt(float x) { return 1.0F / std::sqrt(x); }

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
CHARONIA_DEVICE uint4 load_cached(const uint4* p) {
  host_grid::check_aligned(p, sizeof(uint4), "load_cached");
  host_grid::check_waited("load_cached");
  return *p;
}
template <class T>
CHARONIA_DEVICE T load_l2(const T* p) {
  static_assert(sizeof(T) == 16);
  host_grid::check_aligned(p, sizeof(T), "load_l2");
  host_grid::check_waited("load_l2");
  return *p;
}
CHARONIA_DEVICE void prefetch_l2(const void*) { ++host_grid::calls().prefetches; }

CHARONIA_DEVICE void dependency_wait() { host_grid::wait_for_dependency(); }
CHARONIA_DEVICE void dependency_trigger() { host_grid::note_trigger(); }

inline float e4m3_to_float(std::uint8_t bits) {
  static const auto kNumbers = [] {
    std::array<float, 128> out{};
    for (int code = 0; code < 127; ++code) {
      const int exponent = code / 8, mantissa = code % 8;
      out[static_cast<std::size_t>(code)] = exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -9)
                                                          : std::ldexp(static_cast<float>(8 + mantissa), exponent - 10);
    }
    out[127] = NAN;
    return out;
  }();
  const float size = kNumbers[bits & 0x7fU];
  return (bits & 0x80U) != 0 ? -size : size;
}

inline std::uint8_t e4m3_from_float(float x) {
  const auto sign = static_cast<std::uint8_t>(std::signbit(x) ? 0x80 : 0);
  if (std::isnan(x)) return static_cast<std::uint8_t>(sign | 0x7f);
  const float magnitude = std::min(std::fabs(x), kGreatestE4m3);
  if (magnitude == 0) return sign;
  int exponent = 0;
  std::frexp(magnitude, &exponent);             // magnitude in [2^(exponent - 1), 2^exponent)
  const int unit = std::max(exponent - 4, -9);  // exponent of the last place
  // At a power of two the mantissa overflows into the exponent, which gives the correct result.
  const auto places = static_cast<int>(std::nearbyint(std::ldexp(magnitude, -unit)));
  return static_cast<std::uint8_t>(sign | ((unit + 9) * 8 + places));
}

inline std::uint32_t f16_from_e4m3(std::uint32_t word, int i, int j) {
  const auto half = [&](int byte) -> std::uint32_t {
    return from_float<f16>(e4m3_to_float(static_cast<std::uint8_t>(word >> 8 * byte))).bits;
  };
  return half(i) | half(j) << 16;
}

template <class T>
std::uint32_t exact_fma2(std::uint32_t a, std::uint32_t b, std::uint32_t c) {
  const auto half = [&](int shift) {
    const auto of = [&](std::uint32_t x) { return to_float(T{static_cast<std::uint16_t>(x >> shift)}); };
    return static_cast<std::uint32_t>(from_float<T>(std::fma(of(a), of(b), of(c))).bits) << shift;
  };
  return half(0) | half(16);
}

}  // namespace charonia::cuda
