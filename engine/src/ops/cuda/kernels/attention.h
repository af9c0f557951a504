// Attention over blocks of the KV cache, for steps that mix prompt chunks and decodes.
//
// The host divides a step into items (plan_attention), with integers only, so that it can be tested without a device.
// An item is some rows of one sequence with a range of its positions. A thread block computes one kv head of an item;
// the query heads of the group are further rows of the same product. If the positions of a row are divided into several
// splits (long sequences in small batches, so that all SMs have work), each split writes a partial result. Partial
// results are combined in the order of the positions: the last finished block of a set of kCombinedSplits splits
// combines the set, and the last of those blocks combines the sets, with one head of a row per warp.
//
// At batch 1, a context of 32768 with 8 kv heads of 128 has 32 splits per kv head on 132 SMs, one thread block each. By
// instruction count, combining takes two rounds of 16 loads from L2 after the load of the maxima: about 3000 cycles,
// compared with 49000 for reading k and v. (128 splits, combined by sequential loads, would take 90000.) Not measured.
//
// Layers with the same heads and kind of cache share a plan, but may have different windows: items begin at the widest
// window (AttentionShape), and the kernels skip tiles of an item that no row attends to in their layer. A split with no
// remaining tiles reads nothing and writes a partial result of weight 0. Neither changes a bit (attention_tile.h).
//
// Usage:
//   once    attention_bounds() returns the maximum items and partial results of a step within the limits. Allocate that
//           number of items of each list in the step's upload, and one zero-filled DeviceMemory of
//           attention_workspace_bytes(), shared by its layers (and all steps of the stream). Kernels leave its counters
//           at zero; only they write to it. Allocate a new one for other bounds.
//   step    plan_attention(), then upload plan.decode, plan.prefill, {decode.size(), prefill.size()} and the flat
//           tables. Items must be 16-byte aligned.
//   layer   attention(). A captured launch serves every plan with at most max_* items. A list with max_* = 0 launches
//           nothing.
// Only blocks with positions up to a sequence's last position in the step are looked up in its table.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "base/cache_kind.h"
#include "ops/cuda/device/runtime.h"
#include "ops/cuda/device/host_device.h"
#include "ops/cuda/kernels/rows.h"
#include "ops/operations.h"
#include "ops/step.h"

namespace charonia::cuda {

inline constexpr int kAttentionTile = 64;  // items begin, and are divided, at multiples of this

struct alignas(16) AttentionItem {
  std::int32_t table = 0;      // offset of the sequence's block table in the flat list of tables
  std::int32_t first_row = 0;  // row of the step
  std::int32_t num_rows = 0;
  std::int32_t first_position = 0;        // position of first_row; the following rows have the following positions
  std::int32_t kv_begin = 0, kv_end = 0;  // this split; row r attends up to its own position, within its window
  std::int32_t partial = 0;  // first partial result of a divided item. Row r of split i: + i * num_rows + r
  std::int16_t split = 0, splits = 1;
};

struct AttentionPlan {
  std::vector<AttentionItem> decode;   // one row each
  std::vector<AttentionItem> prefill;  // as many rows as a thread block takes
  std::int32_t num_partials = 0;       // rows of partial results, [heads] each
  bool wgmma = false;                  // prefill items are for the kernel with products of warpgroups
  // After widen_plan(): prefill items refer to 16-bit copies of blocks, numbered from 0. Copy i is of the block
  // tables[wide_at + i].
  std::int64_t wide_at = 0, wide_blocks = 0;
};

// Query heads times rows that a thread block of the prefill kernel takes: of the kernel for all devices, and of the one
// with products of warpgroups.
CHARONIA_HD constexpr int prefill_tile_rows(int head_dim) { return head_dim <= 128 ? 128 : 64; }
inline constexpr int kWgmmaPrefillRows = 128;
inline constexpr int kBlocksPerSm = 2;

struct AttentionShape {
  int heads = 0, kv_heads = 0, head_dim = 0, block_len = 0;
  CacheKind kind = CacheKind::full;  // of the block tables that the items refer to
  int window = 0;  // positions that a row attends to, including its own, in the layer with the widest window; 0: all
  int sms = 1;     // of the device; a smaller number leaves SMs to other work
  // If true, a row's bits depend only on its own sequence: positions are summed in chunks of kAttentionChunk; the
  // results of chunks are combined in order within spans of kAttentionSpan, then the results of spans in order, for any
  // number of thread blocks.
  bool reproducible = false;
  int min_decode_split = 256;  // positions; a multiple of kAttentionTile. Without effect in reproducible mode
  // The kernel with products of warpgroups takes the prefill items (see why_no_wgmma()). Not in reproducible mode.
  bool wgmma = false;
  // Decodes over a cache of integers apply the scale and the zero of k to the scores instead of its elements, if
  // has_k_outside(). No GPU has run this yet.
  bool k_outside = false;

  CHARONIA_HD int group() const { return heads / kv_heads; }
  CHARONIA_HD int prefill_rows() const { return wgmma ? kWgmmaPrefillRows : prefill_tile_rows(head_dim); }
  // Rows of a prefill item.
  CHARONIA_HD int item_rows() const { return group() >= prefill_rows() ? 1 : prefill_rows() / group(); }
  CHARONIA_HD int prefill_blocks() const { return sms * (wgmma ? 1 : kBlocksPerSm); }  // that run at the same time
  // The start of the positions of an item whose first row has this position.
  CHARONIA_HD int first_seen(int position) const {
    const int first = window == 0 || window > position ? 0 : position - window + 1;
    return first / kAttentionTile * kAttentionTile;
  }
};

inline constexpr int kCombinedSplits = 32;   // splits whose results one thread block combines
inline constexpr int kAttentionChunk = 512;  // reproducible mode: splits begin at multiples of this
inline constexpr int kAttentionSpan = kCombinedSplits * kAttentionChunk;
inline constexpr int kDecodeTileRows = 16;  // query heads of a row that a thread block takes

// The maximum over all plans with these numbers of rows, sequences and positions (for buffers that are allocated once).
struct AttentionBounds {
  std::int64_t decode_items = 0, prefill_items = 0, partials = 0;
};
AttentionBounds attention_bounds(const AttentionShape& shape, int max_rows, int max_sequences, int max_positions);

// The size of AttentionWork::workspace.
std::size_t attention_workspace_bytes(const AttentionShape& shape, const AttentionBounds& bounds);

// Whether there are tensor-core kernels for heads of this size. Otherwise one warp takes a row with all its positions.
bool attention_has_tiles(int head_dim);

// Why the kernel with products of warpgroups (attention_wgmma_kernel.h) cannot take the prefill items of a layer with
// this shape; empty if it can. It reads copies of a quantised cache.
std::string_view why_no_wgmma(const DeviceInfo& device, const AttentionShape& shape, const CacheLayer& cache);

// Whether decodes of a layer have a kernel for AttentionShape::k_outside. With 4 bits and heads of 96 elements it has too
// few registers.
inline bool has_k_outside(const AttentionShape& shape, const CacheLayer& cache) {
  return !shape.reproducible && cache.dtype != DType::f32 && ops::kv_holds_integers(cache.quant_bits) &&
         !(shape.head_dim == 96 && cache.quant_bits == 4);
}

// table_begin [sequences]: offset of each sequence's table in the flat list. Replaces the contents of `plan`.
void plan_attention(const AttentionShape& shape, const ops::AttentionBatch& batch,
                    std::span<const std::int32_t> table_begin, AttentionPlan& plan);

// For a quantised cache and shape.wgmma: makes the prefill items of a plan refer to copies of the blocks that they
// read, and appends the list of these blocks to `tables`, the flat list. Returns false, and changes nothing, if there
// are more than max_blocks.
bool widen_plan(const AttentionShape& shape, std::int64_t max_blocks, AttentionPlan& plan,
                std::vector<std::int32_t>& tables);

// The 16-bit layer with copies of a quantised layer's blocks in `data`.
inline CacheLayer dequantised(const CacheLayer& cache, void* data) {
  return {data, cache.dtype, cache.kv_heads, cache.head_dim, cache.block_len};
}

// The device arrays of a plan.
struct AttentionWork {
  const AttentionItem* decode = nullptr;
  const AttentionItem* prefill = nullptr;
  const std::int32_t* counts = nullptr;  // [2]: numbers of decode and prefill items; read on the device
  std::int64_t max_decode = 0, max_prefill = 0;
  const std::int32_t* block_tables = nullptr;  // flat
  void* workspace = nullptr;
  std::int64_t max_partials = 0;  // AttentionBounds::partials of the workspace
  std::int64_t num_blocks = 0;    // of the cache; only shape.wgmma needs it
  // With a quantised cache and shape.wgmma: memory for copies of blocks, and AttentionPlan::wide_at and wide_blocks.
  void* wide = nullptr;
  std::int64_t wide_at = 0, wide_blocks = 0;
};

// out [rows, heads * head_dim] = attention with the scores of ops::AttentionParams. qkv must come from rotary_store (q
// is read). how.scale > 0; how.window: at most the shape's. bf16 and f16 caches, and quantised caches of such models,
// use tensor cores if head_dim is 32, 64, 96, 128 or 256, q and out have the cache's type, and rows of qkv and blocks
// of the cache are 16-byte aligned. All other cases use a simple kernel in float.
void attention(Stream& stream, const DeviceInfo& device, const Tensor& out, const Tensor& qkv, const CacheLayer& cache,
               const AttentionShape& shape, const ops::AttentionParams& how, const AttentionWork& work);

}  // namespace charonia::cuda
