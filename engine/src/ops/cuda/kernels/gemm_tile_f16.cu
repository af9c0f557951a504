#include "ops/cuda/kernels/gemm_tile_kernel.h"

namespace charonia::cuda {

bool launch_tile_f16(Stream& stream, const GemmParams& params, const GemmTactic& tactic, bool vectors) {
  return gemm_tile::launch_typed<f16>(stream, params, tactic, vectors);
}

}  // namespace charonia::cuda
