// Quantised weights in device memory.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "ops/cuda/cuda_weights.h"

namespace charonia::cuda {

// A row of a QuantSource, or without codes: of padding.
struct QuantRow {
  const std::uint8_t* codes = nullptr;
  const float* scales = nullptr;
  const std::int8_t* zeros = nullptr;
};

// One or several quantised weights [n, k] of one format, one behind the other, as kernels/quant_layout.h has them.
class QuantMatrices {
 public:
  QuantMatrices() = default;
  // cols: those of the source, of which k is what inputs are padded to. Throws
  // Error(unsupported), naming `name`, for a format that there is no kernel for.
  QuantMatrices(const ops::QuantFormat& format, std::int64_t count, std::int64_t n, std::int64_t k, std::int64_t cols,
                const std::string& name);
  // Packs rows of the index-th matrix, asked for in ascending order.
  void fill(std::int64_t index, const std::function<QuantRow(std::int64_t row)>& row_of, MatrixUpload& upload);

  const void* codes() const { return codes_.data(); }
  QuantWeight weight() const;
  std::size_t bytes() const { return codes_.bytes() + scales_.bytes() + zeros_.bytes(); }

 private:
  ops::QuantFormat format_;  // with the group of padded columns
  std::int64_t n_ = 0, k_ = 0, cols_ = 0, source_groups_ = 0;
  std::size_t code_bytes_ = 0;      // of a matrix
  std::size_t scale_elements_ = 0;  // the same
  DeviceMemory codes_, scales_, zeros_;
};

// What stacked quantised weights have in common, checked.
struct QuantParts {
  // Throws Error(invalid_argument), naming the weight, when parts do not fit together.
  explicit QuantParts(std::span<const ops::QuantSource* const> parts);
  const ops::QuantSource& first() const { return *parts.front(); }
  // Uploads the order of the columns, if there is one.
  DeviceMemory upload_order(MatrixUpload& upload) const;

  std::span<const ops::QuantSource* const> parts;
  std::vector<std::int64_t> rows;  // of the parts
  std::int64_t n = 0, k = 0;
  float input_scale = 0;  // the largest holds for all
};

class CudaQuantLinear : public CudaGemmWeight {
 public:
  // Throws Error(invalid_argument), naming the weight, when parts do not fit together.
  CudaQuantLinear(std::span<const ops::QuantSource* const> parts, std::span<const ops::HostMatrix> bias, DType data,
                  MatrixUpload& upload);
  Gemm gemm() const override;

 private:
  QuantMatrices matrix_;
  DeviceMemory order_;
  float input_scale_ = 0;
};

// A weight whose codes are multiplied in 8 bits (kernels/w8a8_gemm.h, where is_w8a8() says which).
class CudaW8a8Linear : public CudaGemmWeight {
 public:
  // packed: as kernels/gemm.h has it. Throws as CudaQuantLinear.
  CudaW8a8Linear(std::span<const ops::QuantSource* const> parts, std::span<const ops::HostMatrix> bias, DType data,
                 bool packed, MatrixUpload& upload);
  Gemm gemm() const override;

 private:
  ops::QuantFormat format_;
  bool packed_;
  std::int64_t stride_ = 0;  // bytes
  DeviceMemory codes_, scales_, order_;
  float input_scale_ = 0;
};

// Rows of a source, read many at a time: asked for one after the other, or in any order, for which all are kept.
class QuantReader {
 public:
  explicit QuantReader(const ops::QuantSource& source, bool any_order = false)
      : source_(&source), any_order_(any_order) {}
  QuantRow at(std::int64_t row);

 private:
  const ops::QuantSource* source_;
  bool any_order_;
  std::int64_t first_ = 0, count_ = 0;
  std::vector<std::uint8_t> codes_;
  std::vector<float> scales_;
  std::vector<std::int8_t> zeros_;
};

// Rows of stacked weights, one after the other.
class QuantStack {
 public:
  explicit QuantStack(const QuantParts& parts) : parts_(&parts) {
    for (const auto* const part : parts.parts) readers_.emplace_back(*part);
  }
  QuantRow at(std::int64_t row);

 private:
  const QuantParts* parts_;
  std::vector<QuantReader> readers_;
  std::size_t part_ = 0;
  std::int64_t begin_ = 0;  // row of the part
};

}  // namespace charonia::cuda
