// Mixture of experts: routing of rows to experts, the GEMMs of experts with their rows, and the rows' sums.
//
// A row's bits depend only on the row: K is divided into parts as in gemm.h, all kernels without wgmma add in the same
// order, and a row's experts are added in the order of their indices.
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
  int tile_rows = 0, num_tiles = 0;         // of the written tiles
  // On the device: the number of rows; later rows are padding and get no expert. May be null.
  const std::int32_t* real_rows = nullptr;
  // Parts of ExpertsWorkspace:
  std::int32_t* chosen = nullptr;
  float* weights = nullptr;
  std::int32_t* places = nullptr;
  std::int32_t* rows_of = nullptr;
  ExpertTile* tiles = nullptr;
};
void route_rows(Stream& stream, const RouteParams& params);

// out [rows, padded] = in [rows, cols], followed by zeros.
void pad_rows(Stream& stream, const ops::Tensor& in, void* out, std::int64_t padded);

// A GEMM for every place, with the weight of its expert. The gated GEMM: weight rows are in groups of sixteen, eight of
// gate and the corresponding eight of up, which give eight outputs, their activation. Otherwise n rows give n outputs.
struct ExpertGemm {
  DType type = DType::bf16;  // of in, weight and out
  const void* in = nullptr;  // [rows or places, k], rows 16-byte aligned
  std::int64_t in_stride = 0;
  const std::int32_t* rows_of = nullptr;  // [places]: the row of `in` for each place; null: `in` has one row per place
  const void* weight = nullptr;           // [experts, n, k]
  const float* bias = nullptr;            // [experts, n]; null: no biases
  void* out = nullptr;                    // [places, n or n / 2]
  std::int64_t n = 0, k = 0;              // multiples of kExpertVector
  bool gated = false;
  ops::Activation activation = ops::Activation::silu;
  const ExpertTile* tiles = nullptr;
  int num_tiles = 0, tile_rows = 0;
  // Set if the weight is quantised (quant_gemm.h); all experts have the same format.
  std::optional<QuantWeight> quant{};
  bool wgmma = false;  // of quantised weights: may use wgmma, which adds in another order than the other kernels
};
void multiply_experts(Stream& stream, const DeviceInfo& device, const ExpertGemm& gemm);

// The rows of a tile, for the average number of rows per expert. Like all launch shapes, it depends only on the number
// of rows.
int expert_tile_rows(DType type, std::int64_t assignments, int experts);

// out [rows, cols] = `shared`, plus the sums of the rows' places of `down` [places, padded], times their weights.
struct ExpertSums {
  ops::Tensor out;
  DType type = DType::bf16;  // of down and out
  const void* down = nullptr;
  std::int64_t padded = 0;
  const std::int32_t* places = nullptr;
  const float* weights = nullptr;
  int top_k = 0;
  ops::SharedExpert shared{};  // its `out` has type `type`
};
void add_experts(Stream& stream, const ExpertSums& sums);

}  // namespace charonia::cuda
