// GEMMs of few rows with 16-bit numbers: gemm_stream_kernel.h.
#include "ops/cuda/kernels/element_types.h"
#include "ops/cuda/kernels/gemm_stream_kernel.h"

namespace charonia::cuda {
namespace {

using namespace gemm_stream;

template <class T, int kM, int kN, int kRing, int kBlocks>
bool launch_if(Stream& stream, const GemmParams& p, const GemmTactic& tactic) {
  using Rows = StreamShape<T, kM, kN, kRing, kBlocks, false, false>;
  using RowsGated = StreamShape<T, kM, kN, kRing, kBlocks, false, true>;
  using Packed = StreamShape<T, kM, kN, kRing, kBlocks, true, false>;
  using PackedGated = StreamShape<T, kM, kN, kRing, kBlocks, true, true>;
  if (tactic.tile_rows != Rows::kRows || tactic.tile_columns != Rows::kOutputs || tactic.stages != kRing) return false;
  if (p.gate == Gate::none) {
    p.packed ? launch_shape<Packed>(stream, p) : launch_shape<Rows>(stream, p);
  } else {
    p.packed ? launch_shape<PackedGated>(stream, p) : launch_shape<RowsGated>(stream, p);
  }
  return true;
}

template <class T>
bool launch_typed(Stream& stream, const GemmParams& p, const GemmTactic& tactic) {
  return launch_if<T, 1, 1, 4, 3>(stream, p, tactic) || launch_if<T, 1, 1, 8, 2>(stream, p, tactic) ||
         launch_if<T, 2, 1, 4, 2>(stream, p, tactic) || launch_if<T, 1, 2, 4, 3>(stream, p, tactic) ||
         launch_if<T, 2, 2, 4, 2>(stream, p, tactic);
}

}  // namespace

bool launch_stream(Stream& stream, const GemmParams& params, const GemmTactic& tactic, DType type) {
  return with_half(type, [&]<class T>(T) { return launch_typed<T>(stream, params, tactic); });
}

}  // namespace charonia::cuda
