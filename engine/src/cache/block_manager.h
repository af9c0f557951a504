// The pool of KV blocks and the prefix index. Integers only: a block is a number, its contents are token ids.
//
// A block is in exactly one state:
//   Free    no sequence uses it, its contents mean nothing
//   Active  use_count >= 1 sequences use it
//   Cached  no sequence uses it; it is full, indexed, and may be used again or evicted (least recently used first)
//
// A Free block need not have memory yet: the pool may grow into its size by and by, and memory may then not suffice.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

namespace charonia::cache {

using BlockId = std::int32_t;
using TokenId = std::int32_t;

// What a prefix ends in: the block, and a number that is never given twice, so that a block that was evicted and filled
// anew cannot be taken for its former self.
struct PrefixNode {
  BlockId block = -1;           // -1: the empty prefix
  std::uint64_t unique_id = 0;  // 0: the root
};

struct PrefixMatch {
  std::vector<BlockId> blocks;    // now used by the caller (use counts raised)
  std::vector<PrefixNode> nodes;  // of those blocks
  std::int32_t num_tokens = 0;    // blocks.size() * block_len
  PrefixNode last() const { return nodes.empty() ? PrefixNode{} : nodes.back(); }
};

class BlockManager {
 public:
  // How nodes of the index are looked for. Contents are compared as well, so that a bad hash costs time and nothing
  // else.
  using Hash = std::uint64_t (*)(std::uint64_t parent_id, std::uint64_t salt, std::span<const TokenId> tokens);
  static std::uint64_t default_hash(std::uint64_t parent_id, std::uint64_t salt, std::span<const TokenId> tokens);

  // num_blocks >= 1, block_len >= 1. enable_prefix_caching false: match finds nothing and blocks go straight to Free.
  BlockManager(int num_blocks, int block_len, bool enable_prefix_caching, Hash hash = default_hash);

  // Blocks have memory only when they are needed (cache_chunk_size): the first `chunk` blocks are there. When a block
  // is needed and none of those is Free, `commit(n)` provides memory for the first n blocks, `chunk` more than before;
  // only when there is nothing more to be had are Cached blocks evicted. When commit throws Error(resource_exhausted),
  // the pool stays at the size that it has, for good: num_blocks() then is num_committed(). Other errors leave
  // allocate(), which has changed nothing. chunk >= 1.
  using Commit = std::function<void(int num_blocks)>;
  BlockManager(int num_blocks, int block_len, bool enable_prefix_caching, int chunk, Commit commit,
               Hash hash = default_hash);
  ~BlockManager();

  int block_len() const;
  int num_blocks() const;
  int num_committed() const;  // blocks that have memory
  int num_free() const;       // with memory or without
  int num_active() const;
  int num_cached() const;
  int num_available() const;  // free + cached: what allocate() can give, if memory suffices

  // The longest chain of indexed blocks whose tokens equal the beginning of `tokens`, at most max_tokens tokens.
  // Contents are compared, not hashes alone: nothing false can match. Mutates: raises use counts, Cached -> Active.
  // `salt` keeps apart what must not match though the tokens are equal (an adapter). It need not tell how k and v are
  // stored: all blocks of a pool are those of one cache.
  PrefixMatch match(std::span<const TokenId> tokens, std::int32_t max_tokens, std::uint64_t salt = 0);

  // n blocks with use_count 1 (Free first, then the least recently used Cached ones, evicted leaf first), appended to
  // out; or false and no block given when there are fewer than n, perhaps since just now memory did not suffice and
  // num_blocks() is less than before. A Cached block with an Active one behind it (its
  // user has a copy of the prefix) takes that one out of the index when it is evicted.
  bool allocate(int n, std::vector<BlockId>& out);

  // Indexes a full Active block of the caller's behind `parent`. `tokens` are the block's block_len tokens. Returns
  // the node to be the parent of the next one. If an equal node is already there, the caller keeps its own block (it
  // will be Free when released) and the existing node is returned; the caller may retain that node's block and release
  // its own. If the parent was evicted meanwhile (possible only when the caller does not use its block), nothing is
  // indexed and the parent is returned.
  PrefixNode insert(const PrefixNode& parent, BlockId block, std::span<const TokenId> tokens, std::uint64_t salt = 0);

  // Lowers use counts; at zero an indexed block becomes Cached, another Free. Works from the last to the first, so that
  // the end of a chain is evicted before its beginning.
  void release(std::span<const BlockId> blocks);

  // Shares blocks with another sequence (raises use counts).
  void retain(std::span<const BlockId> blocks);

  // Keeps blocks for a session: a pinned block, and its ancestors, is evicted only when no other Cached one is
  // left. Soft: an evicted block loses its pins, and nodes that are no longer in the index are passed over. Pins are
  // counted; unpin() takes back one, and throws Error(internal) when there is none.
  void pin(std::span<const PrefixNode> nodes);
  void unpin(std::span<const PrefixNode> nodes);
  int num_pinned() const;  // blocks with a pin

  // Empties the index: Cached blocks become Free, Active ones will be when they are released.
  void forget_prefixes();

  // Throws Error(internal) with what is wrong: states, counts, lists, index and parents agree.
  // `expected_use`, when given, has the use count of every block.
  void check_integrity(std::span<const std::int32_t> expected_use = {}) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace charonia::cache
