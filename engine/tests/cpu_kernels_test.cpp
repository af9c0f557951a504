// The CPU's kernels below the operations, per instruction set: exponentials, maxima, conversions of element types.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <iterator>
#include <limits>
#include <string_view>

#include "attention_world.h"
#include "charonia/error.h"
#include "errors.h"
#include "ops/cpu/dispatch.h"
#include "ops/cpu/kernels.h"
#include "ops_support.h"

namespace charonia::ops {
namespace {

class CpuKernelsTest : public testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(Isa, CpuKernelsTest, testing::ValuesIn(device_names()), [](const auto& i) { return i.param; });

TEST_P(CpuKernelsTest, exponentials_have_an_error_below_one_in_five_million) {
  const auto& kernels = *cpu::instruction_set(GetParam()).kernels;
  Random random(9);
  std::uniform_real_distribution<float> values(-87, 0);
  std::vector<float> in(4001), out(in.size());
  for (auto& x : in) x = values(random);
  in[7] = 0;
  in[8] = -std::numeric_limits<float>::infinity();
  in[9] = -200;
  const double sum = kernels.exp_sum(out.data(), in.data(), 0, 1, static_cast<std::int64_t>(in.size()));
  double expected_sum = 0;
  for (std::size_t i = 0; i < in.size(); ++i) {
    const double expected = in[i] < -87.3F ? 0 : std::exp(static_cast<double>(in[i]));
    ASSERT_NEAR(out[i], expected, 2e-7 * expected) << in[i];
    expected_sum += expected;
  }
  EXPECT_EQ(out[7], 1.0F);
  EXPECT_NEAR(sum, expected_sum, 1e-6 * expected_sum);
}

TEST_P(CpuKernelsTest, the_hyperbolic_tangent_is_accurate_near_zero_and_far_from_it) {
  const auto& kernels = *cpu::instruction_set(GetParam()).kernels;
  std::vector<float> in = {0, -0.0F, 1e-30F, -1e-30F, 9, -9, 15, -15, 1e30F, -1e30F};
  in.push_back(std::numeric_limits<float>::infinity());
  in.push_back(-std::numeric_limits<float>::infinity());
  Random random(11);
  for (const float range : {0.01F, 0.5F, 2.0F, 12.0F}) {
    for (int i = 0; i < 5000; ++i) in.push_back(std::uniform_real_distribution<float>(-range, range)(random));
  }
  auto out = in;
  kernels.soft_cap(out.data(), 1, static_cast<std::int64_t>(out.size()));
  for (std::size_t i = 0; i < in.size(); ++i) {
    const double expected = std::tanh(static_cast<double>(in[i]));
    ASSERT_NEAR(out[i], expected, 4e-7 * std::abs(expected)) << in[i];
    ASSERT_LE(std::abs(out[i]), 1.0F) << in[i];
  }
  out.assign(3, std::numeric_limits<float>::quiet_NaN());
  kernels.soft_cap(out.data(), 30, 3);
  for (const float x : out) EXPECT_TRUE(std::isnan(x));
}

TEST_P(CpuKernelsTest, gelu_has_a_small_relative_error_below_zero_too) {
  const auto& kernels = *cpu::instruction_set(GetParam()).kernels;
  std::vector<float> gate;
  for (int i = -5500; i <= 20000; ++i) gate.push_back(static_cast<float>(i) * 1e-3F);
  const std::vector<float> up(gate.size(), 1.0F);
  std::vector<float> out(gate.size());
  kernels.gelu_tanh_mul_f32(out.data(), gate.data(), up.data(), static_cast<std::int64_t>(gate.size()));
  for (std::size_t i = 0; i < gate.size(); ++i) {
    const double x = gate[i], inner = 2 * std::sqrt(2 / std::acos(-1.0)) * (x + 0.044715 * x * x * x);
    const double expected = x / (1 + std::exp(-inner));
    ASSERT_NEAR(out[i], expected, std::abs(expected) * (5e-7 + (x < 0 ? 3e-7 * std::abs(inner) : 0))) << x;
  }
}

TEST_P(CpuKernelsTest, the_maximum_of_a_row_reports_nan) {
  const auto& kernels = *cpu::instruction_set(GetParam()).kernels;
  Random random(10);
  for (int n = 1; n < 70; ++n) {
    auto row = Matrix::random(random, DType::f32, 1, n);
    float greatest = -std::numeric_limits<float>::infinity();
    for (int i = 0; i < n; ++i) greatest = std::max(greatest, row.at(0, i));
    const auto* const data = reinterpret_cast<const float*>(row.bytes.data());
    EXPECT_EQ(kernels.maximum(data, n), greatest);
    const int at = uniform(random, 0, n - 1);
    row.set(0, at, std::numeric_limits<float>::infinity());
    EXPECT_EQ(kernels.maximum(data, n), std::numeric_limits<float>::infinity());
    row.set(0, at, std::numeric_limits<float>::quiet_NaN());
    EXPECT_TRUE(std::isnan(kernels.maximum(data, n))) << at << " of " << n;
  }
}

TEST_P(CpuKernelsTest, conversions_of_every_half_are_exact_in_both_directions) {
  const auto& kernels = *cpu::instruction_set(GetParam()).kernels;
  std::vector<cpu::F16> f16(65536 + 3);
  std::vector<cpu::Bf16> bf16(f16.size());
  for (std::size_t i = 0; i < f16.size(); ++i) f16[i].bits = bf16[i].bits = static_cast<std::uint16_t>(i);
  std::vector<float> from_f16(f16.size()), from_bf16(f16.size());
  const auto n = static_cast<std::int64_t>(f16.size());
  kernels.f32_from_f16(from_f16.data(), f16.data(), n);
  kernels.f32_from_bf16(from_bf16.data(), bf16.data(), n);
  std::vector<cpu::F16> f16_back(f16.size());
  std::vector<cpu::Bf16> bf16_back(f16.size());
  kernels.f16_from_f32(f16_back.data(), from_f16.data(), n);
  kernels.bf16_from_f32(bf16_back.data(), from_bf16.data(), n);
  for (std::size_t i = 0; i < f16.size(); ++i) {
    const auto bits = static_cast<std::uint16_t>(i);
    const float expected = f16_to_float(bits);
    if (std::isnan(expected)) {
      ASSERT_TRUE(std::isnan(from_f16[i]));
      ASSERT_TRUE(std::isnan(f16_to_float(f16_back[i].bits)));
    } else {
      ASSERT_EQ(std::bit_cast<std::uint32_t>(from_f16[i]), std::bit_cast<std::uint32_t>(expected));
      ASSERT_EQ(f16_back[i].bits, bits);
      ASSERT_EQ(float_to_f16(expected), bits);
    }
    const float wide = bf16_to_float(bits);
    if (std::isnan(wide)) {
      ASSERT_TRUE(std::isnan(bf16_to_float(bf16_back[i].bits)));
    } else {
      ASSERT_EQ(bf16_back[i].bits, bits);
    }
  }
}

TEST_P(CpuKernelsTest, vector_rounding_equals_scalar_rounding) {
  const auto& kernels = *cpu::instruction_set(GetParam()).kernels;
  Random random(12);
  std::vector<float> in;
  for (int i = 0; i < 100000; ++i) {
    // Any bits, and multiples of half an fp16 step, where ties go to even.
    in.push_back(i % 2 == 0 ? std::bit_cast<float>(static_cast<std::uint32_t>(random()))
                            : std::bit_cast<float>(static_cast<std::uint32_t>(random()) % 0x50000000U & 0xfffff000U));
  }
  const auto n = static_cast<std::int64_t>(in.size());
  std::vector<cpu::F16> f16(in.size());
  std::vector<cpu::Bf16> bf16(in.size());
  kernels.f16_from_f32(f16.data(), in.data(), n);
  kernels.bf16_from_f32(bf16.data(), in.data(), n);
  for (std::size_t i = 0; i < in.size(); ++i) {
    if (std::isnan(in[i])) {
      ASSERT_TRUE(std::isnan(f16_to_float(f16[i].bits)));
      ASSERT_TRUE(std::isnan(bf16_to_float(bf16[i].bits)));
      ASSERT_TRUE(std::isnan(f16_to_float(float_to_f16(in[i]))));
      continue;
    }
    ASSERT_EQ(f16[i].bits, float_to_f16(in[i])) << in[i];
    ASSERT_EQ(bf16[i].bits, float_to_bf16(in[i])) << in[i];
    // No other half is nearer.
    const float back = f16_to_float(f16[i].bits);
    if (std::abs(in[i]) < 65504) {
      const double step = std::max(std::abs(static_cast<double>(in[i])) * 0x1p-11, 0x1p-25);
      ASSERT_LE(std::abs(static_cast<double>(back) - static_cast<double>(in[i])), step) << in[i];
    }
  }
}

// A NaN that is read makes the sum NaN, whatever its weight.
TEST_P(CpuKernelsTest, blocks_outside_all_windows_are_not_read) {
  Random random(13);
  const auto ops = make_ops(GetParam(), 2);
  for (int trial = 0; trial < 12; ++trial) {
    const int block_len = std::array{16, 20, 64, 300}[static_cast<std::size_t>(trial % 4)];
    const Shape shape{2 * (1 + trial % 3), 2, 32, block_len, kWeightTypes[static_cast<std::size_t>(trial % 3)]};
    const int length = uniform(random, 3 * block_len, 3 * block_len + 700);
    const int window = uniform(random, 1, block_len + 10);
    World world(random, *ops, shape, {length, block_len}, {.window = window});
    const auto cache = ops->make_kv_cache(world.layout(), {world.blocks});
    const auto out_type = ops->precision(shape.weight).activation;
    world.step(*ops, *cache, {{0, 0, length}}, out_type);
    // Three rows together: the window of the first row counts.
    const int rows = 3;
    const auto before = world.step(*ops, *cache, {{0, length - rows, length}}, out_type).first;

    auto& bad = world.qkv[1];
    for (std::int64_t r = 0; r < bad.rows; ++r) {
      for (std::int64_t c = 0; c < bad.cols; ++c) bad.set(r, c, std::numeric_limits<float>::quiet_NaN());
    }
    world.step(*ops, *cache, {{1, 0, block_len}}, out_type);
    const int outside = std::max(0, length - rows - window + 1) / block_len;
    ASSERT_GT(outside, 0);
    for (int b = 0; b < outside; ++b) {
      world.tables[static_cast<std::size_t>(b)] = world.tables[static_cast<std::size_t>(world.table_stride)];
    }
    const auto after = world.step(*ops, *cache, {{0, length - rows, length}}, out_type).first;
    for (int r = 0; r < rows; ++r) {
      ASSERT_TRUE(before.same_bits(r, after, r))
          << "length " << length << ", window " << window << ", block of " << block_len;
    }
  }
}

TEST(InstructionSetTest, the_best_is_selected_and_an_unknown_one_is_rejected_by_name) {
  EXPECT_EQ(cpu::instruction_set("").name, cpu::instruction_sets().back().name);
  EXPECT_EQ(cpu::instruction_set("portable").name, "portable");
#if defined(__x86_64__)
  const auto place = [sets = cpu::instruction_sets()](std::string_view name) {
    return std::ranges::find(sets, name, &cpu::InstructionSet::name) - sets.begin();
  };
  const auto all = std::ssize(cpu::instruction_sets());
  if (place("avx512") != all && place("avx512_bf16") != all) {
    EXPECT_EQ(place("avx512_bf16") > place("avx512"), !__builtin_cpu_is("intel"));
  }
#endif
  expect_error(ErrorCode::invalid_argument, {"avx1024", "portable"}, [&] { cpu::instruction_set("avx1024"); });
}

TEST(DTypeTest, names_of_weight_types_are_read_and_others_rejected) {
  for (const auto type : kWeightTypes) EXPECT_EQ(weight_dtype(to_string(type)), type);
  EXPECT_THROW(weight_dtype("int4"), Error);
}

}  // namespace
}  // namespace charonia::ops
