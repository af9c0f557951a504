// The KV blocks on the CPU: [layer with its own storage][block][kv_head] { k transposed [head_dim][block_len], v
// [block_len][head_dim] }. So attention reads one head of a block sequentially, and 16 scores need no sum across a
// vector. A bf16 cache interleaves two neighbouring rows, because processors multiply pairs of bf16: k [head_dim /
// 2][block_len][2], v [block_len / 2][head_dim][2]; if block_len is odd, the last row of v is not interleaved. A
// quantised cache holds k and v as integers (with 4 bits: k [head_dim / 2][block_len] bytes, v [block_len][head_dim /
// 2] bytes), then four rows of f16 [block_len]: scales of k, zeros of k, scales of v, zeros of v. An FP8 cache holds k
// and v as bytes, without scales. The whole cache is
// mapped at construction. Zero-filled pages are allocated when blocks are first written, so unused blocks take no
// memory. A layer of kind `state` has [slot] { f32 [state_floats] } instead, from a multiple of 64 bytes on each.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

#include "base/huge_memory.h"
#include "ops/device.h"

namespace charonia::ops::cpu {

class CpuKvCache : public KvCache {
 public:
  CpuKvCache(const KvLayout& layout, const PerKind<int>& num_blocks)
      : KvCache(layout, num_blocks), memory_(layout_.bytes(num_blocks_)) {
    auto* at = memory_.data();
    for (std::size_t i = 0; i < layout_.layers.size(); ++i) {
      const auto& layer = layout_.layers[i];
      if (layer.storage >= 0) {
        layers_.push_back(layers_[layout_.storage_of(i)]);
        layers_.back().stores = false;
        continue;
      }
      layers_.push_back({layer, at, layout_.head_bytes(layer), layout_.layer_bytes(layer), true});
      at += layers_.back().block_bytes * static_cast<std::size_t>(num_blocks_[layer.kind]);
    }
  }

  struct Layer : KvLayer {
    std::byte* data = nullptr;  // block 0
    std::size_t head_bytes = 0, block_bytes = 0;
    bool stores = true;  // false: `data` belongs to an earlier layer

    // KV head `head` of block 0; block b is b * block_bytes further.
    std::byte* head(int head) const { return data + head_bytes * static_cast<std::size_t>(head); }
    // Of kind `state`: the numbers of a slot [state_floats]; null for slot -1.
    float* state(std::int32_t slot) const {
      return slot < 0 ? nullptr : reinterpret_cast<float*>(data + block_bytes * static_cast<std::size_t>(slot));
    }
  };
  const Layer& layer(int index) const { return layers_[static_cast<std::size_t>(index)]; }
  std::byte* block(std::size_t layer, int block) const override {
    return layers_[layer].data + layers_[layer].block_bytes * static_cast<std::size_t>(block);
  }
  std::size_t resident_bytes() const { return memory_.resident_bytes(); }
  std::size_t untouched_bytes() const override { return memory_.bytes() - std::min(memory_.bytes(), resident_bytes()); }

 private:
  HugeMemory memory_;
  std::vector<Layer> layers_;
};

}  // namespace charonia::ops::cpu
