// Norms, gated activation, embedding, gathering, element types, memory: against references in double.
#include <gtest/gtest.h>

#include <bit>
#include <limits>

#include "charonia/error.h"
#include "ops/cpu/packed_linear.h"
#include "ops_support.h"

namespace charonia::ops {
namespace {

class RowsTest : public testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(Isa, RowsTest, testing::ValuesIn(isa_names()), [](const auto& i) { return i.param; });

constexpr std::array kActivations = {DType::f32, DType::bf16};

TEST_P(RowsTest, rms_norm_adds_the_delta_and_normalises) {
  Random random(7);
  const auto ops = make_ops(GetParam(), 3), one = make_ops(GetParam(), 1);
  for (int trial = 0; trial < 40; ++trial) {
    const int rows = uniform(random, 1, 70), cols = uniform(random, 1, trial % 4 == 0 ? 5000 : 200);
    const auto type = kActivations[static_cast<std::size_t>(trial % 2)];
    const auto before = Matrix::random(random, DType::f32, rows, cols, 3, uniform(random, 0, 4));
    auto delta = Matrix::random(random, DType::f32, rows, cols, 1, uniform(random, 0, 4));
    const auto weight = Matrix::random(random, DType::f32, 1, cols);
    const float eps = 1e-5F;
    auto residual = before;
    Matrix out(type, rows, cols, uniform(random, 0, 4));
    const bool with_delta = trial % 3 != 0;
    ops->rms_norm(out.tensor(), residual.tensor(), with_delta ? delta.tensor() : Tensor{},
                  reinterpret_cast<const float*>(weight.bytes.data()), eps);
    for (int r = 0; r < rows; ++r) {
      double squares = 0;
      for (int c = 0; c < cols; ++c) {
        const float x = with_delta ? before.at(r, c) + delta.at(r, c) : before.at(r, c);
        ASSERT_EQ(residual.at(r, c), x);
        squares += static_cast<double>(x) * x;
      }
      const double factor = 1 / std::sqrt(squares / cols + static_cast<double>(eps));
      for (int c = 0; c < cols; ++c) {
        const double expected = residual.at(r, c) * factor * weight.at(0, c);
        ASSERT_NEAR(out.at(r, c), expected,
                    std::abs(expected) * (1e-5 + (type == DType::f32 ? 0 : rounding(type))) + 1e-30);
      }
      Matrix alone(type, 1, cols);
      auto again = before;
      one->rms_norm(alone.tensor(), again.slice(r, r + 1), with_delta ? delta.slice(r, r + 1) : Tensor{},
                    reinterpret_cast<const float*>(weight.bytes.data()), eps);
      ASSERT_TRUE(alone.same_bits(0, out, r));
    }
  }
}

TEST_P(RowsTest, silu_mul_gates_also_far_from_zero) {
  Random random(8);
  const auto ops = make_ops(GetParam(), 2);
  for (int trial = 0; trial < 30; ++trial) {
    const int rows = uniform(random, 1, 30), inter = uniform(random, 1, 300);
    const auto type = kActivations[static_cast<std::size_t>(trial % 2)];
    auto in = Matrix::random(random, DType::f32, rows, 2 * inter, trial % 3 == 0 ? 60.0F : 2.0F, uniform(random, 0, 4));
    Matrix out(type, rows, inter, uniform(random, 0, 4));
    ops->silu_mul(out.tensor(), in.tensor());
    for (int r = 0; r < rows; ++r) {
      for (int c = 0; c < inter; ++c) {
        const double gate = in.at(r, c), up = in.at(r, inter + c);
        const double expected = gate / (1 + std::exp(-gate)) * up;
        ASSERT_NEAR(out.at(r, c), expected,
                    std::abs(expected) * (1e-6 + (type == DType::f32 ? 0 : rounding(type))) + 1e-30)
            << gate;
      }
    }
  }
}

TEST_P(RowsTest, exponentials_are_good_to_one_part_in_five_million) {
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

TEST_P(RowsTest, the_maximum_of_a_row_tells_of_nan) {
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

TEST_P(RowsTest, embed_gives_the_table_s_rows_in_the_weight_type) {
  Random random(11);
  const auto ops = make_ops(GetParam(), 2);
  for (const auto from : kWeightTypes) {
    for (const auto weight : kWeightTypes) {
      const int vocab = uniform(random, 1, 300), hidden = uniform(random, 1, 200);
      const auto table = Matrix::random(random, from, vocab, hidden);
      const auto embedding = ops->make_embedding(table.host(), weight);
      std::vector<std::int32_t> ids;
      for (int i = uniform(random, 1, 200); i > 0; --i) ids.push_back(uniform(random, 0, vocab - 1));
      Matrix out(DType::f32, static_cast<std::int64_t>(ids.size()), hidden);
      ops->embed(out.tensor(), *embedding, ids);
      Matrix rounded(weight, 1, 1);
      for (std::size_t i = 0; i < ids.size(); ++i) {
        for (int c = 0; c < hidden; ++c) {
          rounded.set(0, 0, table.at(ids[i], c));
          ASSERT_EQ(out.at(static_cast<std::int64_t>(i), c), rounded.at(0, 0));
        }
      }
      ids[0] = vocab;
      EXPECT_THROW(ops->embed(out.tensor(), *embedding, ids), Error);
    }
  }
}

TEST_P(RowsTest, conversions_of_every_half_are_exact_and_back_again) {
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

TEST_P(RowsTest, roundings_agree_with_the_scalar_ones) {
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

TEST(OpsMemoryTest, buffers_are_zero_and_hold_what_is_uploaded) {
  const auto ops = make_ops("", 1);
  for (const std::size_t bytes : {std::size_t{1}, std::size_t{5000}, std::size_t{9} << 20}) {
    const auto buffer = ops->allocate(bytes);
    ASSERT_EQ(buffer->bytes(), bytes);
    std::vector<std::byte> host(bytes, std::byte{1});
    ops->download(host.data(), buffer->data(), bytes);
    ASSERT_EQ(host, std::vector<std::byte>(bytes, std::byte{0}));
    std::fill(host.begin(), host.end(), std::byte{7});
    ops->upload(buffer->data(), host.data(), bytes);
    ASSERT_EQ(buffer->as<std::byte>()[bytes - 1], std::byte{7});
  }
}

TEST(OpsMemoryTest, gather_takes_the_rows_that_are_named) {
  Random random(13);
  const auto ops = make_ops("", 1);
  for (const auto type : kWeightTypes) {
    auto in = Matrix::random(random, type, 20, 33, 1, 2);
    const std::vector<std::int32_t> rows = {19, 0, 7, 7};
    Matrix out(type, 4, 33, 1);
    ops->gather_rows(out.tensor(), in.tensor(), rows);
    for (int i = 0; i < 4; ++i) EXPECT_TRUE(out.same_bits(i, in, rows[static_cast<std::size_t>(i)]));
    EXPECT_THROW(ops->gather_rows(out.tensor(), in.tensor(), std::vector<std::int32_t>{20}), Error);
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
