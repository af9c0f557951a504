// A vector of floats. Its width depends on the instruction set of the compilation. Everything is in an unnamed
// namespace: the linker must never merge the same inline function compiled for two instruction sets, because the
// portable kernels could then execute instructions that the processor lacks. For the same reason kernels use no
// standard library templates.
//
// A Vec has kWidth floats. load and store take float*, Bf16* or F16* and convert, rounding to nearest even; load also
// takes F8* and Q8*. load_n and store_n take the first n < kWidth elements; other lanes are zeros. max and min return
// their second operand if one is NaN. A PairVec has kWidth pairs of bf16. CHARONIA_NATIVE_PAIRS is defined if the
// instruction set multiplies pairs.
#pragma once

#include <cstdint>

#include "ops/cpu/kernels.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace charonia::ops::cpu::CHARONIA_ISA {
namespace {

#if defined(__AVX512F__)
#include "ops/cpu/kernels/vec_avx512.h"
#elif defined(__AVX2__)
#include "ops/cpu/kernels/vec_avx2.h"
#else
#include "ops/cpu/kernels/vec_portable.h"
#endif

// The distance of prefetches of weights that are read once. On Zen 3, one row of bf16 reads 24.7 GB/s with 4096 bytes,
// 26.0 with 2048, 30.8 with 1024 and 27.3 with 512.
#if defined(__AVX512F__)
constexpr int kPrefetchAhead_bytes = 4096;
#else
constexpr int kPrefetchAhead_bytes = 1024;
#endif

#if !defined(__AVX512F__)
template <class T>
inline Vec load_n(const T* p, int n) {
  T part[kWidth] = {};
  for (int i = 0; i < n; ++i) part[i] = p[i];
  return load(part);
}
template <class T>
inline void store_n(T* p, Vec x, int n) {
  T part[kWidth];
  store(part, x);
  for (int i = 0; i < n; ++i) p[i] = part[i];
}
inline ByteVec load_bytes_n(const std::uint8_t* p, int n) {
  std::uint8_t part[kWidth] = {};
  for (int i = 0; i < n; ++i) part[i] = p[i];
  return load_bytes(part);
}
inline PairVec load_pairs_n(const Bf16* p, int n) {
  Bf16 part[2 * kWidth] = {};
  for (int i = 0; i < 2 * n; ++i) part[i] = p[i];
  return load_pairs(part);
}

// The sum of the lanes, by halves; and the largest lane, which is undefined if a lane is NaN.
inline float sum_of(Vec x) {
  float lanes[kWidth];
  store(lanes, x);
  for (int half = kWidth / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  }
  return lanes[0];
}
inline float max_of(Vec x) {
  float lanes[kWidth];
  store(lanes, x);
  float out = lanes[0];
  for (int i = 1; i < kWidth; ++i) out = lanes[i] > out ? lanes[i] : out;
  return out;
}
#endif

inline Vec load(const Q8* p) { return floats_of(load_bytes(&p->bits)); }
inline Vec load_n(const Q8* p, int n) { return floats_of(load_bytes_n(&p->bits, n)); }

// e^x = 2^n (1 + q r) with x = n ln 2 + r, |r| <= ln 2 / 2; 1 + q r is the Taylor polynomial of degree 7 (remainder
// below 6e-9). |n| must be small enough for the exponent of a float.
struct ExpParts {
  Vec n, r, q;
};
inline ExpParts exp_parts(Vec x) {
  const Vec n = round(mul(x, set1(0x1.715476p+0F)));
  Vec r = fma(n, set1(-0x1.62e4p-1F), x);  // ln 2 in two parts: the first has 15 bits, so its product is exact
  r = fma(n, set1(-0x1.7f7d1cp-20F), r);
  Vec p = set1(1.0F / 5040);
  p = fma(p, r, set1(1.0F / 720));
  p = fma(p, r, set1(1.0F / 120));
  p = fma(p, r, set1(1.0F / 24));
  p = fma(p, r, set1(1.0F / 6));
  p = fma(p, r, set1(0.5F));
  p = fma(p, r, set1(1.0F));
  return {n, r, p};
}

// e^x with a relative error of about 1e-7. Below -87.3 the result is 0, above 88 it is e^88; NaN stays NaN.
inline Vec exp(Vec x) {
  const Vec minimum = set1(-87.3F);
  const auto [n, r, q] = exp_parts(max(minimum, min(set1(88.0F), x)));
  return zero_where_less(times_power_of_two(fma(q, r, set1(1.0F)), n), x, minimum);
}

// 2^x with a relative error of about 2e-7, for x below 127: 2^n p(x - n), where p of degree 5 minimises the relative
// error. Below -126 the result is 0; NaN stays NaN.
inline Vec exp2(Vec x) {
  const Vec minimum = set1(-126.0F);
  const Vec within = max(minimum, x);
  const Vec n = round(within), r = sub(within, n);
  Vec p = set1(0x1.5bba14p-10F);
  p = fma(p, r, set1(0x1.3cea88p-7F));
  p = fma(p, r, set1(0x1.c6b752p-5F));
  p = fma(p, r, set1(0x1.ebf9bcp-3F));
  p = fma(p, r, set1(0x1.62e42ap-1F));
  p = fma(p, r, set1(1.0F));
  return zero_where_less(times_power_of_two(p, n), x, minimum);
}

// tanh x = m / (m + 2) with m = e^2x - 1 = 2^n q r + (2^n - 1), with a relative error of about 1e-7, also near zero.
// For |x| >= 10 the result is 1 or -1; NaN stays NaN.
inline Vec tanh(Vec x) {
  const auto [n, r, q] = exp_parts(max(set1(-20.0F), min(set1(20.0F), add(x, x))));
  const Vec power = times_power_of_two(set1(1.0F), n);
  const Vec m = fma(mul(q, r), power, sub(power, set1(1.0F)));
  return div(m, add(m, set1(2.0F)));
}

}  // namespace
}  // namespace charonia::ops::cpu::CHARONIA_ISA
