// Converts rows of activations in registers to 8-bit codes.
#pragma once

#include <cstdint>

#include "ops/cuda/device/portable.h"

namespace charonia::cuda {

// |x|, or infinity if x is not finite.
CHARONIA_DEVICE float magnitude(float x) {
  const float size = fabsf(x);
  return size <= 3.402823466e38F ? size : __uint_as_float(0x7f800000U);
}

// A row's scale, from the largest magnitude of its elements: `given`, or the row's own scale if that is 0. NaN for a
// row that is not finite; then all its outputs are NaN.
template <bool kFp8>
CHARONIA_DEVICE float scale_of_row(float greatest, float given) {
  if (!(greatest <= 3.402823466e38F)) return __uint_as_float(0x7fc00000U);
  return given > 0 ? given : greatest / (kFp8 ? kGreatestE4m3 : 127.0F);
}

// The code of an element, in the lowest byte; 0 for scale 0 or NaN.
template <bool kFp8>
CHARONIA_DEVICE std::uint32_t code_of(float x, float scale) {
  if (!(scale > 0)) return 0;
  if constexpr (kFp8) {
    return e4m3_from_float(x / scale);
  } else {
    const float code = fminf(127.0F, fmaxf(-127.0F, rintf(x / scale)));
    return static_cast<std::uint32_t>(static_cast<int>(code)) & 0xffU;
  }
}

// Codes of eight elements, the first in the lowest byte.
template <bool kFp8>
CHARONIA_DEVICE uint2 codes_of(const float (&x)[8], float scale) {
  std::uint32_t words[2] = {0, 0};
  CHARONIA_UNROLL
  for (int i = 0; i < 8; ++i) words[i / 4] |= code_of<kFp8>(x[i], scale) << 8 * (i % 4);
  return {words[0], words[1]};
}

}  // namespace charonia::cuda
