#include "cache/block_manager.h"

#include <algorithm>
#include <bit>
#include <utility>

#include "base/text.h"
#include "charonia/error.h"

namespace charonia::cache {
namespace {

constexpr BlockId kNone = -1;

// Mixes one value into a running hash (the finaliser of splitmix64). Equality of contents is always checked as well.
std::uint64_t mix(std::uint64_t hash, std::uint64_t value) {
  hash ^= value + 0x9e3779b97f4a7c15ULL;
  hash = (hash ^ (hash >> 30)) * 0xbf58476d1ce4e5b9ULL;
  hash = (hash ^ (hash >> 27)) * 0x94d049bb133111ebULL;
  return hash ^ (hash >> 31);
}

std::uint64_t hash_of(std::uint64_t parent_id, std::uint64_t salt, std::span<const TokenId> tokens) {
  std::uint64_t hash = mix(parent_id, salt);
  for (const auto token : tokens) hash = mix(hash, static_cast<std::uint32_t>(token));
  return hash;
}

[[noreturn]] void broken(const std::string& what) { throw Error(ErrorCode::internal, cat("k/v blocks: ", what)); }

}  // namespace

// The index is a tree: an indexed block hangs behind its parent (or the root), and a node's parent is always indexed
// itself, so that every indexed block can be found by match(). Nodes are found through a hash table whose chains run
// through the blocks; nothing here allocates memory after construction.
struct BlockManager::Impl {
  struct Block {
    std::int32_t use_count = 0;
    BlockId parent = kNone;       // kNone: the root
    std::uint64_t unique_id = 0;  // 0: not indexed, and then the fields from `parent` to `next_in_bucket` mean nothing
    std::uint64_t parent_id = 0;
    std::uint64_t salt = 0;
    std::uint64_t hash = 0;
    BlockId first_child = kNone, next_sibling = kNone, previous_sibling = kNone;
    BlockId next_in_bucket = kNone;
    BlockId older = kNone, newer = kNone;  // neighbours in the list of Cached blocks
  };

  Impl(int num_blocks, int block_len_in, bool enabled_in)
      : block_len(block_len_in),
        enabled(enabled_in),
        blocks(static_cast<std::size_t>(num_blocks)),
        free(static_cast<std::size_t>(num_blocks)),
        buckets(std::bit_ceil(static_cast<std::size_t>(num_blocks)), kNone) {
    if (enabled) contents.resize(static_cast<std::size_t>(num_blocks) * static_cast<std::size_t>(block_len));
    subtree.reserve(static_cast<std::size_t>(num_blocks));
    // The last one is given first: low numbers are used again and again, high ones only when there is need.
    for (int i = 0; i < num_blocks; ++i) free[static_cast<std::size_t>(i)] = num_blocks - 1 - i;
  }

  Block& at(BlockId id) { return blocks[static_cast<std::size_t>(id)]; }
  const Block& at(BlockId id) const { return blocks[static_cast<std::size_t>(id)]; }
  bool is_cached(const Block& block) const { return block.use_count == 0 && block.unique_id != 0; }
  BlockId& bucket(std::uint64_t hash) { return buckets[hash & (buckets.size() - 1)]; }
  int num_blocks() const { return static_cast<int>(blocks.size()); }

  std::span<const TokenId> tokens_of(BlockId id) const {
    const auto length = static_cast<std::size_t>(block_len);
    return std::span(contents).subspan(static_cast<std::size_t>(id) * length, length);
  }

  Block& checked(BlockId id, std::string_view call) {
    if (id < 0 || id >= num_blocks()) broken(cat(call, " of block ", id, ", and there are ", num_blocks()));
    return at(id);
  }

  // ---- the list of Cached blocks: a Cached child is always older than its Cached parent ----

  void append_newest(BlockId id) {
    auto& block = at(id);
    block.older = newest;
    block.newer = kNone;
    (newest == kNone ? oldest : at(newest).newer) = id;
    newest = id;
    ++num_cached;
  }

  void unlink(BlockId id) {
    auto& block = at(id);
    (block.older == kNone ? oldest : at(block.older).newer) = block.newer;
    (block.newer == kNone ? newest : at(block.newer).older) = block.older;
    block.older = block.newer = kNone;
    --num_cached;
  }

  void raise(BlockId id) {
    auto& block = at(id);
    if (block.use_count++ == 0) {
      unlink(id);
      ++num_active;
    }
  }

  void lower(BlockId id) {
    auto& block = at(id);
    if (--block.use_count > 0) return;
    --num_active;
    if (block.unique_id == 0) {
      free.push_back(id);
      return;
    }
    append_newest(id);
    // A user of this block that has its own copy of the prefix does not keep the prefix's blocks Active. They were of
    // use nevertheless, and must outlive this one.
    for (auto above = block.parent; above != kNone && is_cached(at(above)); above = at(above).parent) {
      unlink(above);
      append_newest(above);
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
    std::ranges::copy(tokens, contents.begin() + static_cast<std::ptrdiff_t>(id) * block_len);
    block.next_in_bucket = std::exchange(bucket(hash), id);
    block.first_child = block.previous_sibling = block.next_sibling = kNone;
    if (parent.block == kNone) return;
    block.next_sibling = std::exchange(at(parent.block).first_child, id);
    if (block.next_sibling != kNone) at(block.next_sibling).previous_sibling = id;
  }

  void erase(BlockId id) {
    auto& block = at(id);
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

  // Takes the least recently used Cached block out of the index, and with it what hangs behind it: those blocks could
  // not be found any more. Cached ones among them become Free, Active ones will be when they are released.
  void evict_oldest() {
    subtree.assign(1, oldest);
    while (!subtree.empty()) {
      const auto id = subtree.back();
      if (const auto child = at(id).first_child; child != kNone) {
        subtree.push_back(child);
        continue;
      }
      subtree.pop_back();
      const bool was_cached = is_cached(at(id));
      erase(id);
      if (was_cached) {
        unlink(id);
        free.push_back(id);
      }
    }
  }

  int block_len;
  bool enabled;
  std::vector<Block> blocks;
  std::vector<TokenId> contents;  // [num_blocks, block_len], of indexed blocks
  std::vector<BlockId> free;      // the last one is given next
  std::vector<BlockId> buckets;   // a power of two of them
  std::vector<BlockId> subtree;   // working memory of evict_oldest
  BlockId oldest = kNone, newest = kNone;
  int num_active = 0, num_cached = 0;
  std::uint64_t last_unique_id = 0;
};

BlockManager::BlockManager(int num_blocks, int block_len, bool enable_prefix_caching) {
  if (num_blocks < 1 || block_len < 1) {
    broken(cat("a pool of ", num_blocks, " blocks of ", block_len, " tokens: both must be at least 1"));
  }
  impl_ = std::make_unique<Impl>(num_blocks, block_len, enable_prefix_caching);
}

BlockManager::~BlockManager() = default;

int BlockManager::block_len() const { return impl_->block_len; }
int BlockManager::num_blocks() const { return impl_->num_blocks(); }
int BlockManager::num_free() const { return static_cast<int>(impl_->free.size()); }
int BlockManager::num_active() const { return impl_->num_active; }
int BlockManager::num_cached() const { return impl_->num_cached; }
int BlockManager::num_available() const { return num_free() + num_cached(); }

PrefixMatch BlockManager::match(std::span<const TokenId> tokens, std::int32_t max_tokens, std::uint64_t salt) {
  PrefixMatch result;
  if (!impl_->enabled || max_tokens < impl_->block_len) return result;
  const auto length = static_cast<std::size_t>(impl_->block_len);
  tokens = tokens.first(std::min(tokens.size(), static_cast<std::size_t>(max_tokens)));
  for (; tokens.size() >= length; tokens = tokens.subspan(length)) {
    const auto chunk = tokens.first(length);
    const auto parent_id = result.last.unique_id;
    const auto id = impl_->find(parent_id, salt, chunk, hash_of(parent_id, salt, chunk));
    if (id == kNone) break;
    impl_->raise(id);
    result.blocks.push_back(id);
    result.last = {id, impl_->at(id).unique_id};
  }
  result.num_tokens = static_cast<std::int32_t>(result.blocks.size() * length);
  return result;
}

bool BlockManager::allocate(int n, std::vector<BlockId>& out) {
  if (n < 0) broken(cat("allocate of ", n, " blocks"));
  if (n > num_available()) return false;
  for (int i = 0; i < n; ++i) {
    if (impl_->free.empty()) impl_->evict_oldest();
    const auto id = impl_->free.back();
    impl_->free.pop_back();
    impl_->at(id).use_count = 1;
    ++impl_->num_active;
    out.push_back(id);
  }
  return true;
}

PrefixNode BlockManager::publish(const PrefixNode& parent, BlockId block, std::span<const TokenId> tokens,
                                 std::uint64_t salt) {
  const auto& own = impl_->checked(block, "publish");
  if (own.use_count < 1) broken(cat("publish of block ", block, ", which is not Active"));
  if (tokens.size() != static_cast<std::size_t>(impl_->block_len)) {
    broken(cat("publish of block ", block, " with ", tokens.size(), " tokens, a block has ", impl_->block_len));
  }
  if (!impl_->enabled) return parent;
  if (parent.block != kNone) {
    const auto& behind = impl_->checked(parent.block, "publish behind");
    if (behind.unique_id != parent.unique_id) return parent;  // evicted meanwhile: nothing behind it could be found
    if (behind.salt != salt) broken(cat("block ", block, " is published with another salt than its parent's"));
  }
  const auto hash = hash_of(parent.unique_id, salt, tokens);
  if (const auto id = impl_->find(parent.unique_id, salt, tokens, hash); id != kNone) {
    return {id, impl_->at(id).unique_id};
  }
  if (own.unique_id != 0) broken(cat("block ", block, " is published a second time, with other contents"));
  impl_->insert(block, parent, salt, tokens, hash);
  return {block, own.unique_id};
}

void BlockManager::release(std::span<const BlockId> blocks) {
  for (auto id = blocks.rbegin(); id != blocks.rend(); ++id) {
    if (impl_->checked(*id, "release").use_count < 1) broken(cat("block ", *id, " is released and nobody uses it"));
    impl_->lower(*id);
  }
}

void BlockManager::retain(std::span<const BlockId> blocks) {
  for (const auto id : blocks) {
    const auto& block = impl_->checked(id, "retain");
    if (block.use_count == 0 && block.unique_id == 0) broken(cat("retain of block ", id, ", which is Free"));
    impl_->raise(id);
  }
}

void BlockManager::forget_prefixes() {
  for (BlockId id = num_blocks() - 1; id >= 0; --id) {
    auto& block = impl_->at(id);
    if (impl_->is_cached(block)) impl_->free.push_back(id);
    block.unique_id = 0;
    block.older = block.newer = kNone;
  }
  std::ranges::fill(impl_->buckets, kNone);
  impl_->oldest = impl_->newest = kNone;
  impl_->num_cached = 0;
}

void BlockManager::check_integrity(std::span<const std::int32_t> expected_use) const {
  const auto& impl = *impl_;
  const auto num = static_cast<std::size_t>(num_blocks());
  const auto require = [](bool holds, const auto&... what) {
    if (!holds) broken(cat(what...));
  };
  if (!expected_use.empty()) {
    require(expected_use.size() == num, "use counts of ", expected_use.size(), " blocks, there are ", num);
    for (std::size_t i = 0; i < num; ++i) {
      require(impl.blocks[i].use_count == expected_use[i], "block ", i, " has use count ", impl.blocks[i].use_count,
              ", expected ", expected_use[i]);
    }
  }

  enum class State { active, cached, free };
  std::vector<State> states(num);
  int active = 0, cached = 0, free = 0, indexed = 0;
  for (std::size_t i = 0; i < num; ++i) {
    const auto& block = impl.blocks[i];
    require(block.use_count >= 0, "block ", i, " has use count ", block.use_count);
    states[i] = block.use_count > 0 ? State::active : block.unique_id != 0 ? State::cached : State::free;
    active += states[i] == State::active;
    cached += states[i] == State::cached;
    free += states[i] == State::free;
    indexed += block.unique_id != 0;
  }
  require(active == impl.num_active, active, " Active blocks, counted as ", impl.num_active);
  require(cached == impl.num_cached, cached, " Cached blocks, counted as ", impl.num_cached);
  require(free == num_free(), free, " Free blocks, ", num_free(), " in the list");

  std::vector<bool> seen(num, false);
  for (const auto id : impl.free) {
    require(states.at(static_cast<std::size_t>(id)) == State::free, "block ", id, " is in the free list, but not Free");
    require(!seen[static_cast<std::size_t>(id)], "block ", id, " is in the free list twice");
    seen[static_cast<std::size_t>(id)] = true;
  }

  std::vector<std::int32_t> age(num, -1);  // place in the list of Cached blocks
  std::int32_t listed = 0;
  auto before = kNone;
  for (auto id = impl.oldest; id != kNone; before = id, id = impl.at(id).newer) {
    require(states[static_cast<std::size_t>(id)] == State::cached, "block ", id,
            " is in the Cached list, but not Cached");
    require(impl.at(id).older == before, "the Cached list is broken at block ", id);
    require(listed < cached, "the Cached list has more than ", cached, " entries");
    age[static_cast<std::size_t>(id)] = listed++;
  }
  require(listed == cached && impl.newest == before, "the Cached list has ", listed, " of ", cached, " blocks");

  int in_buckets = 0;
  for (std::size_t b = 0; b < impl.buckets.size(); ++b) {
    for (auto id = impl.buckets[b]; id != kNone; id = impl.at(id).next_in_bucket) {
      const auto& block = impl.at(id);
      require(block.unique_id != 0, "block ", id, " is in the index without a unique id");
      require(block.hash == hash_of(block.parent_id, block.salt, impl.tokens_of(id)), "block ", id, ": wrong hash");
      require((block.hash & (impl.buckets.size() - 1)) == b, "block ", id, " is in the wrong bucket");
      require(++in_buckets <= indexed, "the index has more than ", indexed, " entries");
    }
  }
  require(in_buckets == indexed, "the index has ", in_buckets, " of ", indexed, " blocks");

  int children = 0, behind_blocks = 0;
  for (std::size_t i = 0; i < num; ++i) {
    const auto& block = impl.blocks[i];
    if (block.unique_id == 0) continue;
    require(block.unique_id <= impl.last_unique_id, "block ", i, " has a unique id that was never given");
    require((block.parent == kNone) == (block.parent_id == 0), "block ", i, ": parent and parent's id disagree");
    if (block.parent != kNone) {
      ++behind_blocks;
      const auto& parent = impl.at(block.parent);
      require(parent.unique_id == block.parent_id, "block ", i, " hangs behind block ", block.parent,
              ", which is not its parent any more");
      require(parent.salt == block.salt, "block ", i, " has another salt than its parent");
      require(parent.unique_id < block.unique_id, "block ", i, " is older than its parent");
      if (states[i] == State::cached && age[static_cast<std::size_t>(block.parent)] >= 0) {
        require(age[i] < age[static_cast<std::size_t>(block.parent)], "block ", i, " would outlive its parent");
      }
    }
    auto previous = kNone;
    for (auto child = block.first_child; child != kNone; previous = child, child = impl.at(child).next_sibling) {
      require(impl.at(child).unique_id != 0 && impl.at(child).parent == static_cast<BlockId>(i), "block ", child,
              " is listed as a child of block ", i);
      require(impl.at(child).previous_sibling == previous, "the children of block ", i, " are broken at ", child);
      require(++children <= indexed, "the children of block ", i, " never end");
    }
  }
  require(children == behind_blocks, children, " children are listed, there are ", behind_blocks);
}

}  // namespace charonia::cache
