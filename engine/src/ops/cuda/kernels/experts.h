// Mixture of experts: rows to experts, the GEMMs of experts with their rows, and the rows' sums.
//
// A row's bits depend on the row alone: K is cut into parts as in gemm.h, all tactics of a GEMM add alike, and a row's
// experts are added in the order of their indices.
#pragma once

#include <cstdint>
#include <optional>

#include "base/dtype.h"
#include "ops/cuda/device/runtime.h"
#include "ops/cuda/experts_workspace.h"
#include "ops/cuda/kernels/gemm.h"
#include "ops/operations.h"

namespace charonia::cuda {

inline constexpr int kMaxExperts = 1024, kMaxExpertsOfRow = 32;

struct RouteParams {
  const float* logits = nullptr;  // [rows, experts]
  std::int64_t stride = 0;
  bool in_halves = false;     // [rows, 2 * experts]: logit e is the sum of columns e and experts + e
  int rows = 0, experts = 0;  // experts <= kMaxExperts
  ops::RouterParams how{};    // top_k <= kMaxExpertsOfRow
  int tile_rows = 0, num_tiles = 0;  // of the tiles that are written
  const std::int32_t* real_rows = nullptr;  // on the device: rows from there on are padding and get no expert; or null
  // Parts of ExpertsWorkspace:
  std::int32_t* chosen = nullptr;
  float* weights = nullptr;
  std::int32_t* places = nullptr;
  std::int32_t* rows_of = nullptr;
  ExpertTile* tiles = nullptr;
};
void route_rows(Stream& stream, const RouteParams& params);

// out [rows, padded] = in [rows, cols], with zeros behind.
void pad_rows(Stream& stream, const ops::Tensor& in, void* out, std::int64_t padded);

// Of every place, with the weight of its expert. The gated GEMM: weight rows come in sixteens, eight of gate and
// the eight of up that belong to them, and eight outputs come of them, activation(gate) * up. Else n outputs of n rows.
struct ExpertGemm {
  DType type = DType::bf16;  // of in, weight and out
  const void* in = nullptr;  // [rows or places, k], rows 16-byte aligned
  std::int64_t in_stride = 0;
  const std::int32_t* rows_of = nullptr;  // [places] the rows of `in`; null: it has a row for each place
  const void* weight = nullptr;           // [experts, n, k]
  void* out = nullptr;                    // [places, n or n / 2]
  std::int64_t n = 0, k = 0;              // multiples of kExpertVector
  bool gated = false;
  ops::Activation activation = ops::Activation::silu;
  const ExpertTile* tiles = nullptr;
  int num_tiles = 0, tile_rows = 0;
  std::optional<QuantWeight> quant{};  // the weight is quantised, all experts alike (quant_gemm.h)
};
void multiply_experts(Stream& stream, const DeviceInfo& device, const ExpertGemm& gemm);

// Rows of a tile, by how many rows an expert has on average: a function of the number of rows alone, as everything that
// shapes a launch.
int expert_tile_rows(DType type, std::int64_t assignments, int experts);

// out [rows, cols] = what `shared` says, and to it the sums of the rows' places of `down` [places, padded], times their
// weights.
struct ExpertSums {
  ops::Tensor out;
  DType type = DType::bf16;  // of down and out
  const void* down = nullptr;
  std::int64_t padded = 0;
  const std::int32_t* places = nullptr;
  const float* weights = nullptr;
  int top_k = 0;
  ops::SharedExpert shared{};  // out: of `type`
};
void add_experts(Stream& stream, const ExpertSums& sums);

}  // namespace charonia::cuda
