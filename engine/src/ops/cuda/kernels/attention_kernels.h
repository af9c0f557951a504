// The kernels behind attention(): what they take, and how each is started. Only kernels/attention*.cu include this.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

#include "ops/cuda/kernels/attention.h"

namespace charonia::cuda {

// What is done to products of q and k beyond their scale. Kernels have a version with it and one without.
struct Weighing {
  bool any = false;
  int window = 1 << 30;  // positions that a row sees, itself among them
  bool changes = false;  // scores are x = q k^T * scale, capped, plus slopes; else x = q k^T
  float scale = 1;
  float cap = 0;                  // 0: none
  float to_exponent = 0;          // 2 log2(e) / cap
  const float* slopes = nullptr;  // [heads]; null: none
};

// What there is room for in AttentionParams::sums for each of kBlocksPerSm thread blocks on an SM, in floats: a sum, a
// maximum and head_dim columns of every row; four lanes have the former two. Of chunks and of spans.
constexpr std::int64_t attention_sums_stride(int head_dim) {
  return 2 * std::int64_t{prefill_tile_rows(head_dim)} * (head_dim + 8);
}

inline constexpr int kCombineLevels = 2;  // splits to sets, sets to rows

struct AttentionParams {
  const AttentionItem* items = nullptr;
  const std::int32_t* count = nullptr;   // of items
  const std::int32_t* tables = nullptr;  // flat block tables
  const void* q = nullptr;               // [rows, heads, head_dim], rows q_stride elements apart
  void* out = nullptr;                   // likewise, out_stride
  std::int64_t q_stride = 0, out_stride = 0;
  CacheLayer cache;
  int heads = 0, group = 0;
  int tiles = 1;              // thread blocks for one kv head of one item
  int max_units = 0;          // items there is room for, times kv heads and tiles
  int max_blocks = 0;         // of a grid that runs all at once
  int stages = 2;             // of the pipeline of k and v tiles
  int chunk = 0;              // positions that are summed up by themselves; a power of two
  int span = 0;               // positions whose chunks are; kCombinedSplits chunks, or one where there are no chunks
  float scale = 1;            // softmax is over 2^(x * scale), log2(e) is in it; x = q k^T, or what Weighing says
  float* partials = nullptr;  // [partials][heads][head_dim + 4]: sum of p v, maximum, sum of p, -, -
  // [partials][kv_heads][tiles][kCombineLevels]: splits of a set, at its first partial, and sets of an item, at its
  // first, that are done
  std::int32_t* counters = nullptr;
  float* sums = nullptr;             // [thread blocks][sums_stride]: what a block has of the chunks before, when there
  std::int64_t sums_stride = 0;      //   may be several in an item
  Weighing weighing;
};

// `items`: the most that *params.count can be. The first two need elements of type T (bf16, f16), heads of kDim
// elements (one of TiledHeadSizes), and rows of q and out that are 16-byte aligned. Each head size has a source file of
// its own with their instances, so that they are compiled side by side.
using TiledHeadSizes = std::integer_sequence<int, 32, 64, 96, 128, 256>;
template <class T, int kDim>
void start_decode(Stream& stream, const DeviceInfo& device, AttentionParams params, std::int64_t items);
template <class T, int kDim>
void start_prefill(Stream& stream, AttentionParams params, std::int64_t items);

// Any shape and any types. Items are taken whole: the first split of cut rows does all of them.
void attention_plain(Stream& stream, const DeviceInfo& device, DType q_type, DType out_type,
                     const AttentionParams& params, std::int64_t items, int rows_per_item);

}  // namespace charonia::cuda
