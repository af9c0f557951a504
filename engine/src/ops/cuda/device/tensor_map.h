// Descriptions of tensors in global memory for copy_box() (hopper.h).
#pragma once

#include <array>
#include <cstdint>

#include "base/dtype.h"
#include "ops/cuda/device/elements.h"

namespace charonia::cuda {

// In the driver's format. Part of a kernel's parameters.
struct alignas(128) TensorMap {
  std::array<unsigned char, 128> bytes{};
};

// A tensor of 16-bit or 8-bit elements and the box that one copy takes. Dimensions are ordered from the innermost one.
struct TensorBox {
  static constexpr int kMaxRank = 4;
  const void* data = nullptr;                    // aligned to 16 bytes
  DType type = DType::bf16;                      // or f16, i8
  int rank = 2;                                  // 2 to 4
  std::array<std::int64_t, kMaxRank> sizes{};    // elements
  std::array<std::int64_t, kMaxRank> strides{};  // bytes, multiples of 16; the first one is not used
  std::array<int, kMaxRank> box{};               // elements, 1 to 256 a dimension
  Swizzle swizzle = Swizzle::none;               // the box's rows have the swizzle's width
};

// Throws Error(internal) that names the value if the device rejects the box.
void check(const TensorBox& box);
// Checks too.
TensorMap make_tensor_map(const TensorBox& box);

}  // namespace charonia::cuda
