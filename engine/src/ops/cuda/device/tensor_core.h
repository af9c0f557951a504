// Tensor-core products, matrix loads from shared memory, and asynchronous copies to shared memory (sm_80 and newer),
// each with its host version. Layouts are those of PTX ISA, "Matrix Fragments for mma.m16n8k16". With g = lane / 4, t =
// lane % 4,
//   A [16, 16]  a[0] = (g, 2t..2t+1)  a[1] = (g + 8, 2t..)  a[2] = (g, 2t + 8..)  a[3] = (g + 8, 2t + 8..)
//   B [16, 8]   b[0] = (2t..2t+1, g)  b[1] = (2t + 8.., g)                    two elements of one column per register
//   C, D [16, 8] c[0], c[1] = (g, 2t), (g, 2t + 1)   c[2], c[3] = (g + 8, 2t), (g + 8, 2t + 1)
// Within a register the element of the lower index is in the low half. The layouts of mma.m16n8k32, for 8-bit elements,
// are the same with two 8-bit elements for each 16-bit element. So kernels that move 16-bit elements can move pairs of
// 8-bit elements (i8x2, e4m3x2), and multiply them with mma_m16n8k32<T>() in the same way.
#pragma once

#include "native_tensor_core.h"
#include "ops/cuda/device/portable.h"

namespace charonia::cuda {

// d += the product of a chunk of 16 bytes of 16 rows. a0 and b0 hold the lanes' words x and y, a1 and b1 hold z and w.
// Tensor cores keep fewer bits than float in sums of FP8, so the sum of a chunk starts at 0 and is added in float.
template <class T>
CHARONIA_DEVICE void multiply_chunk(SumType<T> (&d)[4], const std::uint32_t (&a0)[4], const std::uint32_t (&a1)[4],
                                    const std::uint32_t (&b0)[2], const std::uint32_t (&b1)[2]) {
  if constexpr (std::is_same_v<T, e4m3x2>) {
    float fresh[4] = {0, 0, 0, 0};
    mma_m16n8k32<T>(fresh, a0, b0);
    mma_m16n8k32<T>(fresh, a1, b1);
    CHARONIA_UNROLL
    for (int c = 0; c < 4; ++c) d[c] += fresh[c];
  } else {
    mma_m16n8k32<T>(d, a0, b0);
    mma_m16n8k32<T>(d, a1, b1);
  }
}

// Packs two floats into a register of two 16-bit elements, `low` in the low half. pack_at_once does this in one
// instruction, but needs more registers if many results are pending.
template <class T>
CHARONIA_DEVICE std::uint32_t pack(float low, float high) {
  return static_cast<std::uint32_t>(from_float<T>(high).bits) << 16 | from_float<T>(low).bits;
}

// Lane t of each quad gets word t of its four lanes, in their order.
CHARONIA_DEVICE void transpose_quad(std::uint32_t (&words)[4]) {
  CHARONIA_UNROLL
  for (int bit = 1; bit <= 2; bit *= 2) {
    const bool upper = (lane_id() & bit) != 0;
    CHARONIA_UNROLL
    for (int i = 0; i < 4; ++i) {
      if ((i & bit) != 0) continue;
      const auto other =
          static_cast<std::uint32_t>(shuffle_xor(static_cast<int>(upper ? words[i] : words[i + bit]), bit));
      words[i] = upper ? other : words[i];
      words[i + bit] = upper ? words[i + bit] : other;
    }
  }
}

}  // namespace charonia::cuda
