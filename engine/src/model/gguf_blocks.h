// The quantised types of GGUF files. A row is a sequence of blocks; a block has the codes of some columns of the row,
// with their scales and, in some types, minimums. The layouts are those of ggml.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "base/dtype.h"
#include "ops/quant_weight.h"

namespace charonia::model {

inline constexpr std::int64_t kMaxBlock = 256, kMaxGroups = 16;  // columns and groups of the largest block

// A block in the common form of quant_weight.h, without zeros.
struct DecodedBlock {
  std::uint8_t codes[kMaxBlock];
  float scales[kMaxGroups];
  float minimums[kMaxGroups];  // only with BlockType::minimums
};

struct BlockType {
  std::string_view name;        // of the type in ggml, such as "Q4_K"
  std::int64_t columns, bytes;  // of a block
  ops::Code code;               // each number of the type is a number of this code
  std::int64_t group;           // columns that share a scale
  bool minimums;
  DType scale_type;  // represents all scales exactly
  void (*decode)(const std::byte* block, DecodedBlock& out);
};

// Returns null for an unknown type.
const BlockType* find_block_type(std::string_view name);

}  // namespace charonia::model
