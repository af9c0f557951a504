// Weights in the layout that the kernels read (kernels.h): panels of 64 output features.
#pragma once

#include <span>
#include <vector>

#include "base/huge_memory.h"
#include "base/thread_pool.h"
#include "ops/device.h"

namespace charonia::ops::cpu {

class PackedLinear : public Linear {
 public:
  // As Ops::make_linear. Throws Error(invalid_argument) when shapes do not fit together.
  PackedLinear(std::span<const HostMatrix> parts, std::span<const HostMatrix> bias, DType weight, ThreadPool& pool,
               HugeArena& arena);

  DType type() const { return type_; }
  std::int64_t panels() const { return panels_; }
  const std::byte* panel(std::int64_t index) const {
    return data_.get() + static_cast<std::size_t>(index) * panel_bytes_;
  }
  std::size_t panel_bytes() const { return panel_bytes_; }
  const float* bias() const { return bias_.empty() ? nullptr : bias_.data(); }  // [out_features]

 private:
  DType type_;
  std::int64_t panels_ = 0;
  std::size_t panel_bytes_ = 0;
  HugeChunk data_;
  std::vector<float> bias_;
};

// `n` elements of a matrix's type as float, or in the bits of a 16-bit type; throws Error(unsupported) for integers.
void convert(float* out, const void* in, DType type, std::int64_t n);
void convert_to(void* out, DType to, const void* in, DType from, std::int64_t n);

}  // namespace charonia::ops::cpu
