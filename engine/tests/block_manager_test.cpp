// Compares the pool with a slow reference that knows the text of every block and searches all blocks each time.
#include "cache/block_manager.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <memory>
#include <numeric>
#include <random>

#include "cache/units.h"
#include "charonia/error.h"

namespace charonia::cache {
namespace {

struct Shape {
  // chunk 0: all blocks have memory. memory: the number of blocks that fit into memory.
  int num_blocks, block_len, chunk, memory;
  bool bad_hash, prefixes = true;
  std::vector<UnitKind> kinds = {};
};

// All contents collide, except for one bit.
std::uint64_t bad_hash(std::uint64_t, std::uint64_t, std::span<const TokenId> tokens) {
  return static_cast<std::uint64_t>(tokens.front() & 1);
}

// One kind after kind 0: the node of each unit, found by its unique id.
struct ReferenceKind {
  struct Unit {
    std::uint64_t node = 0;  // 0: not in the tree
    int use = 0;
    std::uint64_t last_used = 0;
  };

  UnitKind kind;
  std::vector<Unit> units;
  std::map<std::uint64_t, int> pins;  // by node
  std::uint64_t clock = 0;

  int count(bool active) const {
    return static_cast<int>(
        std::ranges::count_if(units, [&](const Unit& u) { return active ? u.use > 0 : u.use == 0 && u.node != 0; }));
  }
  int free() const { return static_cast<int>(units.size()) - count(true) - count(false); }
  Unit& at(BlockId id) { return units.at(static_cast<std::size_t>(id)); }
  BlockId of_node(std::uint64_t node) const {
    const auto found = std::ranges::find(units, node, &Unit::node);
    return found == units.end() ? -1 : static_cast<BlockId>(found - units.begin());
  }
  void release(BlockId id) {
    if (--at(id).use == 0) at(id).last_used = ++clock;
  }
  void drop(std::uint64_t node) {
    pins.erase(node);
    for (auto& unit : units) {
      if (unit.node == node) unit.node = 0;
    }
  }
  // Evicts if no unit is free. Returns whether the pool may have given this unit.
  bool take(BlockId id) {
    if (free() == 0) {
      Unit* first = nullptr;
      const auto key = [this](const Unit& unit) { return std::pair(pins.contains(unit.node), unit.last_used); };
      for (auto& unit : units) {
        if (unit.use == 0 && unit.node != 0 && (first == nullptr || key(unit) < key(*first))) first = &unit;
      }
      first->node = 0;
    }
    if (at(id).use != 0 || at(id).node != 0) return false;
    at(id).use = 1;
    return true;
  }
  std::int32_t first_needed(int block_len, std::size_t depth) const {
    if (kind.kind == CacheKind::state) return std::max(0, static_cast<std::int32_t>(depth) - 1);
    const int computed = static_cast<int>(depth) * block_len;
    int first = 0;  // the block of the first token that a query at position `computed` reads
    while ((first + 1) * block_len <= computed - kind.window + 1) ++first;
    return first;
  }
};

class Reference {
 public:
  struct Node {
    std::uint64_t unique_id = 0;  // 0: not in the index
    std::uint64_t parent_id = 0, salt = 0;
    std::vector<TokenId> tokens;
    int use = 0, pins = 0;
    std::uint64_t last_used = 0;
  };

  explicit Reference(const Shape& shape)
      : shape_(shape),
        total_(shape.num_blocks),
        committed_(shape.chunk == 0 ? shape.num_blocks : std::min(shape.chunk, shape.num_blocks)),
        nodes_(static_cast<std::size_t>(shape.num_blocks)) {
    for (const auto& kind : shape.kinds) {
      kinds.push_back({kind, std::vector<ReferenceKind::Unit>(static_cast<std::size_t>(kind.num_units)), {}});
    }
  }

  std::vector<ReferenceKind> kinds;

  int total() const { return total_; }
  int committed() const { return committed_; }
  int active() const {
    return count([](const Node& node) { return node.use > 0; });
  }
  int cached() const {
    return count([](const Node& node) { return node.use == 0 && node.unique_id != 0; });
  }
  int pinned() const {
    return count([](const Node& node) { return node.pins > 0; });
  }
  std::vector<std::int32_t> use() const {
    std::vector<std::int32_t> counts;
    for (int i = 0; i < total_; ++i) counts.push_back(at(i).use);
    return counts;
  }
  Node& at(BlockId id) { return nodes_[static_cast<std::size_t>(id)]; }
  const Node& at(BlockId id) const { return nodes_[static_cast<std::size_t>(id)]; }

  // -1 if not found.
  BlockId find(std::uint64_t parent_id, std::uint64_t salt, std::span<const TokenId> tokens) const {
    if (!shape_.prefixes) return -1;
    for (BlockId id = 0; id < total_; ++id) {
      const auto& node = at(id);
      if (node.unique_id != 0 && node.parent_id == parent_id && node.salt == salt &&
          std::ranges::equal(node.tokens, tokens)) {
        return id;
      }
    }
    return -1;
  }

  void release(BlockId id) {
    auto* node = &at(id);
    if (--node->use > 0 || node->unique_id == 0) return;
    while (node != nullptr && node->use == 0) {
      node->last_used = ++clock_;
      node = by_unique_id(node->parent_id);
    }
  }

  // `given`: the pool's result; returns whether it is allowed.
  bool allocate(int n, bool given, std::span<const BlockId> blocks) {
    const auto free = [this] { return committed_ - active() - cached(); };
    if (n <= total_ - active()) {
      while (n > free() && committed_ < total_) {
        const int next = std::min(committed_ + shape_.chunk, total_);
        if (next > shape_.memory) {
          total_ = committed_;
        } else {
          committed_ = next;
        }
      }
    }
    const bool fits = n <= total_ - active();
    if (fits != given) return false;
    if (!fits) return blocks.empty();
    for (const auto id : blocks) {
      if (free() == 0) evict();
      if (id < 0 || id >= committed_ || at(id).use != 0 || at(id).unique_id != 0) return false;
      at(id) = {};
      at(id).use = 1;
    }
    return static_cast<int>(blocks.size()) == n;
  }

  void forget(std::span<const TokenId> tokens, std::uint64_t salt, std::size_t known_good) {
    const auto length = static_cast<std::size_t>(shape_.block_len);
    std::uint64_t parent = 0;
    for (std::size_t begin = 0; begin + length <= tokens.size(); begin += length) {
      const auto id = find(parent, salt, tokens.subspan(begin, length));
      if (id < 0) return;
      if (begin + length > known_good) return drop(at(id));
      parent = at(id).unique_id;
    }
  }

 private:
  template <class Is>
  int count(Is is) const {
    return static_cast<int>(std::ranges::count_if(nodes_, is));
  }

  Node* by_unique_id(std::uint64_t unique_id) {
    const auto found =
        std::ranges::find_if(nodes_, [&](const Node& node) { return unique_id != 0 && node.unique_id == unique_id; });
    return found == nodes_.end() ? nullptr : &*found;
  }

  bool is_pinned(const Node& node) const {
    return node.pins > 0 || std::ranges::any_of(nodes_, [&](const Node& child) {
             return child.unique_id != 0 && child.parent_id == node.unique_id && is_pinned(child);
           });
  }

  void drop(Node& node) {
    const auto unique_id = std::exchange(node.unique_id, 0);
    node.pins = 0;
    for (auto& kind : kinds) kind.drop(unique_id);
    for (auto& child : nodes_) {
      if (child.unique_id != 0 && child.parent_id == unique_id) drop(child);
    }
  }

  // Unpinned blocks first, then the least recently used. The last block of a chain is evicted first, because it was
  // released first.
  void evict() {
    Node* first = nullptr;
    const auto key = [this](const Node& node) { return std::pair(is_pinned(node), node.last_used); };
    for (auto& node : nodes_) {
      if (node.use == 0 && node.unique_id != 0 && (first == nullptr || key(node) < key(*first))) first = &node;
    }
    drop(*first);
  }

  Shape shape_;
  int total_, committed_;
  std::vector<Node> nodes_;  // by block
  std::uint64_t clock_ = 0;
};

UnitKind states(int num_units) { return {.num_units = num_units, .kind = CacheKind::state}; }

class AgainstReference : public testing::TestWithParam<std::tuple<Shape, std::uint64_t>> {
 protected:
  struct User {
    std::vector<TokenId> tokens;
    std::uint64_t salt = 0;
    std::vector<BlockId> blocks;
    std::vector<PrefixNode> nodes;
    std::vector<UnitRange> units;
  };

  int below(int n) { return std::uniform_int_distribution<int>(0, n - 1)(random_); }

  std::unique_ptr<BlockManager> make_pool() {
    const auto hash = shape_.bad_hash ? bad_hash : BlockManager::default_hash;
    const auto& shape = shape_;
    if (shape.chunk == 0) {
      return std::make_unique<BlockManager>(shape.num_blocks, shape.block_len, shape.prefixes, shape.num_blocks,
                                            nullptr, hash, shape.kinds);
    }
    const auto commit = [this](int n) {
      if (n > shape_.memory) throw Error(ErrorCode::resource_exhausted, "no memory is left");
    };
    return std::make_unique<BlockManager>(shape.num_blocks, shape.block_len, shape.prefixes, shape.chunk, commit, hash,
                                          shape.kinds);
  }

  std::span<const TokenId> tokens_of(const User& user, std::size_t index) const {
    const auto length = static_cast<std::size_t>(shape_.block_len);
    return std::span(user.tokens).subspan(index * length, length);
  }

  void come() {
    User user;
    user.salt = static_cast<std::uint64_t>(below(2));
    const int full = below(7);
    for (int i = 0; i < full * shape_.block_len; ++i) user.tokens.push_back(below(3) == 0 ? below(4) : 0);
    const int looked_up = below(4) == 0 ? below(full * shape_.block_len + 1) : full * shape_.block_len;
    auto match = pool_->match(user.tokens, looked_up, user.salt);
    std::vector<BlockId> path;
    std::size_t depth = 0;  // of the longest path that has all its units
    for (std::uint64_t parent_id = 0; static_cast<int>(path.size() + 1) * shape_.block_len <= looked_up;) {
      const auto id = reference_.find(parent_id, user.salt, tokens_of(user, path.size()));
      if (id < 0) break;
      path.push_back(id);
      parent_id = reference_.at(id).unique_id;
      const auto valid = [&](const ReferenceKind& kind) {
        const auto first = kind.first_needed(shape_.block_len, path.size());
        return std::all_of(path.begin() + first, path.end(),
                           [&](BlockId node) { return kind.of_node(reference_.at(node).unique_id) >= 0; });
      };
      if (std::ranges::all_of(reference_.kinds, valid)) depth = path.size();
    }
    path.resize(depth);
    ASSERT_EQ(match.blocks, path);
    ASSERT_EQ(match.num_tokens, static_cast<int>(depth) * shape_.block_len);
    for (std::size_t i = 0; i < depth; ++i) {
      ASSERT_EQ(match.nodes[i].unique_id, reference_.at(path[i]).unique_id);
      ++reference_.at(path[i]).use;
    }
    user.blocks = match.blocks;
    user.nodes = match.nodes;
    user.units = match.units;
    const int missing = full + below(2) - static_cast<int>(user.blocks.size());
    std::vector<int> missing_units;
    bool units_fit = true;
    for (std::size_t k = 0; k < user.units.size(); ++k) {
      auto& kind = reference_.kinds[k];
      auto& range = user.units[k];
      ASSERT_EQ(range.first, kind.first_needed(shape_.block_len, depth));
      ASSERT_EQ(range.end(), std::ssize(path));
      for (auto i = range.first; i < range.end(); ++i) {
        ASSERT_EQ(range.at(i), kind.of_node(match.nodes[static_cast<std::size_t>(i)].unique_id));
        ++kind.at(range.at(i)).use;
      }
      missing_units.push_back(missing);
      units_fit = units_fit && missing <= kind.kind.num_units - kind.count(true);
    }
    const auto before = user;
    const bool given = pool_->allocate(missing, user.blocks, missing_units, user.units);
    if (given || units_fit) {
      ASSERT_TRUE(reference_.allocate(missing, given, std::span(user.blocks).subspan(before.blocks.size())));
    }
    ASSERT_TRUE(units_fit || !given);
    for (std::size_t k = 0; given && k < user.units.size(); ++k) {
      for (auto i = before.units[k].units.size(); i < user.units[k].units.size(); ++i) {
        ASSERT_TRUE(reference_.kinds[k].take(user.units[k].units[i]));
      }
      ASSERT_EQ(user.units[k].end(), before.units[k].end() + missing);
    }
    if (given) {
      users_.push_back(std::move(user));
    } else {
      ASSERT_EQ(user.blocks, before.blocks);
      release(user);
    }
  }

  void release(const std::vector<BlockId>& blocks) {
    pool_->release(blocks);
    for (auto id = blocks.rbegin(); id != blocks.rend(); ++id) reference_.release(*id);
  }

  void release_units(std::size_t k, std::span<const BlockId> units) {
    pool_->release_units(k, units);
    for (auto id = units.rbegin(); id != units.rend(); ++id) reference_.kinds[k].release(*id);
  }

  void release(User& user) {
    release(user.blocks);
    for (std::size_t k = 0; k < user.units.size(); ++k) release_units(k, user.units[k].units);
  }

  // As a sequence does when its window moves.
  void release_first_units(User& user) {
    for (std::size_t k = 0; k < user.units.size(); ++k) {
      auto& range = user.units[k];
      // The next unit to insert is still needed.
      const auto most = std::min(static_cast<std::int32_t>(user.nodes.size()), range.end()) - range.first;
      if (most <= 0) continue;
      const auto count = below(most + 1);
      release_units(k, std::span(range.units).first(static_cast<std::size_t>(count)));
      range.units.erase(range.units.begin(), range.units.begin() + count);
      range.first += count;
    }
  }

  void insert(User& user) {
    const auto index = user.nodes.size();
    if ((index + 1) * static_cast<std::size_t>(shape_.block_len) > user.tokens.size()) return;
    const auto parent = user.nodes.empty() ? PrefixNode{} : user.nodes.back();
    const auto block = user.blocks[index];
    std::vector<BlockId> units;
    for (std::size_t k = 0; k < user.units.size(); ++k) {
      // Most blocks have no snapshot.
      const bool none = shape_.kinds[k].kind == CacheKind::state && below(2) == 0;
      units.push_back(none ? -1 : user.units[k].at(static_cast<std::int32_t>(index)));
    }
    const auto own_units = units;
    const auto node = pool_->insert(parent, block, tokens_of(user, index), user.salt, units);
    if (parent.unique_id != 0 && reference_.at(parent.block).unique_id != parent.unique_id) {
      ASSERT_EQ(node.unique_id, parent.unique_id);
    } else if (const auto id = reference_.find(parent.unique_id, user.salt, tokens_of(user, index)); id >= 0) {
      ASSERT_EQ(node.block, id);
      ASSERT_EQ(node.unique_id, reference_.at(id).unique_id);
      if (id != block && below(2) == 0) {  // takes the existing block instead of its own
        pool_->retain({&id, 1});
        ++reference_.at(id).use;
        release({block});
        user.blocks[index] = id;
      }
    } else if (shape_.prefixes) {
      ASSERT_EQ(node.block, block);
      auto& own = reference_.at(block);
      own.unique_id = node.unique_id;
      own.parent_id = parent.unique_id;
      own.salt = user.salt;
      own.tokens.assign(tokens_of(user, index).begin(), tokens_of(user, index).end());
    }
    user.nodes.push_back(node);
    const bool inserted = shape_.prefixes && node.unique_id != parent.unique_id;
    for (std::size_t k = 0; k < units.size(); ++k) {
      auto& kind = reference_.kinds[k];
      if (own_units[k] < 0) {
        ASSERT_EQ(units[k], -1);
        continue;
      }
      const auto existing = inserted ? kind.of_node(node.unique_id) : own_units[k];
      ASSERT_EQ(units[k], existing < 0 ? own_units[k] : existing);
      if (existing < 0) {
        kind.at(units[k]).node = node.unique_id;
      } else if (existing != own_units[k]) {
        ++kind.at(existing).use;
        kind.release(own_units[k]);
      }
      user.units[k].at(static_cast<std::int32_t>(index)) = units[k];
    }
  }

  // A sequence takes a unit back to change it, or drops a snapshot.
  void withdraw_or_drop(User& user) {
    for (std::size_t k = 0; k < user.units.size(); ++k) {
      auto& kind = reference_.kinds[k];
      if (const auto& range = user.units[k]; !range.units.empty()) {
        const auto unit = range.units[static_cast<std::size_t>(below(static_cast<int>(range.units.size())))];
        ASSERT_EQ(pool_->withdraw_unit(k, unit), kind.at(unit).use == 1);
        if (kind.at(unit).use == 1) kind.at(unit).node = 0;
      }
      if (user.nodes.empty()) continue;
      const auto& node = user.nodes[static_cast<std::size_t>(below(static_cast<int>(user.nodes.size())))];
      pool_->drop_unit(k, node);
      const auto unit = node.unique_id == 0 ? -1 : kind.of_node(node.unique_id);
      if (unit >= 0 && kind.at(unit).use == 0 && !kind.pins.contains(node.unique_id)) kind.at(unit).node = 0;
    }
  }

  void pin(const std::vector<PrefixNode>& nodes, int by) {
    if (by > 0) {
      pool_->pin(nodes);
    } else {
      pool_->unpin(nodes);
    }
    for (const auto& node : nodes) {
      if (node.unique_id != 0 && reference_.at(node.block).unique_id == node.unique_id) {
        reference_.at(node.block).pins += by;
      }
    }
    for (auto& kind : reference_.kinds) {
      for (std::size_t i = 0; i < nodes.size(); ++i) {
        const auto& node = nodes[i];
        if (static_cast<std::int32_t>(i) < kind.first_needed(shape_.block_len, nodes.size()) || node.unique_id == 0 ||
            reference_.at(node.block).unique_id != node.unique_id) {
          continue;
        }
        if ((kind.pins[node.unique_id] += by) == 0) kind.pins.erase(node.unique_id);
      }
    }
  }

  void compare() {
    std::vector<std::vector<std::int32_t>> unit_use;
    for (std::size_t k = 0; k < reference_.kinds.size(); ++k) {
      const auto& kind = reference_.kinds[k];
      unit_use.emplace_back();
      for (const auto& unit : kind.units) unit_use.back().push_back(unit.use);
      ASSERT_EQ(pool_->kinds()[k].num_active(), kind.count(true));
      ASSERT_EQ(pool_->kinds()[k].num_cached(), kind.count(false));
      ASSERT_EQ(pool_->kinds()[k].num_pinned(), std::ssize(kind.pins));
    }
    ASSERT_NO_THROW(pool_->check_integrity(reference_.use(), unit_use));
    ASSERT_EQ(pool_->num_blocks(), reference_.total());
    ASSERT_EQ(pool_->num_committed(), reference_.committed());
    ASSERT_EQ(pool_->num_active(), reference_.active());
    ASSERT_EQ(pool_->num_cached(), reference_.cached());
    ASSERT_EQ(pool_->num_pinned(), reference_.pinned());
  }

  Shape shape_ = std::get<0>(GetParam());
  std::mt19937_64 random_{std::get<1>(GetParam())};
  std::unique_ptr<BlockManager> pool_ = make_pool();
  Reference reference_{shape_};
  std::vector<User> users_;
  std::vector<std::vector<PrefixNode>> sessions_;  // the nodes that they pinned
};

TEST_P(AgainstReference, BlocksPinsAndMemoryFollowTheRules) {
  SCOPED_TRACE(testing::Message() << "seed " << std::get<1>(GetParam()));
  for (int step = 0; step < 3000; ++step) {
    const auto any = [&](auto& list) { return list.begin() + below(static_cast<int>(list.size())); };
    const int action = below(100);
    if (action < 30 || users_.empty()) {
      come();
    } else if (action < 65) {
      insert(*any(users_));
    } else if (action < 75) {
      auto nodes = any(users_)->nodes;
      if (below(3) == 0) nodes.erase(nodes.begin(), nodes.begin() + below(static_cast<int>(nodes.size()) + 1));
      pin(nodes, 1);
      sessions_.push_back(std::move(nodes));
    } else if (action < 80) {
      if (sessions_.empty()) continue;
      const auto session = any(sessions_);
      pin(*session, -1);
      sessions_.erase(session);
    } else if (action < 81) {
      const auto& user = *any(users_);
      const auto known_good = static_cast<std::size_t>(below(static_cast<int>(user.tokens.size()) + 1));
      pool_->forget_prefix(user.tokens, user.salt, known_good);
      reference_.forget(user.tokens, user.salt, known_good);
    } else if (action < 83) {
      release_first_units(*any(users_));
    } else if (action < 85) {
      withdraw_or_drop(*any(users_));
    } else {
      const auto user = any(users_);
      release(*user);
      users_.erase(user);
    }
    if (!HasFailure()) compare();
    ASSERT_FALSE(HasFailure()) << "in step " << step;
  }
  for (const auto& session : sessions_) pin(session, -1);
  for (auto& user : users_) release(user);
  compare();
  EXPECT_EQ(pool_->num_pinned(), 0);
  EXPECT_EQ(pool_->num_available(), pool_->num_blocks());
  for (const auto& kind : pool_->kinds()) EXPECT_EQ(kind.num_available(), kind.num_units());
}

INSTANTIATE_TEST_SUITE_P(Shapes, AgainstReference,
                         testing::Combine(testing::Values(Shape{24, 2, 0, 0, false}, Shape{24, 2, 0, 0, true},
                                                          Shape{9, 1, 0, 0, false}, Shape{40, 3, 7, 40, false},
                                                          Shape{40, 1, 4, 18, false}, Shape{30, 2, 4, 17, true},
                                                          Shape{48, 2, 0, 0, false}, Shape{3, 2, 1, 3, false},
                                                          Shape{20, 2, 0, 0, false, false},
                                                          Shape{24, 2, 0, 0, false, true, {{5, 12}}},
                                                          Shape{40, 3, 7, 40, false, true, {{1, 25}, {7, 30}}},
                                                          Shape{30, 1, 4, 17, true, true, {{3, 17}}},
                                                          Shape{20, 2, 0, 0, false, false, {{4, 11}}},
                                                          Shape{24, 2, 0, 0, false, true, {states(14)}},
                                                          Shape{40, 3, 7, 40, false, true, {{7, 30}, states(30)}},
                                                          Shape{30, 1, 4, 17, true, true, {states(17)}}),
                                          testing::Range<std::uint64_t>(1, 5)));

std::vector<TokenId> numbers(int n, int first = 0) {
  std::vector<TokenId> tokens(static_cast<std::size_t>(n));
  std::iota(tokens.begin(), tokens.end(), first);
  return tokens;
}

TEST(BlockManager, MatchFindsTheLongestChainAndTheOldestIsEvictedFromItsEnd) {
  BlockManager pool(6, 2, true);
  EXPECT_EQ(pool.num_free(), 6);
  std::vector<BlockId> blocks, taken;
  ASSERT_TRUE(pool.allocate(3, blocks));
  PrefixNode node;
  for (std::size_t i = 0; i < 2; ++i) node = pool.insert(node, blocks[i], numbers(2, 2 * static_cast<int>(i)), 7);
  EXPECT_EQ(pool.num_active(), 3);
  pool.release(blocks);
  EXPECT_EQ(pool.num_cached(), 2);
  EXPECT_EQ(pool.num_free(), 4);
  EXPECT_EQ(pool.num_available(), 6);
  EXPECT_EQ(pool.match(numbers(5), 5, 0).num_tokens, 0) << "the salt differs";
  const auto match = pool.match(numbers(5), 5, 7);
  EXPECT_EQ(match.num_tokens, 4);
  EXPECT_EQ(match.blocks, std::vector<BlockId>(blocks.begin(), blocks.begin() + 2));
  EXPECT_EQ(match.last().unique_id, node.unique_id);
  pool.release(match.blocks);
  ASSERT_TRUE(pool.allocate(5, taken));
  EXPECT_EQ(taken.back(), blocks[1]);
  EXPECT_EQ(pool.match(numbers(5), 3, 7).num_tokens, 2);
  pool.check_integrity();
}

TEST(BlockManager, AnErrorOfTheMemoryOtherThanItsLackChangesNothing) {
  std::vector<int> asked;
  BlockManager pool(100, 1, true, 2, [&](int n) {
    asked.push_back(n);
    if (asked.size() == 1) throw Error(ErrorCode::internal, "the driver is away");
    if (n > 4) throw Error(ErrorCode::resource_exhausted, "no memory is left");
  });
  std::vector<BlockId> taken;
  EXPECT_THROW(pool.allocate(3, taken), Error);
  EXPECT_TRUE(taken.empty());
  EXPECT_EQ(pool.num_blocks(), 100);
  pool.check_integrity();
  EXPECT_FALSE(pool.allocate(5, taken));
  EXPECT_EQ(pool.num_blocks(), 4);
  EXPECT_TRUE(pool.allocate(4, taken));
  EXPECT_EQ(asked, (std::vector<int>{4, 4, 6})) << "the pool does not ask for memory again";
  pool.check_integrity();
}

TEST(BlockManager, MisuseIsAnError) {
  EXPECT_THROW(BlockManager(0, 1, true), Error);
  EXPECT_THROW(BlockManager(1, 0, true), Error);
  EXPECT_THROW(BlockManager(4, 1, true, 0, [](int) {}), Error);
  EXPECT_THROW(BlockManager(4, 1, true, 2, nullptr), Error);
  BlockManager pool(3, 2, true);
  const auto tokens = numbers(2);
  std::vector<BlockId> blocks;
  for (const BlockId wrong : {-1, 0, 3}) {
    EXPECT_THROW(pool.release({&wrong, 1}), Error);
    EXPECT_THROW(pool.retain({&wrong, 1}), Error);
    EXPECT_THROW(pool.insert({}, wrong, tokens), Error);
  }
  EXPECT_THROW(pool.allocate(-1, blocks), Error);
  pool.allocate(1, blocks);
  EXPECT_THROW(pool.insert({}, blocks[0], std::span(tokens).first(1)), Error);
  const auto node = pool.insert({}, blocks[0], tokens);
  EXPECT_THROW(pool.insert({}, blocks[0], numbers(2, 5)), Error);
  pool.allocate(1, blocks);
  EXPECT_THROW(pool.insert(node, blocks[1], tokens, 1), Error);
  EXPECT_THROW(pool.unpin({&node, 1}), Error) << "it is not pinned";
  EXPECT_THROW(pool.check_integrity(std::vector<std::int32_t>{0, 0, 0}), Error);
  pool.check_integrity();
}

}  // namespace
}  // namespace charonia::cache
