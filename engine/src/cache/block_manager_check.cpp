#include "cache/block_manager_impl.h"

namespace charonia::cache {

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
    states[i] = block.use_count > 0 ? State::active : block.is_indexed() ? State::cached : State::free;
    active += states[i] == State::active;
    cached += states[i] == State::cached;
    free += states[i] == State::free;
    indexed += block.is_indexed();
  }
  require(active == impl.num_active, active, " Active blocks, counted as ", impl.num_active);
  require(cached == num_cached(), cached, " Cached blocks, ", num_cached(), " in their queue");
  require(free == num_free(), free, " Free blocks, counted as ", num_free());
  require(impl.committed <= impl.total, impl.committed, " blocks have memory, and there are ", impl.total);
  require(active + cached + static_cast<int>(impl.free.size()) == impl.committed, impl.committed,
          " blocks have memory, of which ", active, " are Active, ", cached, " Cached and ", impl.free.size(),
          " in the free list");

  std::vector<bool> seen(num, false);
  for (const auto id : impl.free) {
    require(states.at(static_cast<std::size_t>(id)) == State::free, "block ", id, " is in the free list, but not Free");
    require(!seen[static_cast<std::size_t>(id)], "block ", id, " is in the free list twice");
    require(id < impl.committed, "block ", id, " is in the free list and has no memory");
    seen[static_cast<std::size_t>(id)] = true;
  }

  require(impl.cached.is_in_order(), "the queue of Cached blocks is out of order");
  for (std::size_t i = 0; i < num; ++i) {
    require(impl.cached.contains(static_cast<BlockId>(i)) == (states[i] == State::cached), "block ", i, " is ",
            states[i] == State::cached ? "Cached and not" : "not Cached and", " in their queue");
  }

  int in_buckets = 0;
  for (std::size_t b = 0; b < impl.buckets.size(); ++b) {
    for (auto id = impl.buckets[b]; id != kNone; id = impl.at(id).next_in_bucket) {
      const auto& block = impl.at(id);
      require(block.is_indexed(), "block ", id, " is in the index without a unique id");
      require(block.hash == impl.hash_of(block.parent_id, block.salt, impl.tokens_of(id)), "block ", id,
              ": wrong hash");
      require((block.hash & (impl.buckets.size() - 1)) == b, "block ", id, " is in the wrong bucket");
      require(++in_buckets <= indexed, "the index has more than ", indexed, " entries");
    }
  }
  require(in_buckets == indexed, "the index has ", in_buckets, " of ", indexed, " blocks");

  int children = 0, behind_blocks = 0, pinned = 0;
  for (std::size_t i = 0; i < num; ++i) {
    const auto& block = impl.blocks[i];
    if (!block.is_indexed()) continue;
    pinned += block.pins > 0;
    require(block.pins >= 0, "block ", i, " has ", block.pins, " pins");
    require(block.unique_id <= impl.last_unique_id, "block ", i, " has a unique id that was never given");
    require((block.parent == kNone) == (block.parent_id == 0), "block ", i, ": parent and parent's id disagree");
    if (block.parent != kNone) {
      ++behind_blocks;
      const auto& parent = impl.at(block.parent);
      require(parent.unique_id == block.parent_id, "block ", i, " is a child of block ", block.parent,
              ", which is not its parent any more");
      require(parent.salt == block.salt, "block ", i, " has another salt than its parent");
      require(parent.unique_id < block.unique_id, "block ", i, " is older than its parent");
      if (states[i] == State::cached && parent.is_cached()) {
        require(impl.cached.key_of(static_cast<BlockId>(i)) < impl.cached.key_of(block.parent), "block ", i,
                " would outlive its parent");
      }
    }
    if (states[i] == State::cached) {
      require(((impl.cached.key_of(static_cast<BlockId>(i)) & Impl::kPinned) != 0) == block.is_pinned(), "block ", i,
              " is queued as if it were ", block.is_pinned() ? "not " : "", "pinned");
    }
    std::int32_t pinned_children = 0;
    auto previous = kNone;
    for (auto child = block.first_child; child != kNone; previous = child, child = impl.at(child).next_sibling) {
      pinned_children += impl.at(child).is_pinned();
      require(impl.at(child).is_indexed() && impl.at(child).parent == static_cast<BlockId>(i), "block ", child,
              " is listed as a child of block ", i);
      require(impl.at(child).previous_sibling == previous, "the children of block ", i, " are broken at ", child);
      require(++children <= indexed, "the children of block ", i, " never end");
    }
    require(pinned_children == block.pinned_children, "block ", i, " has ", pinned_children,
            " pinned children, counted as ", block.pinned_children);
  }
  require(children == behind_blocks, children, " children are listed, there are ", behind_blocks);
  require(pinned == impl.num_pinned, pinned, " blocks are pinned, counted as ", impl.num_pinned);
}

}  // namespace charonia::cache
