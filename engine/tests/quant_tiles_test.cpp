// The GEMM with a quantised weight with matrix tiles, on tiles in plain C++ (emulated_tiles.h), compared bit by bit
// with the order of operations of kernels.h; and the layout of panels, read as kernels.h describes it.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <vector>

#include "emulated_tiles.h"
#include "ops/cpu/kernels/quant_tiles.h"
#include "ops/cpu/quant_linear.h"
#include "ops_support.h"
#include "quant_support.h"

namespace charonia::ops {
namespace {

using cpu::kPanel;

// The `Codes` of quant_tiles.h, one number at a time.
template <Code C>
struct PlainCodes {
  static void unpack(const char* from, std::int64_t words, cpu::Bf16* to) {
    constexpr int kBits = bits_of(C), kWordK = 32 / kBits;
    for (std::int64_t i = 0; i < words * kWordK; ++i) {
      for (int j = 0; j < kPanel; ++j) {
        std::uint32_t word = 0;
        std::memcpy(&word, from + (i / kWordK * kPanel + j) * 4, sizeof word);
        const auto at = i % kWordK;
        const auto code = static_cast<std::uint8_t>(word >> (at % 2 * 16 + at / 2 * kBits) & ((1U << kBits) - 1));
        const float number = C == Code::u4   ? number_of(C, code) - 8
                             : C == Code::i8 ? static_cast<float>(int{code} - 128)
                                             : number_of(C, code);
        to[(i / 2 * kPanel + j) * 2 + i % 2].bits = float_to_bf16(number);
      }
    }
  }
  static void load_scales(const cpu::QuantPanel& shape, const char* group, float* to) {
    for (int j = 0; j < kPanel; ++j) {
      const auto size = size_of(shape.scale_type);
      const char* const from = group + shape.scales() + static_cast<std::size_t>(j) * size;
      if (shape.scale_type == DType::f8_e8m0) {
        to[j] = std::ldexp(1.0F, static_cast<unsigned char>(*from) - 127);
      } else if (shape.scale_type == DType::f32) {
        std::memcpy(&to[j], from, sizeof(float));
      } else {
        std::uint16_t half = 0;
        std::memcpy(&half, from, sizeof half);
        to[j] = shape.scale_type == DType::bf16 ? bf16_to_float(half) : f16_to_float(half);
      }
    }
  }
  static void load_zeros(const cpu::QuantPanel& shape, const char* group, float* to) {
    for (int j = 0; j < kPanel; ++j) to[j] = static_cast<float>(static_cast<std::int8_t>(group[shape.zeros() + j]));
  }
  static void add_group(const float* c, int rows, const float* scales, const float* zeros, const float* sums,
                        std::int64_t stride, float* totals) {
    for (int i = 0; i < rows * kPanel; ++i) {
      const int j = i % kPanel;
      const float x = zeros == nullptr ? c[i] : std::fma(-sums[i / kPanel * stride], zeros[j], c[i]);
      totals[i] = std::fma(scales[j], x, totals[i]);
    }
  }
};

void multiply(const cpu::QuantLinearArgs& args) {
  switch (args.shape.code) {
    case Code::u4:
      return cpu::quant_linear_tiles<EmulatedTiles, PlainCodes<Code::u4>>(args);
    case Code::i8:
      return cpu::quant_linear_tiles<EmulatedTiles, PlainCodes<Code::i8>>(args);
    case Code::f8_e4m3:
      return cpu::quant_linear_tiles<EmulatedTiles, PlainCodes<Code::f8_e4m3>>(args);
    case Code::f4_e2m1:
      return cpu::quant_linear_tiles<EmulatedTiles, PlainCodes<Code::f4_e2m1>>(args);
  }
}

TEST(QuantTilesTest, groups_are_summed_in_steps_of_32_and_scaled_in_the_documented_order) {
  Random random(31);
  ThreadPool pool(1);
  HugeArena arena;
  struct Trial {
    QuantFormat format;
    std::int64_t groups;
  };
  const Trial trials[] = {
      {{Code::u4, 128, true, DType::f16}, 3},          {{Code::u4, 32, false, DType::bf16}, 9},
      {{Code::i8, 64, true, DType::f32}, 3},           {{Code::f8_e4m3, 1100, false, DType::f32}, 1},
      {{Code::f4_e2m1, 32, false, DType::f8_e8m0}, 5}, {{Code::u4, 44, true, DType::f16}, 4}};
  for (const auto& [format, groups] : trials) {
    const auto source = MemoryQuantSource::random(random, 50, groups * format.group, format);
    const QuantSource* const parts[] = {&source};
    const cpu::QuantLinear linear(parts, {}, DType::bf16, pool, arena);
    const std::int64_t k = source.cols(), stride = (k + 31) / 32 * 32 + 32;
    for (const int rows : {1, 7, 16, 17, 40, 150}) {
      std::normal_distribution<float> normal;
      std::vector<std::uint16_t> a(static_cast<std::size_t>(rows * stride));
      for (auto& x : a) x = float_to_bf16(normal(random));
      std::vector<float> sums(static_cast<std::size_t>(rows * groups)),
          out(static_cast<std::size_t>(rows * kPanel), NAN);
      for (auto& x : sums) x = normal(random);  // any numbers would do
      multiply({.a = a.data(),
                .a_stride = stride,
                .sums = sums.data(),
                .sums_stride = groups,
                .rows = rows,
                .shape = linear.shape(),
                .panel = linear.panel(0),
                .out = out.data(),
                .out_stride = kPanel,
                .columns = 50});
      for (int r = 0; r < rows; ++r) {
        for (int j = 0; j < 50; ++j) {
          float total = 0;
          for (std::int64_t g = 0; g < groups; ++g) {
            float sum = 0;
            for (std::int64_t begin = 0; begin < format.group; begin += 32) {
              float even = 0, odd = 0;
              for (std::int64_t i = begin; i < std::min(begin + 32, format.group); ++i) {
                const auto at = g * format.group + i;
                const float number = number_of(format.code, source.codes[static_cast<std::size_t>(j * k + at)]) -
                                     (format.code == Code::u4 ? 8.0F : 0.0F);
                float& to = i % 2 == 0 ? even : odd;
                to = std::fma(bf16_to_float(a[static_cast<std::size_t>(r * stride + at)]), number, to);
              }
              sum += even + odd;
            }
            const auto at = static_cast<std::size_t>(j * groups + g);
            const float zero = format.zeros ? source.zeros[at] - (format.code == Code::u4 ? 8.0F : 0.0F) : 0;
            if (format.zeros) sum = std::fma(-sums[static_cast<std::size_t>(r * groups + g)], zero, sum);
            total = std::fma(source.scales[at], sum, total);
          }
          ASSERT_EQ(std::bit_cast<std::uint32_t>(out[static_cast<std::size_t>(r * kPanel + j)]),
                    std::bit_cast<std::uint32_t>(total))
              << "row " << r << " of " << rows << ", feature " << j << ", " << to_string(format);
        }
        for (int j = 50; j < kPanel; ++j) ASSERT_TRUE(std::isnan(out[static_cast<std::size_t>(r * kPanel + j)]));
      }
    }
  }
}

}  // namespace
}  // namespace charonia::ops
