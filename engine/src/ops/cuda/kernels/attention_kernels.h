// The kernels of attention(): their parameters, and functions to start them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

#include "ops/cuda/kernels/attention.h"

namespace charonia::cuda {

// Operations on products of q and k besides scaling, and sinks. Kernels have one version with them and one without.
struct ScoreMod {
  bool any = false;
  int window = 1 << 30;  // positions that a row attends to, including its own
  bool changes = false;  // scores are x = q k^T * scale, capped, plus slopes; otherwise x = q k^T
  float scale = 1;
  float cap = 0;                  // 0: no cap
  float to_exponent = 0;          // 2 log2(e) / cap
  const float* slopes = nullptr;  // [heads]; null: no slopes
  const float* sinks = nullptr;   // [heads]; null: no sinks
};

// Space in AttentionParams::sums for each of kBlocksPerSm thread blocks per SM, in floats: a sum, a maximum and
// head_dim columns of every row; four lanes hold the sum and the maximum. For chunks and for spans.
constexpr std::int64_t attention_sums_stride(int head_dim) {
  return 2 * std::int64_t{prefill_tile_rows(head_dim)} * (head_dim + 8);
}

inline constexpr int kCombineLevels = 2;  // splits to sets, sets to rows

struct AttentionParams {
  const AttentionItem* items = nullptr;
  const std::int32_t* count = nullptr;   // number of items
  const std::int32_t* tables = nullptr;  // flat block tables
  const void* q = nullptr;               // [rows, heads, head_dim], rows q_stride elements apart
  void* out = nullptr;                   // the same with out_stride
  std::int64_t q_stride = 0, out_stride = 0;
  CacheLayer cache;
  int heads = 0, group = 0;
  int tiles = 1;              // thread blocks per kv head of an item
  int max_units = 0;          // maximum items times kv heads and tiles
  int max_blocks = 0;         // of a grid whose blocks all run at the same time
  bool late_trigger = false;  // see launch()
  bool k_outside = false;     // AttentionShape::k_outside, if has_k_outside()
  int stages = 2;             // of the pipeline of k and v tiles
  int chunk = 0;              // positions that are summed separately; a power of two
  int span = 0;               // positions of kCombinedSplits chunks, or of one if there are no chunks
  float scale = 1;            // softmax is over 2^(x * scale), which includes log2(e); x: q k^T, or its modified score
  float* partials = nullptr;  // [partials][heads][head_dim + 4]: sum of p v, maximum, sum of p, -, -
  // [partials][kv_heads][tiles][kCombineLevels]: numbers of finished splits of a set, at its first partial, and of
  // finished sets of an item, at its first partial
  std::int32_t* counters = nullptr;
  float* sums = nullptr;  // [thread blocks][sums_stride]: sums of earlier chunks of an item
  std::int64_t sums_stride = 0;
  ScoreMod score_mod;  // `any` if there are v_scales
  const float* v_scales = nullptr;  // [kv_heads]: factors of out, of an FP8 cache; null: 1
};

// `items`: the maximum of *params.count. The first two need elements of type T (bf16, f16), heads of kDim elements (one
// of TiledHeadSizes), and 16-byte aligned rows of q and out. Each head size has its own source file, so that they
// compile in parallel.
using TiledHeadSizes = std::integer_sequence<int, 32, 64, 96, 128, 256>;
template <class T, int kDim>
void start_decode(Stream& stream, const DeviceInfo& device, AttentionParams params, std::int64_t items);
template <class T, int kDim>
void start_prefill(Stream& stream, AttentionParams params, std::int64_t items);

// How many positions of the cache start_wgmma_prefill() copies at a time; 0: it cannot copy blocks of this length.
// Copies have a multiple of 8 rows, and items begin at multiples of kAttentionTile.
constexpr int wgmma_box_positions(int block_len) {
  const bool fits = block_len >= 8 && (block_len % kAttentionTile == 0 || kAttentionTile % block_len == 0);
  return !fits ? 0 : block_len < kAttentionTile ? block_len : kAttentionTile;
}

// The same with products of warpgroups, for items of kWgmmaPrefillRows and a 16-bit cache; see why_no_wgmma(). rows: of
// q. num_blocks: of the cache. params.tables may be null: items' tables are then numbers of blocks, which follow each
// other.
using WgmmaHeadSizes = std::integer_sequence<int, 64, 128, 256>;
template <class T, int kDim>
void start_wgmma_prefill(Stream& stream, const AttentionParams& params, std::int64_t items, std::int64_t rows,
                         std::int64_t num_blocks);

// Writes 16-bit copies of `count` blocks of a quantised cache to `to`.
void dequantise_blocks(Stream& stream, const CacheLayer& cache, const std::int32_t* blocks, std::int64_t count,
                       void* to);

// Any shape and any types. Items are not divided: the first split of divided rows computes all splits.
void attention_plain(Stream& stream, const DeviceInfo& device, DType q_type, DType out_type,
                     const AttentionParams& params, std::int64_t items, int rows_per_item);

}  // namespace charonia::cuda
