// A model of the engine for the tests of the scheduler: it stores which token's KV is in which slot.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <set>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "base/text.h"
#include "cache/units.h"
#include "schedule/scheduler.h"

namespace charonia::schedule {

using cache::BlockId;
using cache::BlockManager;

inline constexpr int kVocab = 5;

inline std::uint64_t mix(std::uint64_t hash, std::uint64_t value) {
  hash = (hash ^ (value + 0x9e3779b97f4a7c15ULL)) * 0xbf58476d1ce4e5b9ULL;
  return hash ^ (hash >> 29);
}

// The inputs of a sequence's tokens, besides its prompt.
struct Voice {
  std::uint64_t salt = 0;
  std::uint64_t seed = 0;  // for sampling: KV does not depend on it
};

// The "model": the KV of a token is a hash of all tokens up to it, and the next token follows from it.
inline std::uint64_t state_before_first_token(const Voice& voice) { return mix(17, voice.salt); }
inline TokenId next_token(std::uint64_t state, const Voice& voice) {
  return static_cast<TokenId>((mix(state, voice.seed) >> 20) % kVocab);
}

// [total]: the prompt and the following tokens; `rows`, if given, receives the token for each row of the prompt.
inline std::vector<TokenId> generate_alone(const std::vector<TokenId>& prompt, std::size_t total, const Voice& voice,
                                           std::vector<TokenId>* rows = nullptr) {
  auto tokens = prompt;
  auto state = state_before_first_token(voice);
  for (std::size_t i = 0; tokens.size() < total || i < prompt.size(); ++i) {
    state = mix(state, static_cast<std::uint64_t>(tokens[i]));
    if (rows != nullptr && i < prompt.size()) rows->push_back(next_token(state, voice));
    if (i + 1 == tokens.size()) tokens.push_back(next_token(state, voice));
  }
  return tokens;
}

// The tokens of a sequence, and the proposals of its part.
inline std::vector<TokenId> tokens_of(const Scheduler& scheduler, const ScheduledSeq& part) {
  const auto known = scheduler.tokens(part.id), proposed = scheduler.proposed(part.id);
  std::vector<TokenId> tokens(known.begin(), known.end());
  tokens.insert(tokens.end(), proposed.begin(), proposed.begin() + part.num_proposed);
  return tokens;
}

// The result of a step: a token for each of its rows of logits, and the tokens after the known tokens of each part.
struct StepResult {
  std::vector<TokenId> rows, sampled;
};

// Runs plans like the engine, on a cache that holds a state for each position, by kind. Like the engine's devices, it
// knows the samples of the previous step if the scheduler has placeholders. windows: of the kinds after kind 0; 0 for
// kind `state`, which holds one state for each unit.
class FakeDevice {
 public:
  explicit FakeDevice(const BlockManager& pool, std::vector<std::int32_t> windows = {})
      : block_len_(pool.block_len()), windows_(std::move(windows)) {
    slots_.emplace_back(static_cast<std::size_t>(pool.num_blocks() * block_len_));
    for (const auto& kind : pool.kinds()) {
      const bool is_state = kind.kind() == CacheKind::state;
      slots_.emplace_back(static_cast<std::size_t>(kind.num_units() * (is_state ? 1 : block_len_)));
    }
  }

  // Every earlier position must be in the cache, because attention needs it.
  StepResult step(const Scheduler& scheduler, const StepPlan& plan, const std::map<SeqId, Voice>& voices) {
    StepResult result;
    for (const auto& [from, to, kind] : plan.block_copies) {
      const auto k = static_cast<std::size_t>(kind);
      for (std::int32_t i = 0; i < block_len_; ++i) slot(k, to, i) = slot(k, from, i);
    }
    std::set<const std::uint64_t*> computed;
    std::multiset<const std::uint64_t*> read;
    std::vector<std::pair<std::uint64_t*, std::uint64_t>> written;
    std::size_t own_reads = 0;
    for (const auto& part : plan.seqs) {
      const auto& voice = voices.at(part.id);
      const auto tokens = tokens_of(scheduler, part);
      const auto end = part.first_position + part.num_tokens;
      const auto last_known = end - 1 - part.num_proposed;
      auto state = state_before_first_token(voice);
      std::vector<std::uint64_t> after;  // the states after the last known token and after each proposal
      for (std::int32_t position = 0; position < end; ++position) {
        if (position == part.first_position && position > 0) {
          for (auto* const slot : states_of(scheduler, part, true)) {
            EXPECT_EQ(*slot, state) << "sequence " << part.id << " does not find its state before " << position;
            read.insert(slot);
          }
        }
        state = mix(state, static_cast<std::uint64_t>(known(tokens[static_cast<std::size_t>(position)])));
        for (auto* const slot : slots_of(scheduler, part, position)) {
          if (position < part.first_position) {
            EXPECT_EQ(*slot, state) << "sequence " << part.id << " does not find its position " << position;
            continue;
          }
          EXPECT_TRUE(computed.insert(slot).second) << "two sequences write to one slot";
          *slot = state;
        }
        if (position < part.first_position) continue;
        if (position >= last_known) after.push_back(state);
        if (part.all_rows || (part.samples && position >= last_known)) result.rows.push_back(next_token(state, voice));
        if (part.samples && position == last_known) result.sampled.push_back(result.rows.back());
      }
      for (auto* const slot : states_of(scheduler, part, false)) {
        EXPECT_TRUE(computed.insert(slot).second) << "two sequences write to one state";
        written.emplace_back(slot, after.front());
        own_reads += part.first_position > 0 && states_of(scheduler, part, true) == states_of(scheduler, part, false);
      }
      for (std::int32_t i = 0; i < part.num_proposed; ++i) {
        for (auto* const slot : proposal_states(scheduler, part, i)) {
          EXPECT_TRUE(computed.insert(slot).second) << "two rows write to one state";
          written.emplace_back(slot, after.at(static_cast<std::size_t>(i + 1)));
        }
      }
    }
    std::size_t all_reads = 0;
    for (const auto& [slot, state] : written) {
      all_reads += read.count(slot);
      *slot = state;
    }
    EXPECT_EQ(all_reads, own_reads) << "a sequence reads a state that another one writes";
    last_rows_ = result.rows;
    return result;
  }

  // The states of a block of a kind: 0, or k + 1 for kind k after kind 0.
  std::span<std::uint64_t> block(std::size_t kind, BlockId id) {
    if (kind > 0 && windows_[kind - 1] == 0) return {&slots_[kind].at(static_cast<std::size_t>(id)), 1};
    return {&slot(kind, id, 0), static_cast<std::size_t>(block_len_)};
  }

  // A step that was not launched, or that failed: the contents of its slots are undefined, except for states. (A step
  // with states is planned again only if it was not launched.)
  void fail(const Scheduler& scheduler, const StepPlan& plan) {
    for (const auto& [from, to, kind] : plan.block_copies) {
      for (std::int32_t i = 0; i < block_len_; ++i) slot(static_cast<std::size_t>(kind), to, i) = kSpoilt;
    }
    for (const auto& part : plan.seqs) {
      for (std::int32_t i = 0; i < part.num_tokens; ++i) {
        for (auto* const slot : slots_of(scheduler, part, part.first_position + i)) *slot = kSpoilt;
      }
    }
  }

 private:
  static constexpr std::uint64_t kSpoilt = 666;

  TokenId known(TokenId token) const {
    return token >= 0 ? token : last_rows_.at(static_cast<std::size_t>(-1 - token));
  }

  std::uint64_t& slot(std::size_t kind, BlockId block, std::int32_t position) {
    return slots_[kind].at(static_cast<std::size_t>(block * block_len_ + position % block_len_));
  }

  // The slots of a position that the part reads or writes: of each kind whose window contains the position.
  std::vector<std::uint64_t*> slots_of(const Scheduler& scheduler, const ScheduledSeq& part, std::int32_t position) {
    const auto block = position / block_len_;
    std::vector<std::uint64_t*> out{&slot(0, scheduler.blocks(part.id)[static_cast<std::size_t>(block)], position)};
    for (std::size_t k = 0; k < windows_.size(); ++k) {
      const auto& range = scheduler.units(part.id)[k];
      if (windows_[k] == 0 || position <= part.first_position - windows_[k]) continue;
      out.push_back(&slot(k + 1, range.units.at(static_cast<std::size_t>(block - range.first)), position));
    }
    return out;
  }

  // The states that a part reads (with computed tokens), or writes.
  std::vector<std::uint64_t*> states_of(const Scheduler& scheduler, const ScheduledSeq& part, bool reads) {
    std::vector<std::uint64_t*> out;
    for (std::size_t k = 0; k < windows_.size(); ++k) {
      if (windows_[k] != 0) continue;
      const auto& units = scheduler.units(part.id)[k].units;
      out.push_back(&slots_[k + 1].at(static_cast<std::size_t>(reads ? units.front() : units.back())));
    }
    return out;
  }

  // The states that the proposal of this number writes.
  std::vector<std::uint64_t*> proposal_states(const Scheduler& scheduler, const ScheduledSeq& part, std::int32_t number) {
    std::vector<std::uint64_t*> out;
    for (std::size_t k = 0; k < windows_.size(); ++k) {
      if (windows_[k] != 0) continue;
      const auto& units = scheduler.proposal_units(part.id)[k].units;
      out.push_back(&slots_[k + 1].at(static_cast<std::size_t>(units.at(static_cast<std::size_t>(number)))));
    }
    return out;
  }

  int block_len_;
  std::vector<std::int32_t> windows_;
  std::vector<std::vector<std::uint64_t>> slots_;  // by kind
  std::vector<TokenId> last_rows_;
};

inline std::vector<SeqId> ids_of(const StepPlan& plan) {
  std::vector<SeqId> ids;
  for (const auto& part : plan.seqs) ids.push_back(part.id);
  return ids;
}

// Stores the states of blocks by their tokens, and of units at the ends that the scheduler names. It loses some of
// them, also while they are loaded, and lets some wait.
class FakeOffload final : public Offload {
 public:
  FakeOffload(FakeDevice& device, const BlockManager& pool) : device_(device), pool_(pool) {}

  void store(const std::string& scope, std::span<const TokenId> tokens, const std::vector<cache::PrefixNode>& nodes,
             std::span<const std::int32_t> hit_ends) {
    for (std::int32_t i = 0; i < std::ssize(nodes); ++i) {
      const auto& node = nodes[static_cast<std::size_t>(i)];
      put(key(scope, tokens, {CacheKind::full, i}), 0, node.block);
      for (std::size_t k = 0; k < pool_.kinds().size(); ++k) {
        const auto unit = pool_.unit_of(k, node);
        const auto is_read = [&](auto end) { return i < end && first_needed(k, end) <= i; };
        if (unit < 0 || std::ranges::none_of(hit_ends, is_read)) continue;
        put(key(scope, tokens, {pool_.kinds()[k].kind(), i}), k + 1, unit);
      }
    }
    for (; stored_.size() > kMost; ++lost_) {
      stored_.erase(std::next(stored_.begin(), static_cast<std::ptrdiff_t>(lost_ % kMost)));
    }
  }
  void forget(const std::string& scope, std::span<const TokenId> tokens) {
    for (std::int32_t i = 0; i < static_cast<std::int32_t>(tokens.size()) / pool_.block_len(); ++i) {
      for (const auto kind : kCacheKinds) stored_.erase(key(scope, tokens, {kind, i}));
    }
  }
  Found find(const std::string& scope, std::span<const TokenId> tokens, std::int32_t first, bool /*shares*/) override {
    const auto all = static_cast<std::int32_t>(tokens.size()) / pool_.block_len();
    EXPECT_EQ(std::ssize(tokens), all * pool_.block_len());
    EXPECT_GT(all, first);
    const auto has = [&](const PrefixPart& part) { return stored_.contains(key(scope, tokens, part)); };
    auto stored = first;
    while (stored < all && has({CacheKind::full, stored})) ++stored;
    for (auto end = stored; end > first; --end) {
      std::vector<PrefixPart> parts;
      for (auto i = first; i < end; ++i) parts.push_back({CacheKind::full, i});
      for (std::size_t k = 0; k < pool_.kinds().size(); ++k) {
        for (auto i = std::max(first, first_needed(k, end)); i < end; ++i) {
          parts.push_back({pool_.kinds()[k].kind(), i});
        }
      }
      if (!std::ranges::all_of(parts, has)) continue;
      std::vector<Key> keys;
      for (const auto& part : parts) keys.push_back(key(scope, tokens, part));
      auto load = std::make_unique<FakeLoad>(*this, std::move(keys), end, std::move(parts));
      return {std::move(load), end < stored ? stored : 0};
    }
    return {nullptr, stored > first ? stored : 0};
  }
  int num_done() const { return num_done_; }  // loads

 private:
  static constexpr std::size_t kMost = 500;
  using Key = std::tuple<std::string, std::vector<TokenId>, CacheKind>;

  class FakeLoad final : public Load {
   public:
    FakeLoad(FakeOffload& from, std::vector<Key> keys, std::int32_t end, std::vector<PrefixPart> parts)
        : Load(end, std::move(parts)), from_(from), keys_(std::move(keys)) {}
    std::int64_t bytes() const override { return 1; }

   private:
    Next copy(BlockId to) override {
      if (++from_.calls_ % 3 == 0) return Next::waits;
      const auto found = from_.stored_.find(keys_.at(next_));
      if (found == from_.stored_.end() || from_.calls_ % 50 == 0) return Next::failed;
      std::size_t kind = 0;
      while (part().kind != CacheKind::full && from_.pool_.kinds()[kind++].kind() != part().kind) {
      }
      std::ranges::copy(found->second, from_.device_.block(kind, to).begin());
      from_.num_done_ += ++next_ == keys_.size() ? 1 : 0;
      return Next::copied;
    }

    FakeOffload& from_;
    std::vector<Key> keys_;
    std::size_t next_ = 0;
  };

  Key key(const std::string& scope, std::span<const TokenId> tokens, const PrefixPart& part) const {
    const auto prefix = tokens.first(static_cast<std::size_t>((part.index + 1) * pool_.block_len()));
    return {scope, {prefix.begin(), prefix.end()}, part.kind};
  }
  std::int32_t first_needed(std::size_t kind, std::int32_t blocks) const {
    return pool_.kinds()[kind].first_needed(blocks * pool_.block_len());
  }
  void put(const Key& key, std::size_t kind, BlockId block) {
    const auto states = device_.block(kind, block);
    stored_.try_emplace(key, states.begin(), states.end());
  }

  FakeDevice& device_;
  const BlockManager& pool_;
  std::map<Key, std::vector<std::uint64_t>> stored_;
  std::size_t lost_ = 0;
  int calls_ = 0, num_done_ = 0;
};

// A plan in short: id:first position+number of tokens of each sequence, with s if it samples, f if its tokens were
// appended, r if it has all rows of logits, and p with the number of proposals.
inline std::string text_of(const StepPlan& plan) {
  std::string out;
  for (const auto& part : plan.seqs) {
    out += cat(out.empty() ? "" : " ", part.id, ":", part.first_position, "+", part.num_tokens, part.samples ? "s" : "",
               part.forced ? "f" : "", part.all_rows ? "r" : "");
    if (part.num_proposed > 0) out += cat("p", part.num_proposed);
  }
  return out;
}

// Conditions of every plan, for any load.
inline void check_plan(const Scheduler& scheduler, const StepPlan& plan, const Limits& limits) {
  std::int32_t tokens = 0, rows = 0;
  std::set<SeqId> ids;
  for (const auto& part : plan.seqs) {
    ASSERT_TRUE(ids.insert(part.id).second) << "a sequence is planned twice";
    ASSERT_GE(part.num_tokens, 1);
    ASSERT_EQ(part.first_position, scheduler.num_computed(part.id));
    ASSERT_TRUE(part.num_proposed == 0 || (part.samples && !part.forced && part.num_tokens == 1 + part.num_proposed));
    ASSERT_LE(part.num_proposed, std::ssize(scheduler.proposed(part.id)));
    const auto end = part.first_position + part.num_tokens - part.num_proposed;
    ASSERT_LE(end, static_cast<std::int32_t>(scheduler.tokens(part.id).size()));
    ASSERT_EQ(part.samples, end == static_cast<std::int32_t>(scheduler.tokens(part.id).size()));
    tokens += part.num_tokens;
    rows += part.num_logits_rows();
  }
  ASSERT_EQ(tokens, plan.num_tokens);
  ASSERT_LE(tokens, limits.token_budget);
  ASSERT_TRUE(limits.max_logits_rows == 0 || rows <= limits.max_logits_rows) << rows << " rows of logits";
  ASSERT_LE(scheduler.num_running(), limits.max_batch_size);
  for (const auto& gone : {plan.preempted, plan.impossible}) {
    for (const auto id : gone) {
      ASSERT_FALSE(ids.contains(id)) << "a sequence is planned, but also preempted or impossible";
      ASSERT_TRUE(scheduler.blocks(id).empty() && scheduler.units(id).empty());
    }
  }
}

inline std::vector<TokenId> numbers(int n, int first = 0) {
  std::vector<TokenId> tokens(static_cast<std::size_t>(n));
  std::iota(tokens.begin(), tokens.end(), first);
  return tokens;
}

// A step whose samples are known immediately.
inline void commit(Scheduler& scheduler, const StepPlan& plan, const std::vector<TokenId>& sampled) {
  scheduler.advance(plan);
  scheduler.resolve(plan, sampled);
}

// Plans and commits a step in which every sample is token 0.
inline StepPlan step(Scheduler& scheduler) {
  auto plan = scheduler.plan();
  scheduler.check_integrity();
  const auto samples = std::ranges::count_if(plan.seqs, [](const auto& part) { return part.samples; });
  commit(scheduler, plan, std::vector<TokenId>(static_cast<std::size_t>(samples), 0));
  scheduler.check_integrity();
  return plan;
}

// A scheduler with its pool.
struct Bed {
  Bed(int blocks, int block_len, const Limits& limits, bool prefixes = true,
      std::span<const cache::UnitKind> kinds = {})
      : pool(blocks, block_len, prefixes, blocks, nullptr, BlockManager::default_hash, kinds),
        scheduler(limits, pool) {}

  std::string step() { return text_of(schedule::step(scheduler)); }
  // Runs steps until one preempts; returns its plan.
  StepPlan step_until_preempted() {
    while (true) {
      if (auto plan = schedule::step(scheduler); !plan.preempted.empty()) return plan;
    }
  }

  BlockManager pool;
  Scheduler scheduler;
};

}  // namespace charonia::schedule
