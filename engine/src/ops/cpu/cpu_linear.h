// A weight on the CPU, packed for its kernels: the common interface of all formats for GEMMs and experts.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/dtype.h"
#include "base/thread_pool.h"
#include "ops/cpu/kernels.h"
#include "ops/device.h"
#include "ops/tensor.h"

namespace charonia::ops::cpu {

// Number of rows that are prepared together (CpuLinear::prepare_row): enough to keep the GEMMs busy.
inline constexpr std::int64_t kPreparedRows = 2 * kWidenedRowBlock;

// How a GEMM with a given number of rows is computed. The choice does not change results: all kernels of a weight
// compute an element in the same order.
struct GemmKernel {
  // The kernel for the weight; the other two are null.
  void (*dense)(const LinearArgs&) = nullptr;
  void (*quantised)(const QuantLinearArgs&) = nullptr;
  void (*integer)(const IntegerLinearArgs&) = nullptr;
  DType operand = DType::f32;          // activation type for `quantised`,
  bool fixed = false;                  // or fixed-point numbers
  std::int64_t row_block = kRowBlock;  // maximum rows of one call
  std::int64_t panels = 1;             // maximum panels of one call
  // Size of a prepared row in bytes, a multiple of 64; 0: the kernel takes activations in place.
  std::int64_t prepared_bytes = 0;
};

// Rows in the form that a kernel takes: in place, or prepared.
struct GemmRows {
  const std::byte* data = nullptr;
  std::int64_t stride = 0;  // bytes
  std::int64_t count = 0;

  const std::byte* row(std::int64_t index) const { return data + index * stride; }
};

inline GemmRows gemm_rows(const Tensor& in) {
  return {static_cast<const std::byte*>(in.data), in.stride * static_cast<std::int64_t>(size_of(in.dtype)), in.rows};
}

class CpuLinear : public Linear {
 public:
  DType type() const { return type_; }  // the weight type; decides the types of inputs and outputs
  std::int64_t panels() const { return (n_ + kPanel - 1) / kPanel; }
  const float* bias() const { return bias_.empty() ? nullptr : bias_.data(); }  // [out_features]

  virtual GemmKernel gemm(const Kernels& kernels, std::int64_t rows) const = 0;
  // Converts one row [in_features] of the activation type into gemm.prepared_bytes bytes, 64-byte aligned.
  virtual void prepare_row(const Kernels& kernels, const GemmKernel& gemm, const void* in, std::byte* out) const = 0;
  // Multiplies rows [row, row + rows) of `in` with up to gemm.panels panels, from `panel` on.
  virtual void multiply(const GemmKernel& gemm, std::int64_t panel, const Tensor& out, const GemmRows& in,
                        std::int64_t row, std::int64_t rows) const = 0;
  // Writes a row [in_features] of the weight, rounded to its type. Throws Error(unsupported) if the class cannot.
  virtual void read_row(std::int64_t row, float* out) const;

 protected:
  // rows: of each part. Throws Error(invalid_argument) if the biases do not match.
  void set_bias(std::span<const std::int64_t> rows, std::span<const HostMatrix> bias);

  DType type_ = DType::f32;
  std::vector<float> bias_;
};

// Bytes of a prepared row with this number of elements, plus one cache line, so that the rows of a tile do not map to
// the same few sets of the L1 cache.
constexpr std::int64_t prepared_row_bytes(std::int64_t cols, DType type) {
  constexpr std::int64_t kLine = 64;
  return (cols * static_cast<std::int64_t>(size_of(type)) + kLine - 1) / kLine * kLine + kLine;
}

// Divides `rows` rows into blocks of equal size; the last may have fewer rows.
struct RowBlocks {
  RowBlocks(const GemmKernel& gemm, std::int64_t rows)
      : count((rows + gemm.row_block - 1) / gemm.row_block), size((rows + count - 1) / count) {}
  std::int64_t count, size;
};

// Multiplications of a GEMM with one panel.
inline std::int64_t work_of_panel(std::int64_t rows, std::int64_t in_features) { return rows * in_features * kPanel; }
// A GEMM with fewer multiplications takes less time than waking a thread.
inline constexpr std::int64_t kSmallGemm = 65536;

}  // namespace charonia::ops::cpu
