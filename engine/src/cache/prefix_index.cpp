#include "cache/prefix_index.h"

#include <algorithm>
#include <bit>
#include <utility>

namespace charonia::cache {

PrefixIndex::PrefixIndex(int num_blocks, int block_len, bool enabled, BlockManager::Hash hash, Blocks& blocks)
    : enabled_(enabled), block_len_(static_cast<std::size_t>(block_len)), hash_(hash), blocks_(blocks) {
  if (!enabled) return;
  const auto num = static_cast<std::size_t>(num_blocks);
  contents_.resize(num * block_len_);
  buckets_.resize(std::bit_ceil(num), kNone);
}

std::span<const TokenId> PrefixIndex::tokens_of(BlockId id) const {
  return std::span(contents_).subspan(static_cast<std::size_t>(id) * block_len_, block_len_);
}

// Also compares the contents: two different keys with equal hashes never match.
BlockId PrefixIndex::find(const Key& key) const {
  for (auto id = bucket(key.hash); id != kNone; id = blocks_[id].next_in_bucket) {
    const auto& block = blocks_[id];
    if (block.hash == key.hash && block.parent_id == key.parent_id && block.salt == key.salt &&
        std::ranges::equal(tokens_of(id), key.tokens)) {
      return id;
    }
  }
  return kNone;
}

void PrefixIndex::insert(BlockId id, BlockId parent, const Key& key) {
  auto& block = blocks_[id];
  block.unique_id = ++last_unique_id_;
  block.parent = parent;
  block.parent_id = key.parent_id;
  block.salt = key.salt;
  block.hash = key.hash;
  std::ranges::copy(key.tokens, contents_.begin() + static_cast<std::ptrdiff_t>(id) * std::ssize(key.tokens));
  block.next_in_bucket = std::exchange(bucket(key.hash), id);
  block.first_child = block.previous_sibling = block.next_sibling = kNone;
  if (parent == kNone) return;
  block.next_sibling = std::exchange(blocks_[parent].first_child, id);
  if (block.next_sibling != kNone) blocks_[block.next_sibling].previous_sibling = id;
}

void PrefixIndex::erase(BlockId id) {
  auto& block = blocks_[id];
  auto* link = &bucket(block.hash);
  while (*link != id) link = &blocks_[*link].next_in_bucket;
  *link = block.next_in_bucket;
  if (block.next_sibling != kNone) blocks_[block.next_sibling].previous_sibling = block.previous_sibling;
  if (block.previous_sibling != kNone) {
    blocks_[block.previous_sibling].next_sibling = block.next_sibling;
  } else if (block.parent != kNone) {
    blocks_[block.parent].first_child = block.next_sibling;
  }
  block.unique_id = 0;
}

}  // namespace charonia::cache
