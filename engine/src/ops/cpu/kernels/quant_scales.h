// Common parts of GEMMs with quantised weights: converts the scales of a panel (kernels.h) to floats, and writes the
// output.
#pragma once

#include <bit>

#include "ops/cpu/kernels/panel_tile.h"

namespace charonia::ops::cpu::CHARONIA_ISA {
namespace {

#if !defined(__AVX512F__)
inline float power_of_two(unsigned char exponent) {
  return std::bit_cast<float>(exponent == 0 ? std::uint32_t{0x00400000} : std::uint32_t{exponent} << 23);
}
#endif

// Converts the scales of a group to floats [64]. An f8_e8m0 scale is the biased exponent of a float. Exponent 0 means
// 2^-127, which is a subnormal float.
inline void load_scales(const QuantPanel& shape, const char* group, float* to) {
  const char* const scales = group + shape.scales();
  if (shape.scale_type == DType::f8_e8m0) {
#if defined(__AVX512F__)
    for (int j = 0; j < kPanel; j += kWidth) {
      const __m512i exponents = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(scales + j)));
      const __mmask16 none = _mm512_testn_epi32_mask(exponents, exponents);
      const __m512i bits = _mm512_mask_mov_epi32(_mm512_slli_epi32(exponents, 23), none, _mm512_set1_epi32(0x00400000));
      store(to + j, {_mm512_castsi512_ps(bits)});
    }
#else
    for (int j = 0; j < kPanel; ++j) to[j] = power_of_two(static_cast<unsigned char>(scales[j]));
#endif
    return;
  }
  for (int j = 0; j < kPanel; j += kWidth) {
    if (shape.scale_type == DType::f32) {
      store(to + j, load(reinterpret_cast<const float*>(scales) + j));
    } else if (shape.scale_type == DType::bf16) {
      store(to + j, load(reinterpret_cast<const Bf16*>(scales) + j));
    } else {
      store(to + j, load(reinterpret_cast<const F16*>(scales) + j));
    }
  }
}

// Writes totals [rows][64] plus the bias to the output.
inline void write_totals(const QuantLinearArgs& args, const float* totals) {
  LinearArgs to;
  to.rows = args.rows;
  to.out = args.out;
  to.out_stride = args.out_stride;
  to.columns = args.columns;
  to.bias = args.bias;
  write_out(to, totals);
}

}  // namespace
}  // namespace charonia::ops::cpu::CHARONIA_ISA
