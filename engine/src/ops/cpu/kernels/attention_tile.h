// The products of attention: c [rows][columns] (+)= a [rows][k] * b [k][columns], with few rows and b in the cache's
// type. Every element of c is summed over k in ascending order, for any number of rows and columns.
//
// A byte holds two 4-bit integers. For k (two planes of rows), byte [i][j] holds elements i and i + head_dim / 2 of b's
// column j; they are summed in the order 0, head_dim / 2, 1, head_dim / 2 + 1, ... For v (two planes of columns), byte
// [i][j] holds columns j and j + head_dim / 2 of b's row i.
#pragma once

#include "ops/cpu/kernels/vec.h"

namespace charonia::ops::cpu::CHARONIA_ISA {
namespace {

#if defined(__AVX512F__)
constexpr int kMaxRows = 6, kMaxVectors = 4;
#elif defined(__AVX2__)
constexpr int kMaxRows = 4, kMaxVectors = 2;
#else
constexpr int kMaxRows = 4, kMaxVectors = 2;
#endif
constexpr int kAheadLevel = 2;  // prefetch into the L2 cache, which has space for the next block

// c [M][V vectors] (+)= a [M][k] * b [k][V vectors]. tail > 0: b has that many columns instead (V is 1). Ahead: also
// prefetches the data that is read next, `ahead` bytes after b.
template <int M, int V, bool Ahead, class T>
inline __attribute__((always_inline)) void tile(const float* a, std::int64_t a_stride, int k, const T* b,
                                                std::int64_t b_stride, float* c, std::int64_t c_stride, bool accumulate,
                                                int tail, std::int64_t ahead) {
  constexpr int kLine_bytes = 64;
  Vec acc[M][V];
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) acc[m][v] = accumulate ? load(c + m * c_stride + v * kWidth) : zero();
  }
  for (int i = 0; i < k; ++i) {
    Vec columns[V];
    if constexpr (Ahead) {
#pragma GCC unroll 8
      for (int byte = 0; byte < V * kWidth * static_cast<int>(sizeof(T)); byte += kLine_bytes) {
        __builtin_prefetch(reinterpret_cast<const char*>(b) + ahead + byte, 0, kAheadLevel);
      }
    }
    if (V == 1 && tail > 0) {
      columns[0] = load_n(b, tail);
    } else {
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) columns[v] = load(b + v * kWidth);
    }
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      const Vec x = set1(a[m * a_stride + i]);
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) acc[m][v] = fma(x, columns[v], acc[m][v]);
    }
    b += b_stride;
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) store(c + m * c_stride + v * kWidth, acc[m][v]);
  }
}

// The same for 4-bit integers. Keys: a has a second row of values, `plane` elements after the first, and b has half as
// many rows. Otherwise c has a second row of columns, `plane` elements after the first. Lanes after the last column
// write back the values that they read.
template <int M, int V, bool Ahead, bool Keys>
inline __attribute__((always_inline)) void tile4(const float* a, std::int64_t a_stride, int k, const Q4* b,
                                                 std::int64_t b_stride, float* c, std::int64_t c_stride,
                                                 std::int64_t plane, bool accumulate, int tail, std::int64_t ahead) {
  constexpr int kLine_bytes = 64, kPlanes = Keys ? 1 : 2;
  Vec acc[M][kPlanes][V];
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) {
#pragma GCC unroll 8
      for (int p = 0; p < kPlanes; ++p) {
        acc[m][p][v] = accumulate ? load(c + m * c_stride + p * plane + v * kWidth) : zero();
      }
    }
  }
  for (int i = 0; i < k; ++i) {
    if constexpr (Ahead) {
#pragma GCC unroll 8
      for (int byte = 0; byte < V * kWidth; byte += kLine_bytes) {
        __builtin_prefetch(reinterpret_cast<const char*>(b) + ahead + byte, 0, kAheadLevel);
      }
    }
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) {
      const auto* const from = &b[v * kWidth].bits;
      const ByteVec bytes = V == 1 && tail > 0 ? load_bytes_n(from, tail) : load_bytes(from);
      const Vec low = low_halves(bytes), high = high_halves(bytes);
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) {
        const float* const x = a + m * a_stride + i;
        acc[m][0][v] = fma(set1(*x), low, acc[m][0][v]);
        acc[m][kPlanes - 1][v] = fma(set1(Keys ? x[plane] : *x), high, acc[m][kPlanes - 1][v]);
      }
    }
    b += b_stride;
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 8
    for (int p = 0; p < kPlanes; ++p) {
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) store(c + m * c_stride + p * plane + v * kWidth, acc[m][p][v]);
    }
  }
}

template <class T>
struct TileGemm {
  int rows;
  const float* a;  // [rows][k]
  std::int64_t a_stride;
  int k;
  const T* b;  // [k][columns]; with 4 bits, bytes
  std::int64_t b_stride;
  int columns;
  float* c;  // [rows][columns]; whole vectors are written: up to kWidth - 1 elements after a row
  std::int64_t c_stride;
  bool accumulate;
  const T* next;           // the b of the next product
  std::int64_t plane = 0;  // 4 bits: offset of the second plane, of a (keys) or of c (values)
  bool keys = false;       // 4 bits: the product with keys
};

template <int M, bool Ahead, class T>
void multiply_rows(const TileGemm<T>& p, int row) {
  const float* const a = p.a + row * p.a_stride;
  float* const c = p.c + row * p.c_stride;
  const auto ahead = reinterpret_cast<const char*>(p.next) - reinterpret_cast<const char*>(p.b);
  int j = 0;
  for (; j + kMaxVectors * kWidth <= p.columns; j += kMaxVectors * kWidth) {
    tile<M, kMaxVectors, Ahead>(a, p.a_stride, p.k, p.b + j, p.b_stride, c + j, p.c_stride, p.accumulate, 0, ahead);
  }
  for (; j + kWidth <= p.columns; j += kWidth) {
    tile<M, 1, Ahead>(a, p.a_stride, p.k, p.b + j, p.b_stride, c + j, p.c_stride, p.accumulate, 0, ahead);
  }
  if (j < p.columns) {
    tile<M, 1, Ahead>(a, p.a_stride, p.k, p.b + j, p.b_stride, c + j, p.c_stride, p.accumulate, p.columns - j, ahead);
  }
}

template <int M, bool Ahead, bool Keys>
inline __attribute__((always_inline)) void multiply_rows4(const TileGemm<Q4>& p, int row) {
  constexpr int kVectors = Keys && M <= 4 ? kMaxVectors : kMaxVectors / 2;
  const float* const a = p.a + row * p.a_stride;
  float* const c = p.c + row * p.c_stride;
  const auto ahead = reinterpret_cast<const char*>(p.next) - reinterpret_cast<const char*>(p.b);
  int j = 0;
  for (; j + kVectors * kWidth <= p.columns; j += kVectors * kWidth) {
    tile4<M, kVectors, Ahead, Keys>(a, p.a_stride, p.k, p.b + j, p.b_stride, c + j, p.c_stride, p.plane, p.accumulate,
                                    0, ahead);
  }
  for (; j + kWidth <= p.columns; j += kWidth) {
    tile4<M, 1, Ahead, Keys>(a, p.a_stride, p.k, p.b + j, p.b_stride, c + j, p.c_stride, p.plane, p.accumulate, 0,
                             ahead);
  }
  if (j < p.columns) {
    tile4<M, 1, Ahead, Keys>(a, p.a_stride, p.k, p.b + j, p.b_stride, c + j, p.c_stride, p.plane, p.accumulate,
                             p.columns - j, ahead);
  }
}
template <int M, bool Ahead>
void multiply_rows(const TileGemm<Q4>& p, int row) {
  p.keys ? multiply_rows4<M, Ahead, true>(p, row) : multiply_rows4<M, Ahead, false>(p, row);
}

// Calls fn(Rows<n>, row) for tiles of n <= kMaxRows rows from `row` on, of about equal size.
template <int N>
struct Rows {
  static constexpr int value = N;
};
template <class Fn>
inline void for_row_tiles(int rows, Fn fn) {
  static_assert(kMaxRows == 4 || kMaxRows == 6);
  const int tiles = (rows + kMaxRows - 1) / kMaxRows;
  for (int t = 0, row = 0; t < tiles; ++t) {
    const int n = rows / tiles + (t < rows % tiles ? 1 : 0);
    switch (n) {
      case 1:
        fn(Rows<1>{}, row);
        break;
      case 2:
        fn(Rows<2>{}, row);
        break;
      case 3:
        fn(Rows<3>{}, row);
        break;
      case 4:
        fn(Rows<4>{}, row);
        break;
      default:
        if constexpr (kMaxRows == 6) {
          if (n == 5) {
            fn(Rows<5>{}, row);
          } else {
            fn(Rows<6>{}, row);
          }
        }
    }
    row += n;
  }
}

// c (+)= a * b. With one tile of rows (decode) memory is the bound, so it prefetches; with more tiles, b comes from the
// cache.
template <bool Ahead, class T>
void multiply_tiles(const TileGemm<T>& p) {
  for_row_tiles(p.rows, [&](auto count, int row) { multiply_rows<count.value, Ahead>(p, row); });
}

template <class T>
void multiply(const TileGemm<T>& p) {
  if (p.rows <= kMaxRows) return multiply_tiles<true>(p);
  multiply_tiles<false>(p);
}

}  // namespace
}  // namespace charonia::ops::cpu::CHARONIA_ISA
