// The products of attention over a bf16 cache, whose k and v are stored in pairs (kernels.h). A step reads a row of
// pairs and multiplies it with a pair of each row of queries or probabilities. If the processor multiplies pairs of
// bf16, queries and probabilities are rounded to bf16, and the sum runs over pairs in ascending order. Otherwise they
// stay floats, and the sum runs over single elements in ascending order. Neither depends on the number of rows and
// columns.
//
// Memory that was never written is not multiplied, not even with zero, because it may be NaN.
#pragma once

#include "ops/cpu/kernels/attention_tile.h"
#include "ops/cpu/kernels/panel_step.h"

namespace charonia::ops::cpu::CHARONIA_ISA {
namespace {

#if defined(CHARONIA_NATIVE_PAIRS)
using PairOperand = Bf16;
#else
using PairOperand = float;
#endif
constexpr int kOperandsPerFloat = sizeof(float) / sizeof(PairOperand);

// The first `used` rows of a matrix in pairs of rows, from column `column` on.
struct PairedRows {
  const Bf16* data;  // column 0
  int rows, columns, column;
  int used;
};

// The last row, if `used` is odd. The other row of its pair must not be used, or does not exist.
template <int M, int V>
inline __attribute__((always_inline)) void odd_step(Vec (&acc)[M][V], const PairOperand* a, std::int64_t a_stride,
                                                    const PairedRows& b, int tail) {
  const bool paired = b.used < b.rows;
  const Bf16* const row = b.data + static_cast<std::int64_t>(b.used - 1) * b.columns + b.column * (paired ? 2 : 1);
#pragma GCC unroll 8
  for (int v = 0; v < V; ++v) {
    const bool whole = V > 1 || tail == 0;
    const Bf16* const at = row + v * kWidth * (paired ? 2 : 1);
    const Vec firsts = paired ? first_of(whole ? load_pairs(at) : load_pairs_n(at, tail))
                              : (whole ? load(at) : load_n(at, tail));
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      const PairOperand* const x = a + m * a_stride + b.used - 1;
#if defined(CHARONIA_NATIVE_PAIRS)
      acc[m][v] = fma_pairs(set1_first(*x), pairs_of_firsts(firsts), acc[m][v]);
#else
      acc[m][v] = fma(set1(*x), firsts, acc[m][v]);
#endif
    }
  }
}

template <int M, int V>
inline __attribute__((always_inline)) void tail_step(Vec (&acc)[M][V], const PairOperand* a, std::int64_t a_stride,
                                                     PairVec b) {
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
#if defined(CHARONIA_NATIVE_PAIRS)
    acc[m][0] = fma_pairs(set1_pair(a + m * a_stride), b, acc[m][0]);
#else
    acc[m][0] = fma(set1(a[m * a_stride]), first_of(b), acc[m][0]);
    acc[m][0] = fma(set1(a[m * a_stride + 1]), second_of(b), acc[m][0]);
#endif
  }
}

// acc [M][V vectors] += a [M][b.used] * b [b.used][V vectors]. tail > 0: b has that many columns instead (V is 1).
// Ahead: also prefetches the data that is read next, `ahead` bytes after b.
template <int M, int V, bool Ahead>
inline __attribute__((always_inline)) void add_product(Vec (&acc)[M][V], const PairOperand* a, std::int64_t a_stride,
                                                       const PairedRows& b, int tail, std::int64_t ahead) {
  constexpr int kLine_bytes = 64, kPair_bytes = 4;
  const Bf16* row = b.data + std::int64_t{2} * b.column;
  for (int i = 0; i + 2 <= b.used; i += 2) {
    if constexpr (Ahead) {
#pragma GCC unroll 8
      for (int byte = 0; byte < V * kWidth * kPair_bytes; byte += kLine_bytes) {
        __builtin_prefetch(reinterpret_cast<const char*>(row) + ahead + byte, 0, kAheadLevel);
      }
    }
    if (V == 1 && tail > 0) {
      tail_step(acc, a + i, a_stride, load_pairs_n(row, tail));
    } else {
      panel_step<M, V>(acc, a + i, a_stride, row);
    }
    row += std::int64_t{2} * b.columns;
  }
  if (b.used % 2 != 0) odd_step<M, V>(acc, a, a_stride, b, tail);
}

// scores [rows][columns], in whole vectors, = q [rows][dim] * k of one block. ahead: bytes to the next block.
struct KeyProduct {
  int rows;
  const PairOperand* q;
  std::int64_t q_stride;
  PairedRows keys;
  int columns;
  float* scores;
  std::int64_t s_stride;
  std::int64_t ahead;

  template <bool Ahead>
  void run() const {
    for_row_tiles(rows, [&](auto count, int row) { rows_of<count.value, Ahead>(row); });
  }

  template <int M, bool Ahead>
  void rows_of(int row) const {
    int j = 0;
    for (; j + kMaxVectors * kWidth <= columns; j += kMaxVectors * kWidth) tile<M, kMaxVectors, Ahead>(row, j, 0);
    for (; j + kWidth <= columns; j += kWidth) tile<M, 1, Ahead>(row, j, 0);
    if (j < columns) tile<M, 1, Ahead>(row, j, columns - j);
  }

  template <int M, int V, bool Ahead>
  void tile(int row, int j, int tail) const {
    Vec acc[M][V];
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) acc[m][v] = zero();
    }
    PairedRows from = keys;
    from.column = j;
    add_product<M, V, Ahead>(acc, q + row * q_stride, q_stride, from, tail, ahead);
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) store(scores + (row + m) * s_stride + j + v * kWidth, acc[m][v]);
    }
  }
};

// acc [rows][dim] = acc * factors + p [rows][positions] * v of the blocks of a chunk. The sums stay in registers across
// blocks. values_at(b): v of block b of the chunk; the block after the last one is prefetched.
template <class ValuesAt>
struct ValueProduct {
  int rows;
  const PairOperand* p;
  std::int64_t p_stride;
  int first_block, positions, block_len, dim;  // blocks [first_block, ...) of the chunk, up to `positions`
  const float* factors;
  float* acc;
  std::int64_t acc_stride;
  ValuesAt values_at;

  // All rows process a few columns of v before the next columns, so that these columns of a chunk stay in the L1 cache.
  template <bool Ahead>
  void run() const {
    constexpr int kColumns = kMaxVectors * kWidth;
    for (int j = 0; j < dim; j += kColumns) {
      const int end = j + kColumns < dim ? j + kColumns : dim;
      for_row_tiles(rows, [&](auto count, int row) { columns_of<count.value, Ahead>(row, j, end); });
    }
  }

  template <int M, bool Ahead>
  void columns_of(int row, int begin, int end) const {
    int j = begin;
    for (; j + kMaxVectors * kWidth <= end; j += kMaxVectors * kWidth) tile<M, kMaxVectors, Ahead>(row, j, 0);
    for (; j + kWidth <= end; j += kWidth) tile<M, 1, Ahead>(row, j, 0);
    if (j < end) tile<M, 1, Ahead>(row, j, end - j);
  }

  template <int M, int V, bool Ahead>
  void tile(int row, int j, int tail) const {
    Vec sums[M][V];
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      const Vec factor = set1(factors[row + m]);
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) sums[m][v] = mul(load(acc + (row + m) * acc_stride + j + v * kWidth), factor);
    }
    const Bf16* values = values_at(first_block);
    for (int b = first_block; b * block_len < positions; ++b) {
      const Bf16* const next = values_at(b + 1);
      const int left = positions - b * block_len;
      add_product<M, V, Ahead>(sums, p + row * p_stride + b * block_len, p_stride,
                               {values, block_len, dim, j, left < block_len ? left : block_len}, tail,
                               reinterpret_cast<const char*>(next) - reinterpret_cast<const char*>(values));
      values = next;
    }
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) store(acc + (row + m) * acc_stride + j + v * kWidth, sums[m][v]);
    }
  }
};

}  // namespace
}  // namespace charonia::ops::cpu::CHARONIA_ISA
