#include "ops/cuda/kernels/gemm_tile_kernel.h"

namespace charonia::cuda {

bool launch_tile_bf16(Stream& stream, const GemmParams& params, const GemmTactic& tactic, bool vectors) {
  return gemm_tile::launch_typed<bf16>(stream, params, tactic, vectors);
}

}  // namespace charonia::cuda
