// Common definitions of the kernels of quant_gemm.h and their launch.
#pragma once

#include <cstdint>
#include <type_traits>

#include "ops/cuda/experts_workspace.h"
#include "ops/cuda/kernels/element_types.h"
#include "ops/cuda/kernels/gemm_params.h"
#include "ops/quant_weight.h"

namespace charonia::cuda {

// `weight` has codes, and weight_stride is their columns with padding. With `tiles` the GEMM is for experts: a tile's
// rows are places from tile.first on, the rows of `in` come from rows_of, and n and the weight are those of one expert.
struct QuantParams : GemmParams {
  const void* scales;
  const void* zeros;            // null: all rows have the zeros of zero_pair
  const float* row_scales;      // [rows of in]: factors of sums; null: none
  const ExpertTile* tiles;      // null: not for experts
  const std::int32_t* rows_of;  // null: in has one row per place
  std::int64_t expert_codes;    // distance between experts, in bytes
  std::int64_t expert_scales;   // the same for scales and zeros, in elements
  const float* expert_bias;     // with tiles: [experts, n]; null: none
  std::uint32_t zero_pair;
  int groups, group, group_shift;  // column c is in group c >> group_shift; the plain kernel divides
  DType scale_type;
  int sms;
  std::size_t sm_shared_bytes;  // of an SM, for one block
  // With tiles: 16 weight rows give 8 outputs, the activation of the first eight and the second eight.
  bool gated;
  ops::Activation activation;
};

// Steps of 64 columns that a warp of the stream kernel has in flight or processes: 4 to 6 KB of codes; with scales for
// 32 columns, as much as fits into 99 KB of shared memory. Smaller rings, which leave more of an SM's memory to the L1
// cache, took 0 to 12 % longer on an H200.
constexpr int quant_stream_ring(int bits, int closes, int units) {
  if (bits == 4) return units == 1 ? 8 : 4;
  return units == 1 ? 6 : closes == 32 ? 2 : 3;
}

// The wgmma kernel's stages.
inline constexpr int kWgmmaStages = 8;

// Calls f with the code as a constant.
template <class F>
auto with_code(ops::Code code, F f) {
  switch (code) {
    case ops::Code::u4:
      return f(std::integral_constant<ops::Code, ops::Code::u4>{});
    case ops::Code::i8:
      return f(std::integral_constant<ops::Code, ops::Code::i8>{});
    case ops::Code::f8_e4m3:
      return f(std::integral_constant<ops::Code, ops::Code::f8_e4m3>{});
    case ops::Code::f4_e2m1:
      break;
  }
  return f(std::integral_constant<ops::Code, ops::Code::f4_e2m1>{});
}

// Calls f with a value of the 16-bit type and the constant `closes`: the number of columns after which sums are
// multiplied by the scale. Returns false if no kernel for this code has it.
template <ops::Code code, class F>
bool with_closes(DType type, int closes, F f) {
  return with_half(type, [&]<class T>(T value) {
    if constexpr (code != ops::Code::f8_e4m3) {
      if (closes == 32) return f(value, std::integral_constant<int, 32>{});
    }
    if constexpr (code != ops::Code::f4_e2m1) {
      if (closes == 64) return f(value, std::integral_constant<int, 64>{});
    }
    return false;
  });
}

// Each code has its own file, so that they compile in parallel. All return false if the tactic does not exist.
template <ops::Code code>
bool launch_quant_stream(Stream& stream, const QuantParams& params, const GemmTactic& tactic, DType type, int closes);
template <ops::Code code>
bool launch_quant_tile(Stream& stream, const QuantParams& params, const GemmTactic& tactic, DType type, int closes);
template <ops::Code code>
bool launch_quant_wgmma(Stream& stream, const QuantParams& params, const GemmTactic& tactic, DType type, int closes);
bool launch_quant_plain(Stream& stream, const QuantParams& params, const GemmTactic& tactic, DType type,
                        ops::Code code);

// out [row_tiles units of rows, weight_stride] of a 16-bit type. group_shift < 0: columns are divided by group.
void launch_dequantise(Stream& stream, const QuantParams& params, DType type, ops::Code code);

}  // namespace charonia::cuda
