// A copy of a block of the KV cache.
#pragma once

#include <cstdint>

namespace charonia {

// Copies a block of one kind, in all layers of this kind.
struct BlockCopy {
  std::int32_t from = 0, to = 0;
  int kind = 0;  // its position in KvLayout::kinds; 0: full attention
  bool operator==(const BlockCopy&) const = default;
};

}  // namespace charonia
