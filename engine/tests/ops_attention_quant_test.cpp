// The KV store and attention with a quantised cache of 8 or 4 bits: compared with references in double, and bitwise
// independence of the division into steps and of the batch.
#include <gtest/gtest.h>

#include <algorithm>
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

Shape with_bits(Shape shape, int bits) {
  shape.quant_bits = bits;
  return shape;
}

TEST_P(QuantisedAttentionTest, equals_attention_in_double_of_the_dequantised_values) {
  Random random(60);
  for (int trial = 0; trial < trials(GetParam(), 30); ++trial) {
    const auto shape = with_bits(random_shape(random), trial % 2 == 0 ? 8 : 4);
    expect_reference(random, GetParam(),
                     World(random, *make_ops(GetParam(), 1), shape,
                           {uniform(random, 1, 40), uniform(random, 1, trial % 5 == 0 ? 600 : 90)}));
  }
}

TEST_P(QuantisedAttentionTest, equals_it_in_every_variant) {
  Random random(61);
  for (int trial = 0; trial < trials(GetParam(), 30); ++trial) {
    const auto shape = with_bits(random_head(random), trial % 2 == 0 ? 8 : 4);
    const int length = uniform(random, 1, trial % 5 == 0 ? 600 : 150);
    const int kind = trial / 2 % 5;
    const Variant variant{.rotated = kind != 3,
                          .rotary_dim = kind == 0 ? 2 * uniform(random, 1, shape.head_dim / 2) : 0,
                          .row_shift = kind == 1 ? 3 : 0,
                          .normed = kind == 4,
                          .scaled = kind == 2 || kind == 4,
                          .window = trial % 3 == 0 ? random_window(random, shape, length) : 0,
                          .soft_cap = trial % 4 < 2 ? 0.0F : 2.0F,
                          .alibi = kind == 3};
    expect_reference(random, GetParam(),
                     World(random, *make_ops(GetParam(), 1), shape, {uniform(random, 1, 40), length}, variant));
  }
}

// The rows of a prefill also attend to each other through the integers.
TEST_P(QuantisedAttentionTest, bits_do_not_depend_on_chunks_batch_or_threads) {
  if (!traits(GetParam()).bitwise) GTEST_SKIP() << "the device does not promise it";
  Random random(62);
  const auto one = make_ops(GetParam(), 1), many = make_ops(GetParam(), 3);
  for (int trial = 0; trial < trials(GetParam(), 16); ++trial) {
    const auto shape = with_bits(trial % 3 == 0 ? random_shape(random) : random_head(random), trial % 2 == 0 ? 8 : 4);
    const int n = uniform(random, 2, trial % 4 == 0 ? 1500 : 120);
    const World world(random, *one, shape, {n, uniform(random, 1, 50), 17},
                      {.normed = trial % 5 == 0,
                       .window = trial % 4 == 3 ? random_window(random, shape, n) : 0,
                       .soft_cap = trial % 4 == 1 ? 5.0F : 0.0F});
    expect_chunks_change_nothing(random, *one, *many, world);
  }
}

TEST_P(QuantisedAttentionTest, a_head_that_is_not_finite_affects_only_its_own_sequence) {
  Random random(63);
  for (const int bits : {8, 4}) {
    for (const float odd : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
      const auto ops = make_ops(GetParam(), 2);
      const Shape shape{4, 2, 32, 16, DType::f32, bits};
      World world(random, *ops, shape, {20, 20});
      const auto cache = ops->make_kv_cache(world.layout(), world.blocks);
      const auto clean = world.step(*ops, *cache, {{1, 0, 20}}, ops->precision(DType::f32).activation).first;
      world.qkv[0].set(7, (shape.heads + shape.kv_heads + 1) * shape.head_dim + 3, odd);  // v of its second head
      const auto out = world.step(*ops, *cache, {{0, 0, 20}, {1, 0, 20}}, ops->precision(DType::f32).activation).first;
      EXPECT_TRUE(std::isnan(out.at(7, 3 * shape.head_dim))) << bits;
      EXPECT_TRUE(std::isnan(out.at(19, 3 * shape.head_dim))) << bits;
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

TEST_P(QuantisedAttentionTest, a_block_has_the_documented_size) {
  const auto ops = make_ops(GetParam(), 1);
  const auto bytes = [](int bits) { return KvLayout{32, 8, 128, 64, DType::bf16, bits}.block_bytes(); };
  EXPECT_EQ(bytes(0), std::size_t{32} * 8 * 64 * 2 * 256);
  EXPECT_EQ(bytes(8), std::size_t{32} * 8 * 64 * 2 * (128 + 4));
  EXPECT_EQ(bytes(4), std::size_t{32} * 8 * 64 * 2 * (64 + 4));
  EXPECT_THROW(ops->make_kv_cache({1, 1, 32, 16, DType::bf16, 5}, 2), Error);
}

}  // namespace
}  // namespace charonia::ops
