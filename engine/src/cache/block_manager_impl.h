// What a BlockManager is inside: its state and the single changes of it, which block_manager.cpp puts together and
// block_manager_check.cpp checks.
#pragma once

#include <algorithm>
#include <bit>
#include <string>
#include <string_view>
#include <utility>

#include "base/text.h"
#include "cache/block_manager.h"
#include "cache/eviction_queue.h"
#include "charonia/error.h"

namespace charonia::cache {

inline constexpr BlockId kNone = -1;

[[noreturn]] inline void broken(const std::string& what) {
  throw Error(ErrorCode::internal, cat("KV blocks: ", what));
}

// The index is a tree: an indexed block is a child of its parent (or the root), and a node's parent is always indexed
// itself, so that every indexed block can be found by match(). Nodes are found through a hash table whose chains run
// through the blocks; nothing here allocates memory after construction.
//
// A block is *pinned* when it has pins or when a block behind it is: it must outlive that one. The queue of Cached
// blocks has those that are not pinned first, then by time of last use. A Cached child always comes before its Cached
// parent.
struct BlockManager::Impl {
  struct Block {
    std::int32_t use_count = 0;
    BlockId parent = kNone;       // kNone: the root
    std::uint64_t unique_id = 0;  // 0: not indexed, and then the fields from `parent` on mean nothing
    std::uint64_t parent_id = 0;
    std::uint64_t salt = 0;
    std::uint64_t hash = 0;
    BlockId first_child = kNone, next_sibling = kNone, previous_sibling = kNone;
    BlockId next_in_bucket = kNone;
    std::int32_t pins = 0;
    std::int32_t pinned_children = 0;

    bool is_indexed() const { return unique_id != 0; }
    bool is_cached() const { return use_count == 0 && is_indexed(); }
    bool is_pinned() const { return pins > 0 || pinned_children > 0; }
  };

  Impl(int num_blocks, int block_len_in, bool enabled_in, int chunk_in, Commit commit_in, Hash hash_in)
      : block_len(block_len_in),
        enabled(enabled_in),
        total(num_blocks),
        chunk(chunk_in),
        commit(std::move(commit_in)),
        hash_of(hash_in),
        blocks(static_cast<std::size_t>(num_blocks)),
        buckets(std::bit_ceil(static_cast<std::size_t>(num_blocks)), kNone),
        cached(num_blocks) {
    if (enabled) contents.resize(static_cast<std::size_t>(num_blocks) * static_cast<std::size_t>(block_len));
    free.reserve(static_cast<std::size_t>(num_blocks));
    subtree.reserve(static_cast<std::size_t>(num_blocks));
    take_in(std::min(chunk, total));
  }

  Block& at(BlockId id) { return blocks[static_cast<std::size_t>(id)]; }
  const Block& at(BlockId id) const { return blocks[static_cast<std::size_t>(id)]; }
  BlockId& bucket(std::uint64_t hash) { return buckets[hash & (buckets.size() - 1)]; }

  std::span<const TokenId> tokens_of(BlockId id) const {
    const auto length = static_cast<std::size_t>(block_len);
    return std::span(contents).subspan(static_cast<std::size_t>(id) * length, length);
  }

  Block& checked(BlockId id, std::string_view call) {
    if (id < 0 || id >= total) broken(cat(call, " of block ", id, ", and there are ", total));
    return at(id);
  }

  // ---- memory ----

  // The blocks up to `num_blocks` have memory. The last one of `free` is given first: low numbers are used again and
  // again, high ones only when there is need.
  void take_in(int num_blocks) {
    for (auto id = num_blocks; id-- > committed;) free.push_back(id);
    committed = num_blocks;
  }

  // False when there is nothing to grow by, from now on if memory does not suffice.
  bool grow() {
    if (committed == total) return false;
    const int next = committed + std::min(chunk, total - committed);
    try {
      commit(next);
    } catch (const Error& error) {
      if (error.code() != ErrorCode::resource_exhausted) throw;
      total = committed;
      return false;
    }
    take_in(next);
    return true;
  }

  // ---- use ----

  std::uint64_t newest_key(const Block& block) { return ++last_key | (block.is_pinned() ? kPinned : 0); }

  void raise(BlockId id) {
    auto& block = at(id);
    if (block.use_count++ == 0) {
      cached.erase(id);
      ++num_active;
    }
  }

  void lower(BlockId id) {
    auto& block = at(id);
    if (--block.use_count > 0) return;
    --num_active;
    if (!block.is_indexed()) {
      free.push_back(id);
      return;
    }
    cached.push(id, newest_key(block));
    // A user of this block that has its own copy of the prefix does not keep the prefix's blocks Active. They were of
    // use nevertheless, and must outlive this one.
    for (auto above = block.parent; above != kNone && at(above).is_cached(); above = at(above).parent) {
      cached.update(above, newest_key(at(above)));
    }
  }

  // ---- pins ----

  void pin(BlockId id) {
    auto& block = at(id);
    const bool was_pinned = block.is_pinned();
    if (block.pins++ == 0) ++num_pinned;
    if (!was_pinned) pinned_changed(id);
  }

  void unpin(BlockId id, std::int32_t times) {
    auto& block = at(id);
    if (times == 0) return;
    block.pins -= times;
    if (block.pins > 0) return;
    --num_pinned;
    if (!block.is_pinned()) pinned_changed(id);
  }

  // Tells the queue and the parent; those above only as far as it changes anything for them.
  void pinned_changed(BlockId id) {
    while (true) {
      const auto& block = at(id);
      if (block.is_cached()) cached.update(id, cached.key_of(id) ^ kPinned);
      if (block.parent == kNone) return;
      auto& parent = at(block.parent);
      const bool was_pinned = parent.is_pinned();
      parent.pinned_children += block.is_pinned() ? 1 : -1;
      if (parent.is_pinned() == was_pinned) return;
      id = block.parent;
    }
  }

  // ---- the index ----

  BlockId find(std::uint64_t parent_id, std::uint64_t salt, std::span<const TokenId> tokens, std::uint64_t hash) {
    for (auto id = bucket(hash); id != kNone; id = at(id).next_in_bucket) {
      const auto& block = at(id);
      if (block.hash == hash && block.parent_id == parent_id && block.salt == salt &&
          std::ranges::equal(tokens_of(id), tokens)) {
        return id;
      }
    }
    return kNone;
  }

  void insert(BlockId id, const PrefixNode& parent, std::uint64_t salt, std::span<const TokenId> tokens,
              std::uint64_t hash) {
    auto& block = at(id);
    block.unique_id = ++last_unique_id;
    block.parent = parent.block;
    block.parent_id = parent.unique_id;
    block.salt = salt;
    block.hash = hash;
    block.pins = block.pinned_children = 0;
    std::ranges::copy(tokens, contents.begin() + static_cast<std::ptrdiff_t>(id) * block_len);
    block.next_in_bucket = std::exchange(bucket(hash), id);
    block.first_child = block.previous_sibling = block.next_sibling = kNone;
    if (parent.block == kNone) return;
    block.next_sibling = std::exchange(at(parent.block).first_child, id);
    if (block.next_sibling != kNone) at(block.next_sibling).previous_sibling = id;
  }

  // Of a block without children.
  void erase(BlockId id) {
    auto& block = at(id);
    unpin(id, block.pins);
    auto* link = &bucket(block.hash);
    while (*link != id) link = &at(*link).next_in_bucket;
    *link = block.next_in_bucket;
    if (block.next_sibling != kNone) at(block.next_sibling).previous_sibling = block.previous_sibling;
    if (block.previous_sibling != kNone) {
      at(block.previous_sibling).next_sibling = block.next_sibling;
    } else if (block.parent != kNone) {
      at(block.parent).first_child = block.next_sibling;
    }
    block.unique_id = 0;
  }

  // Takes the first of the Cached blocks out of the index, and with it its descendants: those blocks could not be
  // found any more. Cached ones among them become Free, Active ones will be when they are released.
  void evict_first() {
    subtree.assign(1, cached.first());
    while (!subtree.empty()) {
      const auto id = subtree.back();
      if (const auto child = at(id).first_child; child != kNone) {
        subtree.push_back(child);
        continue;
      }
      subtree.pop_back();
      const bool was_cached = at(id).is_cached();
      erase(id);
      if (was_cached) {
        cached.erase(id);
        free.push_back(id);
      }
    }
  }

  static constexpr std::uint64_t kPinned = std::uint64_t{1} << 63;  // in the keys of `cached`

  int block_len;
  bool enabled;
  int total;          // blocks that there are, with memory or to be had
  int committed = 0;  // have memory
  int chunk;
  Commit commit;
  Hash hash_of;
  std::vector<Block> blocks;
  std::vector<TokenId> contents;  // [num_blocks, block_len], of indexed blocks
  std::vector<BlockId> free;      // with memory; the last one is given next
  std::vector<BlockId> buckets;   // a power of two of them
  std::vector<BlockId> subtree;   // working memory of evict_first
  EvictionQueue cached;
  int num_active = 0, num_pinned = 0;
  std::uint64_t last_unique_id = 0, last_key = 0;
};

}  // namespace charonia::cache
