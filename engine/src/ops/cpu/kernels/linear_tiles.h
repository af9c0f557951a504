// A GEMM with a packed bf16 weight with matrix tiles: one panel of 64 output features times up to kRowBlock rows.
//
// Layouts: kernels.h. Bound: memory for few rows, the tiles' multiplications for many.
//
// A tile is a register of up to 16 rows of 64 bytes. The next 16 pairs of k of a panel are four neighbouring tiles with
// 16 features each; rows are 256 bytes apart, and the four tiles are 4 KiB of contiguous memory. So the panel is read
// sequentially, in the same layout as with the other instruction sets. `Tiles` provides the processor's operations:
//   configure(rows)      sets the rows of the tiles: `rows` for activations (kFirst, kSecond) and sums, 16 for weights
//   release()            releases the tiles: a thread with tiles in use is slower to switch, and may have a lower clock
//   zero<T>(), load<T>(from, stride_bytes), store<T>(to, stride_bytes)
//   multiply<C, A, B>()  C[m][n] += the sum over 16 pairs of A[m] * B[n], in the order that the instruction documents
//
// The order of operations of an element is fixed: steps of 32 k in ascending order, the last one padded with zeros,
// each added by one tile multiplication. It does not depend on the number of rows, or on the steps after which sums are
// stored in memory.
//
// Like all kernels (vec.h), this header uses only its own definitions. Tests can compile it with other tiles.
#pragma once

#include <cstdint>

#include "ops/cpu/kernels.h"

namespace charonia::ops::cpu {
namespace {

inline constexpr int kTileRows = 16;
inline constexpr int kTileColumns = 16;  // floats, or pairs of bf16
inline constexpr int kTileK = 32;        // k of a step
inline constexpr int kTileStepBytes = kTileK * kPanel * 2;
// Steps of a chunk of a panel. All row tiles process a chunk while it is in the L2 cache (128 KiB). Between chunks the
// sums are loaded and stored: 8 tiles, compared with 4 multiplications per step.
inline constexpr std::int64_t kTileChunkSteps = 32;
inline constexpr int kTilePrefetch_bytes = 2 * kTileStepBytes;

// The use of the eight tile registers. Registers 0 to 3 hold sums.
inline constexpr int kFirst = 4, kSecond = 5;  // activations
inline constexpr int kWeights = 6, kMoreWeights = 7;

inline void prefetch_step(const char* ahead) {
#pragma GCC unroll 8
  for (int line = 0; line < kTileStepBytes; line += 64) __builtin_prefetch(ahead + line);
}

// Adds one step of 32 k to the sums of a row tile: its activations times the step's weights [16][64][2].
template <class Tiles>
inline __attribute__((always_inline)) void tile_step(const char* a, std::int64_t a_stride, const char* weights) {
  constexpr std::int64_t kRow = kPanel * 4;  // bytes of a row of a panel: 64 pairs
  Tiles::template load<kFirst>(a, a_stride);
  Tiles::template load<kWeights>(weights, kRow);
  Tiles::template multiply<0, kFirst, kWeights>();
  Tiles::template load<kMoreWeights>(weights + kRow / 4, kRow);
  Tiles::template multiply<1, kFirst, kMoreWeights>();
  Tiles::template load<kWeights>(weights + kRow / 2, kRow);
  Tiles::template multiply<2, kFirst, kWeights>();
  Tiles::template load<kMoreWeights>(weights + 3 * kRow / 4, kRow);
  Tiles::template multiply<3, kFirst, kMoreWeights>();
}

// One row tile times all 64 features. a: `steps` times 64 bytes, rows a_stride bytes apart. ReadAhead: prefetches
// weights. Sums: [16][64], floats or integers.
template <class Tiles, bool ReadAhead = true, class Sums>
void row_tile(const char* a, std::int64_t a_stride, std::int64_t steps, const char* weights, Sums& sums, bool fresh) {
  constexpr std::int64_t kSumsStride = kPanel * sizeof(float);
  if (fresh) {
    Tiles::template zero<0>();
    Tiles::template zero<1>();
    Tiles::template zero<2>();
    Tiles::template zero<3>();
  } else {
    Tiles::template load<0>(sums[0], kSumsStride);
    Tiles::template load<1>(sums[0] + kTileColumns, kSumsStride);
    Tiles::template load<2>(sums[0] + 2 * kTileColumns, kSumsStride);
    Tiles::template load<3>(sums[0] + 3 * kTileColumns, kSumsStride);
  }
  for (std::int64_t i = 0; i < steps; ++i) {
    if (ReadAhead) prefetch_step(weights + kTilePrefetch_bytes);
    tile_step<Tiles>(a, a_stride, weights);
    a += 2 * kTileK;
    weights += kTileStepBytes;
  }
  Tiles::template store<0>(sums[0], kSumsStride);
  Tiles::template store<1>(sums[0] + kTileColumns, kSumsStride);
  Tiles::template store<2>(sums[0] + 2 * kTileColumns, kSumsStride);
  Tiles::template store<3>(sums[0] + 3 * kTileColumns, kSumsStride);
}

// Two row tiles times 64 features, 32 at a time. It has as many tile loads as multiplications (row_tile has five loads
// for four), and both row tiles use each load of weights.
template <class Tiles, class Sums>
void two_row_tiles(const char* first, const char* second, std::int64_t a_stride, std::int64_t steps,
                   const char* weights, Sums& first_sums, Sums& second_sums, bool fresh, bool read_ahead) {
  constexpr std::int64_t kSumsStride = kPanel * sizeof(float);
  constexpr std::int64_t kRow = kPanel * 4;
  for (int half = 0; half < 2; ++half) {
    auto* const upper = first_sums[0] + half * 2 * kTileColumns;
    auto* const lower = second_sums[0] + half * 2 * kTileColumns;
    const char* w = weights + half * kRow / 2;
    if (fresh) {
      Tiles::template zero<0>();
      Tiles::template zero<1>();
      Tiles::template zero<2>();
      Tiles::template zero<3>();
    } else {
      Tiles::template load<0>(upper, kSumsStride);
      Tiles::template load<1>(upper + kTileColumns, kSumsStride);
      Tiles::template load<2>(lower, kSumsStride);
      Tiles::template load<3>(lower + kTileColumns, kSumsStride);
    }
    for (std::int64_t i = 0; i < steps; ++i) {
      if (read_ahead && half == 0) prefetch_step(w + kTilePrefetch_bytes);
      const std::int64_t k = i * 2 * kTileK;  // bytes
      Tiles::template load<kFirst>(first + k, a_stride);
      Tiles::template load<kWeights>(w, kRow);
      Tiles::template multiply<0, kFirst, kWeights>();
      Tiles::template load<kMoreWeights>(w + kRow / 4, kRow);
      Tiles::template multiply<1, kFirst, kMoreWeights>();
      Tiles::template load<kSecond>(second + k, a_stride);
      Tiles::template multiply<2, kSecond, kWeights>();
      Tiles::template multiply<3, kSecond, kMoreWeights>();
      w += kTileStepBytes;
    }
    Tiles::template store<0>(upper, kSumsStride);
    Tiles::template store<1>(upper + kTileColumns, kSumsStride);
    Tiles::template store<2>(lower, kSumsStride);
    Tiles::template store<3>(lower + kTileColumns, kSumsStride);
  }
}

template <class Tiles>
void linear_tiles(const LinearArgs& args) {
  constexpr int kMaxTiles = (kRowBlock + kTileRows - 1) / kTileRows;
  alignas(64) float sums[kMaxTiles][kTileRows][kPanel];
  // Row tiles have equal size: if the rows do not divide evenly, the last tile begins earlier and recomputes some rows.
  const int tiles = (args.rows + kTileRows - 1) / kTileRows;
  const int rows = (args.rows + tiles - 1) / tiles;
  const auto first_row = [&](int tile) { return tile * rows + rows <= args.rows ? tile * rows : args.rows - rows; };
  const auto* const a = static_cast<const char*>(args.a);
  const auto* const panel = static_cast<const char*>(args.panel);
  const std::int64_t a_stride = args.a_stride * 2;  // bytes
  const std::int64_t steps = args.k / kTileK;       // whole steps

  Tiles::configure(rows);
  const auto pass = [&](const auto& rows_of, std::int64_t stride, std::int64_t length, const char* weights,
                        bool fresh) {
    int tile = 0;
    for (; tile + 1 < tiles; tile += 2) {
      two_row_tiles<Tiles>(rows_of(tile), rows_of(tile + 1), stride, length, weights, sums[tile], sums[tile + 1], fresh,
                           tile == 0);
    }
    if (tile < tiles) row_tile<Tiles>(rows_of(tile), stride, length, weights, sums[tile], fresh);
  };
  const std::int64_t chunk = tiles == 1 ? steps : kTileChunkSteps;
  for (std::int64_t begin = 0; begin < steps; begin += chunk) {
    const auto rows_of = [&](int tile) { return a + first_row(tile) * a_stride + begin * 2 * kTileK; };
    pass(rows_of, a_stride, begin + chunk < steps ? chunk : steps - begin, panel + begin * kTileStepBytes, begin == 0);
  }
  // padded copies, because other rows and panels follow in memory
  if (const int rest = static_cast<int>(args.k % kTileK); rest != 0) {
    alignas(64) char activations[kMaxTiles][kTileRows][2 * kTileK] = {};
    alignas(64) char weights[kTileStepBytes] = {};
    for (int tile = 0; tile < tiles; ++tile) {
      for (int row = 0; row < rows; ++row) {
        __builtin_memcpy(activations[tile][row], a + (first_row(tile) + row) * a_stride + steps * 2 * kTileK,
                         static_cast<std::size_t>(2 * rest));
      }
    }
    __builtin_memcpy(weights, panel + steps * kTileStepBytes,
                     static_cast<std::size_t>((rest + 1) / 2) * 2 * kPanel * sizeof(Bf16));
    const auto rows_of = [&](int tile) { return activations[tile][0]; };
    pass(rows_of, 2 * kTileK, 1, weights, steps == 0);
  }
  Tiles::release();

  for (int row = 0; row < args.rows; ++row) {
    const int tile = row / rows;
    const float* const from = sums[tile][row - first_row(tile)];
    float* const to = args.out + row * args.out_stride;
    if (args.bias == nullptr) {
      for (int j = 0; j < args.columns; ++j) to[j] = from[j];
    } else {
      for (int j = 0; j < args.columns; ++j) to[j] = from[j] + args.bias[j];
    }
  }
}

}  // namespace
}  // namespace charonia::ops::cpu
