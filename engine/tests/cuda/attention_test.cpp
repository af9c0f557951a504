// Attention over blocks on the device, compared with double precision; and its bitwise independence of the batch.
#include "attention_kernel_world.h"
#if defined(CHARONIA_CUDA_ON_HOST)
#include "ops/cuda/kernels/attention_tile.h"
#endif

namespace charonia::cuda {
namespace {

#if defined(CHARONIA_CUDA_ON_HOST)
template <int kUnits>
void check_layout() {
  std::vector<int> uses(64 * kUnits, 0);
  for (int row = 0; row < 64; ++row) {
    for (int unit = 0; unit < kUnits; ++unit)
      ++uses.at(static_cast<std::size_t>(unit_offset<kUnits>(row, unit) / kUnitBytes));
  }
  EXPECT_EQ(std::count(uses.begin(), uses.end(), 1), 64 * kUnits) << "every unit has its own place";
  const auto bank = [](int offset) { return 1U << offset / kUnitBytes % 8; };
  for (int row = 0; row < 64; row += 8) {
    for (int unit = 0; unit < kUnits; ++unit) {
      unsigned banks = 0;
      for (int i = 0; i < 8; ++i) banks |= bank(unit_offset<kUnits>(row + i, unit));
      EXPECT_EQ(banks, 0xffU) << "a matrix of 8 rows: " << row << ' ' << unit;
    }
  }
  for (int first = 0; first < 64 * kUnits; first += 8) {
    unsigned banks = 0;
    for (int i = first; i < first + 8; ++i) banks |= bank(unit_offset<kUnits>(i / kUnits, i % kUnits));
    EXPECT_EQ(banks, 0xffU) << "a copy of 8 units from " << first;
  }
  for (int row = 0; row < 8; ++row) {
    for (int by = 0; by < kUnits; by += 4) {
      for (int unit = 0; unit < 4; ++unit) {
        EXPECT_EQ(unit_offset_by<kUnits>(unit_offset<kUnits>(row, unit), by), unit_offset<kUnits>(row, unit + by));
      }
    }
    for (int by = 0; by < kUnits; by += 2) {
      for (int unit = 0; unit < 2; ++unit) {
        EXPECT_EQ(unit_offset_by<kUnits>(unit_offset<kUnits>(row, unit), by), unit_offset<kUnits>(row, unit + by));
      }
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

TEST(CudaAttentionTest, mixed_steps_equal_attention_in_double) {
  Random random(1);
  for (int trial = 0; trial < 20; ++trial) {
    const auto type = trial % 2 == 0 ? DType::bf16 : DType::f16;
    const int dim = kTiledDims[static_cast<std::size_t>(trial % 5)];
    const World world(random, shape_of(dim < 128 ? 2 : 1, one_of(random, kGroups), dim, one_of(random, kBlockLens)),
                      type, {uniform(random, 1, 40), uniform(random, 1, 150), uniform(random, 60, 200)});
    const auto chunks = random_chunks(random, world.lengths);
    auto options = world.options();
    options.padding = trial % 3;
    in_both_orders([&] {
      const auto out = world.run(chunks, options);
      world.check(random, chunks, out, ops::rounding(type), ops::rounding(type));
    });
  }
}

// Each thread block takes many short units, and copies run ahead over several of them.
TEST(CudaAttentionTest, decodes_of_many_sequences_by_few_thread_blocks_are_correct) {
  Random random(9);
  for (const int dim : kTiledDims) {
    std::vector<int> lengths;
    std::vector<Chunk> chunks;
    for (int s = 0; s < 14; ++s) {
      lengths.push_back(s % 3 == 0 ? uniform(random, 1, 200) : uniform(random, 1, 64));
      chunks.push_back({s, lengths.back() - 1, lengths.back()});
    }
    const World world(random, shape_of(2, 2, dim, 24), DType::bf16, lengths);
    auto options = world.options();
    options.sms = 1;
    in_both_orders([&] {
      const auto out = world.run(chunks, options);
      world.check(random, chunks, out, ops::rounding(DType::bf16), ops::rounding(DType::bf16));
    });
  }
}

TEST(CudaAttentionTest, groups_that_fit_no_tile_are_correct) {
  Random random(2);
  for (const int group : {17, 40, 71, 130}) {
    const World world(random, shape_of(1, group, 32, 16), DType::bf16, {70, 34});
    const std::vector<Chunk> chunks = {{0, 69, 70}, {1, 30, 34}};
    world.check(random, chunks, world.run(chunks, world.options()), ops::rounding(DType::bf16),
                ops::rounding(DType::bf16));
  }
}

TEST(CudaAttentionTest, rows_with_several_splits_are_correct) {
  Random random(3);
  for (const bool reproducible : {false, true}) {
    for (const int dim : {32, 64, 256}) {
      const World world(random, shape_of(1, 3, dim, 20), DType::bf16, {1100, 700});
      const std::vector<Chunk> chunks = {{0, 1099, 1100}, {1, 699, 700}};
      auto options = world.options();
      options.sms = 132;
      options.reproducible = reproducible;
      options.repeat = true;  // the first run must reset the counters
      world.check(random, chunks, world.run(chunks, options), ops::rounding(DType::bf16), ops::rounding(DType::bf16));
    }
    const World world(random, shape_of(1, 2, 32, 64), DType::f16, {1300});
    const std::vector<Chunk> chunks = {{0, 1180, 1300}};
    auto options = world.options();
    options.sms = 132;
    options.reproducible = reproducible;
    options.repeat = true;
    in_both_orders([&] {
      world.check(random, chunks, world.run(chunks, options), ops::rounding(DType::f16), ops::rounding(DType::f16));
    });
  }
}

// Divides the sequence into steps of any sizes, next to other sequences, on devices that split its positions or not.
TEST(CudaAttentionTest, reproducible_bits_do_not_depend_on_chunks_batch_or_splits) {
  Random random(4);
  for (const int trial : {0, 1, 2}) {
    const int dim = trial == 0 ? 64 : trial == 1 ? 32 : 256;
    const int n = trial == 0 ? 1150 : 560;
    const World world(random, shape_of(1, trial == 1 ? 5 : 2, dim, trial == 1 ? 64 : 21), DType::bf16, {n, 90, 30});
    auto options = world.options();
    options.reproducible = true;
    options.sms = 1;
    const int begin = n - 60;  // earlier rows are computed by other tests
    const auto whole = world.run({{0, begin, n}}, options);
    for (int at = begin; at < n;) {
      const int end = std::min(n, at + (at == begin ? 1 : uniform(random, 1, 40)));
      options.sms = at % 2 == 0 ? 132 : 1;
      const auto out = world.run({{1, 20, 21 + at % 60}, {0, at, end}, {2, 29, 30}}, options);
      for (int i = at; i < end; ++i) {
        ASSERT_TRUE(whole.same_bits(i - begin, out, 1 + at % 60 + i - at)) << "head size " << dim << " position " << i;
      }
      at = end;
    }
    // Decodes, with and without splits.
    for (const int position : {begin, n - 1}) {
      for (const int sms : {1, 132}) {
        options.sms = sms;
        const auto out = world.run({{0, position, position + 1}}, options);
        ASSERT_TRUE(whole.same_bits(position - begin, out, 0)) << "head size " << dim << " decode at " << position;
      }
      // With this many sequences, splits are not worthwhile.
      options.sms = 1;
      const auto out = world.run(std::vector<Chunk>(6, {0, position, position + 1}), options);
      for (int copy = 0; copy < 6; ++copy) {
        ASSERT_TRUE(whole.same_bits(position - begin, out, copy)) << "head size " << dim << " decode at " << position;
      }
    }
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

TEST(CudaAttentionTest, any_head_size_and_element_type_is_correct_in_float) {
  Random random(6);
  constexpr std::array kDims = {2, 16, 48, 80, 128};
  constexpr std::array kTypes = {DType::f32, DType::bf16, DType::f16};
  for (int trial = 0; trial < 12; ++trial) {
    const World world(random, shape_of(2, one_of(random, kGroups), one_of(random, kDims), one_of(random, kBlockLens)),
                      kTypes[static_cast<std::size_t>(trial % 3)], {uniform(random, 1, 70), uniform(random, 30, 150)});
    auto options = world.options();
    // If q and out are float, values are not rounded again.
    options.out_type = trial % 2 == 0 ? DType::f32 : DType::bf16;
    if (trial % 4 == 0) options.q_type = DType::f32;
    options.q_gap = trial % 5;
    const auto chunks = random_chunks(random, world.lengths);
    in_both_orders([&] {
      world.check(random, chunks, world.run(chunks, options), 0,
                  options.out_type == DType::f32 ? 0 : ops::rounding(options.out_type));
    });
  }
}

TEST(CudaAttentionTest, the_plain_kernel_does_not_depend_on_chunks_batch_or_splits) {
  Random random(7);
  const World world(random, shape_of(1, 2, 40, 20), DType::f32, {1030, 20});
  auto options = world.options();
  const auto whole = world.run({{0, 1000, 1030}}, options);
  options.sms = 132;
  ASSERT_TRUE(whole.same_bits(29, world.run({{1, 3, 20}, {0, 1029, 1030}}, options), 17));
  ASSERT_TRUE(whole.same_bits(12, world.run({{0, 1012, 1014}}, options), 0));
}

TEST(CudaAttentionTest, windows_caps_and_slopes_equal_attention_in_double) {
  Random random(10);
  for (int trial = 0; trial < 28; ++trial) {
    const auto type = trial % 2 == 0 ? DType::bf16 : DType::f16;
    const int dim = kTiledDims[static_cast<std::size_t>(trial % 5)];
    World world(random, shape_of(dim < 128 ? 2 : 1, one_of(random, kGroups), dim, one_of(random, kBlockLens)), type,
                {uniform(random, 1, 40), uniform(random, 1, 150), uniform(random, 100, 300)});
    world.weigh(random, 1 + trial % 7, trial % 3 == 0 ? 200 : 70);
    const auto chunks = random_chunks(random, world.lengths);
    auto options = world.options();
    options.padding = trial % 3;
    options.plan_of_all = trial % 2 == 0;
    in_both_orders([&] {
      const auto out = world.run(chunks, options);
      world.check(random, chunks, out, ops::rounding(type), ops::rounding(type));
    });
  }
}

TEST(CudaAttentionTest, windows_caps_and_slopes_are_correct_in_the_plain_kernel) {
  Random random(11);
  constexpr std::array kDims = {2, 16, 80, 128};
  constexpr std::array kTypes = {DType::f32, DType::bf16, DType::f16};
  for (int trial = 0; trial < 21; ++trial) {
    World world(random, shape_of(2, one_of(random, kGroups), one_of(random, kDims), one_of(random, kBlockLens)),
                kTypes[static_cast<std::size_t>(trial % 3)], {uniform(random, 1, 70), uniform(random, 100, 200)});
    world.weigh(random, 1 + trial % 7, 80);
    auto options = world.options();
    options.out_type = DType::f32;
    options.q_type = DType::f32;
    options.plan_of_all = trial % 2 == 0;
    const auto chunks = random_chunks(random, world.lengths);
    in_both_orders([&] { world.check(random, chunks, world.run(chunks, options), 0, 0); });
  }
}

// Many short units; some are splits before the window, which must keep copies and products synchronised.
TEST(CudaAttentionTest, rows_with_splits_in_a_window_are_correct) {
  Random random(12);
  for (const bool reproducible : {false, true}) {
    for (const bool plan_of_all : {false, true}) {
      for (const int dim : {64, 256}) {
        World world(random, shape_of(1, 3, dim, 20), DType::bf16, {1400, 1100, 50});
        world.window = dim == 64 ? 700 : 90;
        const std::vector<Chunk> chunks = {{0, 1399, 1400}, {1, 1099, 1100}, {2, 49, 50}};
        auto options = world.options();
        options.sms = 132;
        options.reproducible = reproducible;
        options.plan_of_all = plan_of_all;
        options.repeat = true;
        world.check(random, chunks, world.run(chunks, options), ops::rounding(DType::bf16), ops::rounding(DType::bf16));
      }
      World world(random, shape_of(1, 2, 32, 64), DType::f16, {1700});
      world.window = plan_of_all ? 100 : 1100;
      const std::vector<Chunk> chunks = {{0, 1590, 1700}};
      auto options = world.options();
      options.sms = 132;
      options.reproducible = reproducible;
      options.plan_of_all = plan_of_all;
      options.repeat = true;
      in_both_orders([&] {
        world.check(random, chunks, world.run(chunks, options), ops::rounding(DType::f16), ops::rounding(DType::f16));
      });
    }
  }
}

TEST(CudaAttentionTest, reproducible_bits_do_not_depend_on_splits_or_the_widest_window) {
  Random random(13);
  for (const int trial : {0, 1, 2, 3}) {
    const int n = 1180, begin = n - 50;
    World world(random,
                shape_of(1, trial == 1 ? 5 : 2,
                         trial == 2   ? 256
                         : trial == 1 ? 32
                                      : 64,
                         21),
                DType::bf16, {n, 90});
    world.window = trial == 3 ? 0 : std::array{600, 530, 77}[static_cast<std::size_t>(trial)];
    if (trial != 0) {
      world.soft_cap = 2;
      world.slopes.assign(static_cast<std::size_t>(world.shape.heads), 0.01F);
    }
    auto options = world.options();
    options.reproducible = true;
    options.sms = 1;
    const auto whole = world.run({{0, begin, n}}, options);
    for (int at = begin; at < n;) {
      const int end = std::min(n, at + (at == begin ? 1 : uniform(random, 1, 40)));
      options.sms = at % 2 == 0 ? 132 : 1;
      options.plan_of_all = at % 3 == 0;
      const auto out = world.run({{1, 20, 40}, {0, at, end}}, options);
      for (int i = at; i < end; ++i) ASSERT_TRUE(whole.same_bits(i - begin, out, 20 + i - at)) << trial << ' ' << i;
      at = end;
    }
    for (const int position : {begin, n - 17, n - 1}) {
      for (const int sms : {1, 132}) {
        for (const bool plan_of_all : {false, true}) {
          options.sms = sms;
          options.plan_of_all = plan_of_all;
          const auto out = world.run({{0, position, position + 1}}, options);
          ASSERT_TRUE(whole.same_bits(position - begin, out, 0)) << trial << " decode at " << position;
        }
      }
    }
  }
}

// More splits than one thread block combines: sets of them in parallel, then the sets.
TEST(CudaAttentionTest, rows_with_more_splits_than_a_block_combines_are_correct) {
  Random random(15);
  for (const int dim : {32, 96}) {
    const int n = (kCombinedSplits + 3) * 256;
    const World world(random, shape_of(dim == 32 ? 2 : 1, dim == 32 ? 3 : 18, dim, 64), DType::bf16, {n, 40});
    const std::vector<Chunk> chunks = {{1, 39, 40}, {0, n - 1, n}};
    auto options = world.options();
    options.sms = 132;
    options.repeat = true;  // the counters are zero again
    in_both_orders([&] {
      world.check(random, chunks, world.run(chunks, options), ops::rounding(DType::bf16), ops::rounding(DType::bf16));
    });
  }
}

// A span ends within the row, and with a window the item begins in the middle of a span: computed by one block, by
// many, as a decode, and as a row of a prompt.
TEST(CudaAttentionTest, reproducible_rows_over_several_spans_do_not_depend_on_splits) {
  Random random(16);
  for (const int window : {0, kAttentionSpan - 700}) {
    const int n = kAttentionSpan + 3 * kAttentionChunk / 2;
    World world(random, shape_of(1, 2, 32, 64), DType::bf16, {n});
    world.window = window;
    auto options = world.options();
    options.reproducible = true;
    options.sms = 1;
    const auto whole = world.run({{0, n - 2, n}}, options);
    world.check(random, {{0, n - 2, n}}, whole, ops::rounding(DType::bf16), ops::rounding(DType::bf16));
    const auto alone = world.run({{0, n - 1, n}}, options);
    ASSERT_TRUE(whole.same_bits(1, alone, 0)) << "a decode by one block, window " << window;
    options.sms = 132;
    options.repeat = true;
    const auto cut = world.run({{0, n - 2, n}}, options);
    ASSERT_TRUE(whole.same_bits(0, cut, 0) && whole.same_bits(1, cut, 1)) << "rows of a prompt, cut, " << window;
    const auto cut_alone = world.run({{0, n - 1, n}}, options);
    ASSERT_TRUE(whole.same_bits(1, cut_alone, 0)) << "a decode, cut, window " << window;
    if (window == 0) continue;
    options.plan_of_all = true;  // splits before the window that have no positions
    const auto of_all = world.run({{0, n - 1, n}}, options);
    ASSERT_TRUE(whole.same_bits(1, of_all, 0)) << "a decode, with a plan for a layer without a window";
  }
}

// A window that contains all positions uses the other version of the kernels.
TEST(CudaAttentionTest, a_window_of_all_positions_changes_no_bit) {
  Random random(14);
  for (const int dim : {64, 80}) {
    World world(random, shape_of(1, 4, dim, 16), DType::bf16, {150, 70});
    const std::vector<Chunk> chunks = {{0, 100, 150}, {1, 69, 70}};
    const auto plain = world.run(chunks, world.options());
    world.window = 150;
    const auto windowed = world.run(chunks, world.options());
    for (int row = 0; row < 51; ++row) ASSERT_TRUE(plain.same_bits(row, windowed, row)) << dim;
  }
}

// Rows of q that 16-byte copies cannot read use the plain kernel.
TEST(CudaAttentionTest, unaligned_rows_are_correct) {
  Random random(8);
  const World world(random, shape_of(1, 2, 64, 16), DType::bf16, {40});
  auto options = world.options();
  options.q_gap = 3;
  const std::vector<Chunk> chunks = {{0, 20, 40}};
  world.check(random, chunks, world.run(chunks, options), 0, ops::rounding(DType::bf16));
}

}  // namespace
}  // namespace charonia::cuda
