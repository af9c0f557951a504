// The pool of KV blocks and the prefix index. Integers only: a block is a number, its contents are token ids.
// docs/cache_and_scheduler.md introduces both, with the scheduler.
//
// A block is in exactly one state:
//   Free    no sequence uses it, and its contents mean nothing
//   Active  use_count >= 1 sequences use it
//   Cached  no sequence uses it, but it is full and indexed: it can be used again, or evicted (least recently used
//           first)
//
// What a pool is made of: block.h (one block), free_blocks.h (the Free blocks; policy: memory that grows),
// prefix_index.h (which block holds which tokens), eviction_queue.h (the Cached blocks), pins.h (policy: session pins).
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

// The last block of a prefix. unique_id is never given twice, so a block that was evicted and filled again is not
// mistaken for its former self.
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
  // The hash by which the index finds nodes. Contents are compared as well, so a bad hash costs time and nothing else.
  using Hash = std::uint64_t (*)(std::uint64_t parent_id, std::uint64_t salt, std::span<const TokenId> tokens);
  static std::uint64_t default_hash(std::uint64_t parent_id, std::uint64_t salt, std::span<const TokenId> tokens);

  // num_blocks >= 1, block_len >= 1. Without enable_prefix_caching match() finds nothing, and released blocks are Free.
  BlockManager(int num_blocks, int block_len, bool enable_prefix_caching, Hash hash = default_hash);

  // A pool whose memory grows (cache_chunk_size). The first `chunk` blocks have memory. When no block with memory is
  // Free, `commit(n)` provides memory for the first n blocks, `chunk` more than before. Cached blocks are evicted only
  // when all blocks have memory. When commit throws Error(resource_exhausted), the pool keeps its size for good, and
  // num_blocks() becomes num_committed(). Other errors leave allocate(), which then has changed nothing. chunk >= 1.
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
  // Raises their use counts: Cached -> Active. Contents are compared, not hashes alone, so nothing false can match.
  // `salt` separates prefixes that must not match although their tokens are equal (an adapter).
  PrefixMatch match(std::span<const TokenId> tokens, std::int32_t max_tokens, std::uint64_t salt = 0);

  // Appends n blocks with use_count 1 to out: Free ones first, then the least recently used Cached ones, which are
  // evicted, children before their parents. False, and out is unchanged, when fewer than n are available; that may be
  // found out just now, when memory did not suffice and num_blocks() became less. An evicted block takes its
  // descendants out of the index, even Active ones (their users have a copy of the prefix).
  bool allocate(int n, std::vector<BlockId>& out);

  // Indexes a full Active block of the caller as a child of `parent`. `tokens` are the block's block_len tokens.
  // Returns the node that is the parent of the caller's next block. If an equal node is there already, that one is
  // returned: the caller may retain that node's block and release the one it brought, which stays outside the index. If
  // the parent has left the index meanwhile (forgotten, or it or one before it was evicted), nothing is indexed and the
  // parent is returned.
  PrefixNode insert(const PrefixNode& parent, BlockId block, std::span<const TokenId> tokens, std::uint64_t salt = 0);

  // Lowers use counts. At zero an indexed block becomes Cached, any other Free. Goes from the last block to the first,
  // so the end of a chain is evicted before its beginning.
  void release(std::span<const BlockId> blocks);

  // Shares blocks with another sequence (raises use counts).
  void retain(std::span<const BlockId> blocks);

  // Keeps blocks for a session: a pinned block and its ancestors are evicted only when no other Cached block is left.
  // An evicted block loses its pins, and nodes that are no longer in the index are skipped. Pins are counted. unpin()
  // takes back one, and throws Error(internal) when there is none.
  void pin(std::span<const PrefixNode> nodes);
  void unpin(std::span<const PrefixNode> nodes);
  int num_pinned() const;  // blocks that have pins of their own

  // Takes a block and its descendants out of the index: what they hold is suspect. Cached ones become Free, and Active
  // ones when they are released. A node that is no longer in the index is skipped.
  void forget_prefix(const PrefixNode& node);

  // For tests. Throws Error(internal), naming the defect, unless states, counts, lists, index and pins agree.
  // `expected_use`, when given, is the use count of every block.
  void check_integrity(std::span<const std::int32_t> expected_use = {}) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace charonia::cache
