// Finds the full block that holds given tokens after a given prefix.
//
// The index is a tree. An indexed block is a child of the block before it in its sequence, or of the root. The parent
// of an indexed block is always indexed too, so every indexed block can be reached from the root. A child is found by
// its parent, its salt and its tokens, through a hash table whose chains run through the blocks. Nothing here allocates
// memory after construction.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "cache/block.h"

namespace charonia::cache {

class PrefixIndex {
 public:
  // The lookup key of a child. Valid as long as the tokens.
  struct Key {
    std::uint64_t parent_id = 0;  // 0: the root
    std::uint64_t salt = 0;
    std::span<const TokenId> tokens;  // [block_len]
    std::uint64_t hash = 0;
  };

  // If `enabled` is false there is no index, and only enabled() may be called.
  PrefixIndex(int num_blocks, int block_len, bool enabled, BlockManager::Hash hash, Blocks& blocks);

  bool enabled() const { return enabled_; }
  PrefixNode node(BlockId id) const { return {id, blocks_[id].unique_id}; }

  Key key(std::uint64_t parent_id, std::uint64_t salt, std::span<const TokenId> tokens) const {
    return {parent_id, salt, tokens, hash_(parent_id, salt, tokens)};
  }
  BlockId find(const Key& key) const;  // kNone if not found

  // Requires that the block is not indexed and that no equal block is. `key` must be for that parent.
  void insert(BlockId id, BlockId parent, const Key& key);
  void erase(BlockId id);  // a block without children

  void check(int num_blocks) const;  // block_manager_check.cpp

 private:
  BlockId& bucket(std::uint64_t hash) { return buckets_[hash & (buckets_.size() - 1)]; }
  BlockId bucket(std::uint64_t hash) const { return buckets_[hash & (buckets_.size() - 1)]; }
  std::span<const TokenId> tokens_of(BlockId id) const;
  void check_buckets(int indexed) const;
  void check_tree(int num_blocks, int indexed) const;

  bool enabled_;
  std::size_t block_len_;
  BlockManager::Hash hash_;
  Blocks& blocks_;
  std::vector<TokenId> contents_;  // tokens of the indexed blocks [num_blocks, block_len]
  std::vector<BlockId> buckets_;   // the size is a power of two
  std::uint64_t last_unique_id_ = 0;
};

}  // namespace charonia::cache
