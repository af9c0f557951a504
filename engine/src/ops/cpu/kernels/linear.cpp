// A product with a packed weight: one panel of 64 output features times up to kRowBlock rows.
//
// Layouts: kernels.h. Bound: memory for few rows (each weight is read once and used `rows` times), arithmetic for many.
//
// A tile of M rows by V vectors stays in registers; per step of k it loads V vectors of the panel once and broadcasts
// one activation per row. With more rows than one tile the panel is cut along k into pieces that stay in the
// first-level cache while all tiles of the row block pass over them; between pieces the accumulators rest in `c`. That,
// and the size of tiles, changes nothing in the order of operations of an element.
#include "ops/cpu/kernels/vec.h"

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

constexpr int kPrefetchAhead_bytes = 4096;
constexpr int kPiece_bytes = 16384;  // of a panel, while row tiles pass over it

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
constexpr int kPieceSteps = kPiece_bytes / kStep_bytes<W>;

constexpr int passes_for(int rows) { return kPanel / (vectors_for(rows) * kWidth); }

// acc[m][v] += a[m] * w[v] for one k; a[m] lies at a + m * a_stride.
template <int M, int V>
inline __attribute__((always_inline)) void step(Vec (&acc)[M][V], const float* a, std::int64_t a_stride,
                                                const Vec (&w)[V]) {
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
    const Vec x = set1(a[m * a_stride]);
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) acc[m][v] = fma(x, w[v], acc[m][v]);
  }
}

template <int M, int V, class W>
inline __attribute__((always_inline)) void panel_step(Vec (&acc)[M][V], const float* a, std::int64_t a_stride,
                                                      const W* w) {
  Vec weights[V];
#pragma GCC unroll 8
  for (int v = 0; v < V; ++v) weights[v] = load(w + v * kWidth);
  step<M, V>(acc, a, a_stride, weights);
}

#if defined(CHARONIA_NATIVE_PAIRS)
template <int M, int V>
inline __attribute__((always_inline)) void panel_step(Vec (&acc)[M][V], const Bf16* a, std::int64_t a_stride,
                                                      const Bf16* w) {
  PairVec weights[V];
#pragma GCC unroll 8
  for (int v = 0; v < V; ++v) weights[v] = load_pairs(w + 2 * v * kWidth);
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
    const PairVec x = set1_pair(a + m * a_stride);
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) acc[m][v] = fma_pairs(x, weights[v], acc[m][v]);
  }
}
#else
// All the firsts, then all the seconds, so that what is unpacked fits into sixteen registers.
template <int M, int V>
inline __attribute__((always_inline)) void panel_step(Vec (&acc)[M][V], const float* a, std::int64_t a_stride,
                                                      const Bf16* w) {
  Vec weights[V];
#pragma GCC unroll 8
  for (int v = 0; v < V; ++v) weights[v] = first_of(load_pairs(w + 2 * v * kWidth));
  step<M, V>(acc, a, a_stride, weights);
#pragma GCC unroll 8
  for (int v = 0; v < V; ++v) weights[v] = second_of(load_pairs(w + 2 * v * kWidth));
  step<M, V>(acc, a + 1, a_stride, weights);
}
#endif

// One piece of k for M rows and all 64 features. c [M][64] holds the accumulators; with `fresh` they start at zero.
//
// Meanwhile it asks memory for `Lines` cache lines in every step, from `ahead` on. The only tile of a row block asks
// for what it will read soon itself (Soon). Where several tiles pass over a piece they share in asking for the next
// piece, so that memory works all the time and not only under the first of them; that goes into the second-level cache,
// since it would push the piece in use out of the first.
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

// The operands of `rows` rows and `steps` steps, and their stride: activations in place, or widened into `room`.
inline const float* operands(const float* a, int, std::int64_t, float*, std::int64_t&) { return a; }
#if defined(CHARONIA_NATIVE_PAIRS)
inline const Bf16* operands(const Bf16* a, int, std::int64_t, Bf16*, std::int64_t&) { return a; }
#else
inline const float* operands(const Bf16* a, int rows, std::int64_t steps, float* room, std::int64_t& stride) {
  constexpr std::int64_t kLength = std::int64_t{2} * kPieceSteps<Bf16>;
  for (int row = 0; row < rows; ++row) {
    for (std::int64_t k = 0; k < 2 * steps; k += kWidth) {
      const std::int64_t left = 2 * steps - k;
      const Bf16* from = a + row * stride + k;
      store(room + row * kLength + k, left >= kWidth ? load(from) : load_n(from, static_cast<int>(left)));
    }
  }
  stride = kLength;
  return room;
}
#endif

template <class W>
void linear(const LinearArgs& args) {
  using S = Steps<W>;
  using Operand = typename S::Operand;
  constexpr int kLines = kStep_bytes<W> / kLine_bytes;
  constexpr bool kInPlace = sizeof(Operand) == sizeof(typename S::Activation);
  alignas(64) float c[kRowBlock * kPanel];
  alignas(64) Operand room[kInPlace ? kMaxRows * S::kLength : kMaxRows * S::kLength * kPieceSteps<W>];
  const auto* const a = static_cast<const typename S::Activation*>(args.a);
  const auto* const panel = static_cast<const W*>(args.panel);
  const int tiles = (args.rows + kMaxRows - 1) / kMaxRows;
  const bool once = tiles == 1 && passes_for(args.rows) == 1;
  const std::int64_t steps = args.k / S::kLength;  // whole ones
  const std::int64_t piece = once && kInPlace ? steps : kPieceSteps<W>;

  for (std::int64_t begin = 0; begin < steps; begin += piece) {
    const std::int64_t length = begin + piece < steps ? piece : steps - begin;
    const W* const weights = panel + begin * S::kStride;
    const auto* next = reinterpret_cast<const char*>(weights + length * S::kStride);
    for (int t = 0, row = 0; t < tiles; ++t) {
      const int rows = args.rows / tiles + (t < args.rows % tiles ? 1 : 0);
      std::int64_t stride = args.a_stride;
      const auto* const x = operands(a + row * stride + begin * S::kLength, rows, length, room, stride);
      float* const to = c + row * kPanel;
      if (once) {
        const auto* const soon = reinterpret_cast<const char*>(weights) + kPrefetchAhead_bytes;
        tile_of<kLines, true, W>(rows, x, stride, length, weights, to, begin == 0, soon);
      } else if (tiles * passes_for(rows) <= 3) {
        tile_of<(kLines + 1) / 2, false, W>(rows, x, stride, length, weights, to, begin == 0, next);
        next += length * passes_for(rows) * ((kLines + 1) / 2) * kLine_bytes;
      } else {
        tile_of<1, false, W>(rows, x, stride, length, weights, to, begin == 0, next);
        next += length * passes_for(rows) * kLine_bytes;
      }
      row += rows;
    }
  }
  if (args.k % S::kLength != 0) {  // the last activation goes with a zero
    const W* const weights = panel + steps * S::kStride;
    for (int row = 0; row < args.rows; ++row) {
      const typename S::Activation pair[2] = {a[row * args.a_stride + args.k - 1], {}};
      std::int64_t stride = 2;
      const auto* const x = operands(pair, 1, 1, room, stride);
      tile_of<1, false, W>(1, x, stride, 1, weights, c + row * kPanel, steps == 0,
                           reinterpret_cast<const char*>(weights));
    }
  }

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

void linear_bf16(const LinearArgs& args) { linear<Bf16>(args); }
void linear_f16(const LinearArgs& args) { linear<F16>(args); }
void linear_f32(const LinearArgs& args) { linear<float>(args); }

}  // namespace charonia::ops::cpu::CHARONIA_ISA
