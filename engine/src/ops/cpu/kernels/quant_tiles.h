// A GEMM with a quantised weight with matrix tiles: one panel of 64 output features times up to kQuantRowBlock rows.
//
// Layout and order of operations: kernels.h. A piece of the panel's codes is converted to pairs of bf16 in the cache,
// [k / 2][64][2] as in a bf16 panel, padded with zeros after each group to a multiple of 32 k. Then the tiles of
// linear_tiles.h process it. `Codes` provides the vector operations:
//   unpack(from, words, to)                      words of a panel to [k / 2][64][2]
//   load_scales(shape, group, to), load_zeros()  [64] floats
//   add_group(c, rows, scales, zeros, sums, stride, totals)
//                                                totals [rows][64] += scales * (c - zeros * sums[row * stride]); zeros
//                                                may be null
#pragma once

#include "ops/cpu/kernels/linear_tiles.h"
#include "ops/cpu/kernels/quant_pieces.h"

namespace charonia::ops::cpu {
namespace {

inline void write_totals(const QuantLinearArgs& args, const float (*totals)[kPanel]) {
  for (int row = 0; row < args.rows; ++row) {
    float* const to = args.out + row * args.out_stride;
    if (args.bias == nullptr) {
      for (int j = 0; j < args.columns; ++j) to[j] = totals[row][j];
    } else {
      for (int j = 0; j < args.columns; ++j) to[j] = totals[row][j] + args.bias[j];
    }
  }
}

template <class Tiles, class Codes, int K>
void quant_linear_in_tiles(const QuantLinearArgs& args) {
  using Pieces = QuantPieces<K>;
  constexpr int kMaxTiles = kQuantRowBlock / kTileRows;
  alignas(64) Bf16 numbers[Pieces::kK * kPanel];
  alignas(64) float sums[kMaxTiles][kTileRows][kPanel];
  alignas(64) float totals[kQuantRowBlock][kPanel];
  alignas(64) float scales[Pieces::kGroups][kPanel];
  alignas(64) float zeros[Pieces::kGroups][kPanel];
  // Row tiles have equal size: if the rows do not divide evenly, the last tile begins earlier and recomputes some rows.
  const int tiles = (args.rows + kTileRows - 1) / kTileRows;
  const int rows = (args.rows + tiles - 1) / tiles;
  const auto first_row = [&](int tile) { return tile * rows + rows <= args.rows ? tile * rows : args.rows - rows; };
  const auto* const a = static_cast<const char*>(args.a);
  const QuantPanel& shape = args.shape;
  const std::int64_t a_stride = args.a_stride * 2;  // bytes
  const int word_k = 32 / shape.code_bits();
  __builtin_memset(totals, 0, static_cast<std::size_t>(args.rows) * sizeof totals[0]);

  Tiles::configure(rows);
  for (Pieces p(shape); !p.done(); p.next()) {
    const std::int64_t words = (p.length + word_k - 1) / word_k;
    const std::int64_t steps = (p.length + kTileK - 1) / kTileK;
    for (int g = 0; g < p.count; ++g) {
      const char* const group = static_cast<const char*>(args.panel) + (p.group + g) * shape.group_bytes();
      Bf16* const to = numbers + g * p.stride * kPanel;
      Codes::unpack(group + p.begin / word_k * 4 * kPanel, words, to);
      if (const std::int64_t rest = steps * kTileK - words * word_k; rest > 0) {
        __builtin_memset(to + words * word_k * kPanel, 0, static_cast<std::size_t>(rest * kPanel) * sizeof(Bf16));
      }
      if (!p.last()) continue;
      Codes::load_scales(shape, group, scales[g]);
      if (shape.has_zeros) Codes::load_zeros(shape, group, zeros[g]);
    }
    for (int tile = 0; tile < tiles; tile += 2) {
      const int together = tile + 1 < tiles ? 2 : 1;
      for (int g = 0; g < p.count; ++g) {
        const auto* const weights = reinterpret_cast<const char*>(numbers + g * p.stride * kPanel);
        const std::int64_t k = (p.group + g) * shape.group + p.begin;
        const char* const first = a + first_row(tile) * a_stride + 2 * k;
        if (together == 2) {
          const char* const second = a + first_row(tile + 1) * a_stride + 2 * k;
          two_row_tiles<Tiles>(first, second, a_stride, steps, weights, sums[tile], sums[tile + 1], p.begin == 0,
                               false);
        } else {
          row_tile<Tiles, false>(first, a_stride, steps, weights, sums[tile], p.begin == 0);
        }
        if (!p.last()) continue;
        const bool with_zeros = shape.has_zeros;
        for (int t = tile; t < tile + together; ++t) {
          const int row = t * rows, end = row + rows < args.rows ? row + rows : args.rows;
          Codes::add_group(sums[t][row - first_row(t)], end - row, scales[g], with_zeros ? zeros[g] : nullptr,
                           with_zeros ? args.sums + row * args.sums_stride + p.group + g : nullptr, args.sums_stride,
                           totals[row]);
        }
      }
    }
  }
  Tiles::release();

  write_totals(args, totals);
}

// One row tile. Converts the codes of a step while the tile registers multiply the previous step, so that memory is
// always busy. Requires groups of a multiple of 32 k.
template <class Tiles, class Codes>
void quant_linear_one_tile(const QuantLinearArgs& args) {
  constexpr int kBuffers = 4;
  constexpr std::int64_t kSumsStride = kPanel * sizeof(float);
  alignas(64) Bf16 numbers[kBuffers][kTileK * kPanel];
  alignas(64) float sums[kTileRows][kPanel];
  alignas(64) float totals[kTileRows][kPanel];
  alignas(64) float scales[kPanel];
  alignas(64) float zeros[kPanel];
  const QuantPanel& shape = args.shape;
  const std::int64_t a_stride = args.a_stride * 2;  // bytes
  const int words = kTileK * shape.code_bits() / 32;
  const std::int64_t steps = shape.group / kTileK, all = steps * shape.groups();
  __builtin_memset(totals, 0, static_cast<std::size_t>(args.rows) * sizeof totals[0]);

  Tiles::configure(args.rows);
  const auto* const a = static_cast<const char*>(args.a);
  const auto* from = static_cast<const char*>(args.panel);
  const char* group = from;
  std::int64_t unpacked = 0, of_group = 0;
  const auto unpack = [&] {
    Codes::unpack(from, words, numbers[unpacked % kBuffers]);
    ++unpacked;
    from += words * 4 * kPanel;
    if (++of_group == steps) {
      of_group = 0;
      from += shape.group_bytes() - shape.scales();
    }
  };
  unpack();
  for (std::int64_t g = 0, step = 0; g < shape.groups(); ++g, group += shape.group_bytes()) {
    Tiles::template zero<0>();
    Tiles::template zero<1>();
    Tiles::template zero<2>();
    Tiles::template zero<3>();
    for (std::int64_t i = 0; i < steps; ++i, ++step) {
      if (unpacked < all) unpack();
      const auto* const of_step = reinterpret_cast<const char*>(numbers[step % kBuffers]);
      tile_step<Tiles>(a + step * 2 * kTileK, a_stride, of_step);
    }
    Tiles::template store<0>(sums[0], kSumsStride);
    Tiles::template store<1>(sums[0] + kTileColumns, kSumsStride);
    Tiles::template store<2>(sums[0] + 2 * kTileColumns, kSumsStride);
    Tiles::template store<3>(sums[0] + 3 * kTileColumns, kSumsStride);
    Codes::load_scales(shape, group, scales);
    if (shape.has_zeros) Codes::load_zeros(shape, group, zeros);
    const bool with_zeros = shape.has_zeros;
    Codes::add_group(sums[0], args.rows, scales, with_zeros ? zeros : nullptr, with_zeros ? args.sums + g : nullptr,
                     args.sums_stride, totals[0]);
  }
  Tiles::release();
  write_totals(args, totals);
}

template <class Tiles, class Codes>
void quant_linear_tiles(const QuantLinearArgs& args) {
  constexpr int kSomeRows = 128;
  if (args.rows <= kTileRows && args.shape.group % kTileK == 0) return quant_linear_one_tile<Tiles, Codes>(args);
  // With few rows, numbers stay in the L1 cache. With many rows, their totals exceed it and should be loaded less
  // often.
  if (args.rows <= kSomeRows) return quant_linear_in_tiles<Tiles, Codes, 128>(args);
  quant_linear_in_tiles<Tiles, Codes, 512>(args);
}

}  // namespace
}  // namespace charonia::ops::cpu
