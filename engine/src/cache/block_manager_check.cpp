// Integrity checks of the cache, for tests. Each part checks the state that it owns.
#include <string>
#include <vector>

#include "cache/block_manager_impl.h"

namespace charonia::cache {
namespace {

template <class... What>
void require(bool holds, const What&... what) {
  if (!holds) broken(cat(what...));
}

}  // namespace

void BlockManager::check_integrity(std::span<const std::int32_t> expected_use,
                                   std::span<const std::vector<std::int32_t>> unit_use) const {
  const auto num = num_blocks();
  if (!expected_use.empty()) {
    require(std::ssize(expected_use) == num, "got use counts of ", expected_use.size(), " blocks, but there are ", num);
    for (BlockId id = 0; id < num; ++id) {
      const auto expected = expected_use[static_cast<std::size_t>(id)];
      require(impl_->blocks[id].use_count == expected, "block ", id, " has use count ", impl_->blocks[id].use_count,
              ", expected ", expected);
    }
  }
  impl_->check_states();
  std::vector<bool> is_free;
  for (BlockId id = 0; id < num; ++id) is_free.push_back(impl_->blocks[id].is_free());
  impl_->free.check(is_free);
  impl_->check_queue();
  impl_->index.check(num);
  impl_->pins.check(num);
  for (std::size_t k = 0; k < impl_->kinds.size(); ++k) {
    impl_->kinds[k].check(impl_->blocks, num, unit_use.empty() ? std::span<const std::int32_t>() : unit_use[k]);
  }
}

// Units and nodes agree, and every unit is in one state, in the list of that state.
void Units::check(const Blocks& blocks, int num_nodes, std::span<const std::int32_t> expected_use) const {
  require(expected_use.empty() || std::ssize(expected_use) == num_units(), "got use counts of ", expected_use.size(),
          " units, but there are ", num_units());
  int active = 0, cached = 0;
  std::vector<bool> is_free;
  for (BlockId id = 0; id < num_units(); ++id) {
    const auto& unit = at(id);
    require(expected_use.empty() || expected_use[static_cast<std::size_t>(id)] == unit.use_count, "unit ", id,
            " has use count ", unit.use_count, ", expected ",
            expected_use.empty() ? 0 : expected_use[static_cast<std::size_t>(id)]);
    const bool in_tree = unit.node != kNone, is_cached = unit.use_count == 0 && in_tree;
    active += unit.use_count > 0;
    cached += is_cached;
    is_free.push_back(unit.use_count == 0 && !in_tree);
    require(!in_tree || at_node(unit.node).unit == id, "unit ", id, " is not the unit of its node ", unit.node);
    require(cached_.contains(id) == is_cached, "unit ", id, " is ", is_cached ? "Cached and not" : "not Cached and",
            " in their queue");
    require(!is_cached || cached_.is_pinned(id) == (at_node(unit.node).pins > 0), "unit ", id,
            " is in the wrong part of the queue");
  }
  require(cached_.is_in_order() && cached_.size() == cached, "the queue of Cached units is out of order");
  require(active == num_active_, active, " units are Active, but the counter is ", num_active_);
  free_.check(is_free);
  require(active + cached + free_.num_ready() == num_committed(), num_committed(), " units have memory, but ", active,
          " are Active, ", cached, " Cached and ", free_.num_ready(), " in the free list");
  int pinned = 0;
  for (BlockId id = 0; id < num_nodes; ++id) {
    const auto& node = at_node(id);
    pinned += node.pins > 0;
    require(node.pins >= 0, "the unit of block ", id, " has ", node.pins, " pins");
    require(blocks[id].is_indexed() || (node.unit == kNone && node.pins == 0), "block ", id,
            " is not in the tree, but has a unit or pins");
    require(node.unit == kNone || at(node.unit).node == id, "unit ", node.unit, " is at block ", id,
            " and at another one");
  }
  require(pinned == num_pinned_, pinned, " nodes have pins, but the counter is ", num_pinned_);
}

// Every block is in one state, and is counted in that state.
void BlockManager::Impl::check_states() const {
  int active = 0, cached_blocks = 0, free_blocks = 0;
  for (BlockId id = 0; id < free.total(); ++id) {
    const auto& block = blocks[id];
    require(block.use_count >= 0, "block ", id, " has use count ", block.use_count);
    active += block.is_active();
    cached_blocks += block.is_cached();
    free_blocks += block.is_free();
  }
  require(active == num_active, active, " blocks are Active, but the counter is ", num_active);
  require(cached_blocks == cached.size(), cached_blocks, " blocks are Cached, but their queue has ", cached.size());
  require(free_blocks == free.size(), free_blocks, " blocks are Free, but the counter is ", free.size());
  require(active + cached_blocks + free.num_ready() == free.committed(), free.committed(), " blocks have memory, but ",
          active, " are Active, ", cached_blocks, " Cached and ", free.num_ready(), " in the free list");
}

// The queue holds the Cached blocks, children before their parents.
void BlockManager::Impl::check_queue() const {
  require(cached.is_in_order(), "the queue of Cached blocks is out of order");
  for (BlockId id = 0; id < free.total(); ++id) {
    const auto& block = blocks[id];
    require(cached.contains(id) == block.is_cached(), "block ", id, " is ",
            block.is_cached() ? "Cached and not" : "not Cached and", " in their queue");
    if (!block.is_cached()) continue;
    require(cached.is_pinned(id) == block.is_pinned(), "the queue has block ", id, " as ",
            block.is_pinned() ? "not " : "", "pinned, but it is", block.is_pinned() ? "" : " not");
    if (block.parent != kNone && blocks[block.parent].is_cached()) {
      require(cached.is_before(id, block.parent), "block ", id, " would be evicted after its parent");
    }
  }
}

// The list holds Free blocks with memory, each once.
void FreeBlocks::check(const std::vector<bool>& is_free) const {
  require(committed_ <= total_, committed_, " blocks have memory, but there are only ", total_);
  std::vector<bool> seen(static_cast<std::size_t>(total_), false);
  for (const auto id : list_) {
    require(id >= 0 && id < committed_, "block ", id, " is in the free list, but has no memory");
    require(is_free[static_cast<std::size_t>(id)], "block ", id, " is in the free list, but not Free");
    require(!seen[static_cast<std::size_t>(id)], "block ", id, " is in the free list twice");
    seen[static_cast<std::size_t>(id)] = true;
  }
}

void PrefixIndex::check(int num_blocks) const {
  int indexed = 0;
  for (BlockId id = 0; id < num_blocks; ++id) indexed += blocks_[id].is_indexed();
  check_buckets(indexed);
  check_tree(num_blocks, indexed);
}

// The hash table holds the indexed blocks, each once and in the bucket where find() looks for it.
void PrefixIndex::check_buckets(int indexed) const {
  int in_buckets = 0;
  for (std::size_t b = 0; b < buckets_.size(); ++b) {
    for (auto id = buckets_[b]; id != kNone; id = blocks_[id].next_in_bucket) {
      const auto& block = blocks_[id];
      require(block.is_indexed(), "block ", id, " is in the index without a unique id");
      require(block.hash == hash_(block.parent_id, block.salt, tokens_of(id)), "block ", id, " has a wrong hash");
      require((block.hash & (buckets_.size() - 1)) == b, "block ", id, " is in the wrong bucket");
      require(++in_buckets <= indexed, "the index has more than ", indexed, " entries");
    }
  }
  require(in_buckets == indexed, "the index has ", in_buckets, " blocks, expected ", indexed);
}

// Parents are indexed, and parent and child links agree.
void PrefixIndex::check_tree(int num_blocks, int indexed) const {
  int listed = 0, with_parent = 0;
  for (BlockId id = 0; id < num_blocks; ++id) {
    const auto& block = blocks_[id];
    if (!block.is_indexed()) continue;
    require(block.unique_id <= last_unique_id_, "block ", id, " has a unique id that was never assigned");
    require((block.parent == kNone) == (block.parent_id == 0), "block ", id,
            ": parent and parent_id contradict each other");
    if (block.parent != kNone) {
      ++with_parent;
      const auto& parent = blocks_[block.parent];
      require(parent.unique_id == block.parent_id, "block ", id, " is a child of block ", block.parent,
              ", which now has another unique id");
      require(parent.salt == block.salt, "block ", id, " and its parent have different salts");
      require(parent.unique_id < block.unique_id, "block ", id, " is older than its parent");
    }
    auto previous = kNone;
    for (auto child = block.first_child; child != kNone; previous = child, child = blocks_[child].next_sibling) {
      require(blocks_[child].is_indexed() && blocks_[child].parent == id, "block ", child,
              " is listed as a child of block ", id);
      require(blocks_[child].previous_sibling == previous, "the list of children of block ", id, " is broken at ",
              child);
      require(++listed <= indexed, "the list of children of block ", id, " does not end");
    }
  }
  require(listed == with_parent, listed, " children are in lists, but ", with_parent, " blocks have a parent");
}

// Counts of pins and of pinned children. The tree is already checked.
void Pins::check(int num_blocks) const {
  int pinned = 0;
  for (BlockId id = 0; id < num_blocks; ++id) {
    const auto& block = blocks_[id];
    require(block.pins >= 0, "block ", id, " has ", block.pins, " pins");
    if (!block.is_indexed()) {
      require(!block.is_pinned(), "block ", id, " is pinned, but not in the index");
      continue;
    }
    pinned += block.pins > 0;
    std::int32_t children = 0;
    for (auto child = block.first_child; child != kNone; child = blocks_[child].next_sibling) {
      children += blocks_[child].is_pinned();
    }
    require(children == block.pinned_children, "block ", id, " has ", children, " pinned children, but the counter is ",
            block.pinned_children);
  }
  require(pinned == count_, pinned, " blocks are pinned, but the counter is ", count_);
}

}  // namespace charonia::cache
