#include "ops/cuda/kernels/quant_tile_kernel.h"

namespace charonia::cuda {

bool launch_quant_tile_f8(Stream& stream, const QuantParams& params, const GemmTactic& tactic, DType type, int closes) {
  constexpr auto kCode = ops::Code::f8_e4m3;
  if (closes != 64) return false;
  return type == DType::bf16 ? quant_tile::launch_typed<bf16, kCode, 64>(stream, params, tactic)
                             : quant_tile::launch_typed<f16, kCode, 64>(stream, params, tactic);
}

}  // namespace charonia::cuda
