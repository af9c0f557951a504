// The KV blocks on the CPU: [layer][block][kv_head] { k transposed [head_dim][block_len], v [block_len][head_dim] },
// so that attention reads one head of a block in one run, and 16 scores need no sum across a vector. In a cache of bf16
// two neighbouring rows of each lie interleaved, k [head_dim / 2][block_len][2] and v [block_len / 2][head_dim][2], as
// processors multiply pairs of bf16; of an odd block_len the last row of v is by itself. A quantised cache
// holds k and v as integers (of 4 bits: k [head_dim / 2][block_len] bytes, v [block_len][head_dim / 2]), and behind
// them four rows of f16 [block_len]: the scales and zeros of k, the scales and zeros of v. The whole cache is mapped
// when it is made; zero-filled pages come when blocks are first written, so a block that was never used takes no
// memory.
#pragma once

#include <cstddef>

#include "base/huge_memory.h"
#include "ops/device.h"
#include "ops/kv_quant.h"

namespace charonia::ops::cpu {

// Bytes of k and v of one head of a block.
inline std::size_t kv_head_bytes(const KvLayout& layout) {
  if (layout.quant_bits != 0) return kv_quant_head_bytes(layout.head_dim, layout.block_len, layout.quant_bits);
  return std::size_t{2} * static_cast<std::size_t>(layout.head_dim) * static_cast<std::size_t>(layout.block_len) *
         size_of(layout.dtype);
}
// Bytes of one block in one layer.
inline std::size_t kv_block_layer_bytes(const KvLayout& layout) {
  return kv_head_bytes(layout) * static_cast<std::size_t>(layout.kv_heads);
}

class CpuKvCache : public KvCache {
 public:
  CpuKvCache(const KvLayout& layout, int num_blocks)
      : memory_(kv_block_layer_bytes(layout) * static_cast<std::size_t>(layout.num_layers) *
                static_cast<std::size_t>(num_blocks)) {
    layout_ = layout;
    num_blocks_ = num_blocks;
  }

  // Of KV head `head` in block 0 of `layer`; block b lies b * block_bytes() further.
  std::byte* head(int layer, int head) const {
    return memory_.data() +
           kv_block_layer_bytes(layout_) * static_cast<std::size_t>(layer) * static_cast<std::size_t>(num_blocks_) +
           kv_head_bytes(layout_) * static_cast<std::size_t>(head);
  }
  std::size_t resident_bytes() const { return memory_.resident_bytes(); }

  std::int64_t block_bytes() const { return static_cast<std::int64_t>(kv_block_layer_bytes(layout_)); }

 private:
  HugeMemory memory_;
};

}  // namespace charonia::ops::cpu
