// The parts of a BlockManager. block_manager.cpp defines its calls, block_manager_check.cpp the integrity checks.
#pragma once

#include <string_view>
#include <utility>
#include <vector>

#include "cache/block.h"
#include "cache/eviction_queue.h"
#include "cache/free_blocks.h"
#include "cache/pins.h"
#include "cache/prefix_index.h"
#include "cache/units.h"

namespace charonia::cache {

struct BlockManager::Impl {
  Impl(int num_blocks, int block_len_in, bool enable_prefix_caching, int chunk, Commit commit, Hash hash,
       std::span<const UnitKind> unit_kinds)
      : block_len(block_len_in),
        blocks(num_blocks),
        free(num_blocks, chunk, std::move(commit)),
        index(num_blocks, block_len, enable_prefix_caching, hash, blocks),
        cached(num_blocks),
        pins(blocks, cached) {
    subtree.reserve(static_cast<std::size_t>(num_blocks));
    kinds.reserve(unit_kinds.size());
    for (const auto& kind : unit_kinds) kinds.emplace_back(kind, block_len, num_blocks);
  }

  // The node's block; kNone if the node has left the index, or is the root.
  BlockId indexed(const PrefixNode& node, std::string_view call) {
    if (node.unique_id == 0 || checked(node.block, call).unique_id != node.unique_id) return kNone;
    return node.block;
  }

  Block& checked(BlockId id, std::string_view call) {
    if (id < 0 || id >= free.total())
      broken(cat(call, "(): block ", id, " does not exist; there are ", free.total(), " blocks"));
    return blocks[id];
  }

  // The transitions of a block's state.
  void use(BlockId id);    // adds a user: Cached -> Active if it is the first
  void unuse(BlockId id);  // removes a user: Active -> Cached or Free if it was the last
  void evict_first();      // Cached -> Free: evicts the first of the queue and removes its descendants from the index
  void unindex(BlockId root);  // removes a block and its descendants from the index: Cached -> Free
  BlockId take_free();         // Free -> Active; requires a Free block with memory

  std::span<const PrefixNode> window_of(std::span<const PrefixNode> nodes, const Units& kind) const;

  void check_states() const;
  void check_queue() const;

  int block_len;
  Blocks blocks;
  FreeBlocks free;
  PrefixIndex index;
  EvictionQueue cached;
  Pins pins;
  std::vector<Units> kinds;  // after kind 0
  int num_active = 0;
  std::vector<BlockId> subtree;  // working memory of unindex()
};

}  // namespace charonia::cache
