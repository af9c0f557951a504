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
  void read_row(std::int64_t row, float* out) const override;

  const QuantPanel& shape() const { return shape_; }
  const std::byte* panel(std::int64_t index) const { return data_.get() + index * shape_.bytes(); }

 private:
  // Returns a row [in_features] in the order of the columns. The next call of the same thread may overwrite it.
  const Bf16* in_column_order(const Bf16* in) const;
  void pack(std::span<const QuantSource* const> parts, std::int64_t panel_index) const;
  // Writes the sums of a row's groups to their place in its prepared row. in: columns in the order of the weight.
  template <class Element>
  void add_sums(const Kernels& kernels, const GemmKernel& gemm, const Element* in, std::byte* out) const;
  // Adds minimums * sums to `out`. Arguments as in multiply().
  void add_minimums(const GemmKernel& gemm, std::int64_t panel_index, float* out, std::int64_t out_stride,
                    std::int64_t columns, const GemmRows& in, std::int64_t row, std::int64_t rows) const;
  bool needs_sums(const GemmKernel& gemm) const { return has_minimums() || (shape_.has_zeros && !gemm.fixed); }
  bool has_minimums() const { return minimums_ != nullptr; }
  // Byte offset of the sums in a prepared row.
  std::int64_t sums_at(const GemmKernel& gemm) const {
    return gemm.fixed ? FixedRow(shape_).bytes() : prepared_row_bytes(k_, gemm.operand);
  }

  QuantPanel shape_;
  std::vector<std::int32_t> order_;  // empty, or the input feature of every column
  HugeChunk data_;
  // Panels [groups][64] f32 of a dense GEMM whose inputs are the sums of the groups. Null: the weight has no minimums.
  // The integer kernels do not know minimums.
  HugeChunk minimums_;
};

// Checks that the parts have the same format, width and order. Returns their numbers of rows. Throws
// Error(invalid_argument).
std::vector<std::int64_t> check_parts(std::span<const QuantSource* const> parts);

// Creates the class for the format of `parts`. Throws Error(unsupported) with the weight's name if there is none, and
// Error(invalid_argument) if the parts do not match.
std::unique_ptr<CpuLinear> make_quantised(std::span<const QuantSource* const> parts, std::span<const HostMatrix> bias,
                                          DType data, ThreadPool& pool, HugeArena& arena);

}  // namespace charonia::ops::cpu
