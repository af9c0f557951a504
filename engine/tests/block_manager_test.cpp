#include "cache/block_manager.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <memory>
#include <numeric>
#include <random>

#include "charonia/error.h"

namespace charonia::cache {
namespace {

std::vector<TokenId> numbers(int n, int first = 0) {
  std::vector<TokenId> tokens(static_cast<std::size_t>(n));
  std::iota(tokens.begin(), tokens.end(), first);
  return tokens;
}

// Allocates blocks for all full blocks of tokens and inserts them.
std::vector<BlockId> insert_all(BlockManager& pool, std::span<const TokenId> tokens, std::uint64_t salt = 0) {
  const auto length = static_cast<std::size_t>(pool.block_len());
  std::vector<BlockId> blocks;
  EXPECT_TRUE(pool.allocate(static_cast<int>(tokens.size() / length), blocks));
  PrefixNode node;
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    node = pool.insert(node, blocks[i], tokens.subspan(i * length, length), salt);
  }
  pool.check_integrity();
  return blocks;
}

int matched_tokens(BlockManager& pool, std::span<const TokenId> tokens, std::uint64_t salt = 0) {
  const auto match = pool.match(tokens, static_cast<std::int32_t>(tokens.size()), salt);
  pool.release(match.blocks);
  pool.check_integrity();
  return match.num_tokens;
}

TEST(BlockManager, BlocksGoFromFreeToActiveToCachedAndBack) {
  BlockManager pool(4, 2, true);
  EXPECT_EQ(pool.num_free(), 4);
  const auto tokens = numbers(4);
  auto blocks = insert_all(pool, tokens);
  EXPECT_TRUE(pool.allocate(1, blocks));
  EXPECT_EQ(pool.num_active(), 3);
  pool.release(blocks);
  EXPECT_EQ(pool.num_active(), 0);
  EXPECT_EQ(pool.num_cached(), 2);
  EXPECT_EQ(pool.num_free(), 2);
  EXPECT_EQ(pool.num_available(), 4);
  std::vector<BlockId> all;
  EXPECT_TRUE(pool.allocate(4, all));
  pool.check_integrity();
  EXPECT_EQ(matched_tokens(pool, tokens), 0);
}

TEST(BlockManager, AFailedAllocateChangesNothing) {
  BlockManager pool(3, 2, true);
  std::vector<BlockId> out = {7};
  EXPECT_FALSE(pool.allocate(4, out));
  EXPECT_EQ(out, std::vector<BlockId>{7});
  EXPECT_EQ(pool.num_free(), 3);
}

TEST(BlockManager, MatchFindsTheLongestChainOfFullBlocksWithinMaxTokens) {
  BlockManager pool(8, 4, true);
  const auto tokens = numbers(12);
  const auto blocks = insert_all(pool, tokens);
  const auto match = pool.match(tokens, 11);
  EXPECT_EQ(match.num_tokens, 8);
  EXPECT_EQ(match.blocks, std::vector<BlockId>(blocks.begin(), blocks.begin() + 2));
  EXPECT_EQ(match.last().block, blocks[1]);
  std::vector<std::int32_t> use(8, 0);
  for (const auto id : blocks) ++use[static_cast<std::size_t>(id)];
  for (const auto id : match.blocks) ++use[static_cast<std::size_t>(id)];
  pool.check_integrity(use);
  auto other = tokens;
  other[5] = 99;
  EXPECT_EQ(matched_tokens(pool, other), 4);
  EXPECT_EQ(matched_tokens(pool, numbers(12, 1)), 0);
  EXPECT_EQ(pool.match(tokens, 3).num_tokens, 0);
}

TEST(BlockManager, EqualTokensAfterDifferentPrefixesAreDifferentNodes) {
  BlockManager pool(8, 2, true);
  insert_all(pool, std::vector<TokenId>{1, 1, 5, 5});
  EXPECT_EQ(matched_tokens(pool, std::vector<TokenId>{5, 5}), 0);
  EXPECT_EQ(matched_tokens(pool, std::vector<TokenId>{2, 2, 5, 5}), 0);
}

TEST(BlockManager, EqualTokensWithDifferentSaltsDoNotMatch) {
  BlockManager pool(8, 2, true);
  const auto tokens = numbers(4);
  insert_all(pool, tokens, 1);
  EXPECT_EQ(matched_tokens(pool, tokens, 0), 0);
  EXPECT_EQ(matched_tokens(pool, tokens, 1), 4);
}

TEST(BlockManager, WithoutPrefixCachingNothingMatchesAndBlocksBecomeFree) {
  BlockManager pool(4, 2, false);
  const auto tokens = numbers(4);
  const auto blocks = insert_all(pool, tokens);
  EXPECT_EQ(matched_tokens(pool, tokens), 0);
  pool.release(blocks);
  EXPECT_EQ(pool.num_free(), 4);
}

TEST(BlockManager, AnEqualNodeIsReturnedAndTheCopyBecomesFree) {
  BlockManager pool(4, 2, true);
  const auto tokens = numbers(2);
  const auto first = insert_all(pool, tokens);
  std::vector<BlockId> copy;
  pool.allocate(1, copy);
  EXPECT_EQ(pool.insert({}, copy[0], tokens).block, first[0]);
  pool.release(copy);
  EXPECT_EQ(pool.num_free(), 3);
  pool.release(first);
  EXPECT_EQ(pool.num_cached(), 1);
  pool.retain(first);
  EXPECT_EQ(pool.num_active(), 1);
  pool.check_integrity();
}

TEST(BlockManager, TheLeastRecentlyUsedChainIsEvictedFromItsEnd) {
  BlockManager pool(6, 1, true);
  const auto old_tokens = numbers(3, 10), new_tokens = numbers(3, 20);
  const auto old_blocks = insert_all(pool, old_tokens), new_blocks = insert_all(pool, new_tokens);
  pool.release(old_blocks);
  pool.release(new_blocks);
  std::vector<BlockId> taken;
  pool.allocate(2, taken);
  EXPECT_EQ(taken, (std::vector<BlockId>{old_blocks[2], old_blocks[1]}));
  EXPECT_EQ(matched_tokens(pool, new_tokens), 3);
  EXPECT_EQ(matched_tokens(pool, old_tokens), 1);  // it is now the most recently used
  pool.allocate(3, taken);
  EXPECT_EQ(matched_tokens(pool, old_tokens), 1);
  EXPECT_EQ(matched_tokens(pool, new_tokens), 0);
}

TEST(BlockManager, APrefixIsEvictedAfterBlocksThatWereReleasedLater) {
  BlockManager pool(4, 1, true);
  const auto tokens = numbers(2);
  std::vector<BlockId> a, b;
  pool.allocate(1, a);
  pool.allocate(2, b);
  const auto root = pool.insert({}, a[0], std::span(tokens).first(1));
  EXPECT_EQ(pool.insert({}, b[0], std::span(tokens).first(1)).block, a[0]);
  pool.insert(root, b[1], std::span(tokens).last(1));
  pool.release(a);
  pool.release(b);  // its child is used later than the prefix itself
  pool.check_integrity();
  std::vector<BlockId> taken;
  pool.allocate(3, taken);
  EXPECT_EQ(taken.back(), b[1]);
  EXPECT_EQ(matched_tokens(pool, tokens), 1);
}

TEST(BlockManager, EvictingAPrefixTakesItsDescendantsOutOfTheIndex) {
  BlockManager pool(4, 1, true);
  const auto tokens = numbers(3);
  std::vector<BlockId> a, b;
  pool.allocate(1, a);
  pool.allocate(3, b);
  const auto first = pool.insert({}, a[0], std::span(tokens).first(1));
  pool.insert({}, b[0], std::span(tokens).first(1));
  const auto second = pool.insert(first, b[1], std::span(tokens).subspan(1, 1));
  pool.insert(second, b[2], std::span(tokens).last(1));
  pool.release(a);
  pool.release(std::span(b).last(1));  // Cached, with an Active parent and a Cached grandparent
  EXPECT_EQ(pool.num_cached(), 2);
  // Makes the prefix the oldest: its grandchild is used again.
  pool.retain(std::span(b).last(1));
  pool.release(std::span(b).last(1));
  std::vector<BlockId> taken;
  pool.allocate(1, taken);
  pool.check_integrity();
  EXPECT_EQ(taken.front(), a[0]);
  EXPECT_EQ(pool.num_free(), 1);
  EXPECT_EQ(matched_tokens(pool, tokens), 0);
  EXPECT_EQ(pool.insert(second, taken[0], std::span(tokens).last(1)).unique_id, second.unique_id)
      << "the parent is stale";
  pool.release(std::span(b).first(2));
  pool.release(taken);
  EXPECT_EQ(pool.num_free(), 4);
  pool.check_integrity();
}

std::uint64_t one_bucket(std::uint64_t, std::uint64_t, std::span<const TokenId>) { return 7; }

TEST(BlockManager, EqualHashesDoNotMeanEqualContents) {
  BlockManager pool(16, 2, true, one_bucket);
  insert_all(pool, std::vector<TokenId>{1, 2, 3, 4});
  insert_all(pool, std::vector<TokenId>{5, 6, 3, 4});
  insert_all(pool, std::vector<TokenId>{1, 2, 7, 7}, 1);
  EXPECT_EQ(matched_tokens(pool, std::vector<TokenId>{1, 2, 3, 4}), 4);
  EXPECT_EQ(matched_tokens(pool, std::vector<TokenId>{1, 2, 4, 3}), 2) << "the tokens differ";
  EXPECT_EQ(matched_tokens(pool, std::vector<TokenId>{3, 4}), 0) << "the parent differs";
  EXPECT_EQ(matched_tokens(pool, std::vector<TokenId>{1, 2, 7, 7}), 2) << "the salt differs";
  const auto first = pool.match(std::vector<TokenId>{1, 2, 3, 4}, 4),
             second = pool.match(std::vector<TokenId>{5, 6, 3, 4}, 4);
  EXPECT_NE(first.last().block, second.last().block);
}

TEST(BlockManager, PinnedBlocksAreEvictedLast) {
  BlockManager pool(6, 1, true);
  const auto kept = numbers(3, 10), other = numbers(3, 20);
  const auto kept_blocks = insert_all(pool, kept), other_blocks = insert_all(pool, other);
  const auto nodes = pool.match(kept, 3).nodes;
  pool.release(kept_blocks);
  pool.pin(nodes);
  EXPECT_EQ(pool.num_pinned(), 3);
  pool.release(kept_blocks);  // used longer ago than the others
  pool.release(other_blocks);
  std::vector<BlockId> taken;
  pool.allocate(3, taken);
  EXPECT_EQ(matched_tokens(pool, kept), 3);
  EXPECT_EQ(matched_tokens(pool, other), 0);
  pool.allocate(1, taken);
  EXPECT_EQ(taken.back(), kept_blocks[2]) << "the last block of a prefix is evicted first";
  EXPECT_EQ(pool.num_pinned(), 2) << "an evicted block loses its pins";
  EXPECT_EQ(matched_tokens(pool, kept), 2);
  pool.unpin(nodes);
  EXPECT_EQ(pool.num_pinned(), 0);
  pool.check_integrity();
}

TEST(BlockManager, PinsAreCountedAndBelongToTheNodeNotTheBlock) {
  BlockManager pool(2, 1, true);
  const auto first = numbers(1, 10), second = numbers(1, 20);
  auto blocks = insert_all(pool, first);
  const auto old = pool.match(first, 1).nodes;
  pool.pin(old);
  pool.pin(old);
  pool.unpin(old);
  EXPECT_EQ(pool.num_pinned(), 1);
  pool.release(blocks);
  pool.release(blocks);
  std::vector<BlockId> taken;
  pool.allocate(2, taken);
  pool.insert({}, blocks[0], second);
  const auto node = pool.match(second, 1).nodes;
  EXPECT_EQ(node[0].block, old[0].block);
  pool.pin(old);
  pool.unpin(old);
  EXPECT_EQ(pool.num_pinned(), 0) << "the block has other contents now";
  pool.pin(node);
  pool.unpin(old);
  EXPECT_EQ(pool.num_pinned(), 1);
  pool.unpin(node);
  EXPECT_EQ(pool.num_pinned(), 0);
  pool.check_integrity();
}

TEST(BlockManager, APinKeepsTheAncestorsOfABlock) {
  BlockManager pool(4, 1, true);
  const auto chain = numbers(2, 10), other = numbers(2, 20);
  const auto chain_blocks = insert_all(pool, chain), other_blocks = insert_all(pool, other);
  const auto nodes = pool.match(chain, 2).nodes;
  pool.release(chain_blocks);
  pool.release(chain_blocks);
  pool.release(other_blocks);
  pool.pin(std::span(nodes).last(1));
  EXPECT_EQ(pool.num_pinned(), 1);
  std::vector<BlockId> taken;
  pool.allocate(2, taken);
  EXPECT_EQ(matched_tokens(pool, chain), 2);
  EXPECT_EQ(matched_tokens(pool, other), 0);
}

TEST(BlockManager, MemoryGrowsByChunksBeforeAnyEviction) {
  std::vector<int> commits;
  BlockManager pool(7, 1, true, 2, [&](int n) { commits.push_back(n); });
  EXPECT_EQ(pool.num_committed(), 2);
  EXPECT_EQ(pool.num_blocks(), 7);
  EXPECT_EQ(pool.num_free(), 7);
  const auto tokens = numbers(2, 10);
  pool.release(insert_all(pool, tokens));
  EXPECT_TRUE(commits.empty());
  std::vector<BlockId> taken;
  EXPECT_TRUE(pool.allocate(3, taken));
  EXPECT_EQ(commits, (std::vector<int>{4, 6}));
  EXPECT_EQ(matched_tokens(pool, tokens), 2);
  EXPECT_TRUE(pool.allocate(2, taken));
  EXPECT_EQ(commits, (std::vector<int>{4, 6, 7}));
  EXPECT_EQ(matched_tokens(pool, tokens), 2);
  EXPECT_TRUE(pool.allocate(1, taken));
  EXPECT_EQ(matched_tokens(pool, tokens), 1) << "the pool is full, so a Cached block is evicted";
  EXPECT_FALSE(pool.allocate(2, taken));
  EXPECT_TRUE(pool.allocate(1, taken));
  EXPECT_EQ(pool.num_committed(), 7);
  pool.check_integrity();
}

TEST(BlockManager, WithoutMoreMemoryThePoolKeepsItsSize) {
  int asked = 0;
  BlockManager pool(100, 1, true, 2, [&](int n) {
    ++asked;
    if (n == 4 && asked == 1) throw Error(ErrorCode::internal, "the driver is away");
    if (n > 4) throw Error(ErrorCode::resource_exhausted, "no memory is left");
  });
  std::vector<BlockId> taken;
  EXPECT_THROW(pool.allocate(3, taken), Error);
  EXPECT_TRUE(taken.empty());
  EXPECT_EQ(pool.num_blocks(), 100) << "the error was not a lack of memory";
  pool.check_integrity();
  const auto tokens = numbers(3);
  pool.release(insert_all(pool, tokens));
  EXPECT_FALSE(pool.allocate(5, taken));
  EXPECT_EQ(pool.num_blocks(), 4);
  EXPECT_EQ(pool.num_available(), 4);
  EXPECT_EQ(matched_tokens(pool, tokens), 3) << "a failed allocation evicts nothing";
  EXPECT_TRUE(pool.allocate(4, taken));
  EXPECT_EQ(asked, 3) << "the pool does not ask for memory again";
  pool.check_integrity();
}

TEST(BlockManager, MisuseIsAnError) {
  EXPECT_THROW(BlockManager(0, 1, true), Error);
  EXPECT_THROW(BlockManager(1, 0, true), Error);
  BlockManager pool(3, 2, true);
  const auto tokens = numbers(2);
  std::vector<BlockId> blocks;
  EXPECT_THROW(pool.release(std::vector<BlockId>{0}), Error);
  EXPECT_THROW(pool.release(std::vector<BlockId>{3}), Error);
  EXPECT_THROW(pool.retain(std::vector<BlockId>{-1}), Error);
  EXPECT_THROW(pool.retain(std::vector<BlockId>{0}), Error);
  EXPECT_THROW(pool.insert({}, 0, tokens), Error);
  EXPECT_THROW(pool.allocate(-1, blocks), Error);
  pool.allocate(1, blocks);
  EXPECT_THROW(pool.insert({}, blocks[0], std::span(tokens).first(1)), Error);
  const auto node = pool.insert({}, blocks[0], tokens);
  EXPECT_THROW(pool.insert({}, blocks[0], numbers(2, 5)), Error);
  pool.allocate(1, blocks);
  EXPECT_THROW(pool.insert(node, blocks[1], tokens, 1), Error);
  EXPECT_THROW(pool.unpin({&node, 1}), Error) << "it is not pinned";
  EXPECT_THROW(BlockManager(4, 1, true, 0, [](int) {}), Error);
  EXPECT_THROW(BlockManager(4, 1, true, 2, nullptr), Error);
  EXPECT_THROW(pool.check_integrity(std::vector<std::int32_t>{0, 0, 0}), Error);
  pool.check_integrity();
}

// Property test.

// The blocks of a user: a chain of tokens, divided into blocks, some of them inserted.
struct User {
  std::uint64_t salt = 0;
  std::vector<TokenId> tokens;
  std::vector<BlockId> blocks;
  std::vector<PrefixNode> nodes;  // of the inserted blocks
};

// Keeps a model of the index: all inserted blocks by their complete key. Any allocation may evict an entry, so the
// model is a bound: each match must be in it, with the same block and unique id. While a node's whole chain is in use
// it cannot be evicted, and must match.
class RandomUse : public testing::TestWithParam<std::uint64_t> {
 protected:
  using Key = std::pair<std::uint64_t, std::vector<TokenId>>;  // salt, all tokens of the chain

  int below(int n) { return std::uniform_int_distribution<int>(0, n - 1)(random_); }
  User& any_user() { return users_[static_cast<std::size_t>(below(static_cast<int>(users_.size())))]; }

  // The key of the user's first `blocks` blocks.
  Key key_of(const User& user, std::size_t blocks) const {
    const auto end = static_cast<std::ptrdiff_t>(blocks * static_cast<std::size_t>(length_));
    return {user.salt, {user.tokens.begin(), user.tokens.begin() + end}};
  }

  void start(int length, int num_blocks) {
    length_ = length;
    pool_ = std::make_unique<BlockManager>(num_blocks, length, true);
    inserted_.clear();
    users_.clear();
  }

  void check_match(const User& user, const PrefixMatch& match) {
    ASSERT_EQ(match.num_tokens, static_cast<std::int32_t>(match.blocks.size()) * length_);
    for (std::size_t i = 0; i < match.blocks.size(); ++i) {
      const auto known = inserted_.find(key_of(user, i + 1));
      ASSERT_TRUE(known != inserted_.end()) << "matched a block that was never inserted";
      ASSERT_EQ(known->second.block, match.blocks[i]);
      const bool is_last = i + 1 == match.blocks.size();
      ASSERT_TRUE(!is_last || known->second.unique_id == match.last().unique_id);
    }
  }

  // Adds a user with a random text over few tokens, so that many have common prefixes.
  void add_user() {
    User user;
    user.salt = static_cast<std::uint64_t>(below(2));
    const int full = below(6);
    for (int i = 0; i < full * length_; ++i) user.tokens.push_back(below(2));
    // Often looks up only a part, and computes copies of existing blocks.
    const int looked_up = below(2) == 0 ? full * length_ : below(full * length_ + 1);
    auto match = pool_->match(user.tokens, looked_up, user.salt);
    ASSERT_NO_FATAL_FAILURE(check_match(user, match));
    ASSERT_LE(match.num_tokens, looked_up);
    user.blocks = match.blocks;
    for (std::size_t i = 0; i < match.blocks.size(); ++i) user.nodes.push_back(inserted_.at(key_of(user, i + 1)));
    const int missing = full - static_cast<int>(user.blocks.size()) + below(2);
    const int available = pool_->num_available();
    const bool given = pool_->allocate(missing, user.blocks);
    ASSERT_EQ(given, missing <= available);
    if (given) {
      ASSERT_EQ(pool_->num_available(), available - missing);
      users_.push_back(std::move(user));
    } else {
      pool_->release(user.blocks);
    }
  }

  // Inserts the user's next full block, if there is one.
  void insert_block(User& user) {
    const auto index = user.nodes.size(), length = static_cast<std::size_t>(length_);
    if ((index + 1) * length > user.tokens.size()) return;
    const auto parent = index == 0 ? PrefixNode{} : user.nodes.back();
    const auto tokens = std::span<const TokenId>(user.tokens).subspan(index * length, length);
    const auto node = pool_->insert(parent, user.blocks[index], tokens, user.salt);
    user.nodes.push_back(node);
    if (node.unique_id == parent.unique_id) return;  // the parent was evicted
    const auto key = key_of(user, index + 1);
    if (node.block == user.blocks[index]) {
      inserted_[key] = node;
      return;
    }
    ASSERT_EQ(inserted_.at(key).unique_id, node.unique_id);
    if (below(2) == 0) {  // switch to the existing block
      pool_->retain({&node.block, 1});
      pool_->release({&user.blocks[index], 1});
      user.blocks[index] = node.block;
    }
  }

  void remove_user() {
    const auto index = static_cast<std::size_t>(below(static_cast<int>(users_.size())));
    pool_->release(users_[index].blocks);
    users_.erase(users_.begin() + static_cast<std::ptrdiff_t>(index));
  }

  void check_integrity() {
    std::vector<std::int32_t> use(static_cast<std::size_t>(pool_->num_blocks()), 0);
    for (const auto& user : users_) {
      for (const auto id : user.blocks) ++use[static_cast<std::size_t>(id)];
    }
    ASSERT_NO_THROW(pool_->check_integrity(use));
  }

  void look_up(const User& user) {
    std::size_t certain = 0;  // the user's own inserted blocks: in use, so they still exist
    while (certain < user.nodes.size() && user.nodes[certain].block == user.blocks[certain]) ++certain;
    const auto match = pool_->match(user.tokens, static_cast<std::int32_t>(user.tokens.size()), user.salt);
    ASSERT_NO_FATAL_FAILURE(check_match(user, match));
    ASSERT_GE(match.blocks.size(), certain);
    pool_->release(match.blocks);
  }

  void release_all() {
    for (const auto& user : users_) pool_->release(user.blocks);
    users_.clear();
  }

  std::mt19937_64 random_{GetParam()};
  int length_ = 0;
  std::unique_ptr<BlockManager> pool_;
  std::map<Key, PrefixNode> inserted_;
  std::vector<User> users_;
};

TEST_P(RandomUse, OnlyInsertedChainsMatchAndChainsInUseAlwaysMatch) {
  for (int round = 0; round < 12; ++round) {
    const int length = 1 + below(3), num_blocks = 1 + below(48);
    start(length, num_blocks);
    for (int step = 0; step < 4000; ++step) {
      const int action = below(10);
      if (action < 4 || users_.empty()) {
        ASSERT_NO_FATAL_FAILURE(add_user());
      } else if (action < 7) {
        ASSERT_NO_FATAL_FAILURE(insert_block(any_user()));
      } else {
        remove_user();
      }
      ASSERT_NO_FATAL_FAILURE(check_integrity());
      if (users_.empty()) continue;
      ASSERT_NO_FATAL_FAILURE(look_up(any_user()));
      ASSERT_NO_FATAL_FAILURE(check_integrity());
    }
    release_all();
    EXPECT_EQ(pool_->num_available(), num_blocks);
    std::vector<BlockId> all;
    EXPECT_TRUE(pool_->allocate(num_blocks, all));
    EXPECT_NO_THROW(pool_->check_integrity());
  }
}

INSTANTIATE_TEST_SUITE_P(Seeds, RandomUse, testing::Range<std::uint64_t>(1, 7));

}  // namespace
}  // namespace charonia::cache
