// The two products of a LoRA adapter (ops/low_rank.h) for up to kLowRankRows rows of a step.
//
//   down  t[m, j] = scale[j] * sum over k of x[row m, k] * a[j, k]
//   up    out[row m, c] += sum over j of t[m, j] * b[c, j]
//
// ops/low_rank.h has the layouts of A and B. Each sum of `down` has one vector of partial sums, over ascending k (in
// pairs, if the processor multiplies those), which is summed at the end. Each sum of `up` has one accumulator that
// begins with the value of `out`, over ascending j. So bits depend neither on the number of rows of a call nor on the
// other rows.
//
// Bound: memory for one row, because A and B are read once for each adapter; the multiplications for many rows. With
// one row, each call reads one stream of memory; the portable kernels have narrow vectors and read B in two streams.
// Neither product has padding along the rank, except that B has pairs of bf16. A GEMM with panels of 64 output features
// would read four times the bytes of A for an adapter of rank 16.
#include "ops/cpu/kernels/vec.h"

namespace charonia::ops::cpu::CHARONIA_ISA {
namespace {

#if defined(__AVX512F__)
constexpr int kTileRanks = 4, kTileVectors = 4;
#else
constexpr int kTileRanks = 2, kTileVectors = 2;  // sixteen registers
#endif
constexpr int kTileRows = 4;
constexpr int kSingleVectors = kPanel / kWidth <= 8 ? kPanel / kWidth : 8;  // with one row
static_assert(kLowRankGroup % kTileRanks == 0);

template <class T>
constexpr int kLine = 64 / static_cast<int>(sizeof(T));  // elements of a cache line

template <class T>
inline const T* row_of(const LowRankArgs& args, int m) {
  return static_cast<const T*>(args.in) + args.rows[m] * args.in_stride;
}

// Adds the products of elements [k, k + kLine) of the rows, and R lines of A.
template <int M, int R, class T>
inline __attribute__((always_inline)) void add_line(Vec (&sums)[M][R], const T* const (&x)[M], std::int64_t k,
                                                    const T* lines) {
#pragma GCC unroll 8
  for (int at = 0; at < kLine<T>; at += kWidth) {
    Vec in[M];
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) in[m] = load(x[m] + k + at);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const Vec w = load(lines + r * kLine<T> + at);
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) sums[m][r] = fma(in[m], w, sums[m][r]);
    }
  }
}
#if defined(CHARONIA_NATIVE_PAIRS)
static_assert(kLine<Bf16> == 2 * kWidth);
template <int M, int R>
inline __attribute__((always_inline)) void add_line(Vec (&sums)[M][R], const Bf16* const (&x)[M], std::int64_t k,
                                                    const Bf16* lines) {
  PairVec in[M];
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) in[m] = load_pairs(x[m] + k);
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    const PairVec w = load_pairs(lines + r * kLine<Bf16>);
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) sums[m][r] = fma_pairs(in[m], w, sums[m][r]);
  }
}
#endif

// Ranks [rank, rank + R). lines: the first line of `rank` in its group, which has `group` ranks.
template <int M, int R, class T>
inline void down_tile(const LowRankArgs& args, int row, std::int64_t rank, const T* lines, int group) {
  const T* x[M];
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) x[m] = row_of<T>(args, row + m);
  Vec sums[M][R];
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) sums[m][r] = zero();
  }
  const int step = group * kLine<T>;
  std::int64_t k = 0;
  for (; k + kLine<T> <= args.in_features; k += kLine<T>, lines += step) {
    if (M == 1) {
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        __builtin_prefetch(reinterpret_cast<const char*>(lines + r * kLine<T>) + kPrefetchAhead_bytes);
      }
    }
    add_line<M, R>(sums, x, k, lines);
  }
  for (; k < args.in_features; k += kWidth, lines += kWidth) {  // the last line
    const auto rest = args.in_features - k;
    for (int m = 0; m < M; ++m) {
      const Vec in = rest < kWidth ? load_n(x[m] + k, static_cast<int>(rest)) : load(x[m] + k);
      for (int r = 0; r < R; ++r) sums[m][r] = fma(in, load(lines + r * kLine<T>), sums[m][r]);
    }
  }
  for (int m = 0; m < M; ++m) {
    float* const t = args.t + (row + m) * args.t_stride + rank;
    for (int r = 0; r < R; ++r) t[r] = sum_of(sums[m][r]) * args.scales[rank + r];
  }
}

template <int M, int R, class T>
inline void down_rows(const LowRankArgs& args, int row) {
  const std::int64_t end = args.first_rank + args.ranks;
  const std::int64_t padded = (args.in_features + kLine<T> - 1) / kLine<T> * kLine<T>;
  for (std::int64_t first = args.first_rank; first < end; first += kLowRankGroup) {
    const int group = end - first < kLowRankGroup ? static_cast<int>(end - first) : kLowRankGroup;
    const T* const lines = static_cast<const T*>(args.a) + first * padded;
    int rank = 0;
    for (; rank + R <= group; rank += R) {
      down_tile<M, R, T>(args, row, first + rank, lines + rank * kLine<T>, group);
    }
    for (; rank < group; ++rank) down_tile<M, 1, T>(args, row, first + rank, lines + rank * kLine<T>, group);
  }
}

template <class T>
inline void down(const LowRankArgs& args) {
  int row = 0;
  for (; row + kTileRows <= args.count; row += kTileRows) down_rows<kTileRows, kTileRanks, T>(args, row);
  for (; row < args.count; ++row) down_rows<1, kLowRankGroup, T>(args, row);
}

// The ranks of B that are stored together, and their products with kWidth columns. t: of the first of them; the last
// pair may have one rank.
template <class T>
constexpr int kPair = 1;
template <>
constexpr int kPair<Bf16> = 2;

template <int M, int V>
inline __attribute__((always_inline)) void add_ranks(Vec (&sums)[M][V], const float* const (&t)[M], std::int64_t j,
                                                     std::int64_t, const float* from) {
#pragma GCC unroll 8
  for (int v = 0; v < V; ++v) {
    const Vec w = load(from + v * kWidth);
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) sums[m][v] = fma(set1(t[m][j]), w, sums[m][v]);
  }
}
template <int M, int V>
inline __attribute__((always_inline)) void add_ranks(Vec (&sums)[M][V], const float* const (&t)[M], std::int64_t j,
                                                     std::int64_t ranks, const Bf16* from) {
  Vec first[M], second[M];
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
    first[m] = set1(t[m][j]);
    second[m] = j + 1 < ranks ? set1(t[m][j + 1]) : zero();
  }
#pragma GCC unroll 8
  for (int v = 0; v < V; ++v) {
    const PairVec w = load_pairs(from + 2 * v * kWidth);
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      sums[m][v] = fma(first[m], first_of(w), sums[m][v]);
      sums[m][v] = fma(second[m], second_of(w), sums[m][v]);
    }
  }
}

// V vectors of columns of a panel, from `column` on; of the last vector, `last` lanes.
template <int M, int V, class T>
inline void up_tile(const LowRankArgs& args, int row, std::int64_t column, const T* panel, int last) {
  float* out[M];
  const float* t[M];
  Vec sums[M][V];
  for (int m = 0; m < M; ++m) {
    out[m] = args.out + args.rows[row + m] * args.out_stride + column;
    t[m] = args.t + (row + m) * args.t_stride + args.first_rank;
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) {
      const float* const from = out[m] + v * kWidth;
      sums[m][v] = v + 1 < V || last == kWidth ? load(from) : load_n(from, last);
    }
  }
  for (std::int64_t j = 0; j < args.ranks; j += kPair<T>, panel += kPanel * kPair<T>) {
    if (M == 1) {
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) {
        __builtin_prefetch(reinterpret_cast<const char*>(panel + v * kWidth * kPair<T>) + kPrefetchAhead_bytes);
      }
    }
    add_ranks<M, V>(sums, t, j, args.ranks, panel);
  }
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) {
      float* const to = out[m] + v * kWidth;
      if (v + 1 < V || last == kWidth) {
        store(to, sums[m][v]);
      } else {
        store_n(to, sums[m][v], last);
      }
    }
  }
}

template <int M, int V, class T>
inline void up_rows(const LowRankArgs& args, int row) {
  constexpr int kColumns = V * kWidth;
  static_assert(kPanel % kColumns == 0);
  const std::int64_t stride = (args.ranks + kPair<T> - 1) / kPair<T> * kPair<T> * kPanel;
  const auto* panel = static_cast<const T*>(args.b);
  for (std::int64_t first = 0; first < args.columns; first += kPanel, panel += stride) {
    const std::int64_t end = args.columns - first < kPanel ? args.columns - first : kPanel;
    std::int64_t at = 0;
    for (; at + kColumns <= end; at += kColumns) {
      up_tile<M, V, T>(args, row, args.first_column + first + at, panel + at * kPair<T>, kWidth);
    }
    for (; at < end; at += kWidth) {
      const int last = end - at < kWidth ? static_cast<int>(end - at) : kWidth;
      up_tile<M, 1, T>(args, row, args.first_column + first + at, panel + at * kPair<T>, last);
    }
  }
}

template <class T>
inline void up(const LowRankArgs& args) {
  int row = 0;
  for (; row + kTileRows <= args.count; row += kTileRows) up_rows<kTileRows, kTileVectors, T>(args, row);
  for (; row < args.count; ++row) up_rows<1, kSingleVectors, T>(args, row);
}

}  // namespace

void low_rank_down_bf16(const LowRankArgs& args) { down<Bf16>(args); }
void low_rank_down_f32(const LowRankArgs& args) { down<float>(args); }
void low_rank_up_bf16(const LowRankArgs& args) { up<Bf16>(args); }
void low_rank_up_f32(const LowRankArgs& args) { up<float>(args); }

}  // namespace charonia::ops::cpu::CHARONIA_ISA
