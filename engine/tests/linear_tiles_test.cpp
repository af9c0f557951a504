// The GEMM with matrix tiles, on tiles in plain C++ (emulated_tiles.h), compared bit by bit with the order of
// operations in linear_tiles.h.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cfloat>
#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "charonia/error.h"
#include "emulated_tiles.h"
#include "ops/cpu/amx.h"
#include "ops/cpu/dispatch.h"
#include "ops/cpu/kernels/linear_tiles.h"
#include "ops_support.h"

namespace charonia::ops {
namespace {

void linear_emulated(const cpu::LinearArgs& args) { cpu::linear_tiles<EmulatedTiles>(args); }

// Rows of activations and a panel, each followed by other data.
struct Gemm {
  int rows, columns;
  std::int64_t k, stride;
  std::vector<cpu::Bf16> a, panel;
  std::vector<float> bias;

  Gemm(Random& random, int r, std::int64_t length, int features, bool with_bias)
      : rows(r), columns(features), k(length), stride(length + uniform(random, 0, 9)) {
    std::normal_distribution<float> normal;
    const auto fill = [&](std::vector<cpu::Bf16>& to, std::int64_t n) {
      to.resize(static_cast<std::size_t>(n));
      for (auto& x : to) x.bits = float_to_bf16(normal(random));
    };
    fill(a, rows * stride + 100);
    fill(panel, ((k + 1) / 2 + 40) * 2 * cpu::kPanel);
    if (k % 2 == 1) {
      for (int j = 0; j < cpu::kPanel; ++j) panel[weight_index(k, j)].bits = 0;
    }
    if (with_bias) {
      for (int j = 0; j < columns; ++j) bias.push_back(normal(random));
    }
  }

  static std::size_t weight_index(std::int64_t i, int j) {
    return static_cast<std::size_t>(i / 2 * 2 * cpu::kPanel + 2 * j + i % 2);
  }
  float activation(int row, std::int64_t i) const {
    return bf16_to_float(a[static_cast<std::size_t>(row * stride + i)].bits);
  }
  float weight(std::int64_t i, int j) const { return bf16_to_float(panel[weight_index(i, j)].bits); }

  // Computes rows [first, first + count), between columns of NaN that must not be written.
  std::vector<float> run(void (*kernel)(const cpu::LinearArgs&), int first, int count) const {
    const std::int64_t out_stride = columns + 3;
    std::vector<float> out(static_cast<std::size_t>(count * out_stride), NAN);
    kernel({.a = a.data() + first * stride,
            .a_stride = stride,
            .rows = count,
            .k = k,
            .panel = panel.data(),
            .out = out.data(),
            .out_stride = out_stride,
            .columns = columns,
            .bias = bias.empty() ? nullptr : bias.data()});
    std::vector<float> result;
    for (int row = 0; row < count; ++row) {
      const auto* const from = out.data() + row * out_stride;
      result.insert(result.end(), from, from + columns);
      for (int j = columns; j < out_stride; ++j) EXPECT_TRUE(std::isnan(from[j]));
    }
    return result;
  }
};

// For any rows of any number, so a row alone equals the row among others.
TEST(LinearTilesTest, elements_are_summed_in_the_documented_order_in_any_batch) {
  Random random(22);
  for (int trial = 0; trial < 3 * cpu::kRowBlock; ++trial) {
    const bool long_k = uniform(random, 0, 5) == 0;  // more than one piece of a panel
    const Gemm p(random, cpu::kRowBlock, uniform(random, 1, long_k ? 2200 : 200), uniform(random, 1, cpu::kPanel),
                 uniform(random, 0, 1) == 1);
    const int count = 1 + trial % cpu::kRowBlock, first = uniform(random, 0, cpu::kRowBlock - count);
    const auto out = p.run(linear_emulated, first, count);
    for (int row = 0; row < count; ++row) {
      for (int j = 0; j < p.columns; ++j) {
        float sum = 0;
        for (std::int64_t begin = 0; begin < p.k; begin += 32) {
          float even = 0, odd = 0;
          for (std::int64_t i = begin; i < std::min(begin + 32, p.k); ++i) {
            float& to = i % 2 == 0 ? even : odd;
            to = std::fma(p.activation(first + row, i), p.weight(i, j), to);
          }
          sum += even + odd;
        }
        if (!p.bias.empty()) sum += p.bias[static_cast<std::size_t>(j)];
        ASSERT_EQ(std::bit_cast<std::uint32_t>(out[static_cast<std::size_t>(row * p.columns + j)]),
                  std::bit_cast<std::uint32_t>(sum))
            << "row " << row << " of " << count << ", feature " << j << ", k " << p.k;
      }
    }
  }
}

TEST(LinearTilesTest, denormals_are_zeros_in_the_emulation_as_in_the_processor) {
  EXPECT_EQ(EmulatedTiles::flushed(FLT_MIN / 2), 0.0F);
  EXPECT_EQ(EmulatedTiles::flushed(FLT_MIN), FLT_MIN);
  EXPECT_TRUE(std::signbit(EmulatedTiles::flushed(-FLT_MIN / 2)));
  // 2^-70 * 2^-70 is a denormal float.
  std::vector<cpu::Bf16> a(32, {float_to_bf16(0x1p-70F)}), panel(16 * 2 * cpu::kPanel, {float_to_bf16(0x1p-70F)});
  float out[cpu::kPanel];
  linear_emulated({.a = a.data(),
                   .a_stride = 32,
                   .rows = 1,
                   .k = 32,
                   .panel = panel.data(),
                   .out = out,
                   .out_stride = cpu::kPanel,
                   .columns = cpu::kPanel});
  EXPECT_EQ(out[0], 0.0F);
}

TEST(LinearTilesTest, the_start_check_accepts_correct_and_names_wrong_results) {
  const auto* const reference = cpu::instruction_set("portable").kernels;
  EXPECT_EQ(cpu::gemm_mismatch(linear_emulated, reference->linear_bf16), "");
  for (const auto& set : cpu::instruction_sets()) {
    EXPECT_EQ(cpu::gemm_mismatch(set.kernels->linear_bf16, reference->linear_bf16), "") << set.name;
  }
  const auto wrong = [](const cpu::LinearArgs& args) {
    linear_emulated(args);
    if (args.rows == 19) args.out[18 * args.out_stride + 49] += 0.125F;
  };
  const auto mismatch = cpu::gemm_mismatch(wrong, reference->linear_bf16);
  EXPECT_NE(mismatch.find("row 18 of 19, feature 49"), std::string::npos) << mismatch;
}

TEST(LinearTilesTest, amx_is_offered_exactly_where_the_processor_and_the_check_allow_it) {
  bool offered = false;
  for (const auto& set : cpu::instruction_sets()) offered |= set.name == "amx";
  EXPECT_EQ(offered, cpu::has_amx() && cpu::instruction_set_warning().empty());
  if (offered) {
    EXPECT_EQ(cpu::instruction_set("").name, "amx");
  } else {
    EXPECT_THROW(cpu::instruction_set("amx"), Error);
  }
}

}  // namespace
}  // namespace charonia::ops
