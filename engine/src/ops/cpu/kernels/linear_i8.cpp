// An 8-bit integer GEMM: one panel of 64 output features times up to kIntegerRowBlock rows. Also converts activations
// to integers.
//
// Layouts: kernels.h. Integer sums are exact, so tiles, chunks and the multiplication method do not change them. The
// sum over groups and the product with the row's scale have a fixed order, without fused multiply-adds.
//
// Tiles and chunks are the same as in linear.cpp: a tile of M rows by V vectors of sums stays in registers. With more
// rows than one tile, the panel is divided along k into chunks that stay in the L1 cache while all tiles process them.
#include "ops/cpu/kernels/integer_rows.h"
#include "ops/cpu/kernels/integers.h"

namespace charonia::ops::cpu::CHARONIA_ISA {
namespace {

#if defined(__AVX512F__)
constexpr int kMaxRows = 6;
constexpr int vectors_for(int) { return 4; }
#elif defined(__AVX2__)
constexpr int kMaxRows = 4;
constexpr int vectors_for(int rows) { return rows == 1 ? 8 : rows == 2 ? 4 : 2; }
#else
constexpr int kMaxRows = 2;
constexpr int vectors_for(int rows) { return rows == 1 ? 8 : 4; }
#endif
constexpr int passes_for(int rows) { return kPanel / (vectors_for(rows) * kWidth); }

constexpr int kQuad_bytes = 4 * kPanel;  // of a panel: 4 codes of every feature
constexpr int kLine_bytes = 64;
constexpr int kLines = kQuad_bytes / kLine_bytes;
constexpr std::int64_t kChunkQuads = 64;  // if several row tiles process it
constexpr std::int64_t kOnceQuads = 256;  // if there is one tile
// The activations of a tile and a chunk. Rows are padded, so that they do not map to the same cache sets.
constexpr std::int64_t kRow_bytes = 4 * kOnceQuads + 64;

template <class Dot, int M, int V>
inline __attribute__((always_inline)) void panel_step(IntVec (&sums)[M][V], const std::uint8_t* a,
                                                      const std::int8_t* w) {
  typename Dot::Weights weights[V];
#pragma GCC unroll 8
  for (int v = 0; v < V; ++v) weights[v] = Dot::load(w + 4 * v * kWidth);
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
    const Codes codes = Dot::broadcast(a + m * kRow_bytes);
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) sums[m][v] = Dot::add(sums[m][v], codes, weights[v]);
  }
}

// Processes one chunk of k for M rows and all 64 features. c [M][64] holds the sums. Each step also prefetches `Lines`
// cache lines from `ahead` on: data that this tile reads soon (Soon), or into the L2 cache.
template <class Dot, int M, int Lines, bool Soon>
void tile(const std::uint8_t* a, std::int64_t quads, const std::int8_t* panel, std::int32_t* c, const char* ahead) {
  constexpr int V = vectors_for(M);
  for (int column = 0; column < kPanel; column += V * kWidth) {
    IntVec sums[M][V];
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) sums[m][v] = load(c + m * kPanel + column + v * kWidth);
    }
    const std::int8_t* w = panel + 4 * column;
    const std::uint8_t* x = a;
    for (std::int64_t i = 0; i < quads; ++i) {
#pragma GCC unroll 8
      for (int line = 0; line < Lines; ++line) __builtin_prefetch(ahead + line * kLine_bytes, 0, Soon ? 3 : 2);
      panel_step<Dot, M, V>(sums, x, w);
      ahead += Lines * kLine_bytes;
      w += kQuad_bytes;
      x += 4;
    }
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) store(c + m * kPanel + column + v * kWidth, sums[m][v]);
    }
  }
}

template <class Dot, int Lines, bool Soon>
void tile_of(int rows, const std::uint8_t* a, std::int64_t quads, const std::int8_t* panel, std::int32_t* c,
             const char* ahead) {
  static_assert(kMaxRows == 2 || kMaxRows == 4 || kMaxRows == 6);
  if (rows == 1) return tile<Dot, 1, Lines, Soon>(a, quads, panel, c, ahead);
  if (rows == 2) return tile<Dot, 2, Lines, Soon>(a, quads, panel, c, ahead);
  if constexpr (kMaxRows >= 4) {
    if (rows == 3) return tile<Dot, 3, Lines, Soon>(a, quads, panel, c, ahead);
    if (rows == 4) return tile<Dot, 4, Lines, Soon>(a, quads, panel, c, ahead);
  }
  if constexpr (kMaxRows == 6) {
    if (rows == 5) return tile<Dot, 5, Lines, Soon>(a, quads, panel, c, ahead);
    return tile<Dot, 6, Lines, Soon>(a, quads, panel, c, ahead);
  }
}

// Converts the activations of `rows` rows and a chunk to the form of the multiplication method, [rows][kRow_bytes].
template <class Dot>
void take_codes(std::uint8_t* to, const std::int8_t* from, std::int64_t stride, int rows, std::int64_t quads) {
  constexpr std::uint32_t kFlips = Dot::kFlip * 0x01010101U;
  for (int row = 0; row < rows; ++row) {
    for (std::int64_t i = 0; i < quads; ++i) {
      std::uint32_t word;
      __builtin_memcpy(&word, from + row * stride + 4 * i, sizeof word);
      word ^= kFlips;
      __builtin_memcpy(to + row * kRow_bytes + 4 * i, &word, sizeof word);
    }
  }
}

// Initialises the sums of a panel and a group with the corrections for dot products of code + 128.
template <class Dot>
void start(const IntegerLinearArgs& args, const char* panel, std::int64_t group, std::int32_t* c) {
  const auto* const corrections =
      reinterpret_cast<const std::int32_t*>(panel + args.shape.corrections()) + group * kPanel;
  for (int j = 0; j < kPanel; j += kWidth) {
    const IntVec from = Dot::kFlip == 0 ? set1(0) : load(corrections + j);
    for (int row = 0; row < args.rows; ++row) store(c + row * kPanel + j, from);
  }
}

// Converts the integers of a group to floats and adds them to those of earlier groups; after the last group writes the
// output.
void finish(const IntegerLinearArgs& args, const char* panel, std::int64_t group, const std::int32_t* c, float* sums,
            float* out, int columns, const float* bias) {
  const auto& shape = args.shape;
  const auto* const scales = reinterpret_cast<const float*>(panel + shape.scales()) + group * kPanel;
  const auto* const zeros = reinterpret_cast<const std::int32_t*>(panel + shape.zeros()) + group * kPanel;
  const bool last = group + 1 == shape.groups();
  for (int row = 0; row < args.rows; ++row) {
    for (int j = 0; j < kPanel; j += kWidth) {
      IntVec d = load(c + row * kPanel + j);
      if (shape.has_zeros) d = sub(d, mul(load(zeros + j), set1(sums_of_row(args, row)[group])));
      Vec x = mul(load(scales + j), floats_of(d));
      if (group > 0) x = add(load(sums + row * kPanel + j), x);
      if (!last) {
        store(sums + row * kPanel + j, x);
        continue;
      }
      const int n = columns - j;
      if (n <= 0) break;
      x = mul(set1(scale_of_row(args, row)), x);
      float* const to = out + row * args.out_stride + j;
      if (n >= kWidth) {
        if (bias != nullptr) x = add(x, load(bias + j));
        store(to, x);
      } else {
        if (bias != nullptr) x = add(x, load_n(bias + j, n));
        store_n(to, x, n);
      }
    }
  }
}

#if defined(__AVX512F__)
// Processes one chunk of k for M rows of two panels, which are two memory streams.
template <class Dot, int M>
void two_panel_tile(const std::uint8_t* a, std::int64_t quads, const std::int8_t* first, const std::int8_t* second,
                    std::int32_t* first_c, std::int32_t* second_c) {
  constexpr int V = kPanel / kWidth;
  constexpr int kAhead_bytes = 2048;
  IntVec sums[2][M][V];
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) {
      sums[0][m][v] = load(first_c + m * kPanel + v * kWidth);
      sums[1][m][v] = load(second_c + m * kPanel + v * kWidth);
    }
  }
  for (std::int64_t i = 0; i < quads; ++i) {
#pragma GCC unroll 8
    for (int line = 0; line < kQuad_bytes; line += kLine_bytes) {
      __builtin_prefetch(first + kAhead_bytes + line);
      __builtin_prefetch(second + kAhead_bytes + line);
    }
    panel_step<Dot, M, V>(sums[0], a, first);
    panel_step<Dot, M, V>(sums[1], a, second);
    a += 4;
    first += kQuad_bytes;
    second += kQuad_bytes;
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) {
      store(first_c + m * kPanel + v * kWidth, sums[0][m][v]);
      store(second_c + m * kPanel + v * kWidth, sums[1][m][v]);
    }
  }
}

// Few rows of two panels.
template <class Dot>
void linear_two_panels(const IntegerLinearArgs& args) {
  constexpr int kRows = 3;
  alignas(64) std::int32_t c[2][kRows * kPanel];
  alignas(64) float sums[2][kRows * kPanel];
  alignas(64) std::uint8_t buffer[kRows * kRow_bytes];
  const auto* const panel = static_cast<const char*>(args.panel);
  const std::int64_t panel_bytes = args.shape.bytes(), group_quads = (args.shape.group + 3) / 4;
  for (std::int64_t group = 0; group < args.shape.groups(); ++group) {
    for (int p = 0; p < 2; ++p) start<Dot>(args, panel + p * panel_bytes, group, c[p]);
    for (std::int64_t begin = 0; begin < group_quads; begin += kOnceQuads) {
      const std::int64_t quads = begin + kOnceQuads < group_quads ? kOnceQuads : group_quads - begin;
      const std::int64_t quad = group * group_quads + begin;
      take_codes<Dot>(buffer, args.a + 4 * quad, args.a_stride, args.rows, quads);
      const auto* const first = reinterpret_cast<const std::int8_t*>(panel) + quad * kQuad_bytes;
      const auto* const second = first + panel_bytes;
      if (args.rows == 1) {
        two_panel_tile<Dot, 1>(buffer, quads, first, second, c[0], c[1]);
      } else if (args.rows == 2) {
        two_panel_tile<Dot, 2>(buffer, quads, first, second, c[0], c[1]);
      } else {
        two_panel_tile<Dot, 3>(buffer, quads, first, second, c[0], c[1]);
      }
    }
    for (int p = 0; p < 2; ++p) {
      finish(args, panel + p * panel_bytes, group, c[p], sums[p], args.out + p * kPanel,
             p == 0 ? kPanel : args.columns - kPanel, args.bias == nullptr ? nullptr : args.bias + p * kPanel);
    }
  }
}
#endif

template <class Dot>
void linear(const IntegerLinearArgs& args) {
#if defined(__AVX512F__)
  if (args.panels == 2) return linear_two_panels<Dot>(args);
#endif
  alignas(64) std::int32_t c[kIntegerRowBlock * kPanel];
  alignas(64) float sums[kIntegerRowBlock * kPanel];
  alignas(64) std::uint8_t buffer[kMaxRows * kRow_bytes];
  const auto* const panel = static_cast<const char*>(args.panel);
  const std::int64_t group_quads = (args.shape.group + 3) / 4;
  const int tiles = (args.rows + kMaxRows - 1) / kMaxRows;
  const bool once = tiles == 1 && passes_for(args.rows) == 1;
  const std::int64_t chunk = once ? kOnceQuads : kChunkQuads;
  for (std::int64_t group = 0; group < args.shape.groups(); ++group) {
    start<Dot>(args, panel, group, c);
    for (std::int64_t begin = 0; begin < group_quads; begin += chunk) {
      const std::int64_t quads = begin + chunk < group_quads ? chunk : group_quads - begin;
      const std::int64_t quad = group * group_quads + begin;
      const auto* const weights = reinterpret_cast<const std::int8_t*>(panel) + quad * kQuad_bytes;
      const auto* next = reinterpret_cast<const char*>(weights + quads * kQuad_bytes);
      for (int t = 0, row = 0; t < tiles; ++t) {
        const int rows = args.rows / tiles + (t < args.rows % tiles ? 1 : 0);
        take_codes<Dot>(buffer, args.a + row * args.a_stride + 4 * quad, args.a_stride, rows, quads);
        std::int32_t* const to = c + row * kPanel;
        if (once) {
          const auto* const soon = reinterpret_cast<const char*>(weights) + kPrefetchAhead_bytes;
          tile_of<Dot, kLines, true>(rows, buffer, quads, weights, to, soon);
        } else if (tiles * passes_for(rows) <= 3) {
          tile_of<Dot, kLines / 2, false>(rows, buffer, quads, weights, to, next);
          next += quads * passes_for(rows) * (kLines / 2) * kLine_bytes;
        } else {
          tile_of<Dot, 1, false>(rows, buffer, quads, weights, to, next);
          next += quads * passes_for(rows) * kLine_bytes;
        }
        row += rows;
      }
    }
    finish(args, panel, group, c, sums, args.out, args.columns, args.bias);
  }
}

template <class T>
float integers_from(std::int8_t* out, const T* in, float scale, std::int64_t n) {
  Vec most = zero(), broken = zero();  // x * 0 is NaN if x is not finite
  std::int64_t i = 0;
  const auto look_at = [&](Vec x) {
    most = max(max(x, sub(zero(), x)), most);
    broken = add(broken, mul(x, zero()));
  };
  for (; i + kWidth <= n; i += kWidth) look_at(load(in + i));
  if (i < n) look_at(load_n(in + i, static_cast<int>(n - i)));
  const bool finite = !any_nan(broken);
  const float s = !finite ? __builtin_nanf("") : scale > 0 ? scale : max_of(most) / 127.0F;
  const std::int64_t end = (n + kIntegerAlign - 1) / kIntegerAlign * kIntegerAlign;
  i = 0;
  if (s > 0) {
    const Vec divisor = set1(s), limit = set1(127.0F), lowest = set1(-127.0F);
    const auto codes = [&](Vec x) { return max(min(div(x, divisor), limit), lowest); };
    for (; i + kWidth <= n; i += kWidth) store_codes(out + i, codes(load(in + i)));
    if (i < n) {  // the other elements are zeros
      store_codes(out + i, codes(load_n(in + i, static_cast<int>(n - i))));
      i += kWidth;
    }
  }
  for (; i < end; ++i) out[i] = 0;
  return s;
}

}  // namespace

void linear_i8(const IntegerLinearArgs& args) { linear<PlainDot>(args); }
#if defined(__AVX2__)
void linear_i8_vnni(const IntegerLinearArgs& args) { linear<VnniDot>(args); }
#endif

float integers_from_bf16(std::int8_t* out, const Bf16* in, float scale, std::int64_t n) {
  return integers_from(out, in, scale, n);
}
float integers_from_f32(std::int8_t* out, const float* in, float scale, std::int64_t n) {
  return integers_from(out, in, scale, n);
}

void sum_integers(std::int32_t* out, const std::int8_t* codes, std::int64_t group, std::int64_t groups) {
  for (std::int64_t g = 0; g < groups; ++g) {
    std::int32_t sum = 0;
    for (std::int64_t i = 0; i < group; ++i) sum += codes[g * group + i];
    out[g] = sum;
  }
}

}  // namespace charonia::ops::cpu::CHARONIA_ISA
