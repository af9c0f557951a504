// A model of the engine for the tests of the scheduler: it stores which token's KV is in which slot.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <set>
#include <string>
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

// The result of a step: a token for each of its rows of logits, and the tokens of the sampled rows.
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
      const auto tokens = scheduler.tokens(part.id);
      const auto end = part.first_position + part.num_tokens;
      auto state = state_before_first_token(voice);
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
        if (part.all_rows || (part.samples && position == end - 1)) result.rows.push_back(next_token(state, voice));
      }
      if (part.samples) result.sampled.push_back(result.rows.back());
      for (auto* const slot : states_of(scheduler, part, false)) {
        EXPECT_TRUE(computed.insert(slot).second) << "two sequences write to one state";
        written.emplace_back(slot, state);
        own_reads += part.first_position > 0 && states_of(scheduler, part, true) == states_of(scheduler, part, false);
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

// A plan in short: id:first position+number of tokens of each sequence, with s if it samples, f if its tokens were
// appended, and r if it has all rows of logits.
inline std::string text_of(const StepPlan& plan) {
  std::string out;
  for (const auto& part : plan.seqs) {
    out += cat(out.empty() ? "" : " ", part.id, ":", part.first_position, "+", part.num_tokens, part.samples ? "s" : "",
               part.forced ? "f" : "", part.all_rows ? "r" : "");
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
    const auto end = part.first_position + part.num_tokens;
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
