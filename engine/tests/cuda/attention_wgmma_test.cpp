// Attention of prompts with products of warpgroups (attention_wgmma_kernel.h), compared with double precision. Slots
// that no row attends to hold NaN, also within the boxes that the kernel copies.
#include <string_view>

#include "attention_kernel_world.h"
#include "charonia/error.h"

namespace charonia::cuda {
namespace {

class CudaWgmmaAttentionTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!device_info(0).wgmma) GTEST_SKIP() << "wgmma needs compute capability 9.0 and kernels for 90a";
  }
};

constexpr std::array kDims = {64, 128, 256};
constexpr std::array kLens = {8, 16, 32, 64, 128, 192};

World::Options options_of(const World& world) {
  auto options = world.options();
  options.wgmma = true;
  return options;
}

// Steps of several ragged sequences, of chunks after prefixes of any length, and of decodes: plain, and with windows,
// caps, slopes and sinks in all combinations.
TEST_F(CudaWgmmaAttentionTest, mixed_steps_equal_attention_in_double) {
  Random random(1);
  for (int trial = 0; trial < 36; ++trial) {
    const auto type = trial % 2 == 0 ? DType::bf16 : DType::f16;
    World world(random, shape_of(1 + trial % 2, one_of(random, kGroups), one_of(random, kDims), one_of(random, kLens)),
                type, {uniform(random, 1, 40), uniform(random, 2, 150), uniform(random, 60, 300)});
    if (trial % 3 != 0) world.weigh(random, 1 + trial % 15, trial % 4 == 0 ? 250 : 70);
    auto options = options_of(world);
    options.padding = trial % 3;
    options.plan_of_all = trial % 4 < 2;
    options.q_gap = trial % 5 == 0 ? world.shape.head_dim : 0;  // tensor maps may need a multiple of a head
    world.expect_reference(random, random_chunks(random, world.lengths), options);
    if (HasFatalFailure()) return;
  }
}

TEST_F(CudaWgmmaAttentionTest, every_group_of_heads_equals_attention_in_double) {
  Random random(2);
  for (const int group : {1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 20, 32, 48, 63, 64}) {
    const World world(random, shape_of(group < 8 ? 2 : 1, group, 64, 64), DType::bf16, {150, 70});
    world.expect_reference(random, {{1, 0, 70}, {0, 90, 150}}, options_of(world));
    if (HasFatalFailure()) return;
  }
}

// Tiles begin before windows, where tables have other sequences' blocks. These may hold NaN.
TEST_F(CudaWgmmaAttentionTest, values_of_blocks_before_a_window_are_not_used) {
  Random random(11);
  for (const int bits : {0, 8, ops::kKvFp8}) {
    for (const int dim : kDims) {
      for (const int block_len : {8, 16, 32}) {
        World world(random, shape_of(1, 3, dim, block_len), DType::bf16, {70, 260});
        world.window = dim == 128 ? 37 : 100;
        if (bits != 0) world.quantise(bits);
        auto options = options_of(world);
        options.plan_of_all = block_len == 16;
        world.expect_reference(random, {{0, 60, 70}, {1, 120, 260}}, options);
        if (HasFatalFailure()) return;
      }
    }
  }
}

// The last tile of an item ends at, before and after the end of a block, and of the tile's first half.
TEST_F(CudaWgmmaAttentionTest, prompts_of_any_length_equal_attention_in_double) {
  Random random(3);
  for (const int dim : kDims) {
    for (const int length : {2, 63, 64, 65, 127, 128, 129, 192, 193, 257}) {
      const World world(random, shape_of(1, 4, dim, 64), DType::bf16, {length});
      world.expect_reference(random, {{0, std::max(0, length - 40), length}}, options_of(world));
      if (HasFatalFailure()) return;
    }
  }
}

// Items are divided among thread blocks, whose results are combined. With a window some of them have no positions.
TEST_F(CudaWgmmaAttentionTest, rows_with_several_splits_are_correct) {
  Random random(4);
  for (const int dim : kDims) {
    for (const int window : {0, 700, 90}) {
      World world(random, shape_of(1, 3, dim, 64), DType::bf16, {1400, 1200, 50});
      world.window = window;
      if (window == 700 && dim != 64) continue;
      if (window == 90) world.weigh(random, 14, 1);
      for (const bool plan_of_all : {false, true}) {
        auto options = options_of(world);
        options.sms = 132;
        options.repeat = true;
        options.plan_of_all = plan_of_all;
        world.expect_reference(random, {{0, 1370, 1400}, {2, 9, 50}, {1, 1165, 1200}}, options);
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST_F(CudaWgmmaAttentionTest, many_splits_are_combined_in_sets) {
  Random random(5);
  const int n = (kCombinedSplits + 3) * 512;
  const World world(random, shape_of(1, 2, 64, 64), DType::f16, {n});
  auto options = options_of(world);
  options.sms = 132;
  options.repeat = true;
  world.expect_reference(random, {{0, n - 5, n}}, options);
}

// Each thread block takes several units: the rings of k and v continue over them.
TEST_F(CudaWgmmaAttentionTest, many_items_by_few_thread_blocks_are_correct) {
  Random random(6);
  for (const int dim : kDims) {
    std::vector<int> lengths;
    Chunks chunks;
    for (int s = 0; s < 9; ++s) {
      lengths.push_back(uniform(random, 2, s % 3 == 0 ? 300 : 70));
      chunks.push_back({s, uniform(random, 0, lengths.back() / 2), lengths.back()});
    }
    const World world(random, shape_of(2, 3, dim, 64), DType::bf16, lengths);
    auto options = options_of(world);
    options.sms = 2;
    world.expect_reference(random, chunks, options);
    if (HasFatalFailure()) return;
  }
}

// A chunk has the rows of a whole prompt, but other neighbours, so its bits may differ by rounding only.
TEST_F(CudaWgmmaAttentionTest, a_prompt_in_chunks_equals_attention_in_double) {
  Random random(7);
  const World world(random, shape_of(2, 4, 128, 64), DType::bf16, {400});
  for (const auto& [begin, end] : {std::pair{0, 37}, {37, 101}, {101, 300}, {300, 400}}) {
    world.expect_reference(random, {{0, begin, end}}, options_of(world));
    if (HasFatalFailure()) return;
  }
}

// Blocks of a quantised cache are copied in 16 bits first: rows have the bits of the same values in 16 bits.
TEST_F(CudaWgmmaAttentionTest, with_a_quantised_cache_rows_have_the_bits_of_its_values_in_16_bits) {
  Random random(10);
  for (int trial = 0; trial < 24; ++trial) {
    const auto type = trial % 4 < 2 ? DType::bf16 : DType::f16;
    const int dim = kDims[static_cast<std::size_t>(trial % 3)];
    World quantised(random, shape_of(1 + trial % 2, one_of(random, kGroups), dim, one_of(random, kLens)), type,
                    {uniform(random, 1, 40), uniform(random, 2, 150), uniform(random, 200, 300)});
    if (trial % 3 == 0) quantised.weigh(random, 1 + trial % 15, 120);
    quantised.quantise(std::array{8, 4, ops::kKvFp8}[static_cast<std::size_t>(trial / 2 % 3)]);
    auto plain = quantised;
    plain.quant_bits = 0;
    const auto chunks = random_chunks(random, quantised.lengths);
    const auto options = options_of(quantised);
    const auto got = quantised.run(chunks, options), expected = plain.run(chunks, options);
    int row = 0;
    for (const auto& chunk : chunks) {
      // Decodes may have other versions of their kernel.
      for (int i = chunk.begin; i < chunk.end; ++i, ++row) {
        if (chunk.end - chunk.begin < 3) continue;
        ASSERT_TRUE(got.same_bits(row, expected, row)) << "trial " << trial << ", row " << row;
      }
    }
    quantised.scale_values();
    quantised.expect_reference(random, chunks, options);
    if (HasFatalFailure()) return;
  }
}

TEST_F(CudaWgmmaAttentionTest, two_calls_with_the_same_input_have_the_same_bits) {
  Random random(8);
  const World world(random, shape_of(1, 4, 128, 64), DType::bf16, {70, 300});
  auto options = options_of(world);
  const Chunks chunks = {{0, 0, 70}, {1, 100, 300}};
  const auto first = world.run(chunks, options);
  options.repeat = true;
  const auto second = world.run(chunks, options);
  for (int row = 0; row < 270; ++row) ASSERT_TRUE(first.same_bits(row, second, row)) << row;
}

TEST_F(CudaWgmmaAttentionTest, layers_that_the_kernel_cannot_compute_are_named) {
  const auto device = device_info(0);
  const auto why = [&](int group, int dim, int block_len, DType type = DType::bf16, int bits = 0,
                       bool reproducible = false) {
    auto shape = shape_of(2, group, dim, block_len);
    shape.reproducible = reproducible;
    return std::string(why_no_wgmma(device, shape, {nullptr, type, 2, dim, block_len, bits}));
  };
  EXPECT_EQ(why(4, 128, 64), "");
  EXPECT_EQ(why(64, 64, 8, DType::f16), "");
  EXPECT_EQ(why(1, 256, 192), "");
  EXPECT_EQ(why(4, 96, 64), "it supports heads of 64, 128 and 256");
  EXPECT_EQ(why(65, 128, 64), "it supports groups of up to 64 heads");
  for (const int block_len : {4, 24, 96, 100}) {
    EXPECT_EQ(why(4, 128, block_len), "blocks must have a multiple of 64 slots, or 8, 16 or 32");
  }
  EXPECT_EQ(why(4, 128, 64, DType::f32), "it supports 16-bit types");
  for (const int bits : {4, 8, ops::kKvFp8}) EXPECT_EQ(why(4, 128, 64, DType::bf16, bits), "");
  EXPECT_EQ(why(4, 128, 64, DType::bf16, 0, true), "reproducible mode needs the sums of the other kernels");
  auto older = device;
  older.wgmma = false;
  EXPECT_EQ(why_no_wgmma(older, shape_of(2, 4, 128, 64), {nullptr, DType::bf16, 2, 128, 64}),
            "the device or this build has no wgmma");
}

TEST_F(CudaWgmmaAttentionTest, a_layer_that_the_kernel_cannot_compute_is_an_error) {
  Random random(9);
  const World world(random, shape_of(1, 2, 96, 64), DType::bf16, {70});
  try {
    (void)world.run({{0, 0, 70}}, options_of(world));
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "attention of prompts cannot use wgmma: it supports heads of 64, 128 and 256");
  }
}

}  // namespace
}  // namespace charonia::cuda
