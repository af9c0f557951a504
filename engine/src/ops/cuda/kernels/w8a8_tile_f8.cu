#include "ops/cuda/kernels/gemm_tile_kernel.h"
#include "ops/cuda/kernels/w8a8_params.h"

namespace charonia::cuda {

bool launch_w8a8_tile_f8(Stream& stream, const PairParams& params, const GemmTactic& tactic) {
  using gemm_tile::launch_if;
  // The larger one has twice the warps: with the sums of a chunk, a warp has no registers for 64 more sums.
  return launch_if<TileShape<e4m3x2, 64, 32, 2, 1, 6, 3>>(stream, params, tactic, true) ||
         launch_if<TileShape<e4m3x2, 128, 64, 4, 2, 4, 1>>(stream, params, tactic, true);
}

}  // namespace charonia::cuda
