#include "model/rounded_rows.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <span>
#include <utility>

namespace charonia::model {
namespace {

// The loops below have no branches and no calls, so that the compiler vectorises them.

// Writes the values of a row, which may have any alignment, as floats.
void widen(const std::byte* from, DType type, std::span<float> to) {
  const auto halves = [&](auto widened) {
    for (std::size_t i = 0; i < to.size(); ++i) {
      std::uint16_t bits = 0;
      std::memcpy(&bits, from + i * sizeof bits, sizeof bits);
      to[i] = widened(bits);
    }
  };
  if (type == DType::f32) {
    std::memcpy(to.data(), from, to.size_bytes());
  } else if (type == DType::bf16) {
    halves([](std::uint16_t bits) { return bf16_to_float(bits); });
  } else {
    halves([](std::uint16_t bits) { return f16_to_float(bits); });
  }
}

// max |value|; NaN or infinity if a value is not finite. Compares bits, in which a NaN is greater than all numbers.
float greatest(std::span<const float> values) {
  std::uint32_t most = 0;
  for (const float value : values) most = std::max(most, std::bit_cast<std::uint32_t>(value) & 0x7fffffffU);
  return std::bit_cast<float>(most);
}

// Rounds to a type with kDropped fewer mantissa bits than a float, with ties to even. The exponent range stays a
// float's: quotients are below 1024, and very small ones have the code 0 with any rounding.
template <unsigned kDropped>
float narrowed(float value) {
  if constexpr (kDropped == 0) return value;
  const auto bits = std::bit_cast<std::uint32_t>(value);
  constexpr std::uint32_t kLowest = 1U << kDropped;
  return std::bit_cast<float>((bits + (kLowest / 2 - 1) + (bits >> kDropped & 1U)) & ~(kLowest - 1));
}

// The integer nearest to a value of at most 2^21, with ties to even.
std::int32_t integer(float value) {
  constexpr float kUnits = 0x1.8p23F;  // floats have a distance of 1 there
  return std::bit_cast<std::int32_t>(value + kUnits) - std::bit_cast<std::int32_t>(kUnits);
}

// Clamps after rounding, which gives the same integers as before it.
template <unsigned kDropped>
void encode(std::span<const float> values, float scale, ops::Code code, std::uint8_t* out) {
  const auto each = [&](auto coded) {
    for (std::size_t i = 0; i < values.size(); ++i) out[i] = coded(narrowed<kDropped>(values[i] / scale));
  };
  if (code == ops::Code::i8) {
    each([](float value) { return static_cast<std::uint8_t>(std::clamp(integer(value), -128, 127)); });
  } else if (code == ops::Code::u4) {
    each([](float value) { return static_cast<std::uint8_t>(std::clamp(integer(value), -8, 7) + 8); });
  } else {
    each([](float value) { return float_to_e4m3(value); });
  }
}

float limit_of(ops::Code code) {
  return code == ops::Code::i8 ? 127.5F : code == ops::Code::u4 ? 7.5F : 448.0F;
}

float scale_of(float greatest, ops::Code code, DType type) {
  const float exact = greatest / limit_of(code);
  const float scale = type == DType::bf16  ? bf16_to_float(float_to_bf16(exact))
                      : type == DType::f16 ? f16_to_float(float_to_f16(exact))
                                           : exact;
  if (scale != 0) return scale;
  return type == DType::bf16 ? 0x1p-7F : type == DType::f16 ? 0x1p-10F : std::numeric_limits<float>::epsilon();
}

}  // namespace

RoundedRows::RoundedRows(const ops::HostMatrix& own, std::vector<ops::HostMatrix> rest, ops::Code code,
                         std::int64_t group)
    : own_(own), rest_(std::move(rest)), code_(code), group_(group == 0 ? own.cols : group) {}

bool RoundedRows::read(std::int64_t first, std::int64_t n, std::uint8_t* codes, float* scales) const {
  const auto size_of_group = static_cast<std::size_t>(group_);
  std::vector<float> row(static_cast<std::size_t>(own_.cols)), other;
  for (auto index = first; index < first + n; ++index) {
    float rest = 0;
    for (const auto& matrix : rest_) {
      other.resize(static_cast<std::size_t>(matrix.cols));
      widen(matrix.row(index), matrix.dtype, other);
      const float found = greatest(other);
      if (!std::isfinite(found)) return false;
      rest = std::max(rest, found);
    }
    widen(own_.row(index), own_.dtype, row);
    for (std::size_t begin = 0; begin < row.size(); begin += size_of_group, codes += size_of_group) {
      const std::span<const float> values(row.data() + begin, size_of_group);
      const float found = greatest(values);
      if (!std::isfinite(found)) return false;
      const float scale = *scales++ = scale_of(std::max(rest, found), code_, own_.dtype);
      if (own_.dtype == DType::bf16) {
        encode<16>(values, scale, code_, codes);
      } else if (own_.dtype == DType::f16) {
        encode<13>(values, scale, code_, codes);
      } else {
        encode<0>(values, scale, code_, codes);
      }
    }
  }
  return true;
}

}  // namespace charonia::model
