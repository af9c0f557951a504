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

namespace charonia::ops::cpu {

class CpuKvCache : public KvCache {
 public:
  CpuKvCache(const KvLayout& layout, int num_blocks)
      : memory_(layout.block_bytes() * static_cast<std::size_t>(num_blocks)) {
    layout_ = layout;
    num_blocks_ = num_blocks;
  }

  // KV head `head` of block 0 in `layer`; block b is b * block_bytes() further.
  std::byte* head(int layer, int head) const {
    return memory_.data() +
           layout_.layer_bytes() * static_cast<std::size_t>(layer) * static_cast<std::size_t>(num_blocks_) +
           layout_.head_bytes() * static_cast<std::size_t>(head);
  }
  std::size_t resident_bytes() const { return memory_.resident_bytes(); }

  std::int64_t block_bytes() const { return static_cast<std::int64_t>(layout_.layer_bytes()); }

 private:
  HugeMemory memory_;
};

}  // namespace charonia::ops::cpu
