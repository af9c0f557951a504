#include "ops/cuda/kernels/gemm_tile_kernel.h"
#include "ops/cuda/kernels/w8a8_params.h"

namespace charonia::cuda {

bool launch_w8a8_tile_i8(Stream& stream, const PairParams& params, const GemmTactic& tactic) {
  using gemm_tile::launch_if;
  return launch_if<TileShape<i8x2, 64, 32, 2, 1, 6, 3>>(stream, params, tactic, true) ||
         launch_if<TileShape<i8x2, 128, 64, 4, 1, 4, 2>>(stream, params, tactic, true) ||
         launch_if<TileShape<i8x2, 128, 128, 2, 4, 3, 1>>(stream, params, tactic, true);
}

}  // namespace charonia::cuda
