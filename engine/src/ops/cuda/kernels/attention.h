// Attention over blocks of the KV cache, for steps that mix chunks of prompts and decodes.
//
// The host cuts a step into items (plan_attention): integers only, so that cuts are tested without a device. An item is
// some rows of one sequence against a range of its positions; every kv head of it is one thread block's work, with the
// query heads of the group as further rows of the same product. Where the positions of a row are cut into several
// splits (long sequences in small batches, so that all SMs have work), each leaves a partial result. They
// are combined in the order of the positions: those of a set of kCombinedSplits by the block that is done last among
// them, and the sets by the last of those blocks, one head of a row a warp.
//
// At batch 1 a context of 32768 with 8 kv heads of 128 is 32 splits a kv head on 132 SMs, a thread block
// each. By count their combining takes two rounds of 16 loads from L2 behind the load of the maxima: some 3000 cycles,
// beside 49000 for reading k and v. (128 splits, combined by loads one after the other, would take 90000.) Not
// measured.
//
// Layers share a step's plan, and their windows may differ: items begin where the widest window does (AttentionShape),
// and the kernels leave out the tiles of an item that no row of it sees in their layer. A split of which nothing is
// left reads nothing and leaves a partial result of weight 0. Neither changes a bit: see attention_tile.h.
//
// What a caller does:
//   once    attention_bounds() says how many items and partial results any step within the limits has. Make room for
//           that many items of each list in the step's upload, and one zero-filled DeviceMemory of
//           attention_workspace_bytes() that all layers (and all steps of the stream) share. Kernels leave its counters
//           at zero; nobody else writes to it, and for other bounds it is made anew.
//   a step  plan_attention(), then upload plan.decode, plan.prefill, {decode.size(), prefill.size()} and the flat
//   tables.
//           Items may lie anywhere that is 16-byte aligned.
//   a layer attention(). A captured launch serves every plan with at most max_* items; a list whose max_* is 0 launches
//           nothing.
// Only blocks that hold positions <= a sequence's last one in the step are looked up in its table.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "ops/cuda/device/runtime.h"
#include "ops/cuda/emulated/host_device.h"
#include "ops/cuda/kernels/rows.h"
#include "ops/operations.h"
#include "ops/step.h"

namespace charonia::cuda {

inline constexpr int kAttentionTile = 64;  // items begin, and are cut, at multiples of it

struct alignas(16) AttentionItem {
  std::int32_t table = 0;      // where the sequence's block table begins in the flat list of tables
  std::int32_t first_row = 0;  // row of the step
  std::int32_t num_rows = 0;
  std::int32_t first_position = 0;        // of first_row; the following rows stand at the following positions
  std::int32_t kv_begin = 0, kv_end = 0;  // positions of this split; row r sees those <= its own, in its window
  std::int32_t partial = 0;  // of cut rows: their first partial result. Row r of split i: + i * num_rows + r
  std::int16_t split = 0, splits = 1;
};

struct AttentionPlan {
  std::vector<AttentionItem> decode;   // one row each
  std::vector<AttentionItem> prefill;  // as many rows as a thread block takes at once
  std::int32_t num_partials = 0;       // rows of partial results, [heads] each
};

struct AttentionShape {
  int heads = 0, kv_heads = 0, head_dim = 0, block_len = 0;
  int window = 0;  // positions that a row sees in the layer where it sees most, itself among them; 0: all
  int sms = 1;     // of the device; fewer leave some of it to others
  // A row's bits then depend on its own sequence alone: positions are summed up in chunks of kAttentionChunk, the
  // chunks' results are combined in their order within spans of kAttentionSpan, and those of the spans in theirs,
  // whether one thread block does it or several.
  bool reproducible = false;

  CHARONIA_HD int group() const { return heads / kv_heads; }
  // Of an item whose first row stands at the position: where its positions begin.
  CHARONIA_HD int first_seen(int position) const {
    const int first = window == 0 || window > position ? 0 : position - window + 1;
    return first / kAttentionTile * kAttentionTile;
  }
};

inline constexpr int kCombinedSplits = 32;   // whose results are combined by one thread block
inline constexpr int kAttentionChunk = 512;  // reproducible: at multiples of it
inline constexpr int kAttentionSpan = kCombinedSplits * kAttentionChunk;
inline constexpr int kDecodeTileRows = 16;  // query heads of a row that a thread block takes at once
inline constexpr int kBlocksPerSm = 2;

// Query heads times rows that a thread block of the prefill kernel takes at once, and how many rows that is.
CHARONIA_HD constexpr int prefill_tile_rows(int head_dim) { return head_dim <= 128 ? 128 : 64; }
CHARONIA_HD constexpr int prefill_item_rows(int head_dim, int group) {
  return group >= prefill_tile_rows(head_dim) ? 1 : prefill_tile_rows(head_dim) / group;
}

// The most that any plan of so many rows, sequences and positions needs (for buffers that are made once).
struct AttentionBounds {
  std::int64_t decode_items = 0, prefill_items = 0, partials = 0;
};
AttentionBounds attention_bounds(const AttentionShape& shape, int max_rows, int max_sequences, int max_positions);

// Of AttentionWork::workspace.
std::size_t attention_workspace_bytes(const AttentionShape& shape, const AttentionBounds& bounds);

// table_begin [sequences]: where each sequence's table begins in the flat list. Replaces what is in `plan`.
void plan_attention(const AttentionShape& shape, const ops::AttentionBatch& batch,
                    std::span<const std::int32_t> table_begin, AttentionPlan& plan);

// Device arrays of a plan.
struct AttentionWork {
  const AttentionItem* decode = nullptr;
  const AttentionItem* prefill = nullptr;
  const std::int32_t* counts = nullptr;  // [2]: decode, prefill items; read on the device
  std::int64_t max_decode = 0, max_prefill = 0;
  const std::int32_t* block_tables = nullptr;  // flat
  void* workspace = nullptr;
  std::int64_t max_partials = 0;  // AttentionBounds::partials that the workspace was made for
};

// out [rows, heads * head_dim] = the values, weighted by the softmax of what ops::AttentionParams says. qkv as
// rotary_store left it (q is read). how.scale > 0; how.window: no wider than the shape's. bf16 and f16 caches, and
// quantised ones of such models, go over tensor cores where head_dim is 32, 64, 96, 128 or 256, q and out have the
// cache's type, and rows of qkv and blocks of the cache are 16-byte aligned; anything else takes a plain kernel in
// float.
void attention(Stream& stream, const DeviceInfo& device, const Tensor& out, const Tensor& qkv, const CacheLayer& cache,
               const AttentionShape& shape, const ops::AttentionParams& how, const AttentionWork& work);

}  // namespace charonia::cuda
