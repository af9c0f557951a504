// The CPU's kernels below its operations, per instruction set: exponentials, maxima, conversions of element types.
#include <gtest/gtest.h>

#include <bit>
#include <limits>

#include "charonia/error.h"
#include "ops/cpu/dispatch.h"
#include "ops/cpu/kernels.h"
#include "ops_support.h"

namespace charonia::ops {
namespace {

class CpuKernelsTest : public testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(Isa, CpuKernelsTest, testing::ValuesIn(device_names()), [](const auto& i) { return i.param; });

TEST_P(CpuKernelsTest, exponentials_are_good_to_one_part_in_five_million) {
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

TEST_P(CpuKernelsTest, the_maximum_of_a_row_tells_of_nan) {
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

TEST_P(CpuKernelsTest, conversions_of_every_half_are_exact_and_back_again) {
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

TEST_P(CpuKernelsTest, roundings_agree_with_the_scalar_ones) {
  const auto& kernels = *cpu::instruction_set(GetParam()).kernels;
  Random random(12);
  std::vector<float> in;
  for (int i = 0; i < 100000; ++i) {
    // Any bits, and halves of a step of fp16, where ties go to even.
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
    // Nearest: no other half is nearer.
    const float back = f16_to_float(f16[i].bits);
    if (std::abs(in[i]) < 65504) {
      const double step = std::max(std::abs(static_cast<double>(in[i])) * 0x1p-11, 0x1p-25);
      ASSERT_LE(std::abs(static_cast<double>(back) - static_cast<double>(in[i])), step) << in[i];
    }
  }
}

TEST(InstructionSetTest, the_best_is_taken_and_an_unknown_one_is_refused_by_name) {
  EXPECT_EQ(cpu::instruction_set("").name, cpu::instruction_sets().back().name);
  EXPECT_EQ(cpu::instruction_set("portable").name, "portable");
  try {
    cpu::instruction_set("avx1024");
    FAIL();
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), ErrorCode::invalid_argument);
    EXPECT_NE(std::string(e.what()).find("avx1024"), std::string::npos);
    EXPECT_NE(std::string(e.what()).find("portable"), std::string::npos);
  }
}

TEST(DTypeTest, names_of_weight_types_are_read_and_others_refused) {
  for (const auto type : kWeightTypes) EXPECT_EQ(weight_dtype(to_string(type)), type);
  EXPECT_THROW(weight_dtype("int4"), Error);
}

}  // namespace
}  // namespace charonia::ops
