#include "ops/cuda/kernels/gemm_tile_kernel.h"
#include "ops/cuda/kernels/w8a8_params.h"

namespace charonia::cuda {

bool launch_w8a8_tile_f8(Stream& stream, const PairParams& params, const GemmTactic& tactic) {
  return gemm_tile::launch_pairs<e4m3x2>(stream, params, tactic);
}

}  // namespace charonia::cuda
