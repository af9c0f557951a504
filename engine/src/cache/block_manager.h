// The pool of k/v blocks and the prefix index. Integers only: a block is a number, its contents are token ids.
//
// A block is in exactly one state:
//   Free    no sequence uses it, its contents mean nothing
//   Active  use_count >= 1 sequences use it
//   Cached  no sequence uses it; it is full, indexed, and may be used again or evicted (least recently used first)
#pragma once

#include <cstdint>
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
  std::vector<BlockId> blocks;  // now used by the caller (use counts raised)
  PrefixNode last;              // of the last matched block; the root when nothing matched
  std::int32_t num_tokens = 0;  // blocks.size() * block_len
};

class BlockManager {
 public:
  // num_blocks >= 1, block_len >= 1. enable_prefix_caching false: match finds nothing and blocks go straight to Free.
  BlockManager(int num_blocks, int block_len, bool enable_prefix_caching);
  ~BlockManager();

  int block_len() const;
  int num_blocks() const;
  int num_free() const;
  int num_active() const;
  int num_cached() const;
  int num_available() const;  // free + cached: what allocate() can give

  // The longest chain of indexed blocks whose tokens equal the beginning of `tokens`, at most max_tokens tokens.
  // Contents are compared, not hashes alone: nothing false can match. Mutates: raises use counts, Cached -> Active.
  // `salt` keeps apart what must not match though the tokens are equal (adapter, k/v type).
  PrefixMatch match(std::span<const TokenId> tokens, std::int32_t max_tokens, std::uint64_t salt = 0);

  // n blocks with use_count 1 (Free first, then the least recently used Cached ones, evicted leaf first), appended to
  // out; or false and nothing changed when there are fewer than n. A Cached block with an Active one behind it (its
  // user has a copy of the prefix) takes that one out of the index when it is evicted.
  bool allocate(int n, std::vector<BlockId>& out);

  // Indexes a full Active block of the caller's behind `parent`. `tokens` are the block's block_len tokens. Returns
  // the node to be the parent of the next one. If an equal node is already there, the caller keeps its own block (it
  // will be Free when released) and the existing node is returned; the caller may retain that node's block and release
  // its own. If the parent was evicted meanwhile (possible only when the caller does not use its block), nothing is
  // indexed and the parent is returned.
  PrefixNode publish(const PrefixNode& parent, BlockId block, std::span<const TokenId> tokens, std::uint64_t salt = 0);

  // Lowers use counts; at zero an indexed block becomes Cached, another Free. Works from the last to the first, so that
  // the end of a chain is evicted before its beginning.
  void release(std::span<const BlockId> blocks);

  // Shares blocks with another sequence (raises use counts).
  void retain(std::span<const BlockId> blocks);

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
