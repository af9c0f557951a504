// Attention over blocks on the device, also of a quantised cache, compared with double precision; and its bitwise
// independence of the batch.
#include "attention_kernel_world.h"
#if defined(CHARONIA_CUDA_ON_HOST)
#include "ops/cuda/kernels/attention_tile.h"
#endif

namespace charonia::cuda {
namespace {

#if defined(CHARONIA_CUDA_ON_HOST)
template <int kUnits>
void check_layout() {
  const auto bank = [](int row, int unit) { return 1U << unit_offset<kUnits>(row, unit) / kUnitBytes % 8; };
  std::vector<int> uses(64 * kUnits, 0);
  for (int first = 0; first < 64 * kUnits; first += 8) {
    unsigned of_copy = 0, of_matrix = 0;
    for (int i = first; i < first + 8; ++i) {
      ++uses.at(static_cast<std::size_t>(unit_offset<kUnits>(i / kUnits, i % kUnits) / kUnitBytes));
      of_copy |= bank(i / kUnits, i % kUnits);
      of_matrix |= bank(first / 8 / kUnits * 8 + i % 8, first / 8 % kUnits);  // 8 rows of a unit
    }
    EXPECT_EQ(of_copy, 0xffU) << "a copy of 8 units from " << first;
    EXPECT_EQ(of_matrix, 0xffU) << "a matrix of 8 rows: " << first / 8;
  }
  EXPECT_EQ(uses, std::vector<int>(64 * kUnits, 1)) << "every unit has its own place";
  for (const int step : {4, 2}) {
    for (int i = 0; i < 8 * kUnits; ++i) {
      const int row = i / kUnits, by = i % kUnits / step * step, unit = i % step;
      EXPECT_EQ(unit_offset_by<kUnits>(unit_offset<kUnits>(row, unit), by), unit_offset<kUnits>(row, unit + by));
    }
  }
}

TEST(CudaAttentionTest, tiles_in_shared_memory_have_no_bank_conflicts) {
  check_layout<4>();
  check_layout<8>();
  check_layout<12>();
  check_layout<16>();
  check_layout<32>();
}
#endif

// Steps of prompts and decodes: plain, with a window, a cap, slopes or sinks, and of a quantised cache.
TEST(CudaAttentionTest, mixed_steps_equal_attention_in_double) {
  Random random(1);
  for (int trial = 0; trial < 68; ++trial) {
    const auto type = trial % 2 == 0 ? DType::bf16 : DType::f16;
    const int dim = kTiledDims[static_cast<std::size_t>(trial % 5)], kind = trial / 2 % 3;
    World world(random, shape_of(dim < 128 ? 2 : 1, one_of(random, kGroups), dim, one_of(random, kBlockLens)), type,
                {uniform(random, 1, 40), uniform(random, 1, 150), uniform(random, 60, 300)});
    if (kind == 1 || (kind == 2 && trial % 3 == 2)) world.weigh(random, 1 + trial % 15, trial % 4 == 0 ? 200 : 70);
    if (kind == 2) world.quantise(std::array{8, 4, ops::kKvFp8}[static_cast<std::size_t>(trial / 6 % 3)]);
    if (kind == 2 && trial % 2 == 0) world.scale_values();
    auto options = world.options();
    options.padding = trial % 3;
    options.plan_of_all = trial % 4 < 2;
    world.expect_reference(random, random_chunks(random, world.lengths), options);
    if (HasFatalFailure()) return;
  }
}

// Head sizes and types without tiles, and blocks of a quantised cache that are not all aligned to 16 bytes. If q and
// out are float, values are not rounded again.
TEST(CudaAttentionTest, any_head_size_and_element_type_is_correct_in_float) {
  Random random(6);
  constexpr std::array kDims = {2, 6, 16, 48, 80, 128};
  for (int trial = 0; trial < 48; ++trial) {
    const auto type = ops::kWeightTypes[static_cast<std::size_t>(trial % 3)];
    const bool quantised = trial % 4 == 3, odd_blocks = trial % 8 == 3;
    World world(random,
                odd_blocks ? shape_of(1, one_of(random, kGroups), 32, 3)
                        : shape_of(2, one_of(random, kGroups), one_of(random, kDims), one_of(random, kBlockLens)),
                type, {uniform(random, 1, 70), uniform(random, 30, 200)});
    if (trial % 5 >= 2) world.weigh(random, 1 + trial % 15, 80);
    if (quantised) world.quantise(std::array{4, 8, ops::kKvFp8}[static_cast<std::size_t>(trial / 8 % 3)]);
    if (quantised && trial % 8 == 7) world.scale_values();
    auto options = world.options();
    options.plain = true;
    options.out_type = quantised || trial % 2 == 0 ? DType::f32 : DType::bf16;
    if (!quantised && (trial % 4 == 0 || world.shape.head_dim == 128)) options.q_type = DType::f32;
    options.q_gap = quantised ? 0 : trial % 5;
    options.plan_of_all = trial % 3 == 0;
    world.expect_reference(random, random_chunks(random, world.lengths), options);
    if (HasFatalFailure()) return;
  }
}

// Each thread block takes many short units, and copies run ahead over several of them.
TEST(CudaAttentionTest, decodes_of_many_sequences_by_few_thread_blocks_are_correct) {
  Random random(9);
  for (const int dim : kTiledDims) {
    std::vector<int> lengths;
    Chunks chunks;
    for (int s = 0; s < 14; ++s) {
      lengths.push_back(s % 3 == 0 ? uniform(random, 1, 200) : uniform(random, 1, 64));
      chunks.push_back({s, lengths.back() - 1, lengths.back()});
    }
    const World world(random, shape_of(2, 2, dim, 24), DType::bf16, lengths);
    auto options = world.options();
    options.sms = 1;
    world.expect_reference(random, chunks, options);
  }
}

TEST(CudaAttentionTest, groups_that_fit_no_tile_are_correct) {
  Random random(2);
  for (const int group : {17, 40, 71, 130}) {
    const World world(random, shape_of(1, group, 32, 16), DType::bf16, {70, 34});
    world.expect_reference(random, {{0, 69, 70}, {1, 30, 34}}, world.options());
  }
}

// Tiles begin before windows, where tables have other sequences' blocks. These may hold NaN.
TEST(CudaAttentionTest, blocks_before_a_window_are_not_read) {
  Random random(15);
  for (const int bits : {0, 8, 4, ops::kKvFp8}) {
    for (const int dim : {64, 256}) {
      World world(random, shape_of(1, 3, dim, 16), DType::bf16, {140, 140});
      world.window = 20;
      if (bits != 0) world.quantise(bits);
      for (const bool plan_of_all : {false, true}) {
        auto options = world.options();
        options.plan_of_all = plan_of_all;
        world.expect_reference(random, {{0, 119, 120}, {1, 60, 140}}, options);
      }
    }
  }
}

// Rows of q that 16-byte copies cannot read use the plain kernel.
TEST(CudaAttentionTest, unaligned_rows_are_correct) {
  Random random(8);
  const World world(random, shape_of(1, 2, 64, 16), DType::bf16, {40});
  auto options = world.options();
  options.q_gap = 3;
  options.plain = true;
  world.expect_reference(random, {{0, 20, 40}}, options);
}

// Decodes and chunks whose positions are divided over thread blocks. With a window some splits lie before it, which
// must keep copies and products synchronised. More splits than one block combines are combined in sets.
TEST(CudaAttentionTest, rows_with_several_splits_are_correct) {
  Random random(3);
  constexpr int kMany = (kCombinedSplits + 3) * 256;
  struct Case {
    AttentionShape shape;
    DType type;
    std::vector<int> lengths;
    Chunks chunks;
    int window = 0, window_of_all = 0;  // window_of_all: with plan_of_all
  };
  const Chunks decodes = {{0, 1099, 1100}, {1, 699, 700}}, more = {{0, 1399, 1400}, {1, 1099, 1100}, {2, 49, 50}};
  const Case cases[] = {
      {shape_of(1, 3, 32, 20), DType::bf16, {1100, 700}, decodes},
      {shape_of(1, 3, 64, 20), DType::bf16, {1100, 700}, decodes},
      {shape_of(1, 3, 256, 20), DType::bf16, {1100, 700}, decodes},
      {shape_of(1, 2, 32, 64), DType::f16, {1300}, {{0, 1180, 1300}}},
      {shape_of(1, 3, 64, 20), DType::bf16, {1400, 1100, 50}, more, 700, 700},
      {shape_of(1, 3, 256, 20), DType::bf16, {1400, 1100, 50}, more, 90, 90},
      {shape_of(1, 2, 32, 64), DType::f16, {1700}, {{0, 1590, 1700}}, 1100, 100},
      {shape_of(2, 3, 32, 64), DType::bf16, {kMany, 40}, {{1, 39, 40}, {0, kMany - 1, kMany}}},
      {shape_of(1, 18, 96, 64), DType::bf16, {kMany, 40}, {{1, 39, 40}, {0, kMany - 1, kMany}}},
  };
  for (const auto& c : cases) {
    World world(random, c.shape, c.type, c.lengths);
    for (const bool reproducible : {false, true}) {
      for (const bool plan_of_all : {false, true}) {
        if (plan_of_all && c.window == 0) continue;
        if (reproducible && c.lengths[0] == kMany) continue;
        world.window = plan_of_all ? c.window_of_all : c.window;
        auto options = world.options();
        options.sms = 132;
        options.repeat = true;
        options.reproducible = reproducible;
        options.plan_of_all = plan_of_all;
        world.expect_reference(random, c.chunks, options);
        if (HasFatalFailure()) return;
      }
    }
  }
}

// CHARONIA_CUDA_DECODE_SPLIT: many short splits, of all kinds of caches. More splits than one block combines are
// combined in sets.
TEST(CudaAttentionTest, decodes_with_splits_of_64_positions_are_correct) {
  Random random(12);
  constexpr int kMany = (kCombinedSplits + 3) * 64;
  for (const int dim : kTiledDims) {
    for (const int bits : {0, 8, 4, ops::kKvFp8}) {
      auto shape = shape_of(1, 3, dim, 20);
      shape.min_decode_split = 64;
      World world(random, shape, DType::bf16, {dim == 64 ? kMany : 700, 130, 64});
      if (dim == 128) world.window = 300;
      if (bits != 0) world.quantise(bits);
      auto options = world.options();
      options.sms = 132;
      options.repeat = true;
      const int n = world.lengths[0];
      const Chunks decodes = {{0, n - 1, n}, {1, 129, 130}, {2, 63, 64}};
      const std::int32_t starts[] = {0, 1, 2, 3}, positions[] = {n - 1, 129, 63}, begin[] = {0, 0, 0};
      AttentionPlan plan;
      shape.sms = options.sms;
      plan_attention(shape, {starts, positions, {}, 0}, begin, plan);
      EXPECT_TRUE(std::ranges::any_of(plan.decode, [](const auto& item) { return item.kv_end - item.kv_begin == 64; }));
      world.expect_reference(random, decodes, options);
      if (HasFatalFailure()) return;
    }
  }
}

// Divides the sequence into steps of any sizes, next to other sequences, on devices that split its positions or not,
// with plans for other windows; then into decodes, alone and in a batch in which splits are not worthwhile.
TEST(CudaAttentionTest, reproducible_bits_do_not_depend_on_chunks_batch_or_splits) {
  Random random(4);
  struct Case {
    int dim, group, block_len, length, window = 0, quant_bits = 0;
    bool weighed = false;  // a cap, slopes and sinks
  };
  const Case cases[] = {{64, 2, 21, 1150},
                        {32, 5, 64, 560},
                        {256, 2, 21, 560},
                        {64, 2, 21, 1180, 600},
                        {32, 5, 21, 1180, 530, 0, true},
                        {256, 2, 21, 1180, 77, 0, true},
                        {64, 2, 21, 1180, 0, 0, true},
                        {64, 2, 24, 1150, 0, 8},
                        {64, 2, 24, 1150, 500, 4, true},
                        {128, 2, 24, 560, 0, 8},
                        {128, 2, 24, 560, 300, 4, true},
                        {64, 2, 24, 1150, 0, ops::kKvFp8},
                        {128, 2, 24, 560, 300, ops::kKvFp8, true}};
  for (const auto& c : cases) {
    const int n = c.length, begin = n - 60;
    World world(random, shape_of(1, c.group, c.dim, c.block_len), DType::bf16, {n, 90, 30});
    world.window = c.window;
    if (c.weighed) world.weigh(random, 14, 1);
    if (c.quant_bits != 0) world.quantise(c.quant_bits);
    auto options = world.options();
    options.reproducible = true;
    options.sms = 1;
    const auto whole = world.run({{0, begin, n}}, options);
    const auto expect_rows = [&](const Chunks& chunks, int row, int first, int end) {
      const auto out = world.run(chunks, options);
      for (int i = first; i < end; ++i, ++row) {
        ASSERT_TRUE(whole.same_bits(i - begin, out, row))
            << "head size " << c.dim << ", window " << c.window << ", bits " << c.quant_bits << ", position " << i
            << ", " << options.sms << " SMs, plan of all " << options.plan_of_all;
      }
    };
    for (int at = begin; at < n;) {
      const int end = std::min(n, at + (at == begin ? 1 : uniform(random, 1, 40)));
      options.sms = at % 2 == 0 ? 132 : 1;
      options.plan_of_all = at % 3 == 0;
      expect_rows({{1, 20, 21 + at % 60}, {0, at, end}, {2, 29, 30}}, 1 + at % 60, at, end);
      at = end;
    }
    for (const int position : {begin, n - 17, n - 1}) {
      const Chunk decode{0, position, position + 1};
      for (const int sms : {1, 132}) {
        options.sms = sms;
        for (const bool plan_of_all : {false, true}) {
          options.plan_of_all = plan_of_all;
          expect_rows({decode}, 0, position, position + 1);
        }
      }
      options.sms = 1;
      for (const int copy : {0, 5}) expect_rows(Chunks(6, decode), copy, position, position + 1);
    }
    if (HasFatalFailure()) return;
  }
}

TEST(CudaAttentionTest, decodes_with_one_split_have_the_bits_of_prefill_in_any_mode) {
  Random random(5);
  for (const int dim : kTiledDims) {
    const World world(random, shape_of(1, 4, dim, 16), dim == 96 ? DType::f16 : DType::bf16, {150});
    const auto whole = world.run({{0, 100, 150}}, world.options());
    for (const int position : {100, 127, 128, 149}) {
      ASSERT_TRUE(whole.same_bits(position - 100, world.run({{0, position, position + 1}}, world.options()), 0))
          << "head size " << dim << " position " << position;
    }
  }
}

// A span ends within the row, and with a window the item begins in the middle of a span: computed by one block, by
// many, as a decode, and as a row of a prompt.
TEST(CudaAttentionTest, reproducible_rows_over_several_spans_do_not_depend_on_splits) {
  Random random(16);
  const int n = kAttentionSpan + 3 * kAttentionChunk / 2;
  const Chunks both = {{0, n - 2, n}}, alone = {{0, n - 1, n}};
  World world(random, shape_of(1, 2, 32, 64), DType::bf16, {n});
  for (const int window : {0, kAttentionSpan - 700}) {
    world.window = window;
    auto options = world.options();
    options.reproducible = true;
    options.sms = 1;
    const auto whole = world.run(both, options);
    world.check(random, both, whole, false);
    ASSERT_TRUE(whole.same_bits(1, world.run(alone, options), 0)) << "a decode by one block, window " << window;
    options.sms = 132;
    options.repeat = true;
    const auto cut = world.run(both, options);
    ASSERT_TRUE(whole.same_bits(0, cut, 0) && whole.same_bits(1, cut, 1)) << "rows of a prompt, cut, " << window;
    for (const bool plan_of_all : {false, true}) {  // with splits before the window that have no positions
      options.plan_of_all = plan_of_all;
      ASSERT_TRUE(whole.same_bits(1, world.run(alone, options), 0)) << "a decode, cut, window " << window;
    }
  }
}

// A window that contains all positions uses the other version of the kernels.
TEST(CudaAttentionTest, a_window_of_all_positions_changes_no_bit) {
  Random random(14);
  for (const int dim : {64, 80}) {
    World world(random, shape_of(1, 4, dim, 16), DType::bf16, {150, 70});
    const Chunks chunks = {{0, 100, 150}, {1, 69, 70}};
    const auto plain = world.run(chunks, world.options());
    world.window = 150;
    const auto windowed = world.run(chunks, world.options());
    for (int row = 0; row < 51; ++row) ASSERT_TRUE(plain.same_bits(row, windowed, row)) << dim;
  }
}

// In reproducible mode the setting has no effect.
TEST(CudaAttentionTest, decodes_with_the_scales_of_k_outside_the_products_are_correct) {
  Random random(17);
  for (const int bits : {8, 4}) {
    for (const int dim : kTiledDims) {
      const auto type = dim % 64 == 0 ? DType::bf16 : DType::f16;
      World world(random, shape_of(2, 3, dim, 24), type, {700, 90, 1});
      if (dim != 128) world.weigh(random, dim / 32, 300);
      world.quantise(bits);
      const Chunks decodes = {{0, 699, 700}, {1, 89, 90}, {2, 0, 1}};
      auto options = world.options();
      options.repeat = true;
      options.reproducible = true;
      const auto reproducible = world.run(decodes, options);
      world.shape.k_outside = true;
      const auto same = world.run(decodes, options);
      for (int row = 0; row < 3; ++row) ASSERT_TRUE(reproducible.same_bits(row, same, row));
      options.reproducible = false;
      for (const int sms : {1, 132}) {
        options.sms = sms;
        world.expect_reference(random, decodes, options);
        if (HasFatalFailure()) return;
      }
    }
  }
}

// Compared with the same kernels over the same values in 16 bits: their tiles are equal bit by bit. In some rows the
// smallest element of k and of v is tiny compared with the others: a zero that cannot be folded (attention_quant.h).
TEST(CudaAttentionTest, with_a_quantised_cache_rows_have_the_bits_of_its_values_in_16_bits) {
  Random random(16);
  for (const int bits : {8, 4, ops::kKvFp8}) {
    for (const int dim : kTiledDims) {
      World quantised(random, shape_of(1, 3, dim, 32), dim == 64 ? DType::f16 : DType::bf16, {700, 90});
      for (int i = 0; i < 790; ++i) {
        const bool first = i < 700;
        auto& rows = quantised.qkv[first ? 0 : 1];
        for (int c = 3 * dim; c < rows.cols && (!first || (i % 96 >= 40 && i % 96 < 60)); ++c) {
          const int at = first ? i : i - 700;
          rows.set(at, c, c % dim == 5 ? 1.13e-5F : 0.01F + std::abs(rows.at(at, c)));
        }
      }
      quantised.quantise(bits);
      auto plain = quantised;
      plain.quant_bits = 0;
      plain.window = 1 << 20;  // selects the kernel version that a quantised cache uses
      const Chunks chunks = {{0, 690, 700}, {1, 89, 90}, {0, 650, 651}};
      for (const int sms : {1, 132}) {
        auto options = quantised.options();
        options.sms = sms;
        options.reproducible = dim != 96;
        const auto expected = plain.run(chunks, options), got = quantised.run(chunks, options);
        for (int row = 0; row < 12; ++row) {
          ASSERT_TRUE(expected.same_bits(row, got, row)) << bits << " bits, head size " << dim << ", row " << row;
        }
      }
    }
  }
}

}  // namespace
}  // namespace charonia::cuda
