// A GEMM with a quantised weight whose activations are not converted: one panel of 64 output features.
//
// Layout and order of operations: kernels.h. A chunk of the panel's codes is converted to numbers in the L1 cache. All
// rows are then multiplied with it like with a panel of bf16 or floats.
#include "ops/cpu/kernels/panel_tile.h"
#include "ops/cpu/kernels/quant_codes.h"
#include "ops/cpu/kernels/quant_pieces.h"
#include "ops/cpu/kernels/quant_scales.h"
#if defined(CHARONIA_ISA_amx)
#include "ops/cpu/kernels/amx_tiles.h"
#include "ops/cpu/kernels/quant_tiles.h"
#endif

namespace charonia::ops::cpu::CHARONIA_ISA {
namespace {

// Prefetch distance for codes. They go into the L2 cache, because the L1 cache holds numbers and activations.
constexpr int kCodesAhead_bytes = 4096;
template <int Bytes = 4 * kPanel, int Level = 2>
inline void prefetch_codes(const char* from) {
#pragma GCC unroll 4
  for (int line = 0; line < Bytes; line += kLine_bytes) __builtin_prefetch(from + kCodesAhead_bytes + line, 0, Level);
}

// Unpacks `words` words of each of the panel's features to numbers [k][64]; bf16: [k / 2][64][2].
template <Code C>
void unpack(const char* from, std::int64_t words, float* to) {
  for (std::int64_t i = 0; i < words; ++i) {
    prefetch_codes(from);
    for (int j = 0; j < kPanel; j += kWidth) {
      Vec numbers[kWordK<C>];
      to_floats<C>(load_words(from + 4 * j), numbers);
#pragma GCC unroll 8
      for (int k = 0; k < kWordK<C>; ++k) store(to + k * kPanel + j, numbers[k]);
    }
    from += 4 * kPanel;
    to += kWordK<C> * kPanel;
  }
}
#if defined(CHARONIA_NATIVE_PAIRS)
template <Code C>
void unpack(const char* from, std::int64_t words, Bf16* to) {
  for (std::int64_t i = 0; i < words; ++i) {
    prefetch_codes(from);
#pragma GCC unroll 4
    for (int j = 0; j < kPanel; j += kWidth) {
      PairVec pairs[kWordK<C> / 2];
      to_pairs<C>(load_words(from + 4 * j), pairs);
#pragma GCC unroll 4
      for (int k = 0; k < kWordK<C> / 2; ++k) _mm512_storeu_si512(to + 2 * (k * kPanel + j), pairs[k].v);
    }
    from += 4 * kPanel;
    to += kWordK<C> * kPanel;
  }
}
#endif

// Converts the zeros of a group to floats.
void load_zeros(const QuantPanel& shape, const char* group, float* to) {
  const auto* const zeros = reinterpret_cast<const signed char*>(group + shape.zeros());
  for (int j = 0; j < kPanel; ++j) to[j] = static_cast<float>(zeros[j]);
}

// Loads scales and zeros of a group in the form that matches sums over W; no zeros if the weight has none.
template <Code C, class W>
void load_group(const QuantPanel& shape, const char* group, float* scales, float* zeros) {
  constexpr float kOf = sizeof(W) == sizeof(float) ? kUnit<C> : 1;
  load_scales(shape, group, scales);
  if (shape.has_zeros) load_zeros(shape, group, zeros);
  if constexpr (kOf != 1) {
    for (int j = 0; j < kPanel; j += kWidth) {
      store(scales + j, mul(load(scales + j), set1(kOf)));
      if (shape.has_zeros) store(zeros + j, mul(load(zeros + j), set1(1 / kOf)));
    }
  }
}

// totals [rows][64] += scales * (c - zeros * sum), with sums[r * stride] for row r; zeros may be null.
void add_group(const float* c, int rows, const float* scales, const float* zeros, const float* sums,
               std::int64_t stride, float* totals) {
  constexpr int V = kPanel / kWidth < 4 ? kPanel / kWidth : 4;  // vectors that stay in registers for all rows
  for (int j = 0; j < kPanel; j += V * kWidth) {
    Vec scale[V], zero[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) {
      scale[v] = load(scales + j + v * kWidth);
      if (zeros != nullptr) zero[v] = load(zeros + j + v * kWidth);
    }
    for (int r = 0; r < rows; ++r) {
      const Vec sum = set1(zeros != nullptr ? -sums[r * stride] : 0);
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) {
        const int at = r * kPanel + j + v * kWidth;
        Vec x = load(c + at);
        if (zeros != nullptr) x = fma(sum, zero[v], x);
        store(totals + at, fma(scale[v], x, load(totals + at)));
      }
    }
  }
}

#if defined(CHARONIA_ISA_amx)
template <Code C>
struct VectorCodes {
  static void unpack(const char* from, std::int64_t words, Bf16* to) { CHARONIA_ISA::unpack<C>(from, words, to); }
  static void load_scales(const QuantPanel& shape, const char* group, float* to) {
    CHARONIA_ISA::load_scales(shape, group, to);
  }
  static void load_zeros(const QuantPanel& shape, const char* group, float* to) {
    CHARONIA_ISA::load_zeros(shape, group, to);
  }
  static void add_group(const float* c, int rows, const float* scales, const float* zeros, const float* sums,
                        std::int64_t stride, float* totals) {
    CHARONIA_ISA::add_group(c, rows, scales, zeros, sums, stride, totals);
  }
};
#endif

#if defined(__AVX2__)
// Codes are converted in registers for up to kFewRows rows. More than kRowsOfPass take two passes over the panel: two
// passes are faster than one with fewer vectors. few_vectors(): feature vectors that are processed together.
#if defined(__AVX512F__)
template <Code C, class W>
constexpr int kFewRows = C == Code::f8_e4m3 ? 8 : sizeof(W) == sizeof(float) ? 4 : 11;
template <Code C>
constexpr int kRowsOfPass = C == Code::f8_e4m3 ? 8 : 6;
template <Code C>
constexpr int few_vectors(int rows) {
  return rows <= (C == Code::f8_e4m3 ? 3 : 6) ? 4 : 2;
}
#else
template <Code C, class W>
constexpr int kFewRows = 1;
template <Code>
constexpr int kRowsOfPass = 1;
template <Code>
constexpr int few_vectors(int) {
  return 4;
}
#endif

// acc[m] += the products of one word of each of V * kWidth features: one k after the other, or in pairs.
template <Code C, int M, int V>
inline __attribute__((always_inline)) void few_step(Vec (&acc)[M][V], const float* a, std::int64_t a_stride,
                                                    const char* words) {
#pragma GCC unroll 8
  for (int v = 0; v < V; ++v) {
    Vec numbers[kWordK<C>];
    to_floats<C>(load_words(words + 4 * v * kWidth), numbers);
#pragma GCC unroll 8
    for (int k = 0; k < kWordK<C>; ++k) {
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) acc[m][v] = fma(set1(a[m * a_stride + k]), numbers[k], acc[m][v]);
    }
  }
}
#if defined(CHARONIA_NATIVE_PAIRS)
template <Code C, int M, int V>
inline __attribute__((always_inline)) void few_step(Vec (&acc)[M][V], const Bf16* a, std::int64_t a_stride,
                                                    const char* words) {
#pragma GCC unroll 8
  for (int v = 0; v < V; ++v) {
    PairVec pairs[kWordK<C> / 2];
    to_pairs<C>(load_words(words + 4 * v * kWidth), pairs);
#pragma GCC unroll 8
    for (int k = 0; k < kWordK<C> / 2; ++k) {
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) acc[m][v] = fma_pairs(set1_pair(a + m * a_stride + 2 * k), pairs[k], acc[m][v]);
    }
  }
}
#endif

#if defined(__AVX512F__)
// Like few_step, for `words` words. Converts codes to fp16 one word ahead of their products, to hide the latency.
template <int M, int V>
inline __attribute__((always_inline)) void e4m3_steps(Vec (&acc)[M][V], const float* a, std::int64_t a_stride,
                                                      std::int64_t words, const char* from) {
  __m512i halves[2][V][2];
  const auto to_halves = [&](int at, const char* words_at) __attribute__((always_inline)) {
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) {
      e4m3_to_halves(register_of(load_words(words_at + 4 * v * kWidth)), halves[at][v]);
    }
  };
  const auto multiply = [&](int at) __attribute__((always_inline)) {
#pragma GCC unroll 4
    for (int k = 0; k < 4; ++k) {
      Vec numbers[V];
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) numbers[v] = half_to_floats(halves[at][v], k);
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) {
        const Vec x = set1(a[m * a_stride + k]);
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) acc[m][v] = fma(x, numbers[v], acc[m][v]);
      }
    }
    a += 4;
  };
  to_halves(0, from);
  for (std::int64_t i = 0; i < words; ++i) {
    prefetch_codes<4 * V * kWidth, 3>(from);
    if (i + 1 < words) from += 4 * kPanel;  // the memory after the last word has other contents
    to_halves((i + 1) % 2, from);
    multiply(i % 2);
  }
}
#endif

// c [M][64] (+)= the products of `words` words of V * kWidth features. Also prefetches words.
template <Code C, int M, int V, class W>
inline __attribute__((always_inline)) void few_tile(const W* a, std::int64_t a_stride, std::int64_t words,
                                                    const char* from, float* c, bool fresh) {
  Vec acc[M][V];
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) acc[m][v] = fresh ? zero() : load(c + m * kPanel + v * kWidth);
  }
#if defined(__AVX512F__)
  if constexpr (C == Code::f8_e4m3 && sizeof(W) == sizeof(float)) {
    e4m3_steps(acc, a, a_stride, words, from);
  } else
#endif
  {
    for (std::int64_t i = 0; i < words; ++i) {
      prefetch_codes<4 * V * kWidth>(from);
      few_step<C>(acc, a, a_stride, from);
      from += 4 * kPanel;
      a += kWordK<C>;
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) store(c + m * kPanel + v * kWidth, acc[m][v]);
  }
}

// Stride of the activations of a group and some rows: constant, so that addresses are constants, and chosen so that
// rows do not map to the same cache sets.
constexpr int kFewStride = 128 + 16;
template <int M>
void gather_few(const float* from, std::int64_t stride, std::int64_t n, float* to) {
  for (int m = 0; m < M; ++m) {
    std::int64_t i = 0;
    for (; i + kWidth <= n; i += kWidth) store(to + m * kFewStride + i, load(from + m * stride + i));
    for (; i < n; ++i) to[m * kFewStride + i] = from[m * stride + i];
  }
}

template <Code C, class W, int M>
void few_rows(const QuantLinearArgs& args) {
  using Pieces = QuantPieces<128>;
  constexpr bool kGathered = C == Code::f8_e4m3 && sizeof(W) == sizeof(float) && M > 1;
  alignas(64) float gathered[kGathered ? M * kFewStride : 1];
  constexpr int V = few_vectors<C>(M);
  alignas(64) float c[M * kPanel];
  alignas(64) float totals[M * kPanel];
  alignas(64) float scales[kPanel];
  alignas(64) float zeros[kPanel];
  const QuantPanel& shape = args.shape;
  for (int i = 0; i < M * kPanel; i += kWidth) store(totals + i, zero());
  for (Pieces p(shape); !p.done(); p.next()) {
    const W* a = static_cast<const W*>(args.a) + p.group * shape.group + p.begin;
    const char* group = static_cast<const char*>(args.panel) + p.group * shape.group_bytes();
    for (int g = 0; g < p.count; ++g, a += shape.group, group += shape.group_bytes()) {
      const char* const from = group + p.begin / kWordK<C> * 4 * kPanel;
      const std::int64_t words = p.length / kWordK<C>;
      if constexpr (kGathered) gather_few<M>(a, args.a_stride, p.length, gathered);
      for (int j = 0; j < kPanel; j += V * kWidth) {
        if constexpr (kGathered) {
          few_tile<C, M, V, W>(gathered, kFewStride, words, from + 4 * j, c + j, p.begin == 0);
          continue;
        }
        few_tile<C, M, V>(a, args.a_stride, words, from + 4 * j, c + j, p.begin == 0);
      }
      if (!p.last()) continue;
      load_group<C, W>(shape, group, scales, zeros);
      const bool with_zeros = shape.has_zeros;
      add_group(c, M, scales, with_zeros ? zeros : nullptr, with_zeros ? args.sums + p.group + g : nullptr,
                args.sums_stride, totals);
    }
  }
  write_totals(args, totals);
}

// Calls few_rows with M = rows, at most kRowsOfPass.
template <Code C, class W, int M = 1>
void few_rows_of(const QuantLinearArgs& args) {
  if constexpr (M == kFewRows<C, W> || M == kRowsOfPass<C>) {
    few_rows<C, W, M>(args);
  } else {
    args.rows == M ? few_rows<C, W, M>(args) : few_rows_of<C, W, M + 1>(args);
  }
}

// Returns whether it computed the GEMM: only with few rows, and if no word spans two groups.
template <Code C, class W>
bool quant_linear_few(const QuantLinearArgs& args) {
  if (args.rows > kFewRows<C, W> || args.shape.group % kWordK<C> != 0) return false;
  const int passes = (args.rows + kRowsOfPass<C> - 1) / kRowsOfPass<C>;
  QuantLinearArgs pass = args;
  pass.rows = (args.rows + passes - 1) / passes;
  for (int left = args.rows; left > 0; left -= pass.rows) {
    if (pass.rows > left) pass.rows = left;
    few_rows_of<C, W>(pass);
    pass.a = static_cast<const W*>(pass.a) + pass.rows * args.a_stride;
    if (args.sums != nullptr) pass.sums += pass.rows * args.sums_stride;
    pass.out += pass.rows * args.out_stride;
  }
  return true;
}
#else
template <Code, class>
bool quant_linear_few(const QuantLinearArgs&) {
  return false;
}
#endif

// W: the type of converted codes, Bf16 or float, with K of them per feature at a time.
template <Code C, class W, int K>
void quant_linear_in_pieces(const QuantLinearArgs& args) {
  using S = Steps<W>;
  using Pieces = QuantPieces<K>;
  alignas(64) W numbers[Pieces::kK * kPanel];
  alignas(64) float c[kQuantRowBlock * kPanel];
  alignas(64) float totals[kQuantRowBlock * kPanel];
  alignas(64) float scales[Pieces::kGroups * kPanel];
  alignas(64) float zeros[Pieces::kGroups * kPanel];
  const auto* const a = static_cast<const W*>(args.a);
  const QuantPanel& shape = args.shape;
  const int tiles = (args.rows + kMaxRows - 1) / kMaxRows;
  for (int i = 0; i < args.rows * kPanel; i += kWidth) store(totals + i, zero());
  for (Pieces p(shape); !p.done(); p.next()) {
    for (int g = 0; g < p.count; ++g) {
      const char* const group = static_cast<const char*>(args.panel) + (p.group + g) * shape.group_bytes();
      unpack<C>(group + p.begin / kWordK<C> * 4 * kPanel, (p.length + kWordK<C> - 1) / kWordK<C>,
                numbers + g * p.stride * kPanel);
      if (!p.last()) continue;
      load_group<C, W>(shape, group, scales + g * kPanel, zeros + g * kPanel);
    }
    for (int t = 0, row = 0; t < tiles; ++t) {
      const int rows = args.rows / tiles + (t < args.rows % tiles ? 1 : 0);
      for (int g = 0; g < p.count; ++g) {
        const W* const x = a + row * args.a_stride + (p.group + g) * shape.group + p.begin;
        float* const sums = c + row * kPanel;
        tile_of<0, false, W>(rows, x, args.a_stride, p.length / S::kLength, numbers + g * p.stride * kPanel, sums,
                             p.begin == 0, nullptr);
        if (!p.last()) continue;
        const bool with_zeros = shape.has_zeros;
        add_group(sums, rows, scales + g * kPanel, with_zeros ? zeros + g * kPanel : nullptr,
                  with_zeros ? args.sums + row * args.sums_stride + p.group + g : nullptr, args.sums_stride,
                  totals + row * kPanel);
      }
      row += rows;
    }
  }
  write_totals(args, totals);
}

template <Code C, class W>
void quant_linear(const QuantLinearArgs& args) {
  constexpr int kSomeRows = 48;
  if (quant_linear_few<C, W>(args)) return;
  // With few rows, K is small, so that numbers leave space in the L1 cache. With many rows, their sums exceed it and
  // should be loaded less often.
  if (sizeof(W) == sizeof(float) && args.rows <= kSomeRows) return quant_linear_in_pieces<C, W, 64>(args);
  quant_linear_in_pieces<C, W, 128>(args);
}

template <class W>
void group_sums(float* sums, const W* a, std::int64_t group, std::int64_t groups) {
  for (std::int64_t g = 0; g < groups; ++g, a += group) {
    Vec sum = zero();
    std::int64_t i = 0;
    for (; i + kWidth <= group; i += kWidth) sum = add(sum, load(a + i));
    if (i < group) sum = add(sum, load_n(a + i, static_cast<int>(group - i)));
    sums[g] = sum_of(sum);
  }
}

}  // namespace

#if defined(CHARONIA_NATIVE_PAIRS)
void quant_linear_bf16(const QuantLinearArgs& args) {
#if defined(CHARONIA_ISA_amx)
#define CHARONIA_QUANT_LINEAR(code) quant_linear_tiles<AmxTiles, VectorCodes<code>>(args)
#else
#define CHARONIA_QUANT_LINEAR(code) quant_linear<code, Bf16>(args)
#endif
  switch (args.shape.code) {
    case Code::u4:
      return CHARONIA_QUANT_LINEAR(Code::u4);
    case Code::i8:
      return CHARONIA_QUANT_LINEAR(Code::i8);
    case Code::f8_e4m3:
      return CHARONIA_QUANT_LINEAR(Code::f8_e4m3);
    case Code::f4_e2m1:
      return CHARONIA_QUANT_LINEAR(Code::f4_e2m1);
  }
}
#endif

void quant_linear_f32(const QuantLinearArgs& args) {
  switch (args.shape.code) {
    case Code::u4:
      return quant_linear<Code::u4, float>(args);
    case Code::i8:
      return quant_linear<Code::i8, float>(args);
    case Code::f8_e4m3:
      return quant_linear<Code::f8_e4m3, float>(args);
    case Code::f4_e2m1:
      return quant_linear<Code::f4_e2m1, float>(args);
  }
}

void group_sums_bf16(float* sums, const Bf16* a, std::int64_t group, std::int64_t groups) {
  group_sums(sums, a, group, groups);
}
void group_sums_f32(float* sums, const float* a, std::int64_t group, std::int64_t groups) {
  group_sums(sums, a, group, groups);
}

}  // namespace charonia::ops::cpu::CHARONIA_ISA
