// A GEMM with a quantised weight of integers whose activations of 16 bits become fixed-point numbers of 16 bits: one
// panel of 64 output features.
//
// Layout and order of operations: kernels.h. A number is two signed bytes, 256 * high + low, and each is multiplied by
// the processor's dot products of unsigned with signed bytes, 64 products an instruction; codes are the unsigned ones,
// as they lie in the panel. That is 32 products of 16 bits an instruction, as many as there are of bf16, at twice the
// rate of a processor that computes pairs of bf16 no faster than floats, and sums of integers are exact.
#include <bit>

#include "ops/cpu/kernels/quant_codes.h"
#include "ops/cpu/kernels/quant_scales.h"

namespace charonia::ops::cpu::CHARONIA_ISA {
namespace {

#if defined(__AVX512F__) && !defined(__AVX512BF16__)

constexpr int kWord_bytes = 4 * kPanel;  // a word of every feature of a panel
constexpr int kAhead_bytes = 8192;  // where memory is asked for codes
constexpr int kBlock = static_cast<int>(FixedRow::kBlock);

// What is multiplied is kSteps * number + kMiddle: numbers of f4_e2m1 are whole halves.
template <Code C>
constexpr int kSteps = C == Code::f4_e2m1 ? 2 : 1;
template <Code C>
constexpr int kMiddle = C == Code::u4 ? 8 : C == Code::i8 ? 128 : 12;

// In assembly, since only some processors of this instruction set have it.
inline __attribute__((always_inline)) __m512i add_dot(__m512i sums, __m512i codes, __m512i activations) {
  asm("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(codes), "v"(activations));
  return sums;
}

inline __m512i broadcast(const char* p) {
  int word;
  __builtin_memcpy(&word, p, sizeof word);
  return _mm512_set1_epi32(word);
}

// The lower halves of bytes, codes of 4 bits, as what is multiplied.
template <Code C>
inline __m512i unsigned_of(__m512i codes) {
  const __m512i nibbles = _mm512_and_si512(codes, _mm512_set1_epi8(15));
  if constexpr (C == Code::u4) return nibbles;
  const __m128i table = _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0);
  return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), nibbles);
}

// What belongs to a block of a group, for all rows of a call.
struct Block {
  const char* words = nullptr;   // of the panel
  std::int64_t count = 0;        // of words of a feature
  const float* scales = nullptr;  // [64] of the group; null: the group goes on
  const std::int32_t* zeros = nullptr;  // [64], as they are subtracted from stored codes; null: kMiddle of all
  bool fresh = false;             // the first of its group
};

// Rows [0, M) of a block, V vectors of features from j on: c [M][64] (+)= scale of the row's block * sum; with the end
// of the group, totals [M][64] += scales * c. Of each word of the panel kLines lines from `ahead` on are prefetched.
template <Code C, int M, int V, int Lines>
inline __attribute__((always_inline)) void fixed_tile(const Block& block, const char* a, std::int64_t a_stride,
                                                      const float* row_scales, const std::int32_t* row_sums, int j,
                                                      const char* ahead, float* c, float* totals) {
  __m512i high[M][V], low[M][V];
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) high[m][v] = low[m][v] = _mm512_setzero_si512();
  }
  const char* words = block.words + 4 * j;
  const auto dots = [&](const __m512i(&codes)[V], const char* at) __attribute__((always_inline)) {
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      const __m512i h = broadcast(at + m * a_stride), l = broadcast(at + m * a_stride + 4);
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) {
        high[m][v] = add_dot(high[m][v], codes[v], h);
        low[m][v] = add_dot(low[m][v], codes[v], l);
      }
    }
  };
  const char* at = a;
  for (std::int64_t i = 0; i < block.count; ++i) {
#pragma GCC unroll 4
    for (int line = 0; line < Lines; ++line) __builtin_prefetch(ahead + line * kLine_bytes, 0, 2);
    ahead += kWord_bytes;
    __m512i codes[V];
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) codes[v] = _mm512_loadu_si512(words + v * kLine_bytes);
    if constexpr (C == Code::i8) {
      dots(codes, at);
    } else {
      __m512i lower[V];
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) lower[v] = unsigned_of<C>(codes[v]);
      dots(lower, at);
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) codes[v] = unsigned_of<C>(_mm512_srli_epi32(codes[v], 4));
      dots(codes, at + 8);
    }
    words += kWord_bytes;
    at += 2 * kWordK<C>;
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
    const Vec row_scale = set1(row_scales[m * (a_stride / 4)] / kSteps<C>);
    const std::int32_t sum = row_sums[m * (a_stride / 4)];
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) {
      const int at_v = j + v * kWidth;
      const __m512i zeros = block.zeros == nullptr ? _mm512_set1_epi32(kMiddle<C> * sum)
                                                   : _mm512_mullo_epi32(_mm512_loadu_si512(block.zeros + at_v),
                                                                        _mm512_set1_epi32(sum));
      const __m512i d = _mm512_sub_epi32(_mm512_add_epi32(_mm512_slli_epi32(high[m][v], 8), low[m][v]), zeros);
      Vec x = mul(row_scale, Vec{_mm512_cvtepi32_ps(d)});
      if (!block.fresh) x = add(load(c + m * kPanel + at_v), x);
      if (block.scales == nullptr) {
        store(c + m * kPanel + at_v, x);
      } else {
        float* const to = totals + m * kPanel + at_v;
        store(to, fma(load(block.scales + at_v), x, load(to)));
      }
    }
  }
}

// V: so many vectors at a time. pass: how many passes over the block there were before, of all tiles; of `passes`. The
// next codes are asked for in equal parts in all passes of few, into the L2 cache: memory has work all the time.
template <Code C, int M, int V>
inline void fixed_rows(const Block& block, const char* a, std::int64_t a_stride, const float* row_scales,
                       const std::int32_t* row_sums, int pass, int passes, float* c, float* totals) {
  constexpr int kLines = kWord_bytes / kLine_bytes;
  for (int j = 0; j < kPanel; j += V * kWidth, ++pass) {
    const char* const ahead = block.words + kAhead_bytes;
    const auto run = [&]<int Lines>() {
      fixed_tile<C, M, V, Lines>(block, a, a_stride, row_scales, row_sums, j, ahead + pass * Lines * kLine_bytes, c,
                                 totals);
    };
    if constexpr (V * kWidth == kPanel) {  // one tile: the only pass
      run.template operator()<kLines>();
    } else if (passes == 2) {
      run.template operator()<2>();
    } else if (pass < kLines) {
      run.template operator()<1>();
    } else {
      run.template operator()<0>();
    }
  }
}

template <Code C>
void fixed(const QuantLinearArgs& args) {
  constexpr int kMost = 6, kFew = 3;  // rows of a tile; of one that takes all vectors at once
  alignas(64) float c[kQuantRowBlock * kPanel];
  alignas(64) float totals[kQuantRowBlock * kPanel];
  alignas(64) float scales[kPanel];
  alignas(64) std::int32_t zeros[kPanel];
  const QuantPanel& shape = args.shape;
  const FixedRow layout(shape);
  const auto* const a = static_cast<const char*>(args.a);
  const int tiles = (args.rows + kMost - 1) / kMost;
  for (int i = 0; i < args.rows * kPanel; i += kWidth) store(totals + i, zero());
  const auto* group = static_cast<const char*>(args.panel);
  for (std::int64_t g = 0; g < shape.groups(); ++g, group += shape.group_bytes()) {
    for (std::int64_t at = shape.scales(); at < shape.group_bytes(); at += kLine_bytes) {
      __builtin_prefetch(group + kAhead_bytes + at, 0, 2);
    }
    load_scales(shape, group, scales);
    if (shape.has_zeros) {
      const auto* const from = reinterpret_cast<const signed char*>(group + shape.zeros());
      for (int j = 0; j < kPanel; ++j) zeros[j] = kMiddle<C> + kSteps<C> * from[j];
    }
    for (std::int64_t b = 0; b < layout.blocks; ++b) {
      const std::int64_t k = b * kBlock, left = layout.group - k;
      const bool last = left <= kBlock;
      const Block block{.words = group + k / kWordK<C> * kWord_bytes,
                        .count = (last ? left : kBlock) / kWordK<C>,
                        .scales = last ? scales : nullptr,
                        .zeros = shape.has_zeros ? zeros : nullptr,
                        .fresh = b == 0};
      const char* digits = a + 2 * (g * layout.group + k);
      const auto* row_scales = reinterpret_cast<const float*>(a + layout.scales()) + g * layout.blocks + b;
      const auto* row_sums = reinterpret_cast<const std::int32_t*>(a + layout.sums()) + g * layout.blocks + b;
      for (int t = 0, row = 0; t < tiles; ++t) {
        const int rows = args.rows / tiles + (t < args.rows % tiles ? 1 : 0);
        const auto run = [&]<int M, int V>() {
          fixed_rows<C, M, V>(block, digits, args.a_stride, row_scales, row_sums, t * kPanel / kWidth / V,
                              tiles * kPanel / kWidth / V, c + row * kPanel, totals + row * kPanel);
        };
        if (tiles == 1 && rows <= kFew) {
          rows == 1 ? run.template operator()<1, 4>()
                    : rows == 2 ? run.template operator()<2, 4>() : run.template operator()<kFew, 4>();
        } else if (rows <= 4) {
          rows == 4 ? run.template operator()<4, 2>() : run.template operator()<3, 2>();
        } else {
          rows == 5 ? run.template operator()<5, 2>() : run.template operator()<6, 2>();
        }
        row += rows;
        digits += rows * args.a_stride;
        row_scales += rows * (args.a_stride / 4);
        row_sums += rows * (args.a_stride / 4);
      }
    }
  }
  write_totals(args, totals);
}

// The step of a block whose largest |x|, a bf16, is `most`; NaN where it is infinite. 127 * 256 + 127 is the largest
// number of two signed bytes: 1.9921875 * 2^14, of all mantissas the last, is greater by one.
float fixed_scale(float most) {
  const auto bits = std::bit_cast<std::uint32_t>(most);
  if (bits >> 23 == 255) return __builtin_nanf("");
  constexpr std::uint32_t kLast = 1U << 16, kBits = 14;
  const std::uint32_t exponent = (bits + kLast) >> 23;
  return std::bit_cast<float>((exponent > kBits + 1 ? exponent - kBits : 1) << 23);
}

template <int Bits>
void fixed_row(std::byte* out, const Bf16* in, const QuantPanel& shape) {
  const FixedRow layout(shape);
  auto* scales = reinterpret_cast<float*>(out + layout.scales());
  auto* sums = reinterpret_cast<std::int32_t*>(out + layout.sums());
  auto* digits = reinterpret_cast<char*>(out);
  // Four k of a dot product lie as the codes of a word do (kernels.h).
  const __m128i order = Bits == 4 ? _mm_setr_epi8(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15)
                                      : _mm_setr_epi8(0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15);
  for (std::int64_t g = 0; g < shape.groups(); ++g, in += shape.group) {
    for (std::int64_t begin = 0; begin < layout.group; begin += kBlock) {
      const std::int64_t left = shape.group - begin;
      const int n = static_cast<int>(left < kBlock ? left : kBlock);
      const Bf16* const from = in + begin;
      Vec x[kBlock / kWidth];
      Vec most = zero(), broken = zero();  // x * 0 is NaN for what is not finite
      const int vectors = (n + kWidth - 1) / kWidth;
      for (int i = 0; i < vectors; ++i) {
        const int rest = n - i * kWidth;
        x[i] = rest >= kWidth ? load(from + i * kWidth) : load_n(from + i * kWidth, rest);
        most = max(max(x[i], sub(zero(), x[i])), most);
        broken = add(broken, mul(x[i], zero()));
      }
      const float scale = fixed_scale(any_nan(broken) ? __builtin_inff() : max_of(most));
      const bool finite = scale == scale;
      const Vec inverse = set1(finite ? 1.0F / scale : 0);
      __m512i sum = _mm512_setzero_si512();
      for (int i = 0; i < vectors; ++i) {
        const __m512i number = finite ? _mm512_cvtps_epi32(mul(x[i], inverse).v) : _mm512_setzero_si512();
        sum = _mm512_add_epi32(sum, number);
        const __m512i high = _mm512_srai_epi32(_mm512_add_epi32(number, _mm512_set1_epi32(128)), 8);
        const __m128i h = _mm_shuffle_epi8(_mm512_cvtepi32_epi8(high), order);
        const __m128i l = _mm_shuffle_epi8(_mm512_cvtepi32_epi8(number), order);  // its lowest byte
        // The last may go on into what comes next, which is written later.
        _mm_storeu_si128(reinterpret_cast<__m128i*>(digits + 32 * i), _mm_unpacklo_epi32(h, l));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(digits + 32 * i) + 1, _mm_unpackhi_epi32(h, l));
      }
      const std::int64_t padded = layout.group - begin;
      digits += 2 * (padded < kBlock ? padded : kBlock);
      *scales++ = scale;
      *sums++ = _mm512_reduce_add_epi32(sum);
    }
  }
}

#endif

}  // namespace

#if defined(__AVX512F__) && !defined(__AVX512BF16__)
void quant_linear_fixed(const QuantLinearArgs& args) {
  switch (args.shape.code) {
    case Code::u4:
      return fixed<Code::u4>(args);
    case Code::i8:
      return fixed<Code::i8>(args);
    case Code::f4_e2m1:
      return fixed<Code::f4_e2m1>(args);
    case Code::f8_e4m3:
      break;  // its numbers are no integers of 8 bits
  }
}

void fixed_from_bf16(std::byte* out, const Bf16* in, const QuantPanel& shape) {
  shape.code_bits() == 4 ? fixed_row<4>(out, in, shape) : fixed_row<8>(out, in, shape);
}
#endif

}  // namespace charonia::ops::cpu::CHARONIA_ISA
