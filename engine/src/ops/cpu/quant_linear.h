// Quantised weights whose activations are not converted, in the kernels' layout (kernels.h).
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/huge_memory.h"
#include "ops/cpu/cpu_linear.h"

namespace charonia::ops::cpu {

class QuantLinear : public CpuLinear {
 public:
  // Like Device::make_quantised_linear(). Throws Error(invalid_argument) if the parts do not match.
  QuantLinear(std::span<const QuantSource* const> parts, std::span<const HostMatrix> bias, DType data, ThreadPool& pool,
              HugeArena& arena);

  GemmKernel gemm(const Kernels& kernels, std::int64_t rows) const override;
  void prepare_row(const Kernels& kernels, const GemmKernel& gemm, const void* in, std::byte* out) const override;
  void multiply(const GemmKernel& gemm, std::int64_t panel, const Tensor& out, const GemmRows& in, std::int64_t row,
                std::int64_t rows) const override;

  const QuantPanel& shape() const { return shape_; }
  const std::byte* panel(std::int64_t index) const { return data_.get() + index * shape_.bytes(); }

 private:
  // Returns a row [in_features] in the order of the columns. The next call of the same thread may overwrite it.
  const Bf16* in_column_order(const Bf16* in) const;
  void pack(std::span<const QuantSource* const> parts, std::int64_t panel_index) const;

  QuantPanel shape_;
  std::vector<std::int32_t> order_;  // empty, or the input feature of every column
  HugeChunk data_;
};

// Checks that the parts have the same format, width and order. Returns their numbers of rows. Throws
// Error(invalid_argument).
std::vector<std::int64_t> check_parts(std::span<const QuantSource* const> parts);

// Creates the class for the format of `parts`. Throws Error(unsupported) with the weight's name if there is none, and
// Error(invalid_argument) if the parts do not match.
std::unique_ptr<CpuLinear> make_quantised(std::span<const QuantSource* const> parts, std::span<const HostMatrix> bias,
                                          DType data, ThreadPool& pool, HugeArena& arena);

}  // namespace charonia::ops::cpu
