// Tiles of a GEMM with a panel of 64 output features in memory, of floats or of pairs of bf16 (kernels.h): up to
// kMaxRows rows by all 64 features, sums in registers. What linear.cpp and quant_linear.cpp share.
#pragma once

#include "ops/cpu/kernels/panel_step.h"

namespace charonia::ops::cpu::CHARONIA_ISA {
namespace {

#if defined(__AVX512F__)
constexpr int kMaxRows = 6;
constexpr int vectors_for(int) { return 4; }
#elif defined(__AVX2__)
constexpr int kMaxRows = 6;
constexpr int vectors_for(int rows) { return rows == 1 ? 8 : rows <= 3 ? 4 : 2; }
#else
constexpr int kMaxRows = 4;
constexpr int vectors_for(int rows) { return rows == 1 ? 8 : rows == 2 ? 4 : 2; }
#endif

// Of a panel, while row tiles pass over it: few tiles, where memory is the bound; and many, which load and store their
// sums the less often the longer a chunk is.
constexpr int kChunk_bytes = 16384;
#if defined(__AVX512F__)
constexpr int kLongChunk_bytes = 32768;
#else
constexpr int kLongChunk_bytes = kChunk_bytes;
#endif
constexpr int kFewPasses = 3;

constexpr int kLine_bytes = 64;

// How a weight type is stored and multiplied. A step is what one row of a panel holds: one k, or a pair of them.
// Operand is what a tile broadcasts: activations as they come, or bf16 widened beforehand where there is no product of
// pairs.
template <class W>
struct Steps {
  using Activation = float;
  using Operand = float;
  static constexpr int kLength = 1;       // k per step
  static constexpr int kStride = kPanel;  // elements
};
template <>
struct Steps<Bf16> {
  using Activation = Bf16;
#if defined(CHARONIA_NATIVE_PAIRS)
  using Operand = Bf16;
#else
  using Operand = float;
#endif
  static constexpr int kLength = 2;
  static constexpr int kStride = 2 * kPanel;
};

template <class W>
constexpr int kStep_bytes = Steps<W>::kStride * static_cast<int>(sizeof(W));
template <class W>
constexpr int kChunkSteps = kChunk_bytes / kStep_bytes<W>;
template <class W>
constexpr int kLongChunkSteps = kLongChunk_bytes / kStep_bytes<W>;

constexpr int passes_for(int rows) { return kPanel / (vectors_for(rows) * kWidth); }

// One chunk of k for M rows and all 64 features. c [M][64] holds the accumulators; with `fresh` they start at zero.
//
// Meanwhile it asks memory for `Lines` cache lines in every step, from `ahead` on. The only tile of a row block asks
// for what it will read soon itself (Soon). Where several tiles pass over a chunk they share in asking for the next
// chunk, so that memory works all the time and not only under the first of them; that goes into the L2 cache,
// since it would push the chunk in use out of the first.
template <int M, int Lines, bool Soon, class W>
void tile(const typename Steps<W>::Operand* a, std::int64_t a_stride, std::int64_t steps, const W* panel, float* c,
          bool fresh, const char* ahead) {
  constexpr int V = vectors_for(M);
  constexpr int kLevel = Soon ? 3 : 2;
  using S = Steps<W>;
  for (int column = 0; column < kPanel; column += V * kWidth) {
    Vec acc[M][V];
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) acc[m][v] = fresh ? zero() : load(c + m * kPanel + column + v * kWidth);
    }
    const W* w = panel + column * S::kLength;
    const auto* x = a;
    for (std::int64_t i = 0; i < steps; ++i) {
#pragma GCC unroll 8
      for (int line = 0; line < Lines; ++line) __builtin_prefetch(ahead + line * kLine_bytes, 0, kLevel);
      panel_step<M, V>(acc, x, a_stride, w);
      ahead += Lines * kLine_bytes;
      w += S::kStride;
      x += S::kLength;
    }
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) store(c + m * kPanel + column + v * kWidth, acc[m][v]);
    }
  }
}

template <int Lines, bool Soon, class W>
void tile_of(int rows, const typename Steps<W>::Operand* a, std::int64_t a_stride, std::int64_t steps, const W* panel,
             float* c, bool fresh, const char* ahead) {
  static_assert(kMaxRows == 4 || kMaxRows == 6);
  switch (rows) {
    case 1:
      return tile<1, Lines, Soon, W>(a, a_stride, steps, panel, c, fresh, ahead);
    case 2:
      return tile<2, Lines, Soon, W>(a, a_stride, steps, panel, c, fresh, ahead);
    case 3:
      return tile<3, Lines, Soon, W>(a, a_stride, steps, panel, c, fresh, ahead);
    case 4:
      return tile<4, Lines, Soon, W>(a, a_stride, steps, panel, c, fresh, ahead);
    default:
      if constexpr (kMaxRows == 6) {
        if (rows == 5) return tile<5, Lines, Soon, W>(a, a_stride, steps, panel, c, fresh, ahead);
        return tile<6, Lines, Soon, W>(a, a_stride, steps, panel, c, fresh, ahead);
      }
  }
}

void write_out(const LinearArgs& args, const float* c) {
  for (int row = 0; row < args.rows; ++row) {
    const float* from = c + row * kPanel;
    float* to = args.out + row * args.out_stride;
    for (int j = 0; j < args.columns; j += kWidth) {
      const int n = args.columns - j;
      Vec x = load(from + j);
      if (n >= kWidth) {
        if (args.bias != nullptr) x = add(x, load(args.bias + j));
        store(to + j, x);
      } else {
        if (args.bias != nullptr) x = add(x, load_n(args.bias + j, n));
        store_n(to + j, x, n);
      }
    }
  }
}

}  // namespace
}  // namespace charonia::ops::cpu::CHARONIA_ISA
