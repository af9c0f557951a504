// One kind of cache after kind 0: its pool of units, and the unit of each node of the prefix tree.
//
// A sequence uses the units of its window, or its state. A unit that is in the tree stays Cached when no sequence uses
// it, until the least recently used unit is evicted. Then its node has a tombstone. A later sequence that computes the
// same tokens gives the node a unit again (BlockManager::insert()).
//
// Only first_needed() and most_for() know the kind. The rest holds for any kind whose sequences need some of the last
// units of their path. A sequence needs one unit of kind `state`: that of the last node.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "cache/block.h"
#include "cache/eviction_queue.h"
#include "cache/free_blocks.h"

namespace charonia::cache {

class Units {
 public:
  // num_nodes: blocks of kind 0.
  Units(const UnitKind& kind, int block_len, int num_nodes);

  CacheKind kind() const { return kind_; }
  // The first block that a sequence with this many computed tokens still reads, or writes next. Kind `state` with
  // whole blocks: the last block.
  std::int32_t first_needed(std::int32_t computed) const { return std::max(0, computed - window_ + 1) / block_len_; }
  // The most units that a sequence needs to compute `tokens` tokens in one step. Of kind `state`: the state that it
  // reads and the state that it writes.
  std::int32_t most_for(std::int32_t tokens) const {
    return kind_ == CacheKind::state ? 2 : (window_ + tokens + block_len_ - 3) / block_len_ + 1;
  }
  // Whether a sequence that uses the unit is its only user, and the unit is not in the tree.
  bool is_private(BlockId unit) const { return at(unit).use_count == 1 && at(unit).node == kNone; }

  int num_units() const { return free_.total(); }
  int num_committed() const { return free_.committed(); }
  int num_free() const { return free_.size(); }
  int num_active() const { return num_active_; }
  int num_cached() const { return cached_.size(); }
  int num_available() const { return num_free() + num_cached(); }
  int num_pinned() const { return num_pinned_; }  // nodes whose unit, or tombstone, has pins

 private:
  friend class BlockManager;

  struct Unit {
    std::int32_t use_count = 0;
    BlockId node = kNone;  // kNone: not in the tree
  };
  struct Node {
    BlockId unit = kNone;  // kNone: a tombstone
    std::int32_t pins = 0;
  };

  bool has_unit(BlockId node) const { return at_node(node).unit != kNone; }
  void use(BlockId unit);    // adds a user: Cached -> Active if it is the first
  void unuse(BlockId unit);  // removes a user: Active -> Cached or Free if it was the last
  bool provide(int n) { return free_.provide(n, num_cached()); }
  BlockId take();  // Free -> Active; evicts if no unit is Free. provide() must have returned true
  BlockId join(BlockId node, BlockId unit);  // BlockManager::insert(); returns the unit that the caller uses now
  bool withdraw(BlockId unit);
  void drop(BlockId node);
  void leave(BlockId node);  // the node leaves the tree: its unit becomes Free, or when it is released
  void pin(BlockId node);
  void unpin(BlockId node);

  Unit& checked(BlockId unit, std::string_view call);
  Unit& at(BlockId unit) { return units_[static_cast<std::size_t>(unit)]; }
  const Unit& at(BlockId unit) const { return units_[static_cast<std::size_t>(unit)]; }
  Node& at_node(BlockId node) { return nodes_[static_cast<std::size_t>(node)]; }
  const Node& at_node(BlockId node) const { return nodes_[static_cast<std::size_t>(node)]; }
  // Call it after pins of the node have changed from or to 0.
  void requeue(BlockId node);

  void check(const Blocks& blocks, int num_nodes, std::span<const std::int32_t> expected_use) const;

  static constexpr std::int32_t kStateWindow = 2;  // a token reads the state after the token before it

  CacheKind kind_;
  std::int32_t window_;
  int block_len_;
  FreeBlocks free_;
  EvictionQueue cached_;
  std::vector<Unit> units_;
  std::vector<Node> nodes_;  // by block of kind 0; used while it is indexed
  int num_active_ = 0, num_pinned_ = 0;
};

}  // namespace charonia::cache
