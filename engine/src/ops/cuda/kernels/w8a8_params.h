// Common declarations of the kernels of w8a8_gemm.h and their launch. Each is defined in its own file. They return
// false if the tactic does not exist.
#pragma once

#include "ops/cuda/kernels/gemm_params.h"

namespace charonia::cuda {

bool launch_w8a8_stream(Stream& stream, const PairParams& params, const GemmTactic& tactic, ops::Code code);
bool launch_w8a8_tile_i8(Stream& stream, const PairParams& params, const GemmTactic& tactic);
bool launch_w8a8_wgmma(Stream& stream, const PairParams& params, const GemmTactic& tactic);
bool launch_w8a8_tile_f8(Stream& stream, const PairParams& params, const GemmTactic& tactic);

}  // namespace charonia::cuda
