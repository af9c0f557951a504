// Policy: growing memory. The Free blocks of a pool; some of them may not have memory yet.
//
// Blocks get memory in the order of their ids, `chunk` at a time. take() returns the block that was put last, so low
// ids are reused often and high ids get memory only when they are needed. When memory runs out, the pool keeps its
// current size.
#pragma once

#include <algorithm>
#include <utility>
#include <vector>

#include "cache/block.h"

namespace charonia::cache {

class FreeBlocks {
 public:
  FreeBlocks(int num_blocks, int chunk, Commit commit)
      : total_(num_blocks), chunk_(chunk), commit_(std::move(commit)) {
    list_.reserve(static_cast<std::size_t>(num_blocks));
    add_up_to(std::min(chunk, num_blocks));
  }

  int total() const { return total_; }          // blocks of the pool; shrinks when memory runs out
  int committed() const { return committed_; }  // blocks of the pool that have memory
  int num_ready() const { return static_cast<int>(list_.size()); }  // Free blocks that have memory
  int size() const { return num_ready() + total_ - committed_; }    // all Free blocks

  void put(BlockId id) { list_.push_back(id); }

  // num_ready() >= 1.
  BlockId take() {
    const auto id = list_.back();
    list_.pop_back();
    return id;
  }

  // Provides memory for the next chunk. Returns false if all blocks have memory, or if memory ran out: then the blocks
  // without memory leave the pool for good. If the commit function throws another error, nothing changes.
  bool grow() {
    if (committed_ == total_) return false;
    const int next = committed_ + std::min(chunk_, total_ - committed_);
    try {
      commit_(next);
    } catch (const Error& error) {
      if (error.code() != ErrorCode::resource_exhausted) throw;
      total_ = committed_;
      return false;
    }
    add_up_to(next);
    return true;
  }

  // Provides memory until n blocks are Free with memory, or until memory runs out. Returns whether n blocks can be
  // taken, if num_cached blocks can be evicted.
  bool provide(int n, int num_cached) {
    if (n > size() + num_cached) return false;
    while (n > num_ready() && grow()) {
    }
    return n <= size() + num_cached;  // without enough memory, the pool has fewer blocks now
  }

  // block_manager_check.cpp. is_free: by block.
  void check(const std::vector<bool>& is_free) const;

 private:
  void add_up_to(int num_blocks) {
    for (auto id = num_blocks; id-- > committed_;) list_.push_back(id);
    committed_ = num_blocks;
  }

  int total_;
  int committed_ = 0;
  int chunk_;
  Commit commit_;
  std::vector<BlockId> list_;  // with memory; the last one is taken next
};

}  // namespace charonia::cache
