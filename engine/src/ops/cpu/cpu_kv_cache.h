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

namespace charonia::ops::cpu {

class CpuKvCache : public KvCache {
 public:
  CpuKvCache(const KvLayout& layout, int num_blocks)
      : memory_(layout.block_bytes() * static_cast<std::size_t>(num_blocks)) {
    layout_ = layout;
    num_blocks_ = num_blocks;
  }

  // Of KV head `head` in block 0 of `layer`; block b lies b * block_bytes() further.
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
