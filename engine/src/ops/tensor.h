// Memory and matrices: on a device, and in host memory.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/dtype.h"

namespace charonia::ops {

// Memory on the device, freed with the object. Zero-filled when allocated.
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

// Row-major [rows, cols] in host memory, at any alignment. The source of weights.
struct HostMatrix {
  const void* data = nullptr;
  DType dtype = DType::f32;
  std::int64_t rows = 0, cols = 0;
  std::int64_t stride = 0;  // elements from row to row; 0: cols

  std::int64_t row_stride() const { return stride == 0 ? cols : stride; }
  const std::byte* row(std::int64_t index) const {
    return static_cast<const std::byte*>(data) + static_cast<std::size_t>(index * row_stride()) * size_of(dtype);
  }
};

// Row-major [rows, cols] on the device; `stride` elements from row to row.
struct Tensor {
  void* data = nullptr;
  DType dtype = DType::f32;
  std::int64_t rows = 0, cols = 0, stride = 0;
};

}  // namespace charonia::ops
