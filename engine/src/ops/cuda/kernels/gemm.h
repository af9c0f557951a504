// Products with a weight, by our own kernels.
#pragma once

#include <cstdint>
#include <vector>

#include "base/dtype.h"
#include "ops/cuda/runtime.h"

namespace charonia::cuda {

// out [rows, n] = in [rows, k] * weight [n, k]^T + bias [n]. in and weight have the same type; out that type or f32.
// Strides in elements. weight rows are `weight_stride` apart (a multiple of 8, zero-filled beyond k).
struct Gemm {
  void* out = nullptr;
  DType out_type = DType::f32;
  std::int64_t out_stride = 0;
  const void* in = nullptr;
  std::int64_t in_stride = 0;
  const void* weight = nullptr;
  DType type = DType::bf16;
  std::int64_t weight_stride = 0;
  const float* bias = nullptr;   // null: none
  std::int64_t rows = 0, n = 0, k = 0;
};

// A way of computing it: numbers of the kernel's template and launch. Every way of one weight adds in the same order, so
// all give the same bits, whatever the number of rows.
struct GemmWay {
  int tile_rows = 0, tile_columns = 0, stages = 0, k_parts = 1;
  bool operator==(const GemmWay&) const = default;
};

// The ways for a product of so many rows, the likeliest best first; never empty.
std::vector<GemmWay> gemm_ways(const DeviceInfo& device, const Gemm& gemm);

// Bytes of workspace that a way needs (partial sums of k_parts).
std::size_t gemm_workspace_bytes(const GemmWay& way, const Gemm& gemm);

void gemm(Stream& stream, const DeviceInfo& device, const Gemm& gemm, const GemmWay& way, void* workspace);

}  // namespace charonia::cuda
