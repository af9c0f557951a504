// Divides the steps of tiles evenly among the thread blocks of a grid, and adds the sums of a tile that several blocks
// have computed. For kernels whose kWgmmaWarps warps each have a part of a tile's sums in registers.
#pragma once

#include "ops/cuda/kernels/gemm_device.h"

namespace charonia::cuda {

// The steps of all tiles are in a row, tile after tile. Block b takes steps first_of(b) to first_of(b + 1), so it may
// begin and end within a tile. There are at least as many steps as blocks.
struct SharedTiles {
  int tiles;
  int steps;   // of a tile
  int blocks;  // that share the tiles

  CHARONIA_DEVICE std::int64_t all() const { return static_cast<std::int64_t>(tiles) * steps; }
  CHARONIA_DEVICE int first_of(int block) const { return static_cast<int>(all() * block / blocks); }
  CHARONIA_DEVICE int block_of(int step) const {
    return static_cast<int>(((step + std::int64_t{1}) * blocks - 1) / all());
  }
};

// Adds the sums of all blocks that share a tile, in the order of the blocks, through the workspace. Returns false if
// another block will do this. warp: of kWgmmaWarps. The workspace has two tiles and kWgmmaWarps counters for each
// block.
template <class Sum, int kM, int kSums>
CHARONIA_DEVICE bool combine(const GemmParams& p, const SharedTiles& of, int tile, int warp, Sum (&total)[kM][kSums]) {
  const int first_block = of.block_of(tile * of.steps), last_block = of.block_of((tile + 1) * of.steps - 1);
  constexpr int kFours = kSums / 4;
  const auto place = [&](int block) {  // a block has at most two parts of tiles: at its begin and at its end
    const int part = 2 * block + (of.first_of(block) / of.steps == tile ? 0 : 1);
    return reinterpret_cast<Four<Sum>*>(p.sums) +
           (static_cast<std::int64_t>(part) * kWgmmaWarps + warp) * (kM * kFours * kWarp) + lane_id();
  };
  Four<Sum>* const mine = place(static_cast<int>(blockIdx.x));
  CHARONIA_UNROLL
  for (int m = 0; m < kM; ++m) {
    CHARONIA_UNROLL
    for (int i = 0; i < kFours; ++i) {
      const Sum* const four = total[m] + 4 * i;
      mine[(m * kFours + i) * kWarp] = Four<Sum>{four[0], four[1], four[2], four[3]};
    }
  }
  __threadfence();
  __syncwarp();
  int arrived = 0;
  int* const counter = p.counters + first_block * kWgmmaWarps + warp;  // only one shared tile begins in a block
  if (lane_id() == 0) {
    arrived = atomicAdd(counter, 1) + 1;
    if (arrived > last_block - first_block) *counter = 0;
  }
  if (shuffle_from(arrived, 0) <= last_block - first_block) return false;
  __threadfence();
  CHARONIA_UNROLL_BY(1)
  for (int block = first_block; block <= last_block; ++block) {
    const Four<Sum>* const from = place(block);
    CHARONIA_UNROLL
    for (int m = 0; m < kM; ++m) {
      CHARONIA_UNROLL
      for (int i = 0; i < kFours; ++i) {
        const Four<Sum> four = load_l2(from + (m * kFours + i) * kWarp);
        Sum* const to = total[m] + 4 * i;
        const bool adds = block > first_block;
        to[0] = adds ? to[0] + four.x : four.x, to[1] = adds ? to[1] + four.y : four.y;
        to[2] = adds ? to[2] + four.z : four.z, to[3] = adds ? to[3] + four.w : four.w;
      }
    }
  }
  return true;
}

}  // namespace charonia::cuda
