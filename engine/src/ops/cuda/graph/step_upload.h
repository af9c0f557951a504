// The upload of a step, in one piece of memory and one copy. Integers only, so that it can be tested without a device.
//
//   counts        of decode items, of prefill items, of rows; 4 x i32
//   ids           [rows] i32
//   positions     [rows] i32
//   rotary_rows   [rows] i32, equal to the positions if the step has none: a graph serves steps with and without them
//   kv_slots      [rows] i32, block * block_len + slot; -1: the row is padding
//   logits_rows   [logits rows] i32
//   decode, prefill               the attention plan
//   sampling      the output of Sampler::pack
//   tables        the sequences' block tables, contiguous, up to their last positions
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
  std::vector<std::int32_t> begin;  // [sequences]: offsets in `blocks`
};
// Replaces the contents of `to`.
void flatten_tables(const ops::AttentionBatch& batch, int block_len, FlatTables& to);

// The maximum numbers of elements of the parts; a step may have fewer. `tables` is the last part, with
// variable size.
struct StepCapacity {
  std::int64_t rows = 0, logits_rows = 0;
  std::int64_t decode = 0, prefill = 0;
  std::size_t sampling_bytes = 0;
};

// The byte offsets of the parts. Equal capacities give equal layouts; that is why a captured step serves later steps.
inline constexpr int kCountOfRows = 2;  // index in counts of the number of rows; later rows are padding
struct StepLayout {
  std::size_t counts = 0, ids = 0, positions = 0, rotary_rows = 0, kv_slots = 0, logits_rows = 0;
  std::size_t decode = 0, prefill = 0, sampling = 0, tables = 0;
};
StepLayout step_layout(const StepCapacity& capacity);
std::size_t step_bytes(const StepLayout& layout, std::size_t table_entries);

// Writes step_bytes(layout, tables.blocks.size()) bytes, 16-byte aligned. Rows beyond the input are padding: token 0 at
// position 0 (and rotary row 0), not stored, in no attention item. Rows of logits beyond the input refer to the rows
// that follow.
void write_step(std::byte* to, const StepCapacity& capacity, const StepLayout& layout, const ops::StepInput& input,
                int block_len, const FlatTables& tables, const AttentionPlan& plan,
                std::span<const std::byte> sampling);

}  // namespace charonia::cuda
