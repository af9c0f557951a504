// Rows of fixed-point numbers and their GEMM with integer weights (FixedRow in ops/cpu/kernels.h): extreme values that
// ordinary products (ops_quant_linear_test.cpp) do not reach.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "base/huge_memory.h"
#include "base/text.h"
#include "ops/cpu/dispatch.h"
#include "ops/cpu/kernels.h"
#include "ops_support.h"
#include "quant_support.h"

namespace charonia::ops {
namespace {

using cpu::FixedRow;
using cpu::QuantPanel;

// The instruction sets of this processor that have the kernel.
std::vector<std::string> devices() {
  std::vector<std::string> names;
  for (const auto& set : cpu::instruction_sets()) {
    if (cpu::has_fixed_kernel(*set.kernels)) names.emplace_back(set.name);
  }
  return names;
}

using FixedPointTest = testing::TestWithParam<std::string>;
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(FixedPointTest);
INSTANTIATE_TEST_SUITE_P(Cpu, FixedPointTest, testing::ValuesIn(devices()),
                         [](const auto& info) { return info.param; });

struct Row {
  Row(std::string_view device, const QuantPanel& shape, std::span<const cpu::Bf16> x)
      : layout(shape),
        memory(static_cast<std::size_t>(layout.bytes())),
        bits(shape.code_bits()),
        in_words(device == "avx2") {
    cpu::instruction_set(device).kernels->fixed_from_bf16(memory.data(), x.data(), shape);
  }
  float scale(std::int64_t block) const {
    return reinterpret_cast<const float*>(memory.data() + layout.scales())[block];
  }
  std::int32_t sum(std::int64_t block) const {
    return reinterpret_cast<const std::int32_t*>(memory.data() + layout.sums())[block];
  }
  // The number at `column` of a padded group.
  int number(std::int64_t group, std::int64_t column) const {
    if (in_words) return reinterpret_cast<const std::int16_t*>(memory.data())[group * layout.group + column];
    constexpr int kPlaces4[] = {0, 2, 4, 6, 1, 3, 5, 7}, kPlaces8[] = {0, 2, 1, 3};
    const std::int64_t word = bits == 4 ? 8 : 4;
    const auto place = bits == 4 ? kPlaces4[column % word] : kPlaces8[column % word];
    const auto at = group * layout.group + column / word * word + place;
    const auto* const digits = reinterpret_cast<const std::int8_t*>(memory.data()) + at / 4 * 8 + at % 4;
    return 256 * digits[0] + digits[4];
  }

  FixedRow layout;
  HugeMemory memory;
  int bits;
  bool in_words;
};

std::vector<cpu::Bf16> bf16_of(std::span<const float> x) {
  std::vector<cpu::Bf16> out;
  for (const float one : x) out.push_back({float_to_bf16(one)});
  return out;
}

TEST_P(FixedPointTest, numbers_match_the_definition_for_all_exponents) {
  Random random(1);
  for (const Code code : {Code::u4, Code::i8}) {
    for (const std::int64_t group : {36, 128, 300, 704}) {
      const QuantPanel shape{.code = code, .k = 3 * group, .group = group};
      for (const int spread : {0, 3, 12, 120}) {
        for (const int middle : {0, -140, -120, 120}) {
          std::vector<float> x;
          std::vector<double> exact;
          for (std::int64_t i = 0; i < shape.k; ++i) {
            const double drawn = std::ldexp(std::uniform_real_distribution(-2.0, 2.0)(random),
                                            std::min(126, middle + uniform(random, -spread, spread)));
            x.push_back(bf16_to_float(float_to_bf16(i % 29 == 7 ? 0 : static_cast<float>(drawn))));
            exact.push_back(x.back());
          }
          const auto expected = fixed_point(exact, group);
          const Row row(GetParam(), shape, bf16_of(x));
          for (std::int64_t g = 0; g < 3; ++g) {
            for (std::int64_t b = 0; b < row.layout.blocks; ++b) {
              const auto end = std::min(row.layout.group, (b + 1) * FixedRow::kBlock);
              const auto first = exact.begin() + g * group + b * FixedRow::kBlock;
              const auto last = exact.begin() + g * group + std::min(end, group);
              double greatest = 0x1p-112;  // scales end at 2^-126
              for (auto x_of = first; x_of < last; ++x_of) greatest = std::max(greatest, std::abs(*x_of));
              std::int32_t sum = 0;
              for (auto column = b * FixedRow::kBlock; column < end; ++column) {
                const int number = row.number(g, column);
                const double value = column < group ? expected[static_cast<std::size_t>(g * group + column)] : 0;
                ASSERT_EQ(number * double{row.scale(g * row.layout.blocks + b)}, value)
                    << "column " << column << " of " << group << ", " << middle << " +- " << spread;
                if (column < group) {
                  const double x_here = exact[static_cast<std::size_t>(g * group + column)];
                  ASSERT_LE(std::abs(value - x_here), 0x1.02p-15 * greatest);
                }
                sum += number;
              }
              ASSERT_EQ(row.sum(g * row.layout.blocks + b), sum);
            }
          }
        }
      }
    }
  }
}

TEST_P(FixedPointTest, values_that_are_not_finite_make_only_their_blocks_scale_nan) {
  const QuantPanel shape{.code = Code::u4, .k = 512, .group = 256};
  for (const float broken : {std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity(), NAN}) {
    std::vector<float> x(512, 1.0F);
    x[130] = broken;
    const Row row(GetParam(), shape, bf16_of(x));
    for (int block = 0; block < 4; ++block) EXPECT_EQ(std::isnan(row.scale(block)), block == 1) << broken;
    EXPECT_EQ(row.number(0, 129), 0);
    EXPECT_EQ(row.sum(1), 0);
  }
}

// Compares with the definition in ops/cpu/kernels.h bit by bit. So all instruction sets agree, and all numbers of rows
// too. Extreme codes, zeros and activations have the largest sums of integers: nothing may overflow or saturate.
TEST_P(FixedPointTest, sums_are_added_up_and_rounded_in_the_order_of_the_definition) {
  Random random(1);
  constexpr std::int64_t kRows = 30, kColumns = 70;
  for (const Code code : {Code::u4, Code::i8, Code::f4_e2m1}) {
    for (const int variant : {0, 1, 2, 3}) {
      const bool zeros = variant % 2 == 1, extreme = variant >= 2;
      for (const std::int64_t group : {36, 128, 300}) {
        const QuantPanel shape{.code = code, .has_zeros = zeros, .k = 2 * group, .group = group};
        MemoryQuantSource source(kColumns, shape.k, {code, group, zeros, DType::f32, Activations::as_is});
        const int codes = code == Code::i8 ? 255 : 15, least = code == Code::i8 ? -128 : 0,
                  greatest = code == Code::i8 ? 127 : 16;
        for (std::size_t i = 0; i < source.codes.size(); ++i) {
          const auto column = static_cast<int>(static_cast<std::int64_t>(i) / shape.k);
          const std::array ends = {0, codes / 2, codes / 2 + 1, codes};
          source.codes[i] = static_cast<std::uint8_t>(extreme ? ends[static_cast<std::size_t>(column % 4)]
                                                              : uniform(random, 0, codes));
        }
        for (auto& s : source.scales) s = extreme ? 1.0F : static_cast<float>(uniform(random, 1, 1000)) * 0.001F;
        for (std::size_t i = 0; i < source.zeros.size(); ++i) {
          source.zeros[i] =
              static_cast<std::int8_t>(extreme ? (i / 8 % 2 == 0 ? least : greatest) : uniform(random, 0, 15));
        }
        const QuantSource* const part = &source;
        const auto ops = make_ops(GetParam(), 1);
        const auto linear = ops->make_quantised_linear({&part, 1}, {}, DType::bf16);
        auto in = Matrix::random(random, DType::bf16, kRows, shape.k);
        for (int r = 0; extreme && r < kRows; ++r) {
          for (std::int64_t k = 0; k < shape.k; ++k) in.set(r, k, r % 2 == 0 ? 1.9921875F : -1.9921875F);
        }
        // The sum of a block of row r and column c, in units of the row's scale: exact, because numbers are multiples
        // of one half.
        const auto block_sum = [&](const Row& row, std::int64_t c, std::int64_t g, std::int64_t b) {
          const double zero = zeros ? source.zeros[static_cast<std::size_t>(c * 2 + g)] : code == Code::u4 ? 8 : 0;
          double sum = 0;
          for (auto k = b * FixedRow::kBlock; k < std::min(group, (b + 1) * FixedRow::kBlock); ++k) {
            const auto at = static_cast<std::size_t>(c * shape.k + g * group + k);
            sum += row.number(g, k) * (number_of(code, source.codes[at]) - zero);
          }
          return static_cast<float>(sum);
        };
        for (const std::int64_t rows : {1, 2, 3, 4, 5, 6, 7, 8, 13, 17, 19, 30}) {  // tiles of all heights
          const DeviceMatrix device_in(*ops, in), out(*ops, DType::f32, rows, kColumns);
          ops->linear(out.tensor(), device_in.slice(0, static_cast<int>(rows)), *linear);
          const auto result = out.host();
          for (std::int64_t r = 0; r < rows; ++r) {
            std::vector<float> x;
            for (std::int64_t k = 0; k < shape.k; ++k) x.push_back(in.at(r, k));
            const Row row(GetParam(), shape, bf16_of(x));
            for (const std::int64_t c : {0, 1, 6, 7, 8, 31, 63, 64, 69}) {
              float total = 0;
              for (std::int64_t g = 0; g < 2; ++g) {
                float of_group = 0;
                for (std::int64_t b = 0; b < row.layout.blocks; ++b) {
                  const float of_block = row.scale(g * row.layout.blocks + b) * block_sum(row, c, g, b);
                  of_group = b == 0 ? of_block : of_group + of_block;
                }
                total = std::fma(source.scales[static_cast<std::size_t>(c * 2 + g)], of_group, total);
              }
              ASSERT_EQ(result.at(r, c), total) << "row " << r << " of " << rows << ", column " << c << ", group "
                                                << group << (extreme ? ", extreme" : "");
            }
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace charonia::ops
