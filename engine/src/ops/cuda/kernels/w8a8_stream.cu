// GEMMs of few rows of 8-bit numbers: gemm_stream_kernel.h with w8a8_gemm.h's elements. A step of a warp is 64 columns.
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

template <class T>
bool launch_typed(Stream& stream, const PairParams& p, const GemmTactic& tactic) {
  return launch_if<T, 1, 1, 3>(stream, p, tactic) || launch_if<T, 2, 1, 2>(stream, p, tactic) ||
         launch_if<T, 2, 2, 2>(stream, p, tactic);
}

}  // namespace

bool launch_w8a8_stream(Stream& stream, const PairParams& params, const GemmTactic& tactic, ops::Code code) {
  return code == ops::Code::i8 ? launch_typed<i8x2>(stream, params, tactic)
                               : launch_typed<e4m3x2>(stream, params, tactic);
}

}  // namespace charonia::cuda
