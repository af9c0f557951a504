// The change of a weight by a LoRA adapter: out += B (scale * A in).
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "base/dtype.h"
#include "ops/tensor.h"

namespace charonia::ops {

// The change of one Linear. Several modules of a model may be stacked in one Linear, such as q, k and v: each has its
// own rows of A and its own columns of the output. Elements have the device's activation type.
//
// A step with one row reads each matrix once, so both are stored in the order of reading, padded with zeros:
//   A  groups of kGroup ranks (the last one may have fewer), each [ceil(in_features / line)][ranks of the group][line],
//      where a line has 64 bytes: a cache line
//   B  for each part, with 16 bits [panels][ceil(ranks / 2)][kPanel][2], with f32 [panels][ranks][kPanel]
struct LowRank {
  static constexpr std::int64_t kPanel = 64, kGroup = 4;
  static constexpr std::int64_t kMaxRanks = 256;  // of a part

  // Columns [first_column, first_column + columns) of the output: they change by the ranks
  // [first_rank, first_rank + ranks).
  struct Part {
    std::int64_t first_column = 0, columns = 0;
    std::int64_t first_rank = 0, ranks = 0;
    std::int64_t b = 0;  // the first element in `b`

    std::int64_t panels() const { return (columns + kPanel - 1) / kPanel; }
  };

  DType type = DType::f32;  // f32, bf16 or f16
  std::int64_t ranks = 0, in_features = 0, out_features = 0;
  // Device memory of the owner.
  const void* a = nullptr;
  const void* b = nullptr;        // of all parts
  const float* scales = nullptr;  // [ranks]
  std::vector<Part> parts;        // their columns do not overlap

  // The numbers of elements, and the place of an element.
  std::int64_t a_elements() const { return ranks * padded_features(); }
  std::int64_t a_at(std::int64_t rank, std::int64_t k) const {
    const auto first = rank / kGroup * kGroup, group = std::min(kGroup, ranks - first);
    const auto line = (k >> line_bits()) * group + rank - first;
    return first * padded_features() + (line << line_bits()) + (k & ((std::int64_t{1} << line_bits()) - 1));
  }
  std::int64_t b_elements(const Part& part) const { return part.panels() * kPanel * padded_ranks(part); }
  std::int64_t b_at(const Part& part, std::int64_t rank, std::int64_t column) const {
    const auto pair = std::int64_t{1} << pair_bits();
    const auto panel = part.b + column / kPanel * kPanel * padded_ranks(part);
    return panel + (rank & -pair) * kPanel + column % kPanel * pair + (rank & (pair - 1));
  }
  // The number of elements in `b` for each column of a part.
  std::int64_t padded_ranks(const Part& part) const {
    const auto pair = std::int64_t{1} << pair_bits();
    return (part.ranks + pair - 1) & -pair;
  }

 private:
  // Powers of two, so that a_at() and b_at() do not divide.
  int pair_bits() const { return type == DType::f32 ? 0 : 1; }
  int line_bits() const { return type == DType::f32 ? 4 : 5; }
  std::int64_t padded_features() const {
    const auto line = std::int64_t{1} << line_bits();
    return (in_features + line - 1) & -line;
  }
};

// Rows of a step whose output changes.
struct LowRankRows {
  const LowRank* change = nullptr;
  std::span<const std::int32_t> rows;  // ascending
};

// ---- devices with adapter slots (Device::make_adapter_slots()) ----
//
// Such a device has memory for a few adapters. The others stay in host memory. The image of an adapter is one piece of
// memory that can be copied to any slot, because its parts refer to each other by their bytes from its beginning:
//   i64 [weights]  the SlotChange of each weight; 0: the adapter does not change it
//   SlotChange     followed by its parts, SlotPart [parts]
//   A and B        of each change, as in LowRank
// All of them begin at multiples of 64 bytes.
struct SlotChange {
  std::int64_t a = 0;
  std::int32_t ranks = 0, parts = 0;
};
struct SlotPart {  // LowRank::Part
  std::int64_t b = 0;
  std::int32_t first_column = 0, columns = 0, first_rank = 0, ranks = 0;
  float scale = 1;
  std::int32_t unused = 0;
};

struct AdapterSlots {
  struct Weight {
    std::int64_t in_features = 0;
    std::int64_t ranks = 0;  // the most of an adapter
  };
  int count = 0;
  std::size_t bytes = 0;        // of the largest image
  std::vector<Weight> weights;  // those that adapters can change
};

}  // namespace charonia::ops
