// Memory and matrices, on a device and in host memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/dtype.h"

namespace charonia::ops {

// Device memory, freed with the object. Zero-filled at allocation.
class Buffer {
 public:
  virtual ~Buffer() = default;
  void* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }
  template <class T>
  T* as() const {
    return static_cast<T*>(data_);
  }

 protected:
  void* data_ = nullptr;
  std::size_t bytes_ = 0;
};

// A source of weights: row-major [rows, cols] in host memory, at any alignment.
struct HostMatrix {
  const void* data = nullptr;
  DType dtype = DType::f32;
  std::int64_t rows = 0, cols = 0;
  std::int64_t stride = 0;  // elements between rows; 0: cols

  std::int64_t row_stride() const { return stride == 0 ? cols : stride; }
  const std::byte* row(std::int64_t index) const {
    return static_cast<const std::byte*>(data) + static_cast<std::size_t>(index * row_stride()) * size_of(dtype);
  }
};

// From the first byte of a matrix to its last byte.
inline std::span<const std::byte> bytes_of(const HostMatrix& matrix) {
  const auto* const last = matrix.row(matrix.rows - 1) + static_cast<std::size_t>(matrix.cols) * size_of(matrix.dtype);
  return {matrix.row(0), last};
}

// The biases of an expert, at any element stride: gate and up [inter, 1], down [hidden, 1]. Without data: none.
struct ExpertBiases {
  HostMatrix gate, up, down;
};

// Row-major [rows, cols] on the device, with `stride` elements between rows.
struct Tensor {
  void* data = nullptr;
  DType dtype = DType::f32;
  std::int64_t rows = 0, cols = 0, stride = 0;
};

// Columns [begin, begin + cols).
inline Tensor columns_of(const Tensor& tensor, std::int64_t begin, std::int64_t cols) {
  auto* const data = static_cast<std::byte*>(tensor.data) + static_cast<std::size_t>(begin) * size_of(tensor.dtype);
  return {data, tensor.dtype, tensor.rows, cols, tensor.stride};
}

}  // namespace charonia::ops
