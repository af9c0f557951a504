#include "ops/cuda/kernels/quant_tile_kernel.h"

namespace charonia::cuda {

bool launch_quant_tile_i8(Stream& stream, const QuantParams& params, const GemmTactic& tactic, DType type, int closes) {
  constexpr auto kCode = ops::Code::i8;
  if (type == DType::bf16) {
    return closes == 32 ? quant_tile::launch_typed<bf16, kCode, 32>(stream, params, tactic)
                        : quant_tile::launch_typed<bf16, kCode, 64>(stream, params, tactic);
  }
  return closes == 32 ? quant_tile::launch_typed<f16, kCode, 32>(stream, params, tactic)
                      : quant_tile::launch_typed<f16, kCode, 64>(stream, params, tactic);
}

}  // namespace charonia::cuda
