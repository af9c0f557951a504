// GEMMs of few rows with 8-bit numbers: gemm_stream_kernel.h with w8a8_gemm.h's elements. A step of a warp is 64
// columns.
#include "ops/cuda/kernels/gemm_stream_kernel.h"
#include "ops/cuda/kernels/w8a8_params.h"

namespace charonia::cuda {
namespace {

template <class T, int kM, int kN, int kBlocks>
bool launch_if(Stream& stream, const PairParams& p, const GemmTactic& tactic) {
  constexpr int kRing = 4;
  using Rows = gemm_stream::StreamShape<T, kM, kN, kRing, kBlocks, false, false>;
  using Packed = gemm_stream::StreamShape<T, kM, kN, kRing, kBlocks, true, false>;
  if (tactic.tile_rows != Rows::kRows || tactic.tile_columns != Rows::kOutputs || tactic.stages != kRing) return false;
  p.packed ? gemm_stream::launch_shape<Packed>(stream, p) : gemm_stream::launch_shape<Rows>(stream, p);
  return true;
}

}  // namespace

bool launch_w8a8_stream(Stream& stream, const PairParams& params, const GemmTactic& tactic, ops::Code code) {
  if (code == ops::Code::i8) {
    return launch_if<i8x2, 1, 1, 3>(stream, params, tactic) || launch_if<i8x2, 2, 1, 2>(stream, params, tactic) ||
           launch_if<i8x2, 2, 2, 2>(stream, params, tactic);
  }
  // No 32 outputs per warp: with the additional sums of a chunk there are not enough registers.
  return launch_if<e4m3x2, 1, 1, 3>(stream, params, tactic) || launch_if<e4m3x2, 1, 2, 2>(stream, params, tactic);
}

}  // namespace charonia::cuda
