// The sizes of LoRA adapters in a step. Integers only.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "ops/cuda/device/host_device.h"
#include "ops/low_rank.h"

namespace charonia::cuda {

// Rows of a step with one adapter that a thread block processes together. rows = 0: none.
struct alignas(16) AdapterItem {
  std::int32_t slot = 0, first = 0, rows = 0, reserved = 0;  // first: in the list of rows with adapters
};
inline constexpr int kAdapterTile = 32;  // the most rows of an item

// The products with A are divided into slices of this many columns, for any number of rows. So the order of sums, and
// with it the bits, do not depend on the batch.
inline constexpr int kLowRankSlice = 2048;
inline constexpr int kRankTile = 16;  // ranks that a thread block computes together

CHARONIA_HD std::int64_t low_rank_slices(std::int64_t in_features, bool f32) {
  return f32 ? 1 : divide_up(in_features, kLowRankSlice);
}

// Floats of the products with A: [slices][rows][ranks, rounded up to kRankTile].
inline std::int64_t low_rank_floats(const ops::AdapterSlots::Weight& weight, std::int64_t rows, bool f32) {
  return low_rank_slices(weight.in_features, f32) * rows * round_up(weight.ranks, kRankTile);
}

// Bytes of these products for the largest weight.
inline std::size_t low_rank_workspace_bytes(const ops::AdapterSlots& slots, std::int64_t rows, bool f32) {
  std::int64_t floats = 0;
  for (const auto& weight : slots.weights) floats = std::max(floats, low_rank_floats(weight, rows, f32));
  return static_cast<std::size_t>(floats) * sizeof(float);
}

}  // namespace charonia::cuda
