// The k/v blocks on the CPU: [layer][block][kv_head] { k transposed [head_dim][block_len], v [block_len][head_dim] },
// so that attention reads one head of a block in one run, and 16 scores need no sum across a vector. The whole cache is
// mapped when it is made; zero-filled pages come when blocks are first written, so a block that was never used takes no
// memory.
#pragma once

#include <cstddef>

#include "base/huge_memory.h"
#include "base/text.h"
#include "charonia/error.h"
#include "ops/ops.h"

namespace charonia::ops::cpu {

// Bytes of one block in one layer.
inline std::size_t kv_block_layer_bytes(const KvLayout& layout) {
  if (layout.quant_bits != 0) {
    throw Error(ErrorCode::unsupported, cat("quant_policy ", layout.quant_bits, " is not there yet: set it to 0"));
  }
  return std::size_t{2} * static_cast<std::size_t>(layout.kv_heads) * static_cast<std::size_t>(layout.head_dim) *
         static_cast<std::size_t>(layout.block_len) * size_of(layout.dtype);
}

class CpuKvCache : public KvCache {
 public:
  CpuKvCache(const KvLayout& layout, int num_blocks)
      : memory_(kv_block_layer_bytes(layout) * static_cast<std::size_t>(layout.num_layers) *
                static_cast<std::size_t>(num_blocks)) {
    layout_ = layout;
    num_blocks_ = num_blocks;
  }

  // Of k/v head `head` in block 0 of `layer`; block b lies b * block_elements() further.
  std::byte* head(int layer, int head) const {
    return memory_.data() +
           kv_block_layer_bytes(layout_) * static_cast<std::size_t>(layer) * static_cast<std::size_t>(num_blocks_) +
           static_cast<std::size_t>(head_elements() * head) * size_of(layout_.dtype);
  }
  std::size_t resident_bytes() const { return memory_.resident_bytes(); }

  std::int64_t head_elements() const { return std::int64_t{2} * layout_.head_dim * layout_.block_len; }
  std::int64_t block_elements() const { return head_elements() * layout_.kv_heads; }

 private:
  HugeMemory memory_;
};

}  // namespace charonia::ops::cpu
