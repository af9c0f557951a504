// Where a step's mixture of experts works: the parts of its scratch memory. Integers only.
//
// An assignment is a row with one of its experts. In the router's order assignment r * top_k + i is the i-th expert of
// row r, by ascending index. Places number the assignments by expert, within an expert by row.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "ops/cuda/emulated/host_device.h"
#include "ops/device.h"

namespace charonia::cuda {

// Up to so many places, one after the other, of one expert: what a thread block takes at once. rows == 0: nothing.
struct alignas(16) ExpertTile {
  std::int32_t expert = 0, first = 0, rows = 0, reserved = 0;
};
inline constexpr int kMinExpertTile = 8;  // of rows

// Rows of experts' inputs and outputs are padded to so many elements, with zeros.
inline constexpr std::int64_t kExpertVector = 8;

// No more tiles than this have rows, whichever experts are chosen.
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
  // Where the parts begin, in bytes:
  std::size_t chosen = 0;   // [assignments] i32, the expert; the number of experts: the row is padding
  std::size_t weights = 0;  // [assignments] f32
  std::size_t places = 0;   // [assignments] i32; -1: none
  std::size_t rows_of = 0;  // [places] i32
  std::size_t tiles = 0;    // ExpertTile
  std::size_t in = 0;       // [rows, hidden], of inputs that cannot be read 16 bytes at a time
  std::size_t gated = 0;    // [places, inter]
  std::size_t down = 0;     // [places, hidden]
  // Of weights that take int8 codes, which lie in `in` (or `down`) and `gated` then:
  std::size_t in_scales = 0;     // [rows or places] f32
  std::size_t gated_scales = 0;  // [places] f32
  std::size_t bytes = 0;
};

}  // namespace charonia::cuda
