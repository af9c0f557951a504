// What the kernels of quant_gemm.h and their launch share.
#pragma once

#include <cstdint>

#include "ops/cuda/experts_workspace.h"
#include "ops/cuda/kernels/gemm_params.h"
#include "ops/quant_weight.h"

namespace charonia::cuda {

// `weight` are codes, weight_stride their columns with padding. With `tiles` the GEMM is of experts: a tile's rows are
// tile.first .. of the places, in rows come by rows_of, and n and the weight are those of one expert.
struct QuantParams : GemmParams {
  const void* scales;
  const void* zeros;            // null: those of zero_pair are all rows'
  const float* row_scales;      // [rows of in]: sums are multiplied by it; null: not
  const ExpertTile* tiles;      // null: not of experts
  const std::int32_t* rows_of;  // null: in has a row for each place
  std::int64_t expert_codes;    // from one expert to the next, in bytes
  std::int64_t expert_scales;   // the same of scales, and of zeros, in elements
  std::uint32_t zero_pair;
  int groups, group, group_shift;  // column c is of group c >> group_shift; the plain kernel divides
  DType scale_type;
  bool gated;  // with tiles: 8 outputs of 16 weight rows, activation(first eight) * second eight
};

// Steps of 64 columns that a warp of the stream kernel has under way: as many as registers hold.
constexpr int quant_stream_ring(int bits, int closes, int units, int row_tiles) {
  if (row_tiles > 1) return bits == 8 ? 3 : 2;
  return bits == 8 ? 2 : closes == 32 && units == 1 ? 3 : 4;
}

// Each in its own file. False: there is no such tactic.
bool launch_quant_stream_u4(Stream& stream, const QuantParams& params, const GemmTactic& tactic, DType type,
                            int closes);
bool launch_quant_stream_i8(Stream& stream, const QuantParams& params, const GemmTactic& tactic, DType type,
                            int closes);
bool launch_quant_stream_f8(Stream& stream, const QuantParams& params, const GemmTactic& tactic, DType type,
                            int closes);
bool launch_quant_stream_f4(Stream& stream, const QuantParams& params, const GemmTactic& tactic, DType type,
                            int closes);
bool launch_quant_tile_u4(Stream& stream, const QuantParams& params, const GemmTactic& tactic, DType type, int closes);
bool launch_quant_tile_i8(Stream& stream, const QuantParams& params, const GemmTactic& tactic, DType type, int closes);
bool launch_quant_tile_f8(Stream& stream, const QuantParams& params, const GemmTactic& tactic, DType type, int closes);
bool launch_quant_tile_f4(Stream& stream, const QuantParams& params, const GemmTactic& tactic, DType type, int closes);
bool launch_quant_plain(Stream& stream, const QuantParams& params, const GemmTactic& tactic, DType type,
                        ops::Code code);

}  // namespace charonia::cuda
