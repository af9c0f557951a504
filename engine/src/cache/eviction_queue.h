// Cached blocks in the order in which they are evicted: a binary heap by key, the smallest first, that knows the place
// of each block in it. Allocates nothing after construction; every change takes O(log n).
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
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
  BlockId first() const { return heap_.front().block; }                             // not of an empty queue
  std::uint64_t key_of(BlockId block) const { return heap_[place_of(block)].key; }  // of one that is in it

  void push(BlockId block, std::uint64_t key) {
    heap_.push_back({key, block});
    rise(heap_.size() - 1);
  }

  void erase(BlockId block) {
    const auto place = place_of(block);
    const auto last = heap_.back();
    heap_.pop_back();
    places_[static_cast<std::size_t>(block)] = kNowhere;
    if (last.block != block) replace(place, last);
  }

  void update(BlockId block, std::uint64_t key) { replace(place_of(block), {key, block}); }

  void clear() {
    for (const auto& entry : heap_) places_[static_cast<std::size_t>(entry.block)] = kNowhere;
    heap_.clear();
  }

  bool is_in_order() const {
    for (std::size_t i = 0; i < heap_.size(); ++i) {
      if (place_of(heap_[i].block) != i || (i > 0 && heap_[i].key <= heap_[(i - 1) / 2].key)) return false;
    }
    return true;
  }

 private:
  struct Entry {
    std::uint64_t key;  // no two are equal
    BlockId block;
  };
  static constexpr std::size_t kNowhere = static_cast<std::size_t>(-1);

  std::size_t place_of(BlockId block) const { return places_[static_cast<std::size_t>(block)]; }

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
  std::vector<std::size_t> places_;  // in the heap, by block
};

}  // namespace charonia::cache
