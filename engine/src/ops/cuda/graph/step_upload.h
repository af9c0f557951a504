// The upload of a step, in one piece of memory and one copy. Integers only, so that it can be tested without a device.
//
//   counts        of rows, then of decode items and of prefill items of each attention plan; i32
//   ids           [rows] i32
//   positions     [rows] i32
//   rotary_rows   [rows] i32, equal to the positions if the step has none: a graph serves steps with and without them
//   kv_slots      for each kind of cache [rows] i32, block * block_len + slot; -1: the row is padding
//   states        [sequences] StateItem, if there are layers of kind `state`
//   row_states    [rows] i32, if rows besides the last one of a sequence may have a state; -1: the row has none
//   logits_rows   [logits rows] i32
//   hidden_rows   [rows] i32, if steps store or load hidden states; -1: the row has none, or is padding
//   adapter_items [items] AdapterItem, and
//   adapter_rows  [rows] i32: the rows with an adapter, grouped by adapter, if the step has such rows
//   decode, prefill               of each attention plan
//   sampling      the output of Sampler::pack
//   tables        the sequences' block tables of each kind of cache, contiguous, up to their last positions
// Every part begins at a multiple of 16 bytes.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "ops/cuda/kernels/attention.h"
#include "ops/cuda/low_rank_workspace.h"
#include "ops/step.h"

namespace charonia::cuda {

// A sequence of a step, for layers of kind `state` (ops::AttentionBatch).
struct StateItem {
  std::int32_t first_row = 0, num_rows = 0;  // num_rows = 0: padding, which reads and writes nothing
  std::int32_t in = -1, out = -1;            // slots; in = -1: the state is zeros
};

// The uploaded sequences of a step, and the states that it writes, on the device.
struct StateRows {
  const StateItem* items = nullptr;          // [num_items]
  std::int64_t num_items = 0;
  const std::int32_t* row_states = nullptr;  // [rows] as in ops::AttentionBatch; null: only the states of `items`
};

// Whether every row is sampled. Then each sequence decodes: it has the row of its last token, and perhaps rows of
// proposals after it. (Or they are rows of a prompt, which are captured in the same way.)
bool samples_every_row(const ops::StepInput& input);

struct FlatTables {
  std::vector<std::int32_t> blocks;          // of all kinds
  PerKind<std::vector<std::int32_t>> begin;  // [sequences]: offsets in `blocks`; empty: the kind has no tables

  void clear() {
    blocks.clear();
    for (const auto kind : kTableKinds) begin[kind].clear();
  }
};
// Appends the tables of a kind.
void flatten_tables(const ops::AttentionBatch& batch, CacheKind kind, int block_len, FlatTables& to);

// The rows of a step that have an adapter, grouped by its slot, in items of at most kAdapterTile rows.
struct AdapterBatch {
  std::vector<AdapterItem> items;
  std::vector<std::int32_t> rows;
  std::vector<std::size_t> sequences;  // with an adapter, by slot
};
// Groups the rows of `input`.
void group_by_adapter(const ops::StepInput& input, AdapterBatch& to);
// The maximum number of items of a step with this number of rows and of adapters.
constexpr std::int64_t max_adapter_items(std::int64_t rows, std::int64_t adapters) {
  return std::min(rows, adapters + rows / kAdapterTile);
}

// The maximum numbers of elements of the parts; a step may have fewer. `tables` is the last part, with
// variable size.
struct StepCapacity {
  struct Plan {
    std::int64_t decode = 0, prefill = 0;  // items
  };
  std::int64_t rows = 0, logits_rows = 0;
  std::int64_t states = 0;  // sequences; 0 without layers of kind `state`
  std::int64_t row_states = 0;
  std::int64_t hidden_rows = 0;  // the number of rows, or 0
  std::int64_t adapter_items = 0, adapter_rows = 0;
  std::vector<Plan> plans;
  std::size_t sampling_bytes = 0;
};
bool fits(std::span<const AttentionPlan> plans, const StepCapacity& capacity);

// The byte offsets of the parts. Equal capacities give equal layouts; that is why a captured step serves later steps.
inline constexpr int kCountOfRows = 0;  // index in counts of the number of rows; later rows are padding
// The index in counts of a plan's number of decode items; its number of prefill items follows.
constexpr std::size_t counts_of_plan(std::size_t plan) { return 1 + 2 * plan; }
struct StepLayout {
  struct Plan {
    std::size_t decode = 0, prefill = 0;
  };
  std::size_t counts = 0, ids = 0, positions = 0, rotary_rows = 0, logits_rows = 0;
  PerKind<std::size_t> kv_slots;
  std::size_t states = 0, row_states = 0, hidden_rows = 0;
  std::size_t adapter_items = 0, adapter_rows = 0;
  std::vector<Plan> plans;
  std::size_t sampling = 0, tables = 0;
};
StepLayout step_layout(const StepCapacity& capacity);
std::size_t step_bytes(const StepLayout& layout, std::size_t table_entries);

// Writes step_bytes(layout, tables.blocks.size()) bytes, 16-byte aligned. Rows beyond the input are padding: token 0 at
// position 0 (and rotary row 0), not stored, in no attention item. Rows of logits beyond the input refer to the rows
// that follow. Sequences and items beyond the input are padding.
void write_step(std::byte* to, const StepCapacity& capacity, const StepLayout& layout, const ops::StepInput& input,
                int block_len, const FlatTables& tables, std::span<const AttentionPlan> plans,
                const AdapterBatch& adapters, std::span<const std::byte> sampling);

}  // namespace charonia::cuda
