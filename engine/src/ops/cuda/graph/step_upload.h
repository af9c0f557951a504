// What a step brings to the device, as one piece of memory and one copy. Integers only, so that it is tested without a
// device.
//
//   counts        of decode items, of prefill items, of rows; 4 x i32
//   ids           [rows] i32
//   positions     [rows] i32
//   rotary_rows   [rows] i32, the positions where the step has none of its own: a graph serves steps with and without
//   kv_slots      [rows] i32, block * block_len + slot; -1: the row is padding
//   logits_rows   [logits rows] i32
//   decode, prefill               the attention plan
//   sampling      what Sampler::pack wrote
//   tables        the sequences' block tables one behind the other, as far as their positions reach
// Every part begins at a multiple of 16 bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "ops/cuda/kernels/attention.h"
#include "ops/step.h"

namespace charonia::cuda {

// Whether every sequence has one row, and every row is sampled.
bool is_decode(const ops::StepInput& input);

struct FlatTables {
  std::vector<std::int32_t> blocks;
  std::vector<std::int32_t> begin;  // [sequences]: in `blocks`
};
// Replaces what is in `to`.
void flatten_tables(const ops::AttentionBatch& batch, int block_len, FlatTables& to);

// How many elements the parts have room for; those of a step may be fewer. `tables` is the last part and takes what it
// has.
struct StepCapacity {
  std::int64_t rows = 0, logits_rows = 0;
  std::int64_t decode = 0, prefill = 0;
  std::size_t sampling_bytes = 0;
};

// Where the parts begin. The same capacity gives the same layout: that is why a captured step serves later ones.
inline constexpr int kCountOfRows = 2;  // in counts: what comes behind so many rows is padding
struct StepLayout {
  std::size_t counts = 0, ids = 0, positions = 0, rotary_rows = 0, kv_slots = 0, logits_rows = 0;
  std::size_t decode = 0, prefill = 0, sampling = 0, tables = 0;
};
StepLayout step_layout(const StepCapacity& capacity);
std::size_t step_bytes(const StepLayout& layout, std::size_t table_entries);

// Writes step_bytes(layout, tables.blocks.size()) bytes, 16-byte aligned. Rows beyond the input's are padding: token 0
// at position 0 (and rotary row 0), stored nowhere, in no attention item; rows of logits beyond the input's take the
// rows that follow.
void write_step(std::byte* to, const StepCapacity& capacity, const StepLayout& layout, const ops::StepInput& input,
                int block_len, const FlatTables& tables, const AttentionPlan& plan,
                std::span<const std::byte> sampling);

}  // namespace charonia::cuda
