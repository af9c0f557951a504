// A GEMM with a packed weight: one panel of 64 output features times up to kRowBlock rows.
//
// Layouts: kernels.h. Bound: memory for few rows (each weight is read once and used `rows` times), arithmetic for many.
//
// A tile of M rows by V vectors stays in registers. Each step of k loads V vectors of the panel once and broadcasts one
// activation per row. With more rows than one tile, the panel is divided along k into chunks that stay in the L1 cache
// while all tiles of the row block process them. Between chunks the accumulators are stored in `c`. Chunks and tile
// sizes do not change the order of operations of an element.
#include "ops/cpu/kernels/panel_tile.h"

namespace charonia::ops::cpu::CHARONIA_ISA {
namespace {

// Returns the operands of `rows` rows and `length` k, and their stride: activations in place, or widened into `buffer`.
inline const float* operands(const float* a, int, std::int64_t, float*, std::int64_t&) { return a; }
#if defined(CHARONIA_NATIVE_PAIRS)
inline const Bf16* operands(const Bf16* a, int, std::int64_t, Bf16*, std::int64_t&) { return a; }
#else
inline const float* operands(const Bf16* a, int rows, std::int64_t length, float* buffer, std::int64_t& stride) {
  constexpr std::int64_t kLength = std::int64_t{2} * kLongChunkSteps<Bf16>;
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

// The last activation of an odd k, paired with a zero.
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
// Processes one chunk of k for M rows of two panels, which are two memory streams: M * 8 sums in registers.
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
  alignas(64) S::Operand buffer[kInPlace ? kRows * S::kLength : kRows * S::kLength * kLongChunkSteps<Bf16>];
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

// Many rows of a bf16 weight, with float activations: widens a chunk of the panel once into the L2 cache, then all row
// tiles multiply it as a panel of floats. If every tile unpacked the chunk itself, that would cost one operation for
// every 6 multiplications, on the same ports. The order of operations is the order of pairs: the first, then the
// second.
void linear_widened(const LinearArgs& args) {
  constexpr std::int64_t kLength = 512;  // k of a chunk: 128 KiB when widened
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

// Activation: the type of the activations, either the weight's type or float.
template <class W, class Activation = typename Steps<W>::Activation>
void linear(const LinearArgs& args) {
  using S = Steps<W>;
  using Operand = typename S::Operand;
  constexpr int kLines = kStep_bytes<W> / kLine_bytes;
  constexpr bool kInPlace = sizeof(Operand) == sizeof(Activation);
  alignas(64) float c[kRowBlock * kPanel];
  alignas(64) Operand buffer[kInPlace ? kMaxRows * S::kLength : kMaxRows * S::kLength * kLongChunkSteps<W>];
  const auto* const a = static_cast<const Activation*>(args.a);
  const auto* const panel = static_cast<const W*>(args.panel);
  const int tiles = (args.rows + kMaxRows - 1) / kMaxRows;
  const bool once = tiles == 1 && passes_for(args.rows) == 1;
  const std::int64_t steps = args.k / S::kLength;  // whole steps
  const bool few = tiles * passes_for(args.rows) <= kFewPasses;
  const std::int64_t chunk = once && kInPlace ? steps : few ? kChunkSteps<W> : kLongChunkSteps<W>;

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
      } else if (tiles * passes_for(rows) <= kFewPasses) {
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
