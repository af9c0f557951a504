// An 8-bit integer GEMM with matrix tiles: one panel of 64 output features times up to kIntegerRowBlock rows.
//
// In memory, a tile of bytes looks like a tile of pairs of bf16 (linear_tiles.h): a step has 64 k instead of 32 pairs,
// with 4 neighbouring codes of a feature instead of 2. multiply<C, A, B>() adds integers, so only the order of the
// groups matters.
#pragma once

#include "ops/cpu/kernels/integer_rows.h"
#include "ops/cpu/kernels/linear_tiles.h"

namespace charonia::ops::cpu {
namespace {

inline constexpr int kIntegerTileK = 64;  // k of a step
// Steps of a chunk of a panel. All row tiles process a chunk before the next chunk.
inline constexpr std::int64_t kIntegerChunkSteps = 32;

// For shapes that satisfy integer_tiles_take().
template <class Tiles>
void linear_integer_tiles(const IntegerLinearArgs& args) {
  constexpr int kMaxTiles = (kIntegerRowBlock + kTileRows - 1) / kTileRows;
  alignas(64) std::int32_t sums[kMaxTiles][kTileRows][kPanel];
  alignas(64) float totals[kIntegerRowBlock][kPanel];
  const auto& shape = args.shape;
  // Row tiles have equal size: if the rows do not divide evenly, the last tile begins earlier and recomputes some rows.
  const int tiles = (args.rows + kTileRows - 1) / kTileRows;
  const int rows = (args.rows + tiles - 1) / tiles;
  const auto first_row = [&](int tile) { return tile * rows + rows <= args.rows ? tile * rows : args.rows - rows; };
  const auto* const a = reinterpret_cast<const char*>(args.a);
  const auto* const panel = static_cast<const char*>(args.panel);
  const std::int64_t steps = shape.group / kIntegerTileK;  // whole steps of a group

  Tiles::configure(rows);
  const auto pass = [&](std::int64_t step, std::int64_t length, const char* weights, bool fresh) {
    const auto rows_of = [&](int tile) { return a + first_row(tile) * args.a_stride + step * kIntegerTileK; };
    int tile = 0;
    for (; tile + 1 < tiles; tile += 2) {
      two_row_tiles<Tiles>(rows_of(tile), rows_of(tile + 1), args.a_stride, length, weights, sums[tile], sums[tile + 1],
                           fresh, tile == 0);
    }
    if (tile < tiles) row_tile<Tiles>(rows_of(tile), args.a_stride, length, weights, sums[tile], fresh);
  };
  const std::int64_t chunk = tiles == 1 ? steps : kIntegerChunkSteps;
  for (std::int64_t group = 0; group < shape.groups(); ++group) {
    for (std::int64_t begin = 0; begin < steps; begin += chunk) {
      const std::int64_t step = group * steps + begin;
      pass(step, begin + chunk < steps ? chunk : steps - begin, panel + step * kTileStepBytes, begin == 0);
    }
    if (const int rest = static_cast<int>(shape.group % kIntegerTileK); rest != 0) {
      alignas(64) char weights[kTileStepBytes] = {};  // the memory after the panel's codes has other contents
      __builtin_memcpy(weights, panel + steps * kTileStepBytes, static_cast<std::size_t>((rest + 3) / 4 * 4 * kPanel));
      pass(steps, 1, weights, steps == 0);
    }

    const auto* const scales = reinterpret_cast<const float*>(panel + shape.scales()) + group * kPanel;
    const auto* const zeros = reinterpret_cast<const std::int32_t*>(panel + shape.zeros()) + group * kPanel;
    const bool last = group + 1 == shape.groups();
    for (int row = 0; row < args.rows; ++row) {
      const int tile = row / rows;
      const std::int32_t* d = sums[tile][row - first_row(tile)];
      alignas(64) std::int32_t without_zeros[kPanel];
      if (shape.has_zeros) {
        const std::int32_t sum = sums_of_row(args, row)[group];
        for (int j = 0; j < kPanel; ++j) without_zeros[j] = d[j] - zeros[j] * sum;
        d = without_zeros;
      }
      float* const total = totals[row];
      alignas(64) float result[kPanel];
      float* const to = last ? result : total;
      if (group == 0) {
        for (int j = 0; j < kPanel; ++j) to[j] = scales[j] * static_cast<float>(d[j]);
      } else {
        for (int j = 0; j < kPanel; ++j) to[j] = total[j] + scales[j] * static_cast<float>(d[j]);
      }
      if (!last) continue;
      const float scale = scale_of_row(args, row);
      float* const out = args.out + row * args.out_stride;
      if (args.bias != nullptr) {
        for (int j = 0; j < args.columns; ++j) out[j] = scale * result[j] + args.bias[j];
      } else if (args.columns == kPanel) {
        for (int j = 0; j < kPanel; ++j) out[j] = scale * result[j];
      } else {
        for (int j = 0; j < args.columns; ++j) out[j] = scale * result[j];
      }
    }
  }
  Tiles::release();
}

}  // namespace
}  // namespace charonia::ops::cpu
