// The pools of KV blocks and the prefix index. It handles integers only: block ids and token ids.
// docs/cache_and_scheduler.md describes it together with the scheduler.
//
// A model has one or more kinds of cache (base/cache_kind.h). The layers of kind 0, *full*, read all earlier tokens, so
// a sequence needs a block for every block_len tokens. Each further kind has a pool of its own, whose blocks are called
// *units*. Layers of kind `window` read only a window of the last tokens: a sequence releases the units before its
// window (UnitRange). Recurrent layers (kind `state`) read only their state after the last token: a sequence has one
// unit for it. Its state at the end of a block can stay at this block's node as a *snapshot*.
//
// A block is in exactly one state:
//   Free    no sequence uses it, and its contents are undefined
//   Active  use_count >= 1 sequences use it
//   Cached  no sequence uses it, but it is full and indexed: it can be reused or evicted (least recently used first)
//
// A unit has the same states. The prefix index is a tree of blocks of kind 0. A node also has one unit of each further
// kind, or a tombstone if this unit was evicted or never computed. Most nodes have no snapshot.
//
// Parts of a pool: block.h (one block), free_blocks.h (the Free blocks; growing memory), prefix_index.h (which block
// holds which tokens), eviction_queue.h (the Cached blocks), pins.h (session pins), units.h (a kind after kind 0).
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "base/cache_kind.h"

namespace charonia::cache {

using BlockId = std::int32_t;
using TokenId = std::int32_t;

// The last block of a prefix. A unique_id is never reused, so a block that was evicted and filled again is not mistaken
// for its old contents.
struct PrefixNode {
  BlockId block = -1;           // -1: the empty prefix
  std::uint64_t unique_id = 0;  // 0: the root
};

// The units of one kind that a sequence uses: for the blocks first .. end() - 1 of its tokens. Of kind `state`: the
// unit with its state and, while it may not change this unit, the unit that its next step writes (schedule/states.cpp).
struct UnitRange {
  std::int32_t first = 0;
  std::vector<BlockId> units;
  std::int32_t end() const { return first + static_cast<std::int32_t>(units.size()); }
  BlockId& at(std::int32_t block) { return units[static_cast<std::size_t>(block - first)]; }
};

// Provides memory for the first n blocks of a pool. Throws Error(resource_exhausted) if there is not enough.
using Commit = std::function<void(int num_blocks)>;

// A kind of cache after kind 0. With a window, a query at position p reads the positions p - window + 1 to p.
struct UnitKind {
  std::int32_t window = 0;  // >= 1; 0 for kind `state`
  int num_units = 0;  // >= 1
  int chunk = 0;      // as in the constructor of BlockManager; 0: all units have memory
  Commit commit = nullptr;
  CacheKind kind = CacheKind::window;
};

class Units;

struct PrefixMatch {
  std::vector<BlockId> blocks;    // now used by the caller (use counts raised)
  std::vector<PrefixNode> nodes;  // the nodes of those blocks
  std::vector<UnitRange> units;   // by kind: the units for the window of the next token, now used by the caller too
  std::int32_t num_tokens = 0;    // blocks.size() * block_len
  std::int32_t num_indexed = 0;   // tokens whose blocks were found; more than num_tokens if units are missing
  PrefixNode last() const { return nodes.empty() ? PrefixNode{} : nodes.back(); }
};

class BlockManager {
 public:
  // The hash that the index uses to find nodes. The index also compares the contents, so a bad hash only costs time.
  using Hash = std::uint64_t (*)(std::uint64_t parent_id, std::uint64_t salt, std::span<const TokenId> tokens);
  static std::uint64_t default_hash(std::uint64_t parent_id, std::uint64_t salt, std::span<const TokenId> tokens);

  // num_blocks >= 1, block_len >= 1. Without enable_prefix_caching, match() finds nothing and released blocks become
  // Free.
  BlockManager(int num_blocks, int block_len, bool enable_prefix_caching, Hash hash = default_hash);

  // A pool whose memory grows (cache_chunk_size). The first `chunk` blocks have memory. When no block with memory is
  // Free, `commit(n)` provides memory for the first n blocks, `chunk` more than before. Cached blocks are evicted only
  // when all blocks have memory. If commit throws Error(resource_exhausted), the pool never grows again, and
  // num_blocks() becomes num_committed(). Other errors propagate out of allocate(), which has then changed nothing.
  // chunk >= 1.
  // kinds: the kinds after kind 0.
  BlockManager(int num_blocks, int block_len, bool enable_prefix_caching, int chunk, Commit commit,
               Hash hash = default_hash, std::span<const UnitKind> kinds = {});
  ~BlockManager();

  int block_len() const;
  bool has_prefix_index() const;  // enable_prefix_caching
  int num_blocks() const;
  int num_committed() const;  // blocks that have memory
  int num_free() const;       // with memory or without
  int num_active() const;
  int num_cached() const;
  int num_available() const;  // free + cached: the most that allocate() can return, if there is enough memory
  // The kinds after kind 0, in the order of the constructor. The functions above count blocks of kind 0.
  std::span<const Units> kinds() const;

  // Finds the longest chain of indexed blocks whose tokens equal the beginning of `tokens`, at most max_tokens tokens,
  // and whose last nodes have the units that the next token reads. Raises their use counts: Cached -> Active. The index
  // compares contents, not only hashes, so a match is always correct. `salt` separates prefixes that must not match
  // although their tokens are equal (an adapter).
  PrefixMatch match(std::span<const TokenId> tokens, std::int32_t max_tokens, std::uint64_t salt = 0);

  // Appends n blocks with use_count 1 to `out`. Takes Free blocks first, then evicts the least recently used Cached
  // blocks, children before their parents. Returns false and leaves `out` unchanged if fewer than n blocks are
  // available; this can happen during the call, if memory runs out and num_blocks() shrinks. Evicting a block removes
  // its descendants from the index, even Active ones (their users have another copy of the prefix).
  // Also appends num_units[k] units of each kind to units[k]: it succeeds in all kinds, or changes no output.
  bool allocate(int n, std::vector<BlockId>& out, std::span<const int> num_units = {},
                std::span<UnitRange> units = {});

  // Indexes a full Active block of the caller as a child of `parent`. `tokens` are the block's block_len tokens.
  // Returns the node that is the parent of the caller's next block. If an equal node exists, returns that node: the
  // caller may then retain the node's block and release its own block, which stays outside the index. If the parent has
  // left the index meanwhile (it was forgotten, or it or an ancestor was evicted), indexes nothing and returns the
  // parent.
  // units[k]: the caller's Active unit of each kind for the same tokens, or -1. The node takes it if it has a
  // tombstone. Otherwise the caller's unit is released and replaced by the node's unit, which is retained.
  PrefixNode insert(const PrefixNode& parent, BlockId block, std::span<const TokenId> tokens, std::uint64_t salt = 0,
                    std::span<BlockId> units = {});

  // Lowers use counts. At zero an indexed block becomes Cached, any other block Free. Goes from the last block to the
  // first, so the end of a chain is evicted before its beginning.
  void release(std::span<const BlockId> blocks);
  void release_units(std::size_t kind, std::span<const BlockId> units);
  // Removes an Active unit from its node, which then has a tombstone, so that its only user may change it. Returns
  // false if it has other users.
  bool withdraw_unit(std::size_t kind, BlockId unit);
  // The unit of a node; -1 if it has a tombstone or has left the index.
  BlockId unit_of(std::size_t kind, const PrefixNode& node) const;
  // Makes the unit of a node Free, if it is Cached and not pinned. Does nothing if the node has left the index.
  void drop_unit(std::size_t kind, const PrefixNode& node);

  // Shares blocks with another sequence: raises their use counts.
  void retain(std::span<const BlockId> blocks);
  void retain_units(std::size_t kind, std::span<const BlockId> units);

  // Pins blocks for a session: a pinned block and its ancestors are evicted only when no other Cached block is left. An
  // evicted block loses its pins, and nodes that have left the index are skipped. Pins are counted. pin() also
  // pins the units of the other kinds that the token after the last node reads. unpin() removes the pins of one pin(),
  // which had the same nodes. It throws Error(internal) if there are none.
  void pin(std::span<const PrefixNode> nodes);
  void unpin(std::span<const PrefixNode> nodes);
  int num_pinned() const;  // blocks that have pins of their own
  // How many more blocks, or units of a kind, are pinned than this share of them; 0 or less if there are no more.
  int excess_pins(double share) const;

  // Whether the node is still in the index. Then its block has not changed.
  bool is_indexed(const PrefixNode& node) const;

  // Removes the first block of `tokens` with a token after the first `known_good`, and its descendants, from the index,
  // because their contents may be wrong. Cached blocks become Free, Active blocks become Free when they are released.
  void forget_prefix(std::span<const TokenId> tokens, std::uint64_t salt = 0, std::size_t known_good = 0);

  // For tests. Throws Error(internal) with the fault unless states, counts, lists, index and pins agree.
  // `expected_use`, if not empty, is the use count of every block, and unit_use[k] of every unit.
  void check_integrity(std::span<const std::int32_t> expected_use = {},
                       std::span<const std::vector<std::int32_t>> unit_use = {}) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace charonia::cache
