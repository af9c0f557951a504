// The KV blocks on the CPU: [layer][block][kv_head] { k transposed [head_dim][block_len], v [block_len][head_dim] }. So
// attention reads one head of a block sequentially, and 16 scores need no sum across a vector. A bf16 cache interleaves
// two neighbouring rows, because processors multiply pairs of bf16: k [head_dim / 2][block_len][2], v [block_len /
// 2][head_dim][2]; if block_len is odd, the last row of v is not interleaved. A quantised cache holds k and v as
// integers (with 4 bits: k [head_dim / 2][block_len] bytes, v [block_len][head_dim / 2] bytes), then four rows of f16
// [block_len]: scales of k, zeros of k, scales of v, zeros of v. The whole cache is mapped at construction. Zero-filled
// pages are allocated when blocks are first written, so unused blocks take no memory.
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

  // KV head `head` of block 0 in `layer`; block b is b * block_bytes() further.
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
