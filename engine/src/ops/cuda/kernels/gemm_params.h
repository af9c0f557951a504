// Common definitions of the kernels of gemm.h and their launch.
#pragma once

#include <cstdint>
#include <vector>

#include "ops/cuda/device/elements.h"
#include "ops/cuda/device/host_device.h"
#include "ops/cuda/kernels/gemm.h"

namespace charonia::cuda {

struct GemmParams {
  void* out;           // [rows, n] of the type of in, or float
  const void* in;      // [rows, k]
  const void* weight;  // [n, k]
  const float* bias;   // [n] or null
  // For k_blocks > 1 without a cluster. gemm_bulk.cu and shared_tiles.h have other layouts.
  int* counters;  // [tiles], zero
  float* sums;    // [tiles][parts][threads][sums of a thread]
  std::int64_t out_stride;
  int in_stride, weight_stride;
  int rows, n, k;
  int parts, part_length;  // see split_k, or one part for each of k_blocks
  int k_blocks, parts_of_block;
  bool cluster;  // the k_blocks blocks of a tile form a cluster
  int row_tiles, column_tiles;
  Gate gate;
  bool packed;                // the weight is packed
  bool late_trigger;          // see launch()
  bool out_f32, out_vectors;  // out_vectors: a row's outputs can be stored 16 bytes at a time
};

// For GEMMs of 8-bit numbers (w8a8_gemm.h): the factors of sums, and whether 16-bit outputs are f16.
struct PairParams : GemmParams {
  const float* column_scales;  // [n]
  const float* row_scales;     // [rows]
  bool out_f16;
};
template <class T>
using ParamsOf = std::conditional_t<kIsPair<T>, PairParams, GemmParams>;

// The block's tile. Blocks that run at the same time should share their reads: all row tiles of a group use the same
// weight tile, so that weights are read from memory once per group, while the group's input stays in the L2 cache.
inline constexpr int kTileGroup = 16;
struct TilePlace {
  int row_tile, column_tile;
};
CHARONIA_HD TilePlace tile_place(int index, int row_tiles, int column_tiles) {
  const int group = index / (kTileGroup * column_tiles);
  const int first = group * kTileGroup;
  const int rows = row_tiles - first < kTileGroup ? row_tiles - first : kTileGroup;
  const int within = index - first * column_tiles;
  return {first + within % rows, within / rows};
}

inline constexpr int kBulkColumns = 16;  // weight rows of a tile of the bulk kernel
// Its tactics; empty if the device or the GEMM does not support it. They keep SumOrder::fixed.
std::vector<GemmTactic> bulk_tactics(const DeviceInfo& device, const Gemm& gemm);

// The warps of a wgmma kernel that multiply.
inline constexpr int kWgmmaWarps = 8;
// The numbers of thread blocks of a wgmma kernel (shared_tiles.h): one for each SM, which share tiles; and in front of
// it fewer, if then each block computes whole tiles, or a half or a quarter of a tile, so that fewer sums of parts are
// written and read. k: in elements of 16 bits. A block has 256 of them or more.
std::vector<int> wgmma_blocks(const DeviceInfo& device, std::int64_t tiles, std::int64_t k);

// Adds a tactic with each number of thread blocks that may share the parts of K of a tile: more of them as long as
// there are fewer than two blocks per SM. The number that just fills the device comes first. Each with the possible
// places to combine sums in that order: if a block has one part, its sum is the part's sum.
void add_tile_tactics(std::vector<GemmTactic>& tactics, GemmTactic tactic, const DeviceInfo& device, const Gemm& gemm,
                      SumOrder order);
// The parameters of a GEMM: its operands, the parts of K, the number of tiles, and where sums are combined.
GemmParams gemm_params(const Gemm& gemm, const GemmTactic& tactic, void* workspace);

// Each is defined in its own file. Returns false if the tactic does not exist.
bool launch_stream(Stream& stream, const GemmParams& params, const GemmTactic& tactic, DType type);
bool launch_bulk(Stream& stream, const GemmParams& params, const GemmTactic& tactic, DType type);
bool launch_tile_bf16(Stream& stream, const GemmParams& params, const GemmTactic& tactic, bool vectors);
bool launch_tile_f16(Stream& stream, const GemmParams& params, const GemmTactic& tactic, bool vectors);
bool launch_plain(Stream& stream, const GemmParams& params, const GemmTactic& tactic, bool vectors);

}  // namespace charonia::cuda
