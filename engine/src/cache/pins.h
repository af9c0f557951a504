// Policy: session pins. A pin keeps a block and its ancestors for a session that may continue.
//
// Pins are soft: they only change the order of eviction. A block is *pinned* if it has its own pins or a pinned child,
// because it must outlive that child. Among the Cached blocks, unpinned blocks are evicted first (eviction_queue.h).
#pragma once

#include "cache/block.h"
#include "cache/eviction_queue.h"

namespace charonia::cache {

class Pins {
 public:
  Pins(Blocks& blocks, EvictionQueue& cached) : blocks_(blocks), cached_(cached) {}

  int count() const { return count_; }  // blocks that have their own pins

  // Requires an indexed block.
  void add(BlockId id) {
    auto& block = blocks_[id];
    const bool was_pinned = block.is_pinned();
    if (block.pins++ == 0) ++count_;
    if (!was_pinned) changed(id);
  }

  // times <= the number of pins of the block.
  void remove(BlockId id, int times) {
    auto& block = blocks_[id];
    if (times == 0) return;
    block.pins -= times;
    if (block.pins > 0) return;
    --count_;
    if (!block.is_pinned()) changed(id);
  }

  // Called before a block leaves the index.
  void remove_all(BlockId id) { remove(id, blocks_[id].pins); }

  void check(int num_blocks) const;  // block_manager_check.cpp

 private:
  // Called after is_pinned() of the block has changed. Updates the queue and the parent, and goes up as long as the
  // parent's is_pinned() changes.
  void changed(BlockId id) {
    while (true) {
      const auto& block = blocks_[id];
      if (block.is_cached()) cached_.set_pinned(id, block.is_pinned());
      if (block.parent == kNone) return;
      auto& parent = blocks_[block.parent];
      const bool was_pinned = parent.is_pinned();
      parent.pinned_children += block.is_pinned() ? 1 : -1;
      if (parent.is_pinned() == was_pinned) return;
      id = block.parent;
    }
  }

  Blocks& blocks_;
  EvictionQueue& cached_;
  int count_ = 0;
};

}  // namespace charonia::cache
