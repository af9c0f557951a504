// A GEMM with a quantised integer weight, with 16-bit activations converted to 16-bit fixed-point numbers: one panel of
// 64 output features.
//
// Layout and order of operations: kernels.h. Sums of integers are exact, so all multiplication methods give the same
// bits.
#include <bit>

#if defined(__AVX512F__) && !defined(__AVX512BF16__)
#include "ops/cpu/kernels/fixed_bytes.h"
#define CHARONIA_FIXED
#elif defined(__AVX2__) && !defined(__AVX512F__)
#include "ops/cpu/kernels/fixed_words.h"
#define CHARONIA_FIXED
#endif

#if defined(CHARONIA_FIXED)

namespace charonia::ops::cpu::CHARONIA_ISA {
namespace {

constexpr int kBlock = static_cast<int>(FixedRow::kBlock);

// Rows [0, M) of a block, V vectors of features from j on: c [M][64] (+)= scale of the row's block * sum. At the end of
// the group, totals [M][64] += scales * c.
template <Code C, int M, int V, int Lines>
inline __attribute__((always_inline)) void fixed_tile(const FixedBlock& block, const char* a, std::int64_t a_stride,
                                                      const float* row_scales, const std::int32_t* row_sums, int j,
                                                      const char* ahead, float* c, float* totals) {
  IntVec sums[M][V];
  sum_block<C, M, V, Lines>(block, a, a_stride, j, ahead, sums);
  const float* const scales = block.scales;
  const std::int32_t* const zeros = block.zeros;
  const bool fresh = block.fresh;
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
    const Vec row_scale = set1(row_scales[m * (a_stride / 4)] / kSteps<C>);
    const IntVec sum = set1(row_sums[m * (a_stride / 4)]), all = mul(set1(kMiddle<C>), sum);
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) {
      const int at = m * kPanel + j + v * kWidth;
      const IntVec above = zeros == nullptr ? all : mul(load(zeros + j + v * kWidth), sum);
      Vec x = mul(row_scale, floats_of(sub(sums[m][v], above)));
      if (!fresh) x = add(load(c + at), x);
      if (scales == nullptr) {
        store(c + at, x);
      } else {
        store(totals + at, fma(load(scales + j + v * kWidth), x, load(totals + at)));
      }
    }
  }
}

// V: vectors processed together. pass: number of earlier passes over the block, of all tiles; passes: their total
// number. With few passes, each one prefetches an equal part of the next codes into the L2 cache, so that memory is
// always busy.
template <Code C, int M, int V>
inline void fixed_rows(const FixedBlock& block, const char* a, std::int64_t a_stride, const float* row_scales,
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
    } else if (block.copy != nullptr) {
      run.template operator()<0>();
    } else if (passes == 2) {
      run.template operator()<2>();
    } else if (pass < kLines) {
      run.template operator()<1>();
    } else {
      run.template operator()<0>();
    }
  }
}

// Calls run<M>() with M = rows <= kTileRows.
template <int M = 1, class F>
inline __attribute__((always_inline)) void with_rows(int rows, const F& run) {
  if constexpr (M == kTileRows) {
    run.template operator()<M>();
  } else {
    rows == M ? run.template operator()<M>() : with_rows<M + 1>(rows, run);
  }
}

template <Code C>
void fixed(const QuantLinearArgs& args) {
  alignas(64) float c[kQuantRowBlock * kPanel];
  alignas(64) float totals[kQuantRowBlock * kPanel];
  alignas(64) float scales[kPanel];
  alignas(64) std::int32_t zeros[kPanel];
  alignas(64) std::int16_t copy[kCopiedFrom > 0 ? kBlock * kPanel : 1];
  const QuantPanel& shape = args.shape;
  const FixedRow layout(shape);
  const auto* const a = static_cast<const char*>(args.a);
  const int tiles = (args.rows + kTileRows - 1) / kTileRows;
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
      FixedBlock block{.words = group + k / kWordK<C> * kWord_bytes,
                       .count = (last ? left : kBlock) / kWordK<C>,
                       .scales = last ? scales : nullptr,
                       .zeros = shape.has_zeros ? zeros : nullptr,
                       .fresh = b == 0};
      if constexpr (kCopiedFrom > 0) {
        if (tiles >= kCopiedFrom) {
          copy_codes<C>(block, copy);
          block.copy = copy;
        }
      }
      const char* digits = a + 2 * (g * layout.group + k);
      const auto* row_scales = reinterpret_cast<const float*>(a + layout.scales()) + g * layout.blocks + b;
      const auto* row_sums = reinterpret_cast<const std::int32_t*>(a + layout.sums()) + g * layout.blocks + b;
      for (int t = 0, row = 0; t < tiles; ++t) {
        const int rows = args.rows / tiles + (t < args.rows % tiles ? 1 : 0);
        with_rows(rows, [&]<int M>() {
          const auto run = [&]<int V>() {
            fixed_rows<C, M, V>(block, digits, args.a_stride, row_scales, row_sums, t * kPanel / kWidth / V,
                                tiles * kPanel / kWidth / V, c + row * kPanel, totals + row * kPanel);
          };
          if (tiles == 1) {
            run.template operator()<fixed_vectors(M, true)>();
          } else if constexpr (M >= kTileRows / 2) {  // rows are distributed evenly
            run.template operator()<fixed_vectors(M, false)>();
          }
        });
        row += rows;
        digits += rows * args.a_stride;
        row_scales += rows * (args.a_stride / 4);
        row_sums += rows * (args.a_stride / 4);
      }
    }
  }
  write_totals(args, totals);
}

// The scale of a block whose largest |x|, a bf16, is `most`; NaN if that is infinite. 127 * 256 + 127 is the largest
// number of two signed bytes. The largest mantissa, 1.9921875 * 2^14, exceeds it by one.
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
  for (std::int64_t g = 0; g < shape.groups(); ++g, in += shape.group) {
    for (std::int64_t begin = 0; begin < layout.group; begin += kBlock) {
      const std::int64_t left = shape.group - begin;
      const int n = static_cast<int>(left < kBlock ? left : kBlock);
      const Bf16* const from = in + begin;
      Vec x[kBlock / kWidth];
      Vec most = zero(), broken = zero();  // x * 0 is NaN if x is not finite
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
      IntVec sum = set1(0);
      for (int i = 0; i < vectors; ++i) {
        sum = add(sum, store_numbers<Bits>(digits + 2 * kWidth * i, finite ? mul(x[i], inverse) : zero()));
      }
      const std::int64_t padded = layout.group - begin;
      digits += 2 * (padded < kBlock ? padded : kBlock);
      *scales++ = scale;
      *sums++ = sum_of(sum);
    }
  }
}

}  // namespace

void quant_linear_fixed(const QuantLinearArgs& args) {
  switch (args.shape.code) {
    case Code::u4:
      return fixed<Code::u4>(args);
    case Code::i8:
      return fixed<Code::i8>(args);
    case Code::f4_e2m1:
      return fixed<Code::f4_e2m1>(args);
    case Code::f8_e4m3:
      break;  // its numbers are not 8-bit integers
  }
}

void fixed_from_bf16(std::byte* out, const Bf16* in, const QuantPanel& shape) {
  shape.code_bits() == 4 ? fixed_row<4>(out, in, shape) : fixed_row<8>(out, in, shape);
}

}  // namespace charonia::ops::cpu::CHARONIA_ISA

#endif
