// Quantised weights in device memory.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "ops/cuda/cuda_weights.h"

namespace charonia::cuda {

// A row of a QuantSource; a padding row if it has no codes.
struct QuantRow {
  const std::uint8_t* codes = nullptr;
  const float* scales = nullptr;
  const std::int8_t* zeros = nullptr;
};

// One or several quantised weights [n, k] of one format, contiguous, in the layout of kernels/quant_layout.h.
class QuantMatrices {
 public:
  QuantMatrices() = default;
  // cols: columns of the source; k: the padded number of columns of the inputs. Throws Error(unsupported) with `name`
  // if no kernel supports the format.
  QuantMatrices(const ops::QuantFormat& format, std::int64_t count, std::int64_t n, std::int64_t k, std::int64_t cols,
                const std::string& name);
  // Packs the rows of matrix `index`. row_of() is called in ascending order.
  void fill(std::int64_t index, const std::function<QuantRow(std::int64_t row)>& row_of, MatrixUpload& upload);

  const void* codes() const { return codes_.data(); }
  QuantWeight weight() const;
  std::size_t bytes() const { return codes_.bytes() + scales_.bytes() + zeros_.bytes(); }

 private:
  ops::QuantFormat format_;  // with the group size of padded columns
  std::int64_t n_ = 0, k_ = 0, cols_ = 0, source_groups_ = 0;
  std::size_t code_bytes_ = 0;      // bytes of one matrix
  std::size_t scale_elements_ = 0;  // scales of one matrix
  DeviceMemory codes_, scales_, zeros_;
};

// The checked common properties of stacked quantised weights.
struct QuantParts {
  // Throws Error(invalid_argument) with the weight's name if the parts do not match.
  explicit QuantParts(std::span<const ops::QuantSource* const> parts);
  const ops::QuantSource& first() const { return *parts.front(); }
  // Uploads the order of the columns, if they have one.
  DeviceMemory upload_order(MatrixUpload& upload) const;

  std::span<const ops::QuantSource* const> parts;
  std::vector<std::int64_t> rows;  // rows of each part
  std::int64_t n = 0, k = 0;
  float input_scale = 0;  // the largest of all parts
};

class CudaQuantLinear : public CudaGemmWeight {
 public:
  // Throws Error(invalid_argument) with the weight's name if the parts do not match.
  CudaQuantLinear(std::span<const ops::QuantSource* const> parts, std::span<const ops::HostMatrix> bias, DType data,
                  MatrixUpload& upload);
  Gemm gemm() const override;

 private:
  QuantMatrices matrix_;
  DeviceMemory order_;
  float input_scale_ = 0;
};

// A weight that is multiplied as 8-bit codes (kernels/w8a8_gemm.h; is_w8a8() tells which weights).
class CudaW8a8Linear : public CudaGemmWeight {
 public:
  // packed: see kernels/gemm.h. Throws like CudaQuantLinear.
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

// Reads rows of a source, many at a time. Rows are requested in ascending order, or in any order; the latter keeps all
// rows in memory.
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

// Reads a weight row by row as numbers of a type. All threads of a pool dequantise the next rows.
class DequantisedReader {
 public:
  static constexpr std::size_t kBytes = std::size_t{64} << 20;
  // bytes: of the rows that are dequantised together, at least 64. The source and the pool must live as long as the
  // reader.
  DequantisedReader(const ops::QuantSource& source, DType type, ThreadPool& pool, std::size_t bytes = kBytes);
  // Valid until the next call. Rows are requested in ascending order.
  MatrixUpload::SourceRow at(std::int64_t row);

 private:
  const ops::QuantSource* source_;
  DType type_;
  ThreadPool* pool_;
  std::int64_t most_;                   // rows
  std::int64_t first_ = 0, count_ = 0;  // the rows in rows_
  std::vector<std::byte> rows_;         // [count, cols]
};

// Reads the rows of stacked weights in order.
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
