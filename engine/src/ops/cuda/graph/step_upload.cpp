#include "ops/cuda/graph/step_upload.h"

#include <algorithm>
#include <cstring>

#include "base/text.h"
#include "charonia/error.h"

namespace charonia::cuda {
namespace {

constexpr std::size_t kAlignment = 16;
constexpr int kCounts = 4;  // 3 are used

std::size_t aligned(std::size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

void require(bool holds, std::string_view what) {
  if (!holds) throw Error(ErrorCode::internal, cat("ops::begin_step: ", what));
}

std::int64_t count(const auto& span) { return static_cast<std::int64_t>(span.size()); }

// `text` is called for the message alone: these checks run over every row of every step.
template <class Text>
void require_that(bool holds, Text text) {
  if (!holds) [[unlikely]]
    require(false, text());
}

void check_attention(const ops::AttentionBatch& batch, std::int64_t rows, const StepFacts& facts) {
  if (batch.query_start.empty() && batch.positions.empty()) return;  // a step without attention
  require(!batch.query_start.empty() && batch.query_start.front() == 0 && batch.query_start.back() == rows &&
              count(batch.positions) == rows,
          "query_start must run from 0 to the number of rows, and every row needs a position");
  require(batch.rotary_rows.empty() || count(batch.rotary_rows) == rows,
          "rotary_rows must be one for every row, or none");
  for (const auto row : batch.rotary_rows) {
    require_that(row >= 0, [&] { return cat("rotary row ", row, " is in no table"); });
  }
  const auto sequences = count(batch.query_start) - 1;
  require(batch.table_stride >= 0 && count(batch.block_tables) >= sequences * batch.table_stride,
          "block_tables must be [sequences, table_stride]");
  for (std::int64_t s = 0; s < sequences; ++s) {
    const auto begin = batch.query_start[static_cast<std::size_t>(s)];
    const auto end = batch.query_start[static_cast<std::size_t>(s + 1)];
    require(begin <= end && end <= rows, "query_start must not descend");
    if (begin == end) continue;
    const auto first = batch.positions[static_cast<std::size_t>(begin)];
    for (auto row = begin; row < end; ++row) {
      const auto position = batch.positions[static_cast<std::size_t>(row)];
      require_that(position >= 0 && position - first == row - begin, [&] {
        return cat("row ", row, " stands at position ", position, ": positions must ascend by one within a sequence");
      });
    }
    const auto last = first + (end - 1 - begin);
    require_that(facts.max_positions == 0 || last < facts.max_positions,
                 [&] { return cat("position ", last, " of ", facts.max_positions); });
    if (facts.block_len == 0) continue;
    const auto blocks = last / facts.block_len + 1;
    require_that(blocks <= batch.table_stride, [&] {
      return cat("position ", last, " of sequence ", s, " is beyond its table of ", batch.table_stride, " blocks");
    });
    for (std::int64_t i = 0; i < blocks; ++i) {
      const auto block = batch.block_tables[static_cast<std::size_t>(s * batch.table_stride + i)];
      require_that(block >= 0 && (facts.num_blocks == 0 || block < facts.num_blocks),
                   [&] { return cat("block ", block, " of ", facts.num_blocks, " in the table of sequence ", s); });
    }
  }
}

}  // namespace

void check_step(const ops::StepInput& input, const StepFacts& facts, std::int64_t sampled_before) {
  const auto rows = count(input.ids);
  for (const auto id : input.ids) {
    require_that(id < 0 || facts.vocab == 0 || id < facts.vocab,
                 [&] { return cat("token id ", id, " is not in the table of ", facts.vocab); });
    require_that(id >= 0 || -1 - std::int64_t{id} < sampled_before, [&] {
      return cat("token of sample row ", -1 - std::int64_t{id}, " of the step before, which sampled ", sampled_before);
    });
  }
  check_attention(input.attention, rows, facts);
  require(std::is_sorted(input.logits_rows.begin(), input.logits_rows.end()) &&
              (input.logits_rows.empty() || input.logits_rows.front() >= 0),
          "logits_rows must ascend");
  require(input.logits_rows.empty() || input.logits_rows.back() < rows, "logits_rows must be rows of the step");
  require(input.sample.size() == input.logits_rows.size(), "every row of logits needs a SampleRow");
  for (const auto& row : input.sample) {
    require_that(row.pending < sampled_before, [&] {
      return cat("sample row ", row.pending, " of the step before, which sampled ", sampled_before);
    });
  }
}

bool is_decode(const ops::StepInput& input) {
  const auto rows = count(input.ids);
  if (rows == 0 || count(input.attention.query_start) != rows + 1 || count(input.logits_rows) != rows) return false;
  for (std::int64_t i = 0; i < rows; ++i) {
    const auto at = static_cast<std::size_t>(i);
    if (input.attention.query_start[at] != i || input.logits_rows[at] != i) return false;
  }
  return true;
}

void flatten_tables(const ops::AttentionBatch& batch, int block_len, FlatTables& to) {
  to.blocks.clear();
  to.begin.clear();
  for (std::size_t s = 0; s + 1 < batch.query_start.size(); ++s) {
    to.begin.push_back(static_cast<std::int32_t>(to.blocks.size()));
    const auto end = batch.query_start[s + 1];
    if (end == batch.query_start[s]) continue;
    const auto blocks = batch.positions[static_cast<std::size_t>(end - 1)] / block_len + 1;
    const auto* const table = batch.block_tables.data() + static_cast<std::int64_t>(s) * batch.table_stride;
    to.blocks.insert(to.blocks.end(), table, table + blocks);
  }
}

StepLayout step_layout(const StepCapacity& capacity) {
  std::size_t at = 0;
  const auto place = [&at](std::int64_t count, std::size_t element) {
    const auto begin = at;
    at += aligned(static_cast<std::size_t>(count) * element);
    return begin;
  };
  StepLayout out;
  out.counts = place(kCounts, sizeof(std::int32_t));
  out.ids = place(capacity.rows, sizeof(std::int32_t));
  out.positions = place(capacity.rows, sizeof(std::int32_t));
  out.rotary_rows = place(capacity.rows, sizeof(std::int32_t));
  out.kv_slots = place(capacity.rows, sizeof(std::int32_t));
  out.logits_rows = place(capacity.logits_rows, sizeof(std::int32_t));
  out.decode = place(capacity.decode, sizeof(AttentionItem));
  out.prefill = place(capacity.prefill, sizeof(AttentionItem));
  out.sampling = place(static_cast<std::int64_t>(capacity.sampling_bytes), 1);
  out.tables = at;
  return out;
}

std::size_t step_bytes(const StepLayout& layout, std::size_t table_entries) {
  return layout.tables + aligned(table_entries * sizeof(std::int32_t));
}

void write_step(std::byte* to, const StepCapacity& capacity, const StepLayout& layout, const ops::StepInput& input,
                int block_len, const FlatTables& tables, const AttentionPlan& plan,
                std::span<const std::byte> sampling) {
  const auto rows = count(input.ids);
  const auto& batch = input.attention;
  require(rows <= capacity.rows && count(input.logits_rows) <= capacity.logits_rows &&
              count(plan.decode) <= capacity.decode && count(plan.prefill) <= capacity.prefill &&
              sampling.size() <= capacity.sampling_bytes,
          "the step is larger than the capacity that was made for it");
  const auto put = [to](std::size_t at, const auto& values) {
    if (!values.empty()) std::memcpy(to + at, values.data(), values.size() * sizeof(values[0]));
  };
  const auto i32 = [to](std::size_t at) { return reinterpret_cast<std::int32_t*>(to + at); };

  auto* const counts = i32(layout.counts);
  counts[0] = static_cast<std::int32_t>(plan.decode.size());
  counts[1] = static_cast<std::int32_t>(plan.prefill.size());
  counts[kCountOfRows] = static_cast<std::int32_t>(rows);
  counts[3] = 0;

  put(layout.ids, input.ids);
  put(layout.positions, batch.positions);
  put(layout.rotary_rows, batch.rotary_rows.empty() ? batch.positions : batch.rotary_rows);
  std::fill(i32(layout.ids) + rows, i32(layout.ids) + capacity.rows, 0);
  for (const auto part : {layout.positions, layout.rotary_rows}) {
    std::fill(i32(part) + count(batch.positions), i32(part) + capacity.rows, 0);
  }

  auto* const slots = i32(layout.kv_slots);
  std::fill(slots, slots + capacity.rows, -1);
  for (std::size_t s = 0; s < tables.begin.size(); ++s) {
    const auto* const table = tables.blocks.data() + tables.begin[s];
    for (auto row = batch.query_start[s]; row < batch.query_start[s + 1]; ++row) {
      const auto position = batch.positions[static_cast<std::size_t>(row)];
      slots[row] = table[position / block_len] * block_len + position % block_len;
    }
  }

  put(layout.logits_rows, input.logits_rows);
  for (auto i = count(input.logits_rows); i < capacity.logits_rows; ++i) {
    i32(layout.logits_rows)[i] =
        static_cast<std::int32_t>(std::min(rows + i - count(input.logits_rows), capacity.rows - 1));
  }

  put(layout.decode, plan.decode);
  put(layout.prefill, plan.prefill);
  put(layout.sampling, sampling);
  put(layout.tables, tables.blocks);
}

}  // namespace charonia::cuda
