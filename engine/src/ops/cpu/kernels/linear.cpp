// A GEMM with a packed weight: one panel of 64 output features times up to kRowBlock rows.
//
// Layouts: kernels.h. Bound: memory for few rows (each weight is read once and used `rows` times), arithmetic for many.
//
// A tile of M rows by V vectors stays in registers; per step of k it loads V vectors of the panel once and broadcasts
// one activation per row. With more rows than one tile the panel is cut along k into chunks that stay in the
// L1 cache while all tiles of the row block pass over them; between chunks the accumulators rest in `c`. That,
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
constexpr int kChunk_bytes = 16384;  // of a panel, while row tiles pass over it

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

// The operands of `rows` rows and `length` k, and their stride: activations in place, or widened into `buffer`.
inline const float* operands(const float* a, int, std::int64_t, float*, std::int64_t&) { return a; }
#if defined(CHARONIA_NATIVE_PAIRS)
inline const Bf16* operands(const Bf16* a, int, std::int64_t, Bf16*, std::int64_t&) { return a; }
#else
inline const float* operands(const Bf16* a, int rows, std::int64_t length, float* buffer, std::int64_t& stride) {
  constexpr std::int64_t kLength = std::int64_t{2} * kChunkSteps<Bf16>;
  for (int row = 0; row < rows; ++row) {
    for (std::int64_t k = 0; k < length; k += kWidth) {
      const std::int64_t left = length - k;
      const Bf16* from = a + row * stride + k;
      store(buffer + row * kLength + k, left >= kWidth ? load(from) : load_n(from, static_cast<int>(left)));
    }
  }
  stride = kLength;
  return buffer;
}
#endif

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

// The last activation of an odd k, which goes with a zero.
template <class W, class Activation>
void last_step(const LinearArgs& args, const W* panel, float* c, typename Steps<W>::Operand* buffer) {
  using S = Steps<W>;
  const auto* const a = static_cast<const Activation*>(args.a);
  const std::int64_t steps = args.k / S::kLength;
  const W* const weights = panel + steps * S::kStride;
  for (int row = 0; row < args.rows; ++row) {
    const Activation pair[2] = {a[row * args.a_stride + args.k - 1], {}};
    std::int64_t stride = 2;
    const auto* const x = operands(pair, 1, S::kLength, buffer, stride);
    tile_of<1, false, W>(1, x, stride, 1, weights, c + row * kPanel, steps == 0,
                         reinterpret_cast<const char*>(weights));
  }
}

#if defined(__AVX512F__) && !defined(CHARONIA_ISA_amx)
// One chunk of k for M rows of two panels, two streams of memory: M * 8 sums in registers.
template <int M>
void two_panel_tile(const Steps<Bf16>::Operand* a, std::int64_t a_stride, std::int64_t steps, const Bf16* first,
                    const Bf16* second, float* first_c, float* second_c, bool fresh) {
  constexpr int V = kPanel / kWidth;
  constexpr int kAhead_bytes = 2048;
  using S = Steps<Bf16>;
  Vec acc[2][M][V];
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) {
      acc[0][m][v] = fresh ? zero() : load(first_c + m * kPanel + v * kWidth);
      acc[1][m][v] = fresh ? zero() : load(second_c + m * kPanel + v * kWidth);
    }
  }
  for (std::int64_t i = 0; i < steps; ++i) {
#pragma GCC unroll 8
    for (int line = 0; line < kStep_bytes<Bf16>; line += kLine_bytes) {
      __builtin_prefetch(reinterpret_cast<const char*>(first) + kAhead_bytes + line);
      __builtin_prefetch(reinterpret_cast<const char*>(second) + kAhead_bytes + line);
    }
    panel_step<M, V>(acc[0], a, a_stride, first);
    panel_step<M, V>(acc[1], a, a_stride, second);
    a += S::kLength;
    first += S::kStride;
    second += S::kStride;
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) {
      store(first_c + m * kPanel + v * kWidth, acc[0][m][v]);
      store(second_c + m * kPanel + v * kWidth, acc[1][m][v]);
    }
  }
}

// Few rows of two panels.
void linear_two_panels(const LinearArgs& args) {
  using S = Steps<Bf16>;
  constexpr int kRows = 3;
  constexpr bool kInPlace = sizeof(S::Operand) == sizeof(S::Activation);
  alignas(64) float c[2][kRows * kPanel];
  alignas(64) S::Operand buffer[kInPlace ? kRows * S::kLength : kRows * S::kLength * kChunkSteps<Bf16>];
  const auto* const a = static_cast<const Bf16*>(args.a);
  const auto* const panel = static_cast<const Bf16*>(args.panel);
  const std::int64_t panel_size = (args.k + 1) / 2 * S::kStride;
  const std::int64_t steps = args.k / S::kLength;
  const std::int64_t chunk = kInPlace ? steps : kChunkSteps<Bf16>;
  for (std::int64_t begin = 0; begin < steps; begin += chunk) {
    const std::int64_t length = begin + chunk < steps ? chunk : steps - begin;
    std::int64_t stride = args.a_stride;
    const auto* const x = operands(a + begin * S::kLength, args.rows, length * S::kLength, buffer, stride);
    const Bf16* const first = panel + begin * S::kStride;
    if (args.rows == 1) {
      two_panel_tile<1>(x, stride, length, first, first + panel_size, c[0], c[1], begin == 0);
    } else if (args.rows == 2) {
      two_panel_tile<2>(x, stride, length, first, first + panel_size, c[0], c[1], begin == 0);
    } else {
      two_panel_tile<3>(x, stride, length, first, first + panel_size, c[0], c[1], begin == 0);
    }
  }
  for (int p = 0; p < 2; ++p) {
    if (args.k % S::kLength != 0) last_step<Bf16, Bf16>(args, panel + p * panel_size, c[p], buffer);
    LinearArgs part = args;
    part.out += p * kPanel;
    part.columns = p == 0 ? kPanel : args.columns - kPanel;
    if (part.bias != nullptr) part.bias += p * kPanel;
    write_out(part, c[p]);
  }
}
#endif

// Many rows of a bf16 weight, activations in float: a chunk of the panel is widened once into the L2 cache
// and then multiplied as a panel of floats by all row tiles. Unpacked by every tile anew it would cost one operation
// for every 6 multiplications, on the same ports. The order of operations is that of pairs: the first, then the second.
void linear_widened(const LinearArgs& args) {
  constexpr std::int64_t kLength = 512;  // k of a chunk: 128 KiB widened
  alignas(64) float c[kWidenedRowBlock * kPanel];
  alignas(64) float wide[kLength * kPanel];
  const auto* const a = static_cast<const float*>(args.a);
  const auto* const panel = static_cast<const Bf16*>(args.panel);
  const int tiles = (args.rows + kMaxRows - 1) / kMaxRows;
  for (std::int64_t begin = 0; begin < args.k; begin += kLength) {
    const std::int64_t length = begin + kLength < args.k ? kLength : args.k - begin;
    const Bf16* const chunk = panel + begin * kPanel;
    for (std::int64_t i = 0; i < length; i += 2) {
      const Bf16* const from = chunk + i * kPanel;
      float* const to = wide + i * kPanel;
      __builtin_prefetch(from + 16 * kPanel);
      __builtin_prefetch(from + 17 * kPanel);
#pragma GCC unroll 8
      for (int v = 0; v < kPanel; v += kWidth) {
        const PairVec pairs = load_pairs(from + 2 * v);
        store(to + v, first_of(pairs));
        store(to + kPanel + v, second_of(pairs));
      }
    }
    for (int t = 0, row = 0; t < tiles; ++t) {
      const int rows = args.rows / tiles + (t < args.rows % tiles ? 1 : 0);
      tile_of<0, false, float>(rows, a + row * args.a_stride + begin, args.a_stride, length, wide, c + row * kPanel,
                               begin == 0, nullptr);
      row += rows;
    }
  }
  write_out(args, c);
}

// Activation: what the activations come as, the weight's own or floats.
template <class W, class Activation = typename Steps<W>::Activation>
void linear(const LinearArgs& args) {
  using S = Steps<W>;
  using Operand = typename S::Operand;
  constexpr int kLines = kStep_bytes<W> / kLine_bytes;
  constexpr bool kInPlace = sizeof(Operand) == sizeof(Activation);
  alignas(64) float c[kRowBlock * kPanel];
  alignas(64) Operand buffer[kInPlace ? kMaxRows * S::kLength : kMaxRows * S::kLength * kChunkSteps<W>];
  const auto* const a = static_cast<const Activation*>(args.a);
  const auto* const panel = static_cast<const W*>(args.panel);
  const int tiles = (args.rows + kMaxRows - 1) / kMaxRows;
  const bool once = tiles == 1 && passes_for(args.rows) == 1;
  const std::int64_t steps = args.k / S::kLength;  // whole ones
  const std::int64_t chunk = once && kInPlace ? steps : kChunkSteps<W>;

  for (std::int64_t begin = 0; begin < steps; begin += chunk) {
    const std::int64_t length = begin + chunk < steps ? chunk : steps - begin;
    const W* const weights = panel + begin * S::kStride;
    const auto* next = reinterpret_cast<const char*>(weights + length * S::kStride);
    for (int t = 0, row = 0; t < tiles; ++t) {
      const int rows = args.rows / tiles + (t < args.rows % tiles ? 1 : 0);
      std::int64_t stride = args.a_stride;
      const auto* const x = operands(a + row * stride + begin * S::kLength, rows, length * S::kLength, buffer, stride);
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
  if (args.k % S::kLength != 0) last_step<W, Activation>(args, panel, c, buffer);
  write_out(args, c);
}

}  // namespace

#if !defined(CHARONIA_ISA_amx)  // linear_amx.cpp
void linear_bf16(const LinearArgs& args) {
#if defined(__AVX512F__)
  if (args.panels == 2) return linear_two_panels(args);
#endif
  linear<Bf16>(args);
}
#endif
void linear_bf16_widened(const LinearArgs& args) {
#if !defined(CHARONIA_NATIVE_PAIRS)
  if (args.rows < kWidenedFrom) return linear<Bf16, float>(args);
#endif
  linear_widened(args);
}
void linear_f16(const LinearArgs& args) { linear<F16>(args); }
void linear_f32(const LinearArgs& args) { linear<float>(args); }

}  // namespace charonia::ops::cpu::CHARONIA_ISA
