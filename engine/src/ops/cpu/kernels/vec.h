// A vector of floats in the width of the instruction set that this file is compiled for. Everything stands in an
// unnamed namespace: the same inline function compiled for two instruction sets must never be merged by the linker, or
// the portable kernels would run into instructions that the processor lacks. For the same reason kernels use no
// standard library templates.
//
// A Vec has kWidth floats. load and store take float*, Bf16* or F16* and convert, rounding to nearest even; load_n and
// store_n take the first n < kWidth elements, the others are zeros. max and min return their second operand when one is
// NaN.
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
#endif

// The sum of the lanes, by halves.
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

// e^x to about 1e-7 relative. x = n ln 2 + r with |r| <= ln 2 / 2; e^r by its Taylor polynomial of degree 7 (remainder
// below 6e-9), 2^n by the exponent. Below -87.3 the result is 0, above 88 it is e^88; NaN stays NaN.
inline Vec exp(Vec x) {
  const Vec least = set1(-87.3F);
  const Vec clamped = max(least, min(set1(88.0F), x));
  const Vec n = round(mul(clamped, set1(0x1.715476p+0F)));
  Vec r = fma(n, set1(-0x1.62e4p-1F), clamped);  // ln 2 in two parts: the first has 15 bits, so its product is exact
  r = fma(n, set1(-0x1.7f7d1cp-20F), r);
  Vec p = set1(1.0F / 5040);
  p = fma(p, r, set1(1.0F / 720));
  p = fma(p, r, set1(1.0F / 120));
  p = fma(p, r, set1(1.0F / 24));
  p = fma(p, r, set1(1.0F / 6));
  p = fma(p, r, set1(0.5F));
  p = fma(p, r, set1(1.0F));
  p = fma(p, r, set1(1.0F));
  return zero_where_less(times_power_of_two(p, n), x, least);
}

}  // namespace
}  // namespace charonia::ops::cpu::CHARONIA_ISA
