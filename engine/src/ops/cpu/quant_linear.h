// Quantised weights whose activations stay as they are, in the layout that the kernels read (kernels.h).
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
  // As Device::make_quantised_linear. Throws Error(invalid_argument) when parts do not fit together.
  QuantLinear(std::span<const QuantSource* const> parts, std::span<const HostMatrix> bias, DType data, ThreadPool& pool,
              HugeArena& arena);

  GemmKernel gemm(const Kernels& kernels, std::int64_t rows) const override;
  void prepare_row(const Kernels& kernels, const GemmKernel& gemm, const void* in, std::byte* out) const override;
  void multiply(const GemmKernel& gemm, std::int64_t panel, const Tensor& out, const GemmRows& in, std::int64_t row,
                std::int64_t rows) const override;

  const QuantPanel& shape() const { return shape_; }
  const std::byte* panel(std::int64_t index) const { return data_.get() + index * shape_.bytes(); }

 private:
  // A row [in_features] in the order of the columns. The next call of the thread may overwrite it.
  const Bf16* by_column(const Bf16* in) const;
  void pack(std::span<const QuantSource* const> parts, std::int64_t panel_index) const;

  QuantPanel shape_;
  std::vector<std::int32_t> order_;  // empty, or the input feature of every column
  HugeChunk data_;
};

// Whether parts are of one format, width and order, which is one. Their rows. Throws Error(invalid_argument).
std::vector<std::int64_t> check_parts(std::span<const QuantSource* const> parts);

// The class for the format of `parts`. Throws Error(unsupported), naming the weight, where there is none, and
// Error(invalid_argument) when parts do not fit together.
std::unique_ptr<CpuLinear> make_quantised(std::span<const QuantSource* const> parts, std::span<const HostMatrix> bias,
                                          DType data, ThreadPool& pool, HugeArena& arena);

}  // namespace charonia::ops::cpu
