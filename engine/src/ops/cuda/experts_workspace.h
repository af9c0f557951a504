// The parts of the scratch memory of a step's mixture of experts. Integers only.
//
// An assignment is a pair: a row and an expert that is selected for it. In the router's order, assignment r * top_k + i
// is the i-th expert of row r, by ascending index. Places number the assignments by expert, then by row.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "ops/cuda/device/host_device.h"
#include "ops/device.h"

namespace charonia::cuda {

// Consecutive places of one expert that a thread block processes together. rows == 0: none.
struct alignas(16) ExpertTile {
  std::int32_t expert = 0, first = 0, rows = 0, reserved = 0;
};
inline constexpr int kMinExpertTile = 8;  // of rows

// Rows of experts' inputs and outputs are padded with zeros to a multiple of this.
inline constexpr std::int64_t kExpertVector = 8;

// The maximum number of tiles with rows, for any selection of experts.
CHARONIA_HD constexpr std::int64_t max_expert_tiles(std::int64_t assignments, int experts, int tile_rows) {
  return assignments / tile_rows + (assignments < experts ? assignments : experts);
}

struct ExpertsWorkspace {
  ExpertsWorkspace(const ops::ExpertsShape& shape, std::int64_t rows)
      : assignments(rows * shape.top_k),
        hidden(round_up(shape.hidden, kExpertVector)),
        inter(round_up(shape.inter, kExpertVector)) {
    const auto place = [this](std::int64_t count, std::size_t element) {
      constexpr std::int64_t kAlignment = 256;
      const auto at = bytes;
      bytes += static_cast<std::size_t>(round_up(count * static_cast<std::int64_t>(element), kAlignment));
      return at;
    };
    const auto type = size_of(shape.weight);
    chosen = place(assignments, sizeof(std::int32_t));
    weights = place(assignments, sizeof(float));
    places = place(assignments, sizeof(std::int32_t));
    rows_of = place(assignments, sizeof(std::int32_t));
    tiles = place(max_expert_tiles(assignments, shape.count, kMinExpertTile), sizeof(ExpertTile));
    in = place(rows * hidden, type);
    gated = place(assignments * inter, type);
    down = place(assignments * hidden, type);
    in_scales = place(assignments, sizeof(float));
    gated_scales = place(assignments, sizeof(float));
  }

  std::int64_t assignments, hidden, inter;  // hidden and inter: with padding
  // Byte offsets of the parts:
  std::size_t chosen = 0;   // [assignments] i32, the expert; equal to the number of experts if the row is padding
  std::size_t weights = 0;  // [assignments] f32
  std::size_t places = 0;   // [assignments] i32; -1: no place
  std::size_t rows_of = 0;  // [places] i32
  std::size_t tiles = 0;    // ExpertTile
  std::size_t in = 0;       // [rows, hidden]: copies of inputs that cannot be read 16 bytes at a time
  std::size_t gated = 0;    // [places, inter]
  std::size_t down = 0;     // [places, hidden]
  // For weights that take int8 codes, which are stored in `in` (or `down`) and `gated`:
  std::size_t in_scales = 0;     // [rows or places] f32
  std::size_t gated_scales = 0;  // [places] f32
  std::size_t bytes = 0;
};

}  // namespace charonia::cuda
