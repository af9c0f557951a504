// The upload of a step: every number is where its reader looks for it.
#include "ops/cuda/graph/step_upload.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <iterator>
#include <set>

#include "charonia/error.h"
#include "errors.h"
#include "ops/check_step.h"
#include "ops/cuda/graph/decode_buckets.h"
#include "ops_support.h"

namespace charonia::cuda {
namespace {

using ops::SampleRow;
using ops::StepInput;
using ops::Random;
using ops::uniform;

constexpr int kBlockLen = 4, kBlocks = 50;
constexpr int kVocab = 100, kPositions = 64;
constexpr ops::StepFacts kFacts{
    .vocab = kVocab, .block_len = kBlockLen, .num_blocks = {kBlocks, 0}, .max_positions = kPositions};

// A step that owns its arrays.
struct Step {
  std::vector<std::int32_t> ids, query_start{0}, positions, rotary_rows, tables, other_tables, logits_rows, state_in,
      state_out, row_states, adapters, hidden_rows;
  std::vector<SampleRow> sample;
  std::int64_t stride = kPositions / kBlockLen;

  void add(int first_position, int rows, bool sampled) {
    for (int i = 0; i < rows; ++i) {
      ids.push_back(static_cast<std::int32_t>(ids.size()) % kVocab);
      positions.push_back(first_position + i);
    }
    query_start.push_back(static_cast<std::int32_t>(ids.size()));
    state_in.push_back(first_position == 0 ? -1 : first_position);
    state_out.push_back(static_cast<std::int32_t>(state_out.size()));
    for (std::int64_t i = 0; i < stride; ++i) tables.push_back(static_cast<std::int32_t>(tables.size() * 7 % kBlocks));
    if (sampled) {
      logits_rows.push_back(static_cast<std::int32_t>(ids.size()) - 1);
      sample.emplace_back();
    }
  }
  // A number for each row.
  void fill(std::vector<std::int32_t>& to, Random& random, int least, int most) const {
    std::generate_n(std::back_inserter(to), ids.size(), [&] { return uniform(random, least, most); });
  }
  StepInput input() const {
    return {ids,
            {query_start, positions, {tables, other_tables, {}}, stride, rotary_rows, state_in, state_out, row_states},
            logits_rows,
            sample,
            {},
            adapters,
            hidden_rows};
  }
};

// Reads the output of write_step().
struct Written {
  std::vector<std::uint64_t> memory;  // aligned
  StepLayout layout;
  std::size_t bytes = 0;

  const std::byte* at(std::size_t offset) const { return reinterpret_cast<const std::byte*>(memory.data()) + offset; }
  std::int32_t i32(std::size_t offset, std::int64_t index) const {
    std::int32_t out = 0;
    std::memcpy(&out, at(offset) + static_cast<std::size_t>(index) * sizeof out, sizeof out);
    return out;
  }
};

Written write(const Step& step, const StepCapacity& capacity, const FlatTables& tables,
              std::span<const AttentionPlan> plans, std::span<const std::byte> sampling,
              const AdapterBatch& adapters = {}) {
  Written out;
  out.layout = step_layout(capacity);
  out.bytes = step_bytes(out.layout, tables.blocks.size());
  // so that zeros do not appear by chance
  out.memory.assign(out.bytes / sizeof(std::uint64_t) + 1, 0x5555555555555555U);
  write_step(reinterpret_cast<std::byte*>(out.memory.data()), capacity, out.layout, step.input(), kBlockLen, tables,
             plans, adapters, sampling);
  return out;
}

std::array<AttentionPlan, 2> random_plans(Random& random, StepCapacity& capacity) {
  std::array<AttentionPlan, 2> plans;
  for (auto& plan : plans) {
    plan.decode.resize(static_cast<std::size_t>(uniform(random, 0, 3)));
    plan.prefill.resize(static_cast<std::size_t>(uniform(random, 0, 3)));
    for (auto& item : plan.decode) item.first_row = uniform(random, 0, 1000);
    for (auto& item : plan.prefill) item.first_row = uniform(random, 0, 1000);
    capacity.plans.push_back({std::ssize(plan.decode) + uniform(random, 0, 2),
                              std::ssize(plan.prefill) + uniform(random, 0, 2)});
  }
  return plans;
}

void expect_states(const Written& out, const Step& step, std::int64_t states, int sequences) {
  for (std::int64_t i = 0; i < states; ++i) {
    const auto s = static_cast<std::size_t>(i);
    const bool is_padding = i >= sequences;
    const std::int32_t first = is_padding ? 0 : step.query_start[s];
    EXPECT_EQ(out.i32(out.layout.states, 4 * i), first);
    EXPECT_EQ(out.i32(out.layout.states, 4 * i + 1), is_padding ? 0 : step.query_start[s + 1] - first);
    EXPECT_EQ(out.i32(out.layout.states, 4 * i + 2), is_padding ? -1 : step.state_in[s]);
    EXPECT_EQ(out.i32(out.layout.states, 4 * i + 3), is_padding ? -1 : step.state_out[s]);
  }
}

void expect_row_states(const Written& out, const Step& step, std::int64_t rows) {
  for (std::int64_t i = 0; i < rows; ++i) {
    const bool has_slot = i < std::ssize(step.row_states);
    EXPECT_EQ(out.i32(out.layout.row_states, i), has_slot ? step.row_states[static_cast<std::size_t>(i)] : -1);
  }
}

TEST(StepUploadTest, every_array_is_at_its_offset_and_padding_is_not_stored) {
  Random random(1);
  for (int trial = 0; trial < 50; ++trial) {
    Step step;
    const int sequences = uniform(random, 1, 6);
    for (int s = 0; s < sequences; ++s) {
      const int rows = uniform(random, 1, 9);
      step.add(uniform(random, 0, kPositions - rows), rows, uniform(random, 0, 1) == 1);
    }
    if (trial % 2 == 0) step.fill(step.rotary_rows, random, 0, 5000);
    if (trial % 4 == 0) step.fill(step.row_states, random, -1, 9);
    if (trial % 4 == 1) step.fill(step.hidden_rows, random, -1, 99);
    check_step(step.input(), kFacts, 0);
    for (const auto block : step.tables) step.other_tables.push_back((block + 1) % kBlocks);
    FlatTables tables;
    for (const auto kind : kTableKinds) flatten_tables(step.input().attention, kind, kBlockLen, tables);
    StepCapacity capacity;
    const auto plans = random_plans(random, capacity);
    std::vector<std::byte> sampling(static_cast<std::size_t>(uniform(random, 0, 70)));
    for (auto& one : sampling) one = static_cast<std::byte>(uniform(random, 0, 255));
    capacity.rows = std::ssize(step.ids) + uniform(random, 0, 5);
    capacity.logits_rows = std::ssize(step.logits_rows) + uniform(random, 0, 5);
    capacity.sampling_bytes = sampling.size() + static_cast<std::size_t>(uniform(random, 0, 20));
    capacity.states = trial % 3 == 0 ? 0 : sequences + uniform(random, 0, 3);
    capacity.hidden_rows = trial % 8 < 6 ? capacity.rows : 0;
    capacity.row_states = trial % 3 == 0 ? 0 : capacity.rows;
    const auto out = write(step, capacity, tables, plans, sampling);
    const auto& at = out.layout;
    for (const auto offset : {at.counts, at.ids, at.positions, at.rotary_rows, at.kv_slots.full, at.kv_slots.window,
                              at.states, at.row_states, at.logits_rows, at.hidden_rows, at.plans[0].decode,
                              at.plans[0].prefill, at.plans[1].decode, at.plans[1].prefill, at.sampling, at.tables,
                              out.bytes}) {
      ASSERT_EQ(offset % 16, 0U);
    }
    const auto same = [&](std::size_t offset, const auto& values) {
      return values.empty() || std::memcmp(out.at(offset), values.data(), values.size() * sizeof values[0]) == 0;
    };
    for (std::size_t i = 0; i < plans.size(); ++i) {
      const auto first = static_cast<std::int64_t>(counts_of_plan(i));
      EXPECT_EQ(out.i32(at.counts, first), std::ssize(plans[i].decode));
      EXPECT_EQ(out.i32(at.counts, first + 1), std::ssize(plans[i].prefill));
      EXPECT_TRUE(same(at.plans[i].decode, plans[i].decode));
      EXPECT_TRUE(same(at.plans[i].prefill, plans[i].prefill));
    }
    EXPECT_EQ(out.i32(at.counts, kCountOfRows), std::ssize(step.ids));
    expect_states(out, step, capacity.states, sequences);
    expect_row_states(out, step, capacity.row_states);
    std::vector<std::int32_t> slots, other_slots;
    for (int s = 0; s < sequences; ++s) {
      for (auto row = slots.size(); row < static_cast<std::size_t>(step.query_start[static_cast<std::size_t>(s + 1)]);
           ++row) {
        const auto in_table = step.positions[row] / kBlockLen;
        const auto block = step.tables[static_cast<std::size_t>(s * step.stride + in_table)];
        const auto other = (block + 1) % kBlocks;
        slots.push_back(block * kBlockLen + step.positions[row] % kBlockLen);
        other_slots.push_back(other * kBlockLen + step.positions[row] % kBlockLen);
        // The flat tables of the sequence have the same blocks.
        EXPECT_EQ(out.i32(at.tables, tables.begin.full[static_cast<std::size_t>(s)] + in_table), block);
        EXPECT_EQ(out.i32(at.tables, tables.begin.window[static_cast<std::size_t>(s)] + in_table), other);
      }
    }
    const auto padded = [&](std::vector<std::int32_t> values, std::int32_t padding) {
      values.resize(static_cast<std::size_t>(capacity.rows), padding);
      return values;
    };
    EXPECT_TRUE(same(at.ids, padded(step.ids, 0)));
    EXPECT_TRUE(same(at.positions, padded(step.positions, 0)));
    EXPECT_TRUE(same(at.rotary_rows, padded(step.rotary_rows.empty() ? step.positions : step.rotary_rows, 0)));
    EXPECT_TRUE(same(at.kv_slots.full, padded(slots, -1)));
    EXPECT_TRUE(same(at.kv_slots.window, padded(other_slots, -1)));
    EXPECT_TRUE(capacity.hidden_rows == 0 || same(at.hidden_rows, padded(step.hidden_rows, -1)));
    EXPECT_TRUE(same(at.logits_rows, step.logits_rows));
    for (std::int64_t i = 0; i < capacity.logits_rows; ++i) {
      EXPECT_GE(out.i32(at.logits_rows, i), 0);
      EXPECT_LT(out.i32(at.logits_rows, i), capacity.rows);
    }
    EXPECT_TRUE(same(at.sampling, sampling));
    EXPECT_TRUE(same(at.tables, tables.blocks));
  }
}

TEST(StepUploadTest, rows_are_grouped_by_adapter) {
  Random random(2);
  constexpr int kAdapters = 3;
  for (int trial = 0; trial < 50; ++trial) {
    Step step;
    const int sequences = uniform(random, 1, trial % 10 == 0 ? 90 : 9);
    for (int s = 0; s < sequences; ++s) {
      step.add(0, uniform(random, 1, trial % 2 == 0 ? 1 : 3 * kPositions / 4), false);
      step.adapters.push_back(uniform(random, -1, kAdapters - 1));
    }
    const auto rows = std::ssize(step.ids);
    AdapterBatch batch;
    group_by_adapter(step.input(), batch);
    StepCapacity capacity{
        .rows = rows, .adapter_items = max_adapter_items(rows, kAdapters), .adapter_rows = rows, .plans = {}};
    const auto out = write(step, capacity, {}, {}, {}, batch);
    std::vector<std::int32_t> found(step.ids.size(), -1);
    std::int32_t next = 0, slot = -1;
    for (std::int64_t i = 0; i < capacity.adapter_items; ++i) {
      const auto word = [&](int field) { return out.i32(out.layout.adapter_items, 4 * i + field); };
      if (i >= std::ssize(batch.items)) {
        EXPECT_EQ(word(2), 0) << "padding";
        continue;
      }
      EXPECT_GE(word(0), slot) << "an adapter has its items together";
      slot = word(0);
      EXPECT_EQ(word(1), next);
      EXPECT_TRUE(word(2) >= 1 && word(2) <= kAdapterTile);
      for (; next < word(1) + word(2); ++next) {
        found.at(static_cast<std::size_t>(out.i32(out.layout.adapter_rows, next))) = slot;
      }
    }
    for (std::size_t s = 0; s < step.adapters.size(); ++s) {
      for (auto row = step.query_start[s]; row < step.query_start[s + 1]; ++row) {
        EXPECT_EQ(found[static_cast<std::size_t>(row)], step.adapters[s]);
      }
    }
  }
}

TEST(StepUploadTest, only_the_size_of_the_tables_depends_on_the_step) {
  const StepCapacity capacity{.rows = 8, .logits_rows = 8, .plans = {}, .sampling_bytes = 100};
  Step one, three;
  one.add(3, 1, true);
  three.add(0, 1, true);
  three.add(kBlockLen - 1, 2, true);
  three.add(2 * kBlockLen, 1, true);
  FlatTables tables;
  flatten_tables(one.input().attention, CacheKind::full, kBlockLen, tables);
  const auto first = write(one, capacity, tables, {}, {});
  tables.clear();
  flatten_tables(three.input().attention, CacheKind::full, kBlockLen, tables);
  // A table is uploaded up to its sequence's last position.
  EXPECT_EQ(tables.begin.full, (std::vector<std::int32_t>{0, 1, 3}));
  EXPECT_EQ(tables.blocks.size(), 1U + 2U + 3U);
  const auto second = write(three, capacity, tables, {}, {});
  EXPECT_EQ(first.layout.tables, second.layout.tables);
  EXPECT_EQ(first.layout.sampling, second.layout.sampling);
  EXPECT_GT(second.bytes, first.bytes);
}

TEST(StepUploadTest, a_decode_step_samples_every_row) {
  Step decode;
  for (int s = 0; s < 3; ++s) decode.add(5 * s, 1, true);
  EXPECT_TRUE(samples_every_row(decode.input()));
  Step unsampled = decode;
  unsampled.add(1, 1, false);
  EXPECT_FALSE(samples_every_row(unsampled.input()));
  Step proposals = decode;
  proposals.add(1, 2, true);
  EXPECT_FALSE(samples_every_row(proposals.input())) << "only its last row is sampled";
  proposals.logits_rows = {0, 1, 2, 3, 4};
  EXPECT_TRUE(samples_every_row(proposals.input()));
  EXPECT_FALSE(samples_every_row(StepInput{}));
}

TEST(StepUploadTest, values_out_of_range_are_rejected_by_name) {
  Step good;
  good.add(2, 3, true);
  good.add(7, 1, true);
  struct Case {
    const char* error;  // null: the step is valid
    std::function<void(Step&)> change;
    std::int64_t sampled_before = 0;
  };
  const auto stride = static_cast<std::size_t>(good.stride);
  const Case cases[] = {
      {nullptr, [](Step&) {}},
      {"token id 100", [](Step& step) { step.ids[1] = kVocab; }},
      {"sample row 1", [](Step& step) { step.ids[3] = -2; }, 1},
      {nullptr, [](Step& step) { step.ids[3] = -2; }, 2},
      {"position 9", [](Step& step) { step.positions[1] = 9; }},
      {"position 64", [](Step& step) { step.positions[3] = kPositions; }},
      {"position -1", [](Step& step) { step.positions[0] = -1; }},
      {"rotary_rows", [](Step& step) { step.rotary_rows = {1, 2, 3}; }},
      {"rotary row -1", [](Step& step) { step.rotary_rows = {1, 2, 3, -1}; }},
      {nullptr, [](Step& step) { step.rotary_rows = {900, 901, 902, 5}; }},
      {"block 50", [=](Step& step) { step.tables[stride] = kBlocks; }},
      {nullptr, [=](Step& step) { step.tables[stride - 1] = -5; }},        // belongs to no position of the step
      {"beyond its table", [](Step& step) { step.stride = 1; }},           // position 7 is in the second block
      {"query_start", [](Step& step) { step.query_start.back() = 3; }},
      {"ascend", [](Step& step) { step.logits_rows = {3, 2}; }},
      {"logits_rows", [](Step& step) { step.logits_rows = {2, 4}; }},
      {"SampleRow", [](Step& step) { step.sample.pop_back(); }},
      {"sample row 1", [](Step& step) { step.sample[1].pending = 1; }, 1},
      {nullptr, [](Step& step) { step.sample[1].pending = 1; }, 2},
  };
  for (const auto& c : cases) {
    auto step = good;
    c.change(step);
    const auto check = [&] { check_step(step.input(), kFacts, c.sampled_before); };
    if (c.error != nullptr) {
      expect_error(ErrorCode::internal, {c.error}, check);
    } else {
      check();
    }
  }
}

TEST(DecodeBucketsTest, every_number_of_rows_has_a_bucket_that_is_not_much_larger) {
  for (const int most : {1, 2, 3, 7, 8, 9, 17, 64, 100, 256, 300, 1024}) {
    const auto buckets = decode_buckets(most);
    EXPECT_EQ(buckets.back(), most);
    EXPECT_EQ(std::set<std::int64_t>(buckets.begin(), buckets.end()).size(), buckets.size());
    EXPECT_TRUE(std::is_sorted(buckets.begin(), buckets.end()));
    for (int rows = 1; rows <= most; ++rows) {
      const auto padded = buckets[bucket_of(buckets, rows)];
      EXPECT_GE(padded, rows);
      EXPECT_LE(padded - rows, rows < 64 ? 7 : std::max(15, rows / 8));
    }
    EXPECT_EQ(bucket_of(buckets, most + 1), buckets.size());
  }
  EXPECT_EQ(decode_buckets(40), (std::vector<std::int64_t>{1, 2, 4, 8, 16, 24, 32, 40}));
  EXPECT_TRUE(decode_buckets(0).empty());
}

}  // namespace
}  // namespace charonia::cuda
