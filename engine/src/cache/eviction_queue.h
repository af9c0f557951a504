// The Cached blocks in eviction order: unpinned blocks first, then pinned blocks; within each group the least recently
// used first.
//
// A binary heap that knows the position of each block. It allocates nothing after construction, and every change takes
// O(log n). A block's key is the time of its last use, from a counter of this queue, with the highest bit set if the
// block is pinned.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "cache/block_manager.h"

namespace charonia::cache {

class EvictionQueue {
 public:
  explicit EvictionQueue(int num_blocks) : places_(static_cast<std::size_t>(num_blocks), kNowhere) {
    heap_.reserve(static_cast<std::size_t>(num_blocks));
  }

  int size() const { return static_cast<int>(heap_.size()); }
  bool contains(BlockId block) const { return place_of(block) != kNowhere; }

  // first() requires a queue that is not empty. The other functions, except push(), require a block that is in the
  // queue.
  BlockId first() const { return heap_.front().block; }
  bool is_pinned(BlockId block) const { return (key_of(block) & kPinned) != 0; }
  bool is_before(BlockId a, BlockId b) const { return key_of(a) < key_of(b); }

  // Marks the block as used now.
  void push(BlockId block, bool pinned) {
    heap_.push_back({newest_key(pinned), block});
    rise(heap_.size() - 1);
  }
  void touch(BlockId block, bool pinned) { replace(place_of(block), {newest_key(pinned), block}); }

  // Keeps the time of the last use.
  void set_pinned(BlockId block, bool pinned) {
    const auto time = key_of(block) & ~kPinned;
    replace(place_of(block), {pinned ? time | kPinned : time, block});
  }

  void erase(BlockId block) {
    const auto place = place_of(block);
    const auto last = heap_.back();
    heap_.pop_back();
    places_[static_cast<std::size_t>(block)] = kNowhere;
    if (last.block != block) replace(place, last);
  }

  bool is_in_order() const {
    for (std::size_t i = 0; i < heap_.size(); ++i) {
      if (place_of(heap_[i].block) != i || (i > 0 && heap_[i].key <= heap_[(i - 1) / 2].key)) return false;
    }
    return true;
  }

 private:
  struct Entry {
    std::uint64_t key;  // keys are unique
    BlockId block;
  };
  static constexpr std::size_t kNowhere = static_cast<std::size_t>(-1);
  static constexpr std::uint64_t kPinned = std::uint64_t{1} << 63;

  std::size_t place_of(BlockId block) const { return places_[static_cast<std::size_t>(block)]; }
  std::uint64_t key_of(BlockId block) const { return heap_[place_of(block)].key; }
  std::uint64_t newest_key(bool pinned) { return ++last_time_ | (pinned ? kPinned : 0); }

  void put(std::size_t place, Entry entry) {
    heap_[place] = entry;
    places_[static_cast<std::size_t>(entry.block)] = place;
  }

  void replace(std::size_t place, Entry entry) {
    heap_[place] = entry;
    if (rise(place) == place) sink(place);
  }

  std::size_t rise(std::size_t place) {
    const auto entry = heap_[place];
    for (; place > 0 && entry.key < heap_[(place - 1) / 2].key; place = (place - 1) / 2) {
      put(place, heap_[(place - 1) / 2]);
    }
    put(place, entry);
    return place;
  }

  void sink(std::size_t place) {
    const auto entry = heap_[place];
    while (true) {
      auto below = 2 * place + 1;
      if (below + 1 < heap_.size() && heap_[below + 1].key < heap_[below].key) ++below;
      if (below >= heap_.size() || entry.key < heap_[below].key) break;
      put(place, heap_[below]);
      place = below;
    }
    put(place, entry);
  }

  std::vector<Entry> heap_;
  std::vector<std::size_t> places_;  // position in the heap, by block
  std::uint64_t last_time_ = 0;
};

}  // namespace charonia::cache
