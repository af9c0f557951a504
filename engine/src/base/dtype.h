// Element types of tensors and conversions between their bit patterns.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace charonia {

// The 8-bit floats are storage formats only: E4M3 for the codes of weights (ops/quant_weight.h), E8M0 (a power of two)
// for their scales.
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

}  // namespace charonia
