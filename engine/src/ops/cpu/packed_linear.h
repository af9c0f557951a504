// Dense weights in the kernels' layout (kernels.h): panels of 64 output features.
#pragma once

#include <span>

#include "base/huge_memory.h"
#include "ops/cpu/cpu_linear.h"

namespace charonia::ops::cpu {

class PackedLinear : public CpuLinear {
 public:
  // Like Ops::make_linear(). Throws Error(invalid_argument) if the shapes do not match.
  PackedLinear(std::span<const HostMatrix> parts, std::span<const HostMatrix> bias, DType weight, ThreadPool& pool,
               HugeArena& arena);

  GemmKernel gemm(const Kernels& kernels, std::int64_t rows) const override;
  void prepare_row(const Kernels& kernels, const GemmKernel& gemm, const void* in, std::byte* out) const override;
  void multiply(const GemmKernel& gemm, std::int64_t panel, const Tensor& out, const GemmRows& in, std::int64_t row,
                std::int64_t rows) const override;
  void read_row(std::int64_t row, float* out) const override;

 private:
  const std::byte* panel(std::int64_t index) const {
    return data_.get() + static_cast<std::size_t>(index) * panel_bytes_;
  }

  std::size_t panel_bytes_ = 0;
  HugeChunk data_;
};

// Converts `n` elements to float, or to the bits of a 16-bit type. Throws Error(unsupported) for integers.
void convert(float* out, const void* in, DType type, std::int64_t n);
void convert_to(void* out, DType to, const void* in, DType from, std::int64_t n);

}  // namespace charonia::ops::cpu
