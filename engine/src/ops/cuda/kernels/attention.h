// Attention over blocks of the k/v cache, for steps that mix chunks of prompts and decodes.
//
// The host cuts a step into items (plan_attention): integers only, so that cuts are tested without a device. An item is
// some rows of one sequence against a range of its positions; every kv head of it is one thread block's work, with the
// query heads of the group as further rows of the same product. Where the positions of a row are cut into several items
// (long sequences in small batches, so that all multiprocessors have work), each leaves a partial result and a second
// kernel combines them in the order of the positions.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "ops/cuda/kernels/rows.h"
#include "ops/cuda/runtime.h"
#include "ops/ops.h"

namespace charonia::cuda {

struct AttentionItem {
  std::int32_t table = 0;           // where the sequence's block table begins in the flat list of tables
  std::int32_t first_row = 0;       // row of the step
  std::int32_t num_rows = 0;
  std::int32_t first_position = 0;  // of first_row; the following rows stand at the following positions
  std::int32_t kv_begin = 0, kv_end = 0;  // positions of the range; row r sees those <= its own
  std::int32_t partial = -1;        // >= 0: the first row's partial result goes there, the next row's behind it
  std::int32_t reserved = 0;
};

struct AttentionCombine {
  std::int32_t row = 0;            // of the step
  std::int32_t first_partial = 0;
  std::int32_t num_partials = 0;
  std::int32_t stride = 0;         // from one of the row's partials to its next
};

struct AttentionPlan {
  std::vector<AttentionItem> decode;     // one row each
  std::vector<AttentionItem> prefill;    // as many rows as a thread block takes at once
  std::vector<AttentionCombine> combine; // rows with partial results
  std::int32_t num_partials = 0;         // partial results, each [heads][head_dim + 2] f32
};

struct AttentionShape {
  int heads = 0, kv_heads = 0, head_dim = 0, block_len = 0;
  int multiprocessors = 1;
  bool reproducible = false;  // cuts depend on positions alone, and decodes take the way of prefills
};

// The most that any plan of so many rows, sequences and positions needs (for buffers that are made once).
struct AttentionBounds {
  std::int64_t decode_items = 0, prefill_items = 0, combines = 0, partials = 0;
};
AttentionBounds attention_bounds(const AttentionShape& shape, int max_rows, int max_sequences, int max_positions);

// table_begin [sequences]: where each sequence's table begins in the flat list. Replaces what is in `plan`.
void plan_attention(const AttentionShape& shape, const ops::AttentionBatch& batch,
                    std::span<const std::int32_t> table_begin, AttentionPlan& plan);

// Device arrays of a plan. Counts are read on the device, so that a recorded launch serves other plans: at most
// max_* items are there. 0 of one kind: its kernel is not launched.
struct AttentionWork {
  const AttentionItem* decode = nullptr;
  const AttentionItem* prefill = nullptr;
  const AttentionCombine* combine = nullptr;
  const std::int32_t* counts = nullptr;  // decode, prefill, combine
  std::int64_t max_decode = 0, max_prefill = 0, max_combine = 0;
  const std::int32_t* block_tables = nullptr;  // flat
  float* partials = nullptr;                   // [partials][heads][head_dim + 2]: result, maximum, sum
};

// out [rows, heads * head_dim] = softmax(q k^T * scale) v. qkv as rotary_store left it (q is read). bf16 and f16 caches
// go over tensor cores where head_dim is 32, 64, 96, 128 or 256, with q and out of the cache's type; anything else takes
// a plain kernel in float.
void attention(Stream& stream, const DeviceInfo& device, const Tensor& out, const Tensor& qkv, const CacheLayer& cache,
               const AttentionShape& shape, float scale, const AttentionWork& work);

}  // namespace charonia::cuda
