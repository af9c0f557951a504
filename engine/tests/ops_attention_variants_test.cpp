// The variations of model families on plain rotation and attention: a part of a head rotated or none, heads normalised,
// queries scaled by position, windows, caps, slopes and sinks; compared with references in double, and bitwise
// independence of the batch.
#include <gtest/gtest.h>

#include "attention_checks.h"
#include "charonia/error.h"
#include "ops_support.h"

namespace charonia::ops {
namespace {

class AttentionVariantsTest : public testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(Device, AttentionVariantsTest, testing::ValuesIn(device_names()),
                         [](const auto& i) { return i.param; });

// Each kind of variant alone, with some others beside it; and integers in the cache.
enum class Variation { part, unrotated, other_row, normed, interleaved, norm_place, values, window, cap, alibi, sinks };

Variant variant_of(Random& random, Variation kind, const Shape& shape, int length, int trial) {
  const int some_pairs = 2 * uniform(random, 1, shape.head_dim / 2), window = random_window(random, shape, length);
  switch (kind) {
    case Variation::part:
      return {.rotary_dim = trial == 0 ? 2 : some_pairs};
    case Variation::unrotated:
      return {.rotated = false};
    case Variation::other_row:
      return {.row_shift = 3};
    case Variation::normed:
      return {.normed = trial % 3 != 2, .scaled = trial % 3 != 0};
    case Variation::interleaved:
      return {.rotary_dim = some_pairs, .interleaved = true, .normed = trial % 3 == 0};
    case Variation::norm_place:
      return {.interleaved = trial % 4 == 3,
              .normed = true,
              .norm_after = trial % 2 == 0,
              .norm_rows = trial % 2 == 1,
              .scaled = trial % 3 == 0};
    case Variation::values:
      return {.normed = true, .norm_after = trial % 4 == 1, .v_norm = trial % 3 != 0, .v_from_k = trial % 3 != 1};
    case Variation::window:
      return {.window = window};
    case Variation::cap:
      return {.window = trial % 2 == 0 ? 0 : window,
              .soft_cap = std::array{0.5F, 2.0F, 50.0F}[static_cast<std::size_t>(trial % 3)]};
    case Variation::alibi:
      return {.rotated = false, .soft_cap = trial % 3 == 2 ? 2.0F : 0.0F, .alibi = true};
    case Variation::sinks:
      return {.window = trial % 2 == 0 ? 0 : window, .soft_cap = trial % 5 == 2 ? 2.0F : 0.0F, .sinks = true};
  }
  return {};
}

TEST_P(AttentionVariantsTest, equals_attention_in_double_in_every_variant) {
  Random random(40);
  for (const auto kind :
       {Variation::part, Variation::unrotated, Variation::other_row, Variation::normed, Variation::interleaved,
        Variation::norm_place, Variation::values, Variation::window, Variation::cap, Variation::alibi,
        Variation::sinks}) {
    SCOPED_TRACE(static_cast<int>(kind));
    for (int trial = 0; trial < trials(GetParam(), 18); ++trial) {
      auto shape = random_head(random);
      shape.quant_bits = std::array{0, 8, 0, 4, kKvFp8}[static_cast<std::size_t>(trial % 5)];
      const int length = uniform(random, 1, trial % 5 == 0 ? 600 : 120);
      const auto variant = variant_of(random, kind, shape, length, trial);
      expect_reference(random, GetParam(),
                       World(random, *make_ops(GetParam(), 1), shape, {uniform(random, 1, 40), length}, variant));
    }
  }
}

// All variants together or some of them: one prefill with one thread, compared with chunks and decodes in batches. With
// integers in the cache, the rows of a prefill attend to each other through them.
TEST_P(AttentionVariantsTest, bits_do_not_depend_on_chunks_batch_or_threads) {
  if (!traits(GetParam()).bitwise) GTEST_SKIP() << "the device does not promise it";
  Random random(47);
  const auto one = make_ops(GetParam(), 1), many = make_ops(GetParam(), 3);
  for (int trial = 0; trial < trials(GetParam(), 32); ++trial) {
    auto shape = trial % 3 == 0 ? random_shape(random) : random_head(random);
    shape.quant_bits = std::array{0, 8, kKvFp8, 4}[static_cast<std::size_t>(trial / 4 % 4)];
    const int n = uniform(random, 2, trial % 4 == 0 ? 700 : 120);
    const World world(random, *one, shape, {n, uniform(random, 1, 50), 17},
                      {.rotated = trial % 5 != 0,
                       .rotary_dim = 2 * uniform(random, 1, shape.head_dim / 2),
                       .row_shift = trial % 3,
                       .interleaved = trial % 7 < 3,
                       .normed = trial % 2 == 0,
                       .norm_after = trial % 6 == 2,
                       .norm_rows = trial % 6 == 4,
                       .v_norm = trial % 4 == 0,
                       .v_from_k = trial % 6 != 4 && trial % 5 < 2,
                       .scaled = trial % 3 == 0,
                       .window = trial % 4 == 3 ? 0 : random_window(random, shape, n),
                       .soft_cap = trial % 4 == 1 ? 5.0F : 0.0F,
                       .alibi = trial % 5 == 0,
                       .sinks = trial % 3 == 1,
                       .scaled_kv = trial % 2 == 1});
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
    const auto cache = ops->make_kv_cache(world.layout(), {world.blocks});
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
    const auto cache = ops->make_kv_cache(world.layout(), {world.blocks});
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
      ops->begin_step({.ids = ids, .attention = {starts, at, {table}, 1, one_row}, .logits_rows = {}, .sample = {}}),
      Error);
  EXPECT_THROW(
      ops->begin_step({.ids = ids, .attention = {starts, at, {table}, 1, negative}, .logits_rows = {}, .sample = {}}),
      Error);
}

}  // namespace
}  // namespace charonia::ops
