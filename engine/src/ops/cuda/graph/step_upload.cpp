#include "ops/cuda/graph/step_upload.h"

#include <algorithm>
#include <cstring>

#include "base/text.h"
#include "charonia/error.h"

namespace charonia::cuda {
namespace {

constexpr std::size_t kAlignment = 16;

std::size_t aligned(std::size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

void require(bool holds, std::string_view what) {
  if (!holds) throw Error(ErrorCode::internal, cat("ops::begin_step: ", what));
}

std::int64_t count(const auto& span) { return static_cast<std::int64_t>(span.size()); }

}  // namespace

bool samples_every_row(const ops::StepInput& input) {
  const auto rows = count(input.ids);
  if (rows == 0 || count(input.attention.positions) != rows || count(input.logits_rows) != rows) return false;
  for (std::int64_t i = 0; i < rows; ++i) {
    if (input.logits_rows[static_cast<std::size_t>(i)] != i) return false;
  }
  return true;
}

void flatten_tables(const ops::AttentionBatch& batch, CacheKind kind, int block_len, FlatTables& to) {
  for (std::size_t s = 0; s + 1 < batch.query_start.size(); ++s) {
    to.begin[kind].push_back(static_cast<std::int32_t>(to.blocks.size()));
    const auto end = batch.query_start[s + 1];
    if (end == batch.query_start[s]) continue;
    const auto blocks = batch.positions[static_cast<std::size_t>(end - 1)] / block_len + 1;
    const auto* const table = batch.block_tables[kind].data() + static_cast<std::int64_t>(s) * batch.table_stride;
    to.blocks.insert(to.blocks.end(), table, table + blocks);
  }
}

void group_by_adapter(const ops::StepInput& input, AdapterBatch& to) {
  to.items.clear();
  to.rows.clear();
  to.sequences.clear();
  const auto& slots = input.adapters;
  for (std::size_t s = 0; s < slots.size(); ++s) {
    if (slots[s] >= 0) to.sequences.push_back(s);
  }
  std::ranges::stable_sort(to.sequences, {}, [&](std::size_t s) { return slots[s]; });
  const auto& starts = input.attention.query_start;
  for (const auto s : to.sequences) {
    for (auto row = starts[s]; row < starts[s + 1]; ++row) {
      if (to.items.empty() || to.items.back().slot != slots[s] || to.items.back().rows == kAdapterTile) {
        to.items.push_back({.slot = slots[s], .first = static_cast<std::int32_t>(to.rows.size())});
      }
      ++to.items.back().rows;
      to.rows.push_back(row);
    }
  }
}

bool fits(std::span<const AttentionPlan> plans, const StepCapacity& capacity) {
  for (std::size_t i = 0; i < plans.size(); ++i) {
    if (count(plans[i].decode) > capacity.plans[i].decode || count(plans[i].prefill) > capacity.plans[i].prefill) {
      return false;
    }
  }
  return true;
}

StepLayout step_layout(const StepCapacity& capacity) {
  std::size_t at = 0;
  const auto place = [&at](std::int64_t count, std::size_t element) {
    const auto begin = at;
    at += aligned(static_cast<std::size_t>(count) * element);
    return begin;
  };
  StepLayout out;
  out.counts = place(static_cast<std::int64_t>(counts_of_plan(capacity.plans.size())), sizeof(std::int32_t));
  out.ids = place(capacity.rows, sizeof(std::int32_t));
  out.positions = place(capacity.rows, sizeof(std::int32_t));
  out.rotary_rows = place(capacity.rows, sizeof(std::int32_t));
  for (const auto kind : kTableKinds) out.kv_slots[kind] = place(capacity.rows, sizeof(std::int32_t));
  out.states = place(capacity.states, sizeof(StateItem));
  out.row_states = place(capacity.row_states, sizeof(std::int32_t));
  out.logits_rows = place(capacity.logits_rows, sizeof(std::int32_t));
  out.hidden_rows = place(capacity.hidden_rows, sizeof(std::int32_t));
  out.adapter_items = place(capacity.adapter_items, sizeof(AdapterItem));
  out.adapter_rows = place(capacity.adapter_rows, sizeof(std::int32_t));
  for (const auto& plan : capacity.plans) {
    const auto decode = place(plan.decode, sizeof(AttentionItem));
    out.plans.push_back({decode, place(plan.prefill, sizeof(AttentionItem))});
  }
  out.sampling = place(static_cast<std::int64_t>(capacity.sampling_bytes), 1);
  out.tables = at;
  return out;
}

std::size_t step_bytes(const StepLayout& layout, std::size_t table_entries) {
  return layout.tables + aligned(table_entries * sizeof(std::int32_t));
}

void write_step(std::byte* to, const StepCapacity& capacity, const StepLayout& layout, const ops::StepInput& input,
                int block_len, const FlatTables& tables, std::span<const AttentionPlan> plans,
                const AdapterBatch& adapters, std::span<const std::byte> sampling) {
  const auto rows = count(input.ids);
  const auto& batch = input.attention;
  require(rows <= capacity.rows && count(input.logits_rows) <= capacity.logits_rows &&
              (capacity.states == 0 || count(batch.state_in) <= capacity.states) &&
              (capacity.row_states == 0 || count(batch.row_states) <= capacity.row_states) && fits(plans, capacity) &&
              (capacity.hidden_rows == 0 || count(input.hidden_rows) <= capacity.hidden_rows) &&
              std::ssize(adapters.items) <= capacity.adapter_items &&
              std::ssize(adapters.rows) <= capacity.adapter_rows && sampling.size() <= capacity.sampling_bytes,
          "the step is larger than the capacity that was made for it");
  const auto put = [to](std::size_t at, const auto& values) {
    if (!values.empty()) std::memcpy(to + at, values.data(), values.size() * sizeof(values[0]));
  };
  const auto i32 = [to](std::size_t at) { return reinterpret_cast<std::int32_t*>(to + at); };

  auto* const counts = i32(layout.counts);
  counts[kCountOfRows] = static_cast<std::int32_t>(rows);
  for (std::size_t i = 0; i < plans.size(); ++i) {
    counts[counts_of_plan(i)] = static_cast<std::int32_t>(plans[i].decode.size());
    counts[counts_of_plan(i) + 1] = static_cast<std::int32_t>(plans[i].prefill.size());
    put(layout.plans[i].decode, plans[i].decode);
    put(layout.plans[i].prefill, plans[i].prefill);
  }

  put(layout.ids, input.ids);
  put(layout.positions, batch.positions);
  put(layout.rotary_rows, batch.rotary_rows.empty() ? batch.positions : batch.rotary_rows);
  std::fill(i32(layout.ids) + rows, i32(layout.ids) + capacity.rows, 0);
  for (const auto part : {layout.positions, layout.rotary_rows}) {
    std::fill(i32(part) + count(batch.positions), i32(part) + capacity.rows, 0);
  }

  for (const auto kind : kTableKinds) {
    auto* const slots = i32(layout.kv_slots[kind]);
    std::fill(slots, slots + capacity.rows, -1);
    for (std::size_t s = 0; s < tables.begin[kind].size(); ++s) {
      const auto* const table = tables.blocks.data() + tables.begin[kind][s];
      for (auto row = batch.query_start[s]; row < batch.query_start[s + 1]; ++row) {
        const auto position = batch.positions[static_cast<std::size_t>(row)];
        slots[row] = table[position / block_len] * block_len + position % block_len;
      }
    }
  }

  auto* const states = reinterpret_cast<StateItem*>(to + layout.states);
  for (std::int64_t i = 0; i < capacity.states; ++i) {
    const auto s = static_cast<std::size_t>(i);
    states[i] = {};
    if (i >= count(batch.state_in)) continue;
    const auto first = batch.query_start[s];
    states[i] = {first, batch.query_start[s + 1] - first, batch.state_in[s], batch.state_out[s]};
  }

  std::fill(i32(layout.row_states), i32(layout.row_states) + capacity.row_states, -1);
  if (capacity.row_states > 0) put(layout.row_states, batch.row_states);

  put(layout.logits_rows, input.logits_rows);
  for (auto i = count(input.logits_rows); i < capacity.logits_rows; ++i) {
    i32(layout.logits_rows)[i] =
        static_cast<std::int32_t>(std::min(rows + i - count(input.logits_rows), capacity.rows - 1));
  }

  if (capacity.hidden_rows > 0) {
    std::fill_n(i32(layout.hidden_rows), capacity.hidden_rows, -1);
    put(layout.hidden_rows, input.hidden_rows);
  }

  put(layout.adapter_items, adapters.items);
  auto* const items = reinterpret_cast<AdapterItem*>(to + layout.adapter_items);
  std::fill(items + adapters.items.size(), items + capacity.adapter_items, AdapterItem{});
  put(layout.adapter_rows, adapters.rows);

  put(layout.sampling, sampling);
  put(layout.tables, tables.blocks);
}

}  // namespace charonia::cuda
