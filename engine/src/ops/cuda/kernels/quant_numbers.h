// Converts codes of quantised weights to 16-bit numbers, in registers, without tables and without rounding.
//
// A word of quant_layout.h becomes registers of two numbers each. Every step is exact in both types:
//   int4   0x6400 (f16) is 1024 and 0x4300 (bf16) is 128, with four free bits at the end of the mantissa for the code.
//          One fused multiply-add computes "code + 1024 + zero term". The zero term is -1024 - zero.
//   int8   f16 like int4, with the code's sign bit flipped: code + 1152. bf16 has seven free bits: 128 + the low seven
//          bits, minus 128 or 256 depending on the sign bit, is the code. Zero terms: -1152 - zero, and -zero.
//   fp8    sign, exponent and mantissa move to their positions in the wider type. Only the exponents' bias is then
//          wrong: a factor of 2^8 (f16) or 2^120 (bf16) corrects it, also for subnormal codes.
//   mxfp4  the same with 2^14 and 2^126.
// Integers up to 256 are exact in bf16, and code - zero is at most 255. fp8 and mxfp4 have no zeros. Instructions per
// code: int4 1.4; int8 1 (f16), 2.3 (bf16); fp8 2.3; mxfp4 2.4. At an H200's bandwidth, an SM gets 43 codes of 4 bits
// or 21 of 8 bits per cycle, and issues instructions for 128 lanes: at most 47, 48 and 80 % of them are for this.
#pragma once

#include <cstdint>
#include <type_traits>

#include "ops/cuda/device/portable.h"
#include "ops/quant_weight.h"

namespace charonia::cuda {

// The type of converted codes for a data type: float inputs use numbers that bf16 represents exactly.
template <class T>
using NumberType = std::conditional_t<std::is_same_v<T, float>, bf16, T>;

template <ops::Code code>
inline constexpr int kCodeBits = ops::bits_of(code);

// The zero terms of two zeros (bytes in two's complement; 0 to 16 for int4), from the bytes in both halves.
template <class T, ops::Code code>
CHARONIA_DEVICE std::uint32_t zero_term_of_both(std::uint32_t both) {
  using ops::Code;
  constexpr bool kF16 = std::is_same_v<T, f16>;
  if constexpr (code == Code::u4) {
    return both | (kF16 ? 0xe400e400U : 0xc300c300U);  // -1024 - zero, -128 - zero
  } else if constexpr (code == Code::i8 && kF16) {
    return both ^ 0xe480e480U;  // -1024 - (128 + zero)
  } else if constexpr (code == Code::i8) {
    const std::uint32_t low = (both & 0x007f007fU) | 0x43004300U, sign = (both & 0x00800080U) | 0x43004300U;
    return exact_fma2<T>(low, 0xbf80bf80U, sign);
  } else {
    return 0;
  }
}

template <class T, ops::Code code>
CHARONIA_DEVICE std::uint32_t zero_term(std::uint32_t zero) {
  return zero_term_of_both<T, code>(zero | zero << 16);
}

// The numbers of a word minus the zero; zero is a pair of zero terms. 8 / bits * 4 codes, columns in order.
template <class T, ops::Code code>
CHARONIA_DEVICE void numbers(std::uint32_t word, std::uint32_t zero, std::uint32_t (&out)[16 / kCodeBits<code>]) {
  using ops::Code;
  constexpr bool kF16 = std::is_same_v<T, f16>;
  constexpr std::uint32_t kOne = kF16 ? 0x3c003c00U : 0x3f803f80U, kMinusOne = kOne | 0x80008000U;
  CHARONIA_UNROLL
  for (int i = 0; i < 16 / kCodeBits<code>; ++i) {
    if constexpr (code == Code::u4) {
      constexpr std::uint32_t kBase = kF16 ? 0x64006400U : 0x43004300U;
      out[i] = exact_fma2<T>(mask_or(word >> 4 * i, 0x000f000fU, kBase), kOne, zero);
    } else if constexpr (code == Code::i8) {
      const std::uint32_t bytes = i == 0 ? word >> 8 : word;
      if constexpr (kF16) {
        out[i] = exact_fma2<T>((bytes & 0x00ff00ffU) ^ 0x64806480U, kOne, zero);
      } else {
        const std::uint32_t low = mask_or(bytes, 0x007f007fU, 0x43004300U),
                            sign = mask_or(bytes, 0x00800080U, 0x43004300U);
        out[i] = exact_fma2<T>(exact_fma2<T>(sign, kMinusOne, low), kOne, zero);
      }
    } else if constexpr (code == Code::f8_e4m3) {
      const std::uint32_t bytes = i == 0 ? word : word << 8;  // each in the upper half of its 16 bits
      const std::uint32_t rest = kF16 ? bytes >> 1 & 0x3f803f80U : bytes >> 4 & 0x07f007f0U;
      out[i] = exact_fma2<T>(rest | (bytes & 0x80008000U), kF16 ? 0x5c005c00U : 0x7b807b80U, 0x80008000U);
    } else {
      const std::uint32_t nibbles = word << (12 - 4 * i);  // each at the top of its 16 bits
      const std::uint32_t rest = kF16 ? nibbles >> 3 & 0x0e000e00U : nibbles >> 6 & 0x01c001c0U;
      out[i] = exact_fma2<T>(rest | (nibbles & 0x80008000U), kF16 ? 0x74007400U : 0x7e807e80U, 0x80008000U);
    }
  }
}

}  // namespace charonia::cuda
