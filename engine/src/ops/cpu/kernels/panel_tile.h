// Tiles of a GEMM with a panel of 64 output features in memory, of floats or of pairs of bf16 (kernels.h): up to
// kMaxRows rows by all 64 features, with sums in registers. linear.cpp and quant_linear.cpp use them.
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

// Size of the chunks of a panel that all row tiles process: short with few tiles, when memory is the bound; long with
// many tiles, because sums are loaded and stored once per chunk.
constexpr int kChunk_bytes = 16384;
#if defined(__AVX512F__)
constexpr int kLongChunk_bytes = 32768;
#else
constexpr int kLongChunk_bytes = kChunk_bytes;
#endif
constexpr int kFewPasses = 3;

constexpr int kLine_bytes = 64;

// The storage and multiplication of a weight type. A step is one row of a panel: one k, or a pair of k. Operand is the
// type that a tile broadcasts: activations in place, or bf16 that was widened before, if the processor does not
// multiply pairs.
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

// Processes one chunk of k for M rows and all 64 features. c [M][64] holds the accumulators; with `fresh` they start at
// zero.
//
// Each step also prefetches `Lines` cache lines from `ahead` on. A single tile of a row block prefetches the data that
// it reads soon (Soon). If several tiles process a chunk, each prefetches a part of the next chunk, so that memory is
// busy during all tiles. These prefetches go into the L2 cache, because in the L1 cache they would evict the current
// chunk.
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
