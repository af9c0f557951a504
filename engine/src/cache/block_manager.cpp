#include "cache/block_manager.h"

#include <algorithm>

#include "cache/block_manager_impl.h"

namespace charonia::cache {
namespace {

// Mixes one value into a running hash (the finaliser of splitmix64).
std::uint64_t mix(std::uint64_t hash, std::uint64_t value) {
  hash ^= value + 0x9e3779b97f4a7c15ULL;
  hash = (hash ^ (hash >> 30)) * 0xbf58476d1ce4e5b9ULL;
  hash = (hash ^ (hash >> 27)) * 0x94d049bb133111ebULL;
  return hash ^ (hash >> 31);
}

}  // namespace

void BlockManager::Impl::use(BlockId id) {
  auto& block = blocks[id];
  if (block.use_count++ > 0) return;
  cached.erase(id);
  ++num_active;
}

void BlockManager::Impl::unuse(BlockId id) {
  auto& block = blocks[id];
  if (--block.use_count > 0) return;
  --num_active;
  if (!block.is_indexed()) {
    free.put(id);
    return;
  }
  cached.push(id, block.is_pinned());
  // A parent must be evicted after its child, so a Cached ancestor also counts as used now. This happens only if the
  // caller did not take the block that insert() returned, and so used another copy of the prefix.
  for (auto above = block.parent; above != kNone && blocks[above].is_cached(); above = blocks[above].parent) {
    cached.touch(above, blocks[above].is_pinned());
  }
}

void BlockManager::Impl::evict_first() { unindex(cached.first()); }

// Also removes the descendants from the index, because a lookup could no longer reach them. An Active descendant
// becomes Free when it is released.
void BlockManager::Impl::unindex(BlockId root) {
  subtree.assign(1, root);
  while (!subtree.empty()) {
    const auto id = subtree.back();
    if (const auto child = blocks[id].first_child; child != kNone) {
      subtree.push_back(child);
      continue;
    }
    subtree.pop_back();
    const bool was_cached = blocks[id].is_cached();
    for (auto& kind : kinds) kind.leave(id);
    pins.remove_all(id);
    index.erase(id);
    if (was_cached) {
      cached.erase(id);
      free.put(id);
    }
  }
}

BlockId BlockManager::Impl::take_free() {
  const auto id = free.take();
  blocks[id].use_count = 1;
  ++num_active;
  return id;
}

std::uint64_t BlockManager::default_hash(std::uint64_t parent_id, std::uint64_t salt, std::span<const TokenId> tokens) {
  // Prompts are long, so the hash takes two tokens per multiplication and mixes only at the end.
  std::uint64_t hash = mix(parent_id, salt);
  for (std::size_t i = 0; i < tokens.size(); i += 2) {
    const std::uint64_t second = i + 1 < tokens.size() ? static_cast<std::uint32_t>(tokens[i + 1]) : 0;
    hash = (hash ^ (static_cast<std::uint32_t>(tokens[i]) | second << 32)) * 0x9fb21c651e98df25ULL;
    hash ^= hash >> 32;
  }
  return mix(hash, tokens.size());
}

BlockManager::BlockManager(int num_blocks, int block_len, bool enable_prefix_caching, Hash hash)
    : BlockManager(num_blocks, block_len, enable_prefix_caching, std::max(num_blocks, 1), nullptr, hash) {}

BlockManager::BlockManager(int num_blocks, int block_len, bool enable_prefix_caching, int chunk, Commit commit,
                           Hash hash, std::span<const UnitKind> kinds) {
  if (num_blocks < 1 || block_len < 1) {
    broken(cat("a pool of ", num_blocks, " blocks of ", block_len, " tokens: both must be at least 1"));
  }
  if (chunk < 1) broken(cat("a pool that grows by ", chunk, " blocks: it must be at least 1"));
  if (chunk < num_blocks && !commit) broken("a pool that grows needs a commit function");
  for (const auto& kind : kinds) {
    const bool has_window = kind.kind == CacheKind::window;
    if ((has_window ? kind.window < 1 : kind.window != 0) || kind.num_units < 1 || kind.chunk < 0) {
      broken(cat("a kind with window ", kind.window, ", ", kind.num_units, " units and chunk ", kind.chunk));
    }
    if (kind.chunk > 0 && kind.chunk < kind.num_units && !kind.commit) {
      broken("a kind that grows needs a commit function");
    }
  }
  impl_ = std::make_unique<Impl>(num_blocks, block_len, enable_prefix_caching, chunk, std::move(commit), hash, kinds);
}

BlockManager::~BlockManager() = default;

int BlockManager::block_len() const { return impl_->block_len; }
bool BlockManager::has_prefix_index() const { return impl_->index.enabled(); }
int BlockManager::num_blocks() const { return impl_->free.total(); }
int BlockManager::num_committed() const { return impl_->free.committed(); }
int BlockManager::num_free() const { return impl_->free.size(); }
int BlockManager::num_active() const { return impl_->num_active; }
int BlockManager::num_cached() const { return impl_->cached.size(); }
int BlockManager::num_available() const { return num_free() + num_cached(); }
int BlockManager::num_pinned() const { return impl_->pins.count(); }

std::span<const Units> BlockManager::kinds() const { return impl_->kinds; }

PrefixMatch BlockManager::match(std::span<const TokenId> tokens, std::int32_t max_tokens, std::uint64_t salt) {
  PrefixMatch result;
  auto& kinds = impl_->kinds;
  result.units.resize(kinds.size());
  if (!impl_->index.enabled() || max_tokens < impl_->block_len) return result;
  const auto length = static_cast<std::size_t>(impl_->block_len);
  tokens = tokens.first(std::min(tokens.size(), static_cast<std::size_t>(max_tokens)));
  auto& nodes = result.nodes;
  std::int32_t depth = 0, valid_depth = 0;       // of the path, and of the longest path that has all its units
  std::vector<std::int32_t> missing(kinds.size());  // by kind: the depth below the last tombstone
  for (; tokens.size() >= length; tokens = tokens.subspan(length)) {
    const auto id = impl_->index.find(impl_->index.key(result.last().unique_id, salt, tokens.first(length)));
    if (id == kNone) break;
    nodes.push_back(impl_->index.node(id));
    ++depth;
    bool valid = true;
    for (std::size_t k = 0; k < kinds.size(); ++k) {
      if (!kinds[k].has_unit(id)) missing[k] = depth;
      valid = valid && missing[k] <= kinds[k].first_needed(depth * impl_->block_len);
    }
    if (valid) valid_depth = depth;
  }
  result.num_indexed = depth * impl_->block_len;
  nodes.resize(static_cast<std::size_t>(valid_depth));
  for (const auto& node : nodes) {
    impl_->use(node.block);
    result.blocks.push_back(node.block);
  }
  result.num_tokens = valid_depth * impl_->block_len;
  for (std::size_t k = 0; k < kinds.size(); ++k) {
    auto& range = result.units[k];
    range.first = kinds[k].first_needed(result.num_tokens);
    for (auto i = range.first; i < valid_depth; ++i) {
      range.units.push_back(kinds[k].at_node(nodes[static_cast<std::size_t>(i)].block).unit);
      kinds[k].use(range.units.back());
    }
  }
  return result;
}

bool BlockManager::allocate(int n, std::vector<BlockId>& out, std::span<const int> num_units,
                            std::span<UnitRange> units) {
  auto& kinds = impl_->kinds;
  if (n < 0 || std::ranges::any_of(num_units, [](int count) { return count < 0; })) {
    broken(cat("allocate(): n = ", n, ", or the number of units of a kind, is negative"));
  }
  bool fits = n <= num_available();
  for (std::size_t k = 0; k < num_units.size(); ++k) fits = fits && num_units[k] <= kinds[k].num_available();
  fits = fits && impl_->free.provide(n, num_cached());
  for (std::size_t k = 0; k < num_units.size(); ++k) fits = fits && kinds[k].provide(num_units[k]);
  if (!fits) return false;
  for (int i = 0; i < n; ++i) {
    if (impl_->free.num_ready() == 0) impl_->evict_first();
    out.push_back(impl_->take_free());
  }
  for (std::size_t k = 0; k < num_units.size(); ++k) {
    for (int i = 0; i < num_units[k]; ++i) units[k].units.push_back(kinds[k].take());
  }
  return true;
}

PrefixNode BlockManager::insert(const PrefixNode& parent, BlockId block, std::span<const TokenId> tokens,
                                std::uint64_t salt, std::span<BlockId> units) {
  const auto& own = impl_->checked(block, "insert");
  if (!own.is_active()) broken(cat("insert(): block ", block, " is not Active"));
  if (tokens.size() != static_cast<std::size_t>(impl_->block_len)) {
    broken(cat("insert(): ", tokens.size(), " tokens for block ", block, ", expected ", impl_->block_len));
  }
  if (!impl_->index.enabled()) return parent;
  if (parent.block != kNone) {
    const auto& above = impl_->checked(parent.block, "insert");
    // If the parent was evicted meanwhile, its children could not be found.
    if (above.unique_id != parent.unique_id) return parent;
    if (above.salt != salt) broken(cat("insert(): block ", block, " and its parent have different salts"));
  }
  const auto key = impl_->index.key(parent.unique_id, salt, tokens);
  auto id = impl_->index.find(key);
  if (id == kNone) {
    if (own.is_indexed()) broken(cat("insert(): block ", block, " was already inserted with different contents"));
    impl_->index.insert(block, parent.block, key);
    id = block;
  }
  for (std::size_t k = 0; k < units.size(); ++k) {
    if (units[k] != kNone) units[k] = impl_->kinds[k].join(id, units[k]);
  }
  return impl_->index.node(id);
}

void BlockManager::release(std::span<const BlockId> blocks) {
  for (auto id = blocks.rbegin(); id != blocks.rend(); ++id) {
    if (!impl_->checked(*id, "release").is_active()) broken(cat("release(): block ", *id, " is not Active"));
    impl_->unuse(*id);
  }
}

void BlockManager::release_units(std::size_t kind, std::span<const BlockId> units) {
  auto& pool = impl_->kinds[kind];
  for (auto id = units.rbegin(); id != units.rend(); ++id) {
    if (pool.checked(*id, "release_units").use_count == 0) broken(cat("release_units(): unit ", *id, " is not Active"));
    pool.unuse(*id);
  }
}

bool BlockManager::withdraw_unit(std::size_t kind, BlockId unit) { return impl_->kinds[kind].withdraw(unit); }

BlockId BlockManager::unit_of(std::size_t kind, const PrefixNode& node) const {
  const auto id = impl_->indexed(node, "unit_of");
  return id == kNone ? kNone : impl_->kinds[kind].at_node(id).unit;
}

void BlockManager::drop_unit(std::size_t kind, const PrefixNode& node) {
  if (const auto id = impl_->indexed(node, "drop_unit"); id != kNone) impl_->kinds[kind].drop(id);
}

void BlockManager::retain(std::span<const BlockId> blocks) {
  for (const auto id : blocks) {
    if (impl_->checked(id, "retain").is_free()) broken(cat("retain(): block ", id, " is Free"));
    impl_->use(id);
  }
}

void BlockManager::retain_units(std::size_t kind, std::span<const BlockId> units) {
  auto& pool = impl_->kinds[kind];
  for (const auto id : units) {
    const auto& unit = pool.checked(id, "retain_units");
    if (unit.use_count == 0 && unit.node == kNone) broken(cat("retain_units(): unit ", id, " is Free"));
    pool.use(id);
  }
}

// The nodes of `nodes` whose units the next token reads.
std::span<const PrefixNode> BlockManager::Impl::window_of(std::span<const PrefixNode> nodes, const Units& kind) const {
  const auto first = kind.first_needed(static_cast<std::int32_t>(nodes.size()) * block_len);
  return nodes.subspan(std::min(nodes.size(), static_cast<std::size_t>(first)));
}

void BlockManager::pin(std::span<const PrefixNode> nodes) {
  for (const auto& node : nodes) {
    if (const auto id = impl_->indexed(node, "pin"); id != kNone) impl_->pins.add(id);
  }
  for (auto& kind : impl_->kinds) {
    for (const auto& node : impl_->window_of(nodes, kind)) {
      if (const auto id = impl_->indexed(node, "pin"); id != kNone) kind.pin(id);
    }
  }
}

void BlockManager::unpin(std::span<const PrefixNode> nodes) {
  for (const auto& node : nodes) {
    const auto id = impl_->indexed(node, "unpin");
    if (id == kNone) continue;
    if (impl_->blocks[id].pins == 0) broken(cat("unpin(): block ", id, " is not pinned"));
    impl_->pins.remove(id, 1);
  }
  for (auto& kind : impl_->kinds) {
    for (const auto& node : impl_->window_of(nodes, kind)) {
      if (const auto id = impl_->indexed(node, "unpin"); id != kNone) kind.unpin(id);
    }
  }
}

int BlockManager::excess_pins(double share) const {
  auto excess = num_pinned() - static_cast<int>(share * num_blocks());
  for (const auto& kind : kinds()) {
    excess = std::max(excess, kind.num_pinned() - static_cast<int>(share * kind.num_units()));
  }
  return excess;
}

bool BlockManager::is_indexed(const PrefixNode& node) const { return impl_->indexed(node, "is_indexed") != kNone; }

void BlockManager::forget_prefix(std::span<const TokenId> tokens, std::uint64_t salt, std::size_t known_good) {
  const auto& index = impl_->index;
  const auto length = static_cast<std::size_t>(impl_->block_len);
  std::uint64_t parent = 0;
  for (std::size_t end = length; index.enabled() && end <= tokens.size(); end += length) {
    const auto block = index.find(index.key(parent, salt, tokens.subspan(end - length, length)));
    if (block == kNone) return;
    if (end > known_good) return impl_->unindex(block);
    parent = index.node(block).unique_id;
  }
}

}  // namespace charonia::cache
