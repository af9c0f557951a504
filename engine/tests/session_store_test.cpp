#include "runtime/session_store.h"

#include <gtest/gtest.h>

#include <array>
#include <numeric>
#include <vector>

#include "cache/units.h"

namespace charonia::runtime {
namespace {

constexpr int kBlocks = 16, kBlockLen = 2;

// Computes `count` blocks of tokens from `first` on, with their units, and returns their nodes.
std::vector<cache::PrefixNode> compute(cache::BlockManager& blocks, int count, TokenId first) {
  std::vector<cache::BlockId> ids;
  std::vector<cache::UnitRange> ranges(1);
  const std::array wanted = {count};
  EXPECT_TRUE(blocks.allocate(count, ids, wanted, ranges));
  std::vector<cache::PrefixNode> nodes;
  cache::PrefixNode parent;
  for (std::size_t i = 0; i < ids.size(); ++i) {
    std::array<TokenId, kBlockLen> tokens{};
    std::iota(tokens.begin(), tokens.end(), first + static_cast<TokenId>(i) * kBlockLen);
    parent = blocks.insert(parent, ids[i], tokens, 0, std::span(ranges[0].units).subspan(i, 1));
    nodes.push_back(parent);
  }
  blocks.release(ids);
  blocks.release_units(0, ranges[0].units);
  return nodes;
}

TEST(SessionStoreTest, sessions_that_are_forgotten_together_unpin_the_units_of_each) {
  const std::array kinds = {cache::UnitKind{.window = kBlockLen, .num_units = kBlocks}};
  cache::BlockManager blocks(kBlocks, kBlockLen, true, kBlocks, nullptr, cache::BlockManager::default_hash, kinds);
  SessionStore store({.ttl_s = 60, .pinned = 1, .max_sessions = 4}, blocks, nullptr);
  for (const auto* id : {"a", "b"}) {
    store.enter(id);
    store.keep(id, store.begin(id), {.tokens = {1}, .turns = {0}}, compute(blocks, 3, id[0]));
    store.leave(id);
  }
  const int both = blocks.kinds()[0].num_pinned();
  EXPECT_TRUE(store.forget("a"));
  EXPECT_TRUE(store.forget("b"));
  store.tidy();
  EXPECT_GE(both, 2);
  EXPECT_EQ(blocks.num_pinned(), 0);
  EXPECT_EQ(blocks.kinds()[0].num_pinned(), 0);
  blocks.check_integrity();
}

}  // namespace
}  // namespace charonia::runtime
