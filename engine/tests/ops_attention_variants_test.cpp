// The variations of model families on plain rotation and attention: a part of a head rotated or none, heads normalised,
// queries scaled by position, windows, caps and slopes; compared with references in double, and bitwise independence of
// the batch.
#include <gtest/gtest.h>

#include "attention_checks.h"
#include "charonia/error.h"
#include "ops_support.h"

namespace charonia::ops {
namespace {

class AttentionVariantsTest : public testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(Device, AttentionVariantsTest, testing::ValuesIn(device_names()),
                         [](const auto& i) { return i.param; });

TEST_P(AttentionVariantsTest, a_part_of_a_head_is_rotated) {
  Random random(40);
  for (int trial = 0; trial < trials(GetParam(), 12); ++trial) {
    const auto shape = random_head(random);
    const int rotary_dim = trial == 0 ? 2 : 2 * uniform(random, 1, shape.head_dim / 2);
    expect_reference(random, GetParam(),
                     World(random, *make_ops(GetParam(), 1), shape, {uniform(random, 1, 40), uniform(random, 1, 60)},
                           {.rotary_dim = rotary_dim}));
  }
}

TEST_P(AttentionVariantsTest, without_a_table_nothing_is_rotated) {
  Random random(41);
  for (int trial = 0; trial < trials(GetParam(), 6); ++trial) {
    expect_reference(random, GetParam(),
                     World(random, *make_ops(GetParam(), 1), random_head(random),
                           {uniform(random, 1, 40), uniform(random, 1, 60)}, {.rotated = false}));
  }
}

TEST_P(AttentionVariantsTest, a_row_may_be_rotated_by_another_row_of_the_table) {
  Random random(42);
  for (int trial = 0; trial < trials(GetParam(), 6); ++trial) {
    expect_reference(random, GetParam(),
                     World(random, *make_ops(GetParam(), 1), random_head(random),
                           {uniform(random, 1, 40), uniform(random, 1, 60)}, {.row_shift = 3}));
  }
}

TEST_P(AttentionVariantsTest, heads_are_normalised_before_and_scaled_after_the_rotation) {
  Random random(43);
  for (int trial = 0; trial < trials(GetParam(), 12); ++trial) {
    expect_reference(
        random, GetParam(),
        World(random, *make_ops(GetParam(), 1), random_head(random), {uniform(random, 1, 40), uniform(random, 1, 60)},
              {.normed = trial % 3 != 2, .scaled = trial % 3 != 0}));
  }
}

TEST_P(AttentionVariantsTest, pairs_may_be_interleaved) {
  Random random(50);
  for (int trial = 0; trial < trials(GetParam(), 12); ++trial) {
    const auto shape = random_head(random);
    expect_reference(
        random, GetParam(),
        World(
            random, *make_ops(GetParam(), 1), shape, {uniform(random, 1, 40), uniform(random, 1, 60)},
            {.rotary_dim = 2 * uniform(random, 1, shape.head_dim / 2), .interleaved = true, .normed = trial % 3 == 0}));
  }
}

TEST_P(AttentionVariantsTest, a_norm_may_come_after_the_rotation_or_be_of_all_heads) {
  Random random(51);
  for (int trial = 0; trial < trials(GetParam(), 12); ++trial) {
    expect_reference(
        random, GetParam(),
        World(random, *make_ops(GetParam(), 1), random_head(random), {uniform(random, 1, 40), uniform(random, 1, 60)},
              {.interleaved = trial % 4 == 3,
               .normed = true,
               .norm_after = trial % 2 == 0,
               .norm_rows = trial % 2 == 1,
               .scaled = trial % 3 == 0}));
  }
}

TEST_P(AttentionVariantsTest, a_query_attends_to_its_window) {
  Random random(44);
  for (int trial = 0; trial < trials(GetParam(), 20); ++trial) {
    const auto shape = random_head(random);
    const int length = uniform(random, 1, trial % 5 == 0 ? 600 : 150);
    expect_reference(random, GetParam(),
                     World(random, *make_ops(GetParam(), 1), shape, {uniform(random, 1, 40), length},
                           {.window = random_window(random, shape, length)}));
  }
}

TEST_P(AttentionVariantsTest, scores_are_capped) {
  Random random(45);
  for (int trial = 0; trial < trials(GetParam(), 10); ++trial) {
    const auto shape = random_head(random);
    expect_reference(random, GetParam(),
                     World(random, *make_ops(GetParam(), 1), shape, {uniform(random, 1, 40), uniform(random, 1, 90)},
                           {.window = trial % 2 == 0 ? 0 : random_window(random, shape, 50),
                            .soft_cap = std::array{0.5F, 2.0F, 50.0F}[static_cast<std::size_t>(trial % 3)]}));
  }
}

TEST_P(AttentionVariantsTest, slopes_lower_the_scores_of_far_keys) {
  Random random(46);
  for (int trial = 0; trial < trials(GetParam(), 10); ++trial) {
    expect_reference(random, GetParam(),
                     World(random, *make_ops(GetParam(), 1), random_head(random),
                           {uniform(random, 1, 40), uniform(random, 1, trial % 4 == 0 ? 600 : 90)},
                           {.rotated = false, .soft_cap = trial % 3 == 2 ? 2.0F : 0.0F, .alibi = true}));
  }
}

// All variants together or some of them: one prefill with one thread, compared with chunks and decodes in batches.
TEST_P(AttentionVariantsTest, bits_do_not_depend_on_chunks_batch_or_threads) {
  if (!traits(GetParam()).bitwise) GTEST_SKIP() << "the device does not promise it";
  Random random(47);
  const auto one = make_ops(GetParam(), 1), many = make_ops(GetParam(), 3);
  for (int trial = 0; trial < trials(GetParam(), 16); ++trial) {
    const auto shape = random_head(random);
    const int n = uniform(random, 2, trial % 4 == 0 ? 700 : 120);
    const World world(random, *one, shape, {n, uniform(random, 1, 50), 17},
                      {.rotated = trial % 5 != 0,
                       .rotary_dim = 2 * uniform(random, 1, shape.head_dim / 2),
                       .row_shift = trial % 3,
                       .interleaved = trial % 7 < 3,
                       .normed = trial % 2 == 0,
                       .norm_after = trial % 6 == 2,
                       .norm_rows = trial % 6 == 4,
                       .scaled = trial % 3 == 0,
                       .window = trial % 4 == 3 ? 0 : random_window(random, shape, n),
                       .soft_cap = trial % 4 == 1 ? 5.0F : 0.0F,
                       .alibi = trial % 5 == 0});
    expect_chunks_change_nothing(random, *one, *many, world);
  }
}

TEST_P(AttentionVariantsTest, keys_before_the_window_do_not_count) {
  Random random(48);
  const auto ops = make_ops(GetParam(), 2);
  for (int trial = 0; trial < trials(GetParam(), 8); ++trial) {
    auto shape = random_head(random);
    const int length = uniform(random, 2 * shape.block_len, 5 * shape.block_len);
    const int window = uniform(random, 1, shape.block_len);
    World world(random, *ops, shape, {length, length}, {.window = window});
    const auto cache = ops->make_kv_cache(world.layout(), world.blocks);
    const auto out_type = ops->precision(shape.weight).activation;
    world.step(*ops, *cache, {{0, 0, length}, {1, 0, length}}, out_type);
    const auto before = world.step(*ops, *cache, {{0, length - 1, length}}, out_type).first;
    // The blocks completely before the window now belong to the other sequence.
    const int outside = std::max(0, length - window) / shape.block_len;
    ASSERT_GT(outside, 0);
    for (int b = 0; b < outside; ++b) {
      world.tables[static_cast<std::size_t>(b)] = world.tables[static_cast<std::size_t>(world.table_stride + b)];
    }
    const auto after = world.step(*ops, *cache, {{0, length - 1, length}}, out_type).first;
    ASSERT_TRUE(before.same_bits(0, after, 0)) << "length " << length << ", window " << window;
  }
}

TEST_P(AttentionVariantsTest, invalid_parameters_are_rejected) {
  Random random(49);
  const auto ops = make_ops(GetParam(), 1);
  const Shape shape{2, 1, 16, 4, DType::f32};
  const auto refused = [&](const Variant& variant) {
    const World world(random, *ops, shape, {9}, variant);
    const auto cache = ops->make_kv_cache(world.layout(), world.blocks);
    try {
      world.step(*ops, *cache, {{0, 0, 9}}, ops->precision(DType::f32).activation);
    } catch (const Error& error) {
      if (error.code() == ErrorCode::unsupported) throw;
      return error.code() == ErrorCode::internal;
    }
    return false;
  };
  EXPECT_TRUE(refused({.rotary_dim = 18}));
  EXPECT_TRUE(refused({.rotary_dim = 5}));
  EXPECT_TRUE(refused({.window = -1}));
  EXPECT_FALSE(refused({}));

  const std::vector<std::int32_t> ids = {0, 0}, starts = {0, 2}, at = {0, 1}, table = {0}, one_row = {0},
                                  negative = {0, -1};
  EXPECT_THROW(
      ops->begin_step({.ids = ids, .attention = {starts, at, table, 1, one_row}, .logits_rows = {}, .sample = {}}),
      Error);
  EXPECT_THROW(
      ops->begin_step({.ids = ids, .attention = {starts, at, table, 1, negative}, .logits_rows = {}, .sample = {}}),
      Error);
}

}  // namespace
}  // namespace charonia::ops
