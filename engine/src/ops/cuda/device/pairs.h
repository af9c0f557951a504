// Pairs of 8-bit elements. GEMM kernels move them like 16-bit elements.
#pragma once

#include <cstdint>
#include <type_traits>

namespace charonia::cuda {

// Two 8-bit elements, the first in the low byte: integers in two's complement, or FP8 (E4M3).
struct i8x2 {
  std::uint16_t bits;
};
struct e4m3x2 {
  std::uint16_t bits;
};
template <class T>
inline constexpr bool kIsPair = std::is_same_v<T, i8x2> || std::is_same_v<T, e4m3x2>;
// The type of sums of products; sums of integers are exact.
template <class T>
using SumType = std::conditional_t<std::is_same_v<T, i8x2>, int, float>;

}  // namespace charonia::cuda
