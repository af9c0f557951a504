// The state of one KV block. The comment above each group of fields names the file that owns them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/text.h"
#include "cache/block_manager.h"
#include "charonia/error.h"

namespace charonia::cache {

inline constexpr BlockId kNone = -1;

[[noreturn]] inline void broken(const std::string& what) { throw Error(ErrorCode::internal, cat("KV blocks: ", what)); }

struct Block {
  std::int32_t use_count = 0;  // number of sequences that use it (block_manager.cpp)

  // prefix_index.h. A block is indexed if it has a unique id; the other fields are valid only then.
  std::uint64_t unique_id = 0;
  BlockId parent = kNone;  // kNone: the root
  std::uint64_t parent_id = 0;
  std::uint64_t salt = 0;
  std::uint64_t hash = 0;
  BlockId next_in_bucket = kNone;
  BlockId first_child = kNone, next_sibling = kNone, previous_sibling = kNone;

  // pins.h. Zero unless the block is indexed.
  std::int32_t pins = 0;
  std::int32_t pinned_children = 0;

  bool is_indexed() const { return unique_id != 0; }
  bool is_active() const { return use_count > 0; }
  bool is_cached() const { return !is_active() && is_indexed(); }
  bool is_free() const { return !is_active() && !is_indexed(); }
  bool is_pinned() const { return pins > 0 || pinned_children > 0; }
};

// All blocks of a pool, by block id.
class Blocks {
 public:
  explicit Blocks(int num_blocks) : blocks_(static_cast<std::size_t>(num_blocks)) {}
  Block& operator[](BlockId id) { return blocks_[static_cast<std::size_t>(id)]; }
  const Block& operator[](BlockId id) const { return blocks_[static_cast<std::size_t>(id)]; }

 private:
  std::vector<Block> blocks_;
};

}  // namespace charonia::cache
