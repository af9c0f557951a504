// Conversions between FP8 (OCP E4M3: no infinities, the largest number is 448) and float.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>

#include "ops/cuda/device/portable.h"

namespace charonia::cuda {

inline constexpr float kGreatestE4m3 = 448;

#if defined(CHARONIA_CUDA_ON_HOST)

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

// Rounds to nearest, ties to even. Larger magnitudes become the largest number; NaN stays NaN.
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

#else

// Compute capability 8.9 and newer (DeviceInfo::fp8).
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

#endif

}  // namespace charonia::cuda
