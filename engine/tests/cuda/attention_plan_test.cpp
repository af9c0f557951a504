// Plans of hundreds of random steps: every attended position is in exactly one item, plans stay within the bounds, and
// no thread block has much more work than the others.
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <vector>

#include "ops/cuda/kernels/attention.h"
#include "ops_support.h"

namespace charonia::cuda {
namespace {

using ops::Random;
using ops::uniform;

struct Step {
  std::vector<std::int32_t> starts = {0}, positions, table_begin;
  int sequences() const { return static_cast<int>(table_begin.size()); }
  void add(int first_position, int rows) {
    table_begin.push_back(static_cast<std::int32_t>(1000 * table_begin.size()));
    for (int i = 0; i < rows; ++i) positions.push_back(first_position + i);
    starts.push_back(static_cast<std::int32_t>(positions.size()));
  }
  AttentionPlan plan(const AttentionShape& shape) const {
    AttentionPlan plan;
    plan_attention(shape, {starts, positions, {}, 0}, table_begin, plan);
    return plan;
  }
};

AttentionShape random_shape(Random& random) {
  constexpr std::array kGroups = {1, 2, 4, 5, 6, 7, 8, 16, 17, 71, 200};
  constexpr std::array kDims = {32, 64, 80, 96, 128, 256};
  constexpr std::array kSms = {1, 6, 58, 132};
  const int kv_heads = uniform(random, 1, 9);
  const bool reproducible = uniform(random, 0, 1) == 1;
  return {.heads = kv_heads * kGroups[static_cast<std::size_t>(uniform(random, 0, 10))],
          .kv_heads = kv_heads,
          .head_dim = kDims[static_cast<std::size_t>(uniform(random, 0, 5))],
          .block_len = 64,
          .window = uniform(random, 0, 1) == 0 ? 0 : uniform(random, 1, uniform(random, 0, 1) == 0 ? 100 : 9000),
          .sms = kSms[static_cast<std::size_t>(uniform(random, 0, 3))],
          .reproducible = reproducible,
          .min_decode_split = 64 << uniform(random, 0, 2),
          .wgmma = !reproducible && uniform(random, 0, 1) == 1};
}

Step random_step(Random& random, int max_sequences, int max_rows, int max_positions) {
  Step step;
  int rows_left = max_rows;
  const int kind = uniform(random, 0, 3);
  for (int s = uniform(random, 1, max_sequences); s > 0 && rows_left > 0; --s) {
    const int longest = uniform(random, 0, 4) == 0 ? max_positions : std::min(max_positions, 700);
    const int rows = kind == 0 || uniform(random, 0, kind) == 0 ? 1 : std::min(rows_left, uniform(random, 1, longest));
    step.add(uniform(random, 0, longest - rows), rows);
    rows_left -= rows;
  }
  return step;
}

// Items are sorted, longest first. Reproducible splits are whole chunks from the window on. Plans are within the
// bounds, and partial results have different places.
TEST(AttentionPlanTest, every_position_that_a_row_attends_to_is_in_exactly_one_item) {
  Random random(1);
  int cut = 0;
  for (int trial = 0; trial < 900; ++trial) {
    const auto shape = random_shape(random);
    const int sequences = uniform(random, 1, 40), rows = uniform(random, sequences, 3000);
    const int positions = std::array{400, 20000, 30000}[static_cast<std::size_t>(trial % 3)];
    const auto step = random_step(random, sequences, rows, positions);
    const auto plan = step.plan(shape);
    const auto bounds = attention_bounds(shape, rows, sequences, positions);
    ASSERT_LE(std::ssize(plan.decode), bounds.decode_items);
    ASSERT_LE(std::ssize(plan.prefill), bounds.prefill_items);
    ASSERT_LE(plan.num_partials, bounds.partials);
    std::vector<int> uses(static_cast<std::size_t>(plan.num_partials), 0);
    cut += plan.num_partials > 0;
    std::vector<std::vector<AttentionItem>> of_row(step.positions.size());
    const auto take = [&](const std::vector<AttentionItem>& items, int max_rows_seen) {
      int longest = std::numeric_limits<int>::max();
      for (const auto& item : items) {
        ASSERT_GE(item.num_rows, 1);
        ASSERT_LE(item.num_rows, max_rows_seen);
        ASSERT_LT(item.kv_begin, item.kv_end);
        ASSERT_EQ(item.kv_begin % (shape.reproducible && item.split > 0 ? kAttentionChunk : kAttentionTile), 0);
        ASSERT_LE(item.kv_end - item.kv_begin, longest);
        longest = item.kv_end - item.kv_begin;
        if (shape.reproducible && item.splits > 1) {
          const int first = shape.first_seen(item.first_position);
          const int chunk = (first / kAttentionChunk + item.split) * kAttentionChunk;
          ASSERT_EQ(item.kv_begin, std::max(first, chunk));
          ASSERT_LE(item.kv_end, chunk + kAttentionChunk);
        }
        const auto sequence = static_cast<std::size_t>(item.table / 1000);
        ASSERT_GE(item.first_row, step.starts[sequence]);
        ASSERT_LE(item.first_row + item.num_rows, step.starts[sequence + 1]);
        for (int r = 0; r < item.num_rows; ++r) {
          const auto row = static_cast<std::size_t>(item.first_row + r);
          ASSERT_EQ(step.positions[row], item.first_position + r);
          of_row[row].push_back(item);
          if (item.splits > 1) ++uses.at(static_cast<std::size_t>(item.partial + item.split * item.num_rows + r));
        }
      }
    };
    take(plan.decode, 1);
    take(plan.prefill, shape.item_rows());
    ASSERT_EQ(uses, std::vector<int>(uses.size(), 1));
    for (std::size_t row = 0; row < of_row.size(); ++row) {
      auto& items = of_row[row];
      std::sort(items.begin(), items.end(), [](const auto& a, const auto& b) { return a.split < b.split; });
      ASSERT_EQ(items.size(), static_cast<std::size_t>(items.front().splits));
      // The window's first position is in the first tile.
      int end = items.front().kv_begin;
      const int first = shape.window == 0 ? 0 : std::max(0, items.front().first_position - shape.window + 1);
      ASSERT_LE(end, first);
      ASSERT_LT(first - end, kAttentionTile);
      for (std::size_t i = 0; i < items.size(); ++i) {
        ASSERT_EQ(items[i].split, static_cast<int>(i));
        ASSERT_EQ(items[i].kv_begin, end);
        end = items[i].kv_end;
      }
      ASSERT_GT(end, step.positions[row]);
      // No block of the table beyond the item's last row is looked up.
      ASSERT_EQ(end, items.front().first_position + items.front().num_rows);
    }
  }
  EXPECT_GT(cut, 50) << "too few trials have plans with split rows";
}

// The work of the busiest thread block, relative to a fair share, if items are distributed like in the kernels.
double busiest(const std::vector<AttentionItem>& items, int units, int blocks) {
  std::vector<std::int64_t> work(static_cast<std::size_t>(blocks), 0);
  std::int64_t total = 0;
  const int count = static_cast<int>(items.size()) * units;
  for (int i = 0; i < count; ++i) {
    const int turn = i / blocks, block = turn % 2 == 0 ? i % blocks : blocks - 1 - i % blocks;
    const auto& item = items[static_cast<std::size_t>(i / units)];
    work[static_cast<std::size_t>(block)] += item.kv_end - item.kv_begin;
    total += item.kv_end - item.kv_begin;
  }
  return static_cast<double>(*std::max_element(work.begin(), work.end())) * blocks / static_cast<double>(total);
}

TEST(AttentionPlanTest, decodes_of_any_lengths_keep_all_sms_about_equally_busy) {
  Random random(3);
  for (int trial = 0; trial < 200; ++trial) {
    const AttentionShape shape{.heads = 32, .kv_heads = 8, .head_dim = 128, .block_len = 64, .sms = 132};
    Step step;
    // At least 64 positions per block in each of four splits: enough to be worth distributing.
    for (int s = uniform(random, 1, 64), total = 0; s > 0 || total < 140'000; --s) {
      const int length = uniform(random, 1, uniform(random, 0, 3) == 0 ? 100'000 : 4000);
      step.add(length - 1, 1);
      total += length;
    }
    const auto plan = step.plan(shape);
    EXPECT_LT(busiest(plan.decode, 8, 264), 1.5) << step.sequences() << " sequences";
    for (const auto& item : plan.decode) {
      if (item.splits > 1) {
        EXPECT_GT(item.kv_end - item.kv_begin, 256 - kAttentionTile);
      }
    }
  }
}

TEST(AttentionPlanTest, long_sequences_have_one_split_for_each_thread_block) {
  const auto plan_of = [](int kv_heads, int positions, bool reproducible = false, int min_split = 256) {
    Step one;
    one.add(positions - 1, 1);
    return one.plan({.heads = 8 * kv_heads,
                     .kv_heads = kv_heads,
                     .head_dim = 128,
                     .block_len = 64,
                     .sms = 132,
                     .reproducible = reproducible,
                     .min_decode_split = min_split});
  };
  const auto splits_of = [&](auto... of) { return plan_of(of...).decode.size(); };
  EXPECT_LT(busiest(plan_of(8, 100'000).decode, 8, 264), 1.1);
  EXPECT_EQ(splits_of(8, 32768), 32U);
  EXPECT_EQ(splits_of(32, 32768), 8U);
  EXPECT_EQ(splits_of(1, 131'072), 256U);
  EXPECT_EQ(splits_of(1, 32768), 32768U / 256) << "splits would be too short";
  EXPECT_EQ(splits_of(8, 301), 1U) << "two splits would be too short";
  EXPECT_EQ(splits_of(8, 32768, true), 32768U / kAttentionChunk) << "rows are split at chunks";
  EXPECT_EQ(splits_of(8, 1024), 4U);
  EXPECT_EQ(splits_of(8, 1024, false, 64), 16U);
  EXPECT_EQ(splits_of(8, 32768, false, 64), 32U) << "enough for all thread blocks";
  for (const int min_split : {64, 256})
    EXPECT_EQ(splits_of(8, 32768, true, min_split), 64U) << "the order of sums is fixed";
  Step shorts;
  for (int s = 0; s < 256; ++s) shorts.add(900 + s, 1);
  EXPECT_EQ(shorts.plan({.heads = 32, .kv_heads = 8, .head_dim = 128, .block_len = 64, .sms = 132}).num_partials, 0);
}

TEST(AttentionPlanTest, a_window_limits_the_splits_of_a_long_sequence) {
  AttentionShape shape{.heads = 32, .kv_heads = 8, .head_dim = 128, .block_len = 64, .sms = 132};
  const auto all = attention_bounds(shape, 1, 1, 100'000);
  shape.window = 1024;
  const auto windowed = attention_bounds(shape, 1, 1, 100'000);
  EXPECT_LT(windowed.partials, all.partials / 10);
  Step one;
  one.add(99'999, 1);
  std::int64_t positions = 0;
  for (const auto& item : one.plan(shape).decode) positions += item.kv_end - item.kv_begin;
  EXPECT_LT(positions, 1024 + kAttentionTile);
}

// Copies of blocks of a quantised cache: each block that a prefill item reads has a copy, and only these.
TEST(AttentionPlanTest, prefill_items_refer_to_copies_of_the_blocks_that_they_read) {
  Random random(4);
  for (int trial = 0; trial < 200; ++trial) {
    auto shape = random_shape(random);
    shape.block_len = 8 << uniform(random, 0, 4);
    const auto step = random_step(random, 20, 2000, 3000);
    const auto before = step.plan(shape);
    auto plan = before;
    std::vector<std::int32_t> tables;
    for (int i = 0; i < 1000 * step.sequences(); ++i) tables.push_back(7 * i);
    const auto flat = tables;
    ASSERT_TRUE(widen_plan(shape, 100'000, plan, tables));
    ASSERT_EQ(plan.wide_at, std::ssize(flat));
    ASSERT_EQ(plan.wide_blocks, std::ssize(tables) - std::ssize(flat));
    ASSERT_TRUE(std::equal(flat.begin(), flat.end(), tables.begin()));
    std::vector<bool> read(static_cast<std::size_t>(plan.wide_blocks), false);
    for (std::size_t i = 0; i < plan.prefill.size(); ++i) {
      for (auto at = before.prefill[i].kv_begin; at < before.prefill[i].kv_end; ++at) {
        const auto copy = plan.prefill[i].table + at / shape.block_len;
        ASSERT_GE(copy, 0);
        ASSERT_LT(copy, plan.wide_blocks);
        ASSERT_EQ(tables.at(static_cast<std::size_t>(plan.wide_at + copy)),
                  tables.at(static_cast<std::size_t>(before.prefill[i].table + at / shape.block_len)));
        read[static_cast<std::size_t>(copy)] = true;
      }
    }
    ASSERT_TRUE(std::ranges::all_of(read, [](bool x) { return x; }));
    auto unchanged = before;
    tables = flat;
    if (plan.wide_blocks == 0) continue;
    ASSERT_FALSE(widen_plan(shape, plan.wide_blocks - 1, unchanged, tables));
    ASSERT_EQ(tables, flat);
    ASSERT_EQ(unchanged.wide_blocks, 0);
    for (std::size_t i = 0; i < before.prefill.size(); ++i) {
      ASSERT_EQ(unchanged.prefill[i].table, before.prefill[i].table);
    }
  }
}

TEST(AttentionPlanTest, an_empty_step_has_no_items) {
  Step step;
  EXPECT_TRUE(step.plan({.heads = 4, .kv_heads = 2, .head_dim = 64, .block_len = 16}).decode.empty());
  step.add(7, 0);
  const auto plan = step.plan({.heads = 4, .kv_heads = 2, .head_dim = 64, .block_len = 16});
  EXPECT_TRUE(plan.decode.empty() && plan.prefill.empty());
}

}  // namespace
}  // namespace charonia::cuda
