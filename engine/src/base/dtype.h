// Element types of tensors and conversions between their bit patterns.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace charonia {

// The 8-bit floats are storage formats only: E4M3 for the codes of weights (ops/quant_weight.h) and for k and v
// (ops/kv_quant.h), E8M0 (a power of two) for scales of weights.
enum class DType : std::uint8_t { f32, f16, bf16, i32, i64, u8, i8, f8_e4m3, f8_e8m0 };

constexpr std::size_t size_of(DType type) {
  switch (type) {
    case DType::f32:
    case DType::i32: return 4;
    case DType::f16:
    case DType::bf16: return 2;
    case DType::i64: return 8;
    case DType::u8:
    case DType::i8:
    case DType::f8_e4m3:
    case DType::f8_e8m0: return 1;
  }
  return 0;
}

std::string_view to_string(DType type);       // "fp32", "fp16", "bf16", ...
DType weight_dtype(std::string_view name);    // for weight_type in config.ini; throws Error(unsupported)

// bfloat16 <-> float, round to nearest even, NaN stays NaN.
constexpr float bf16_to_float(std::uint16_t bits) { return std::bit_cast<float>(std::uint32_t{bits} << 16); }
constexpr std::uint16_t float_to_bf16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  if ((bits & 0x7fffffffU) > 0x7f800000U) return static_cast<std::uint16_t>((bits >> 16) | 0x40U);
  return static_cast<std::uint16_t>((bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16);
}

// IEEE half <-> float, round to nearest even. A subnormal half (below 2^-14) is its mantissa times 2^-24. For normal
// halves the exponent biases differ by 127 - 15. Exponent 31 means infinity or NaN.
constexpr float f16_to_float(std::uint16_t bits) {
  const std::uint32_t sign = (bits & 0x8000U) << 16;
  const std::uint32_t magnitude = bits & 0x7fffU;
  std::uint32_t out = 0;
  if (magnitude < 0x0400U) {
    out = std::bit_cast<std::uint32_t>(static_cast<float>(magnitude) * 0x1p-24F);
  } else if (magnitude < 0x7c00U) {
    out = (magnitude << 13) + (112U << 23);
  } else {
    out = (magnitude << 13) | 0x7f800000U;
  }
  return std::bit_cast<float>(sign | out);
}
std::uint16_t float_to_f16(float value);

// OCP FP8 E4M3 <-> float, round to nearest even. There are no infinities: magnitudes above 448, the largest number,
// become 448. NaN stays NaN (0x7f). Subnormal codes are multiples of 2^-9. For normal codes the exponent biases differ
// by 127 - 7.
constexpr float e4m3_to_float(std::uint8_t bits) {
  const std::uint32_t sign = (bits & 0x80U) << 24, magnitude = bits & 0x7fU;
  std::uint32_t out = (magnitude << 20) + (120U << 23);
  if (magnitude < 8) out = std::bit_cast<std::uint32_t>(static_cast<float>(magnitude) * 0x1p-9F);
  if (magnitude == 0x7fU) out = 0x7fc00000U;
  return std::bit_cast<float>(sign | out);
}
// Without branches, so that the compiler vectorises loops over it.
constexpr std::uint8_t float_to_e4m3(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value), all = bits & 0x7fffffffU;
  constexpr auto kMost = std::bit_cast<std::uint32_t>(448.0F), kLeastNormal = std::bit_cast<std::uint32_t>(0x1p-6F);
  const std::uint32_t magnitude = all < kMost ? all : kMost;
  const std::uint32_t normal = ((magnitude + 0x7ffffU + (magnitude >> 20 & 1U)) >> 20) - (120U << 3);
  // The distance between floats at 2^14 is 2^-9.
  const std::uint32_t subnormal = std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude) + 0x1p14F) & 15U;
  const std::uint32_t number = magnitude < kLeastNormal ? subnormal : normal;
  return static_cast<std::uint8_t>((bits >> 24 & 0x80U) | (all > 0x7f800000U ? 0x7fU : number));
}

}  // namespace charonia
