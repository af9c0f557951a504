// 8-bit integer weights with 8-bit integer activations, in the kernels' layout (kernels.h).
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/huge_memory.h"
#include "ops/cpu/cpu_linear.h"

namespace charonia::ops::cpu {

class IntegerLinear : public CpuLinear {
 public:
  // Like Device::make_quantised_linear(), for Code::i8 with Activations::i8_token or i8_tensor. Throws
  // Error(invalid_argument) if the parts do not match.
  IntegerLinear(std::span<const QuantSource* const> parts, std::span<const HostMatrix> bias, DType data,
                ThreadPool& pool, HugeArena& arena);

  GemmKernel gemm(const Kernels& kernels, std::int64_t rows) const override;
  void prepare_row(const Kernels& kernels, const GemmKernel& gemm, const void* in, std::byte* out) const override;
  void multiply(const GemmKernel& gemm, std::int64_t panel, const Tensor& out, const GemmRows& in, std::int64_t row,
                std::int64_t rows) const override;

 private:
  void pack(std::span<const QuantSource* const> parts, std::int64_t panel_index) const;
  // Byte offsets in a prepared row: its scale, after the codes, and the sums of its groups.
  std::int64_t scale_at() const { return (k_ + kIntegerAlign - 1) / kIntegerAlign * kIntegerAlign; }
  std::int64_t sums_at() const { return scale_at() + kIntegerAlign; }

  IntegerPanel shape_;
  float input_scale_ = 0;            // 0: one scale per row
  std::vector<std::int32_t> order_;  // empty, or the input feature of every column
  HugeChunk data_;
};

}  // namespace charonia::ops::cpu
