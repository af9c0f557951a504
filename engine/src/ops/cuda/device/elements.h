// Elements in memory. Arithmetic is in float, or in integers.
#pragma once

#include <cstdint>
#include <type_traits>

#include "ops/cuda/device/host_device.h"

namespace charonia::cuda {

// 16-bit floats.
struct bf16 {
  std::uint16_t bits;
};
struct f16 {
  std::uint16_t bits;
};

// Two 8-bit elements, the first in the low byte: integers in two's complement, or FP8 (OCP E4M3: no infinities). GEMM
// kernels move such pairs like 16-bit elements.
struct i8x2 {
  std::uint16_t bits;
};
struct e4m3x2 {
  std::uint16_t bits;
};
inline constexpr float kGreatestE4m3 = 448;
template <class T>
inline constexpr bool kIsPair = std::is_same_v<T, i8x2> || std::is_same_v<T, e4m3x2>;
// The type of sums of products; sums of integers are exact.
template <class T>
using SumType = std::conditional_t<std::is_same_v<T, i8x2>, int, float>;

// The order of 16-byte pieces in shared memory (hopper.h). The value is the width of a row in bytes.
enum class Swizzle : std::uint8_t { none = 0, of_32 = 32, of_64 = 64, of_128 = 128 };
// The address of a byte of a swizzled row, from its address without the swizzle.
CHARONIA_HD constexpr std::uint32_t swizzled(std::uint32_t at, Swizzle swizzle) {
  const std::uint32_t pieces = static_cast<std::uint32_t>(swizzle) / 16;
  return swizzle == Swizzle::none ? at : at ^ (at >> 7 & (pieces - 1)) << 4;
}

}  // namespace charonia::cuda
