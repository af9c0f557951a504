// The layout of the codes, scales and zeros of a quantised weight (ops/quant_weight.h) in device memory.
//
// Codes: units of 16 rows by 64 columns, 512 bytes for each 4 bits of a code: [rows / 16][columns / 64][bits / 4][32
// lanes][16 bytes]. Lane 4g + t holds columns 8t .. 8t + 7 of each half of the unit, for rows g and g + 8: its operands
// of two m16n8k16 GEMMs per half in gemm_stream_kernel.h's order of K. A warp reads a unit with one or two loads of 512
// contiguous bytes, and the units of a group of rows are contiguous. A lane's words:
//   4 bits: {row g, row g + 8} of the first half, then of the second; columns 2i and 2i + 1 of a word's eight at bits
//           4i and 16 + 4i
//   8 bits: 512 bytes for each half: {row g, columns 0..3; 4..7; row g + 8 likewise}; columns 0, 1, 2, 3 of a word's
//           four in bytes 1, 3, 0, 2
// So a mask and a shift extract two codes as the two 16-bit elements of a register. Scales and zeros: [rows /
// 16][groups][16], rows g and g + 8 next to each other. Scales have the format's scale type. Zeros are bytes in two's
// complement. Padding rows and columns have codes and scales of 0.
#pragma once

#include <cstdint>

#include "ops/cuda/device/host_device.h"

namespace charonia::cuda {

inline constexpr int kQuantRows = 16, kQuantK = 64;

// The position of a code: a 32-bit word, and its first bit.
struct CodePlace {
  std::int64_t word;
  int bit;
};

// bits: 4 or 8; steps: columns / 64.
CHARONIA_HD CodePlace code_place(std::int64_t row, std::int64_t column, int bits, std::int64_t steps) {
  const auto unit = row / kQuantRows * steps + column / kQuantK;
  const int of_unit = static_cast<int>(row % kQuantRows), lower = of_unit / 8;
  const int half = static_cast<int>(column % kQuantK / 32), at = static_cast<int>(column % 8);
  const int lane = of_unit % 8 * 4 + static_cast<int>(column % 32 / 8);
  if (bits == 4) return {(unit * 32 + lane) * 4 + half * 2 + lower, at % 2 * 16 + at / 2 * 4};
  return {((unit * 2 + half) * 32 + lane) * 4 + lower * 2 + at / 4, at % 2 * 16 + (at % 4 < 2 ? 8 : 0)};
}

CHARONIA_HD std::int64_t scale_place(std::int64_t row, std::int64_t group, std::int64_t groups) {
  return (row / kQuantRows * groups + group) * kQuantRows + row % 8 * 2 + row % kQuantRows / 8;
}

}  // namespace charonia::cuda
