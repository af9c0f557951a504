// Rows of activations as 8-bit codes, for kernels that have them in registers.
#pragma once

#include <cstdint>

#include "ops/cuda/device/fp8.h"

namespace charonia::cuda {

// |x|, and infinity for what is not finite.
CHARONIA_DEVICE float magnitude(float x) {
  const float size = fabsf(x);
  return size <= 3.402823466e38F ? size : __uint_as_float(0x7f800000U);
}

// A row's scale, by the largest magnitude of its elements: `given`, or where that is 0 the row's own. NaN for a row
// that is not finite: all its outputs are then.
template <bool kFp8>
CHARONIA_DEVICE float scale_of_row(float greatest, float given) {
  if (!(greatest <= 3.402823466e38F)) return __uint_as_float(0x7fc00000U);
  return given > 0 ? given : greatest / (kFp8 ? kGreatestE4m3 : 127.0F);
}

// The code of an element, in the lowest byte; scale 0 and NaN: 0.
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
