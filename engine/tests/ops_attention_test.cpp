// Rotation, the KV store and attention over blocks: compared with references in double, and bitwise independence of the
// division into steps and of the batch.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "attention_checks.h"
#include "charonia/error.h"
#include "ops_support.h"

namespace charonia::ops {
namespace {

class AttentionTest : public testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(Device, AttentionTest, testing::ValuesIn(device_names()),
                         [](const auto& i) { return i.param; });

TEST_P(AttentionTest, equals_attention_in_double) {
  Random random(4);
  for (int trial = 0; trial < trials(GetParam(), 25); ++trial) {
    expect_reference(random, GetParam(),
                     World(random, *make_ops(GetParam(), 1), random_shape(random),
                           {uniform(random, 1, 40), uniform(random, 1, trial % 5 == 0 ? 600 : 90)}),
                     true);
  }
}

TEST_P(AttentionTest, bits_do_not_depend_on_chunks_batch_or_threads) {
  if (!traits(GetParam()).bitwise) GTEST_SKIP() << "the device does not promise it";
  Random random(5);
  const auto one = make_ops(GetParam(), 1), many = make_ops(GetParam(), 3);
  for (int trial = 0; trial < trials(GetParam(), 15); ++trial) {
    const World world(random, *one, random_shape(random),
                      {uniform(random, 2, trial % 4 == 0 ? 700 : 120), uniform(random, 1, 50), 17});
    expect_chunks_change_nothing(random, *one, *many, world, trial % 2 == 0 ? 1 + trial / 2 : 60);
  }
}

// A device may distribute a long context over its threads.
TEST_P(AttentionTest, a_decode_over_a_long_context_equals_the_prefill_bit_by_bit) {
  if (!traits(GetParam()).bitwise) GTEST_SKIP() << "the device does not promise it";
  Random random(31);
  for (int trial = 0; trial < trials(GetParam(), 6); ++trial) {
    const auto one = make_ops(GetParam(), 1), many = make_ops(GetParam(), 1 + trial % 4 + 2);
    const int kv_heads = uniform(random, 1, 2);
    const Shape shape{kv_heads * uniform(random, 1, 3), kv_heads, trial < 3 ? 32 : 80,
                      std::array{16, 64, 100}[static_cast<std::size_t>(trial % 3)],
                      kWeightTypes[static_cast<std::size_t>(trial % 3)]};
    const int n = traits(GetParam()).effort < 1 ? 1100 : uniform(random, 1500, 2600);
    const World world(random, *one, shape, {n, 40});
    const auto out_type = one->precision(shape.weight).activation;
    const auto whole_cache = one->make_kv_cache(world.layout(), {world.blocks});
    const auto whole = world.step(*one, *whole_cache, {{0, 0, n}}, out_type).first;
    const auto cache = many->make_kv_cache(world.layout(), {world.blocks});
    world.step(*many, *cache, {{0, 0, n - 5}}, out_type);
    int other = 0;
    for (int position = n - 5; position < n; ++position) {
      std::vector<World::Chunk> chunks = {{0, position, position + 1}};
      if (position % 2 == 0) chunks.insert(chunks.begin(), {1, other, other + 7}), other += 7;
      const auto out = world.step(*many, *cache, chunks, out_type).first;
      ASSERT_TRUE(whole.same_bits(position, out, out.rows - 1)) << "position " << position << " of " << n;
    }
  }
}

// The block's previous owner left NaN in all of it.
TEST_P(AttentionTest, earlier_contents_of_a_block_change_no_bit) {
  Random random(32);
  const auto ops = make_ops(GetParam(), 2);
  for (const auto type : kWeightTypes) {
    for (const int block_len : {1, 3, 16, 17, 64}) {
      const Shape shape{4, 2, block_len == 16 ? 80 : 6, block_len, type};
      const int blocks = 1 + 40 / block_len, filled = blocks * block_len;
      World world(random, *ops, shape, {filled, filled});
      std::copy_n(world.tables.begin(), world.table_stride, world.tables.begin() + world.table_stride);
      const auto clean = ops->make_kv_cache(world.layout(), {world.blocks});
      const auto used = ops->make_kv_cache(world.layout(), {world.blocks});
      const auto out_type = ops->precision(shape.weight).activation;
      auto& odd = world.qkv[1];
      for (std::int64_t r = 0; r < odd.rows; ++r) {
        for (std::int64_t c = 0; c < odd.cols; ++c) odd.set(r, c, std::numeric_limits<float>::quiet_NaN());
      }
      world.step(*ops, *used, {{1, 0, filled}}, out_type);
      for (int begin = 0; begin < filled;) {
        const int end = std::min(filled, begin + 1 + begin % 7);
        const auto expected = world.step(*ops, *clean, {{0, begin, end}}, out_type).first;
        const auto out = world.step(*ops, *used, {{0, begin, end}}, out_type).first;
        for (int i = 0; i < end - begin; ++i) {
          for (std::int64_t c = 0; c < out.cols; ++c) ASSERT_TRUE(std::isfinite(out.at(i, c)));
          if (traits(GetParam()).bitwise) {
            ASSERT_TRUE(expected.same_bits(i, out, i)) << "position " << begin + i << ", block of " << block_len;
          }
        }
        begin = end;
      }
    }
  }
}

TEST_P(AttentionTest, a_block_table_that_is_too_short_is_rejected) {
  Random random(6);
  const auto ops = make_ops(GetParam(), 1);
  World world(random, *ops, {2, 1, 16, 4, DType::f32}, {9});
  const auto cache = ops->make_kv_cache(world.layout(), {world.blocks});
  world.table_stride = 2;
  EXPECT_THROW(world.step(*ops, *cache, {{0, 0, 9}}, DType::f32), Error);
}

TEST(KvLayoutTest, a_block_has_the_documented_size) {
  // Llama-2-7B in half precision: 64 MiB for a block of 128 tokens.
  EXPECT_EQ(kv_layout(32, 32, 128, 128, DType::f16).block_bytes(CacheKind::full), std::size_t{64} << 20);
}

}  // namespace
}  // namespace charonia::ops
