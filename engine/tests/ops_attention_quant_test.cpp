// The KV store and attention with a quantised cache of 8 or 4 bits or in FP8: compared with references in double
// (ops_attention_variants_test.cpp has the variants), and values that are not finite.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "attention_checks.h"
#include "charonia/error.h"
#include "ops_support.h"

namespace charonia::ops {
namespace {

class QuantisedAttentionTest : public testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(Device, QuantisedAttentionTest, testing::ValuesIn(device_names()),
                         [](const auto& i) { return i.param; });

TEST_P(QuantisedAttentionTest, equals_attention_in_double_of_the_dequantised_values) {
  Random random(60);
  for (int trial = 0; trial < trials(GetParam(), 30); ++trial) {
    auto shape = random_shape(random);
    shape.quant_bits = std::array{8, 4, kKvFp8}[static_cast<std::size_t>(trial % 3)];
    expect_reference(random, GetParam(),
                     World(random, *make_ops(GetParam(), 1), shape,
                           {uniform(random, 1, 40), uniform(random, 1, trial % 5 == 0 ? 600 : 90)},
                           {.scaled_kv = trial % 2 == 0}));
  }
}

TEST_P(QuantisedAttentionTest, a_head_that_is_not_finite_affects_only_its_own_sequence) {
  Random random(63);
  for (const int bits : {8, 4, kKvFp8}) {
    for (const float odd : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
      if (bits == kKvFp8 && !std::isnan(odd)) continue;  // it becomes the largest number
      const auto ops = make_ops(GetParam(), 2);
      const Shape shape{4, 2, 32, 16, DType::f32, bits};
      World world(random, *ops, shape, {20, 20});
      const auto cache = ops->make_kv_cache(world.layout(), {world.blocks});
      const auto clean = world.step(*ops, *cache, {{1, 0, 20}}, ops->precision(DType::f32).activation).first;
      world.qkv[0].set(7, (shape.heads + shape.kv_heads + 1) * shape.head_dim + 3, odd);  // v of its second head
      const auto out = world.step(*ops, *cache, {{0, 0, 20}, {1, 0, 20}}, ops->precision(DType::f32).activation).first;
      EXPECT_TRUE(std::isnan(out.at(7, 3 * shape.head_dim + 3))) << bits;
      EXPECT_TRUE(std::isnan(out.at(19, 3 * shape.head_dim + 3))) << bits;
      EXPECT_TRUE(std::isfinite(out.at(19, 0))) << bits;
      // The next sequence that gets its block, whose unwritten slots still hold the value, must not be affected either.
      std::copy_n(world.tables.begin(), world.table_stride, world.tables.begin() + world.table_stride);
      const auto after = world.step(*ops, *cache, {{1, 0, 5}}, ops->precision(DType::f32).activation).first;
      for (int i = 0; i < 5; ++i) {
        for (std::int64_t c = 0; c < clean.cols; ++c) {
          ASSERT_NEAR(after.at(i, c), clean.at(i, c), 1e-4) << "row " << i << " column " << c;
        }
      }
    }
  }
}

// The weight of a single key is exactly 1.
TEST_P(QuantisedAttentionTest, all_fp8_codes_of_v_are_returned_and_large_values_saturate) {
  Random random(64);
  for (const auto type : kWeightTypes) {
    const auto ops = make_ops(GetParam(), 1);
    const Shape shape{2, 1, 256, 16, type, kKvFp8};
    World world(random, *ops, shape, {1});
    const int v = (shape.heads + shape.kv_heads) * shape.head_dim;
    const auto number = [](int code) {
      return code == 0xff ? 1e4F : e4m3_to_float(static_cast<std::uint8_t>(code));
    };
    for (int code = 0; code < 256; ++code) world.qkv[0].set(0, v + code, number(code));
    const auto cache = ops->make_kv_cache(world.layout(), {world.blocks});
    const auto out = world.step(*ops, *cache, {{0, 0, 1}}, ops->precision(type).activation).first;
    for (int i = 0; i < 2 * 256; ++i) {
      const float expected = std::min(number(i % 256), 448.0F), found = static_cast<float>(out.at(0, i));
      EXPECT_TRUE(found == expected || (std::isnan(found) && i % 256 == 0x7f)) << found << " of code " << i % 256;
    }
  }
}

TEST_P(QuantisedAttentionTest, a_block_has_the_documented_size) {
  const auto ops = make_ops(GetParam(), 1);
  const auto bytes = [](int bits) { return kv_layout(32, 8, 128, 64, DType::bf16, bits).block_bytes(CacheKind::full); };
  EXPECT_EQ(bytes(0), std::size_t{32} * 8 * 64 * 2 * 256);
  EXPECT_EQ(bytes(8), std::size_t{32} * 8 * 64 * 2 * (128 + 4));
  EXPECT_EQ(bytes(4), std::size_t{32} * 8 * 64 * 2 * (64 + 4));
  EXPECT_EQ(bytes(kKvFp8), std::size_t{32} * 8 * 64 * 2 * 128);
  EXPECT_THROW(ops->make_kv_cache(kv_layout(1, 1, 32, 16, DType::bf16, 5), {2}), Error);
}

}  // namespace
}  // namespace charonia::ops
