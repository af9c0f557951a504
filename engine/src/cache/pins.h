// Policy: session pins. A pin keeps a block, and the blocks of the prefix before it, for a session that may come back.
//
// Pins are soft: they change the order of eviction and nothing else. A block is *pinned* when it has pins of its own or
// a child that is pinned, since it must outlive that child. Among the Cached blocks those that are not pinned are
// evicted first (eviction_queue.h).
#pragma once

#include "cache/block.h"
#include "cache/eviction_queue.h"

namespace charonia::cache {

class Pins {
 public:
  Pins(Blocks& blocks, EvictionQueue& cached) : blocks_(blocks), cached_(cached) {}

  int count() const { return count_; }  // blocks that have pins of their own

  // Of indexed blocks.
  void add(BlockId id) {
    auto& block = blocks_[id];
    const bool was_pinned = block.is_pinned();
    if (block.pins++ == 0) ++count_;
    if (!was_pinned) changed(id);
  }

  // times <= the pins that the block has.
  void remove(BlockId id, int times) {
    auto& block = blocks_[id];
    if (times == 0) return;
    block.pins -= times;
    if (block.pins > 0) return;
    --count_;
    if (!block.is_pinned()) changed(id);
  }

  // Of a block that is about to leave the index.
  void remove_all(BlockId id) { remove(id, blocks_[id].pins); }

  void check(int num_blocks) const;  // block_manager_check.cpp

 private:
  // The block has become pinned, or is not any more. Tells the queue and the parent, and goes on upwards as long as
  // that changes whether the parent is pinned.
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
