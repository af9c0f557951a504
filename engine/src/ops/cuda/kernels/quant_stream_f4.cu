#include "ops/cuda/kernels/quant_stream_kernel.h"

namespace charonia::cuda {

bool launch_quant_stream_f4(Stream& stream, const QuantParams& params, const GemmTactic& tactic, DType type,
                            int closes) {
  constexpr auto kCode = ops::Code::f4_e2m1;
  if (closes != 32) return false;
  return type == DType::bf16 ? quant_stream::launch_typed<bf16, kCode, 32>(stream, params, tactic)
                             : quant_stream::launch_typed<f16, kCode, 32>(stream, params, tactic);
}

}  // namespace charonia::cuda
