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

// Runs plans like the engine, on a cache that holds a state for each position. Like the engine's devices, it knows the
// samples of the previous step if the scheduler has placeholders.
class FakeDevice {
 public:
  explicit FakeDevice(const BlockManager& pool)
      : block_len_(pool.block_len()), slots_(static_cast<std::size_t>(pool.num_blocks() * pool.block_len())) {}

  // Every earlier position must be in the cache, because attention needs it.
  StepResult step(const Scheduler& scheduler, const StepPlan& plan, const std::map<SeqId, Voice>& voices) {
    StepResult result;
    for (const auto& [from, to, kind] : plan.block_copies) {
      for (std::int32_t i = 0; i < block_len_; ++i) slots_[slot_of({&to, 1}, i)] = slots_[slot_of({&from, 1}, i)];
    }
    std::set<std::size_t> computed;
    for (const auto& part : plan.seqs) {
      const auto& voice = voices.at(part.id);
      const auto tokens = scheduler.tokens(part.id);
      const auto blocks = scheduler.blocks(part.id);
      const auto end = part.first_position + part.num_tokens;
      auto state = state_before_first_token(voice);
      for (std::int32_t position = 0; position < end; ++position) {
        const auto slot = slot_of(blocks, position);
        state = mix(state, static_cast<std::uint64_t>(known(tokens[static_cast<std::size_t>(position)])));
        if (position < part.first_position) {
          EXPECT_EQ(slots_[slot], state) << "sequence " << part.id << " does not find its position " << position;
          continue;
        }
        EXPECT_TRUE(computed.insert(slot).second) << "two sequences write to one slot";
        slots_[slot] = state;
        if (part.all_rows || (part.samples && position == end - 1)) result.rows.push_back(next_token(state, voice));
      }
      if (part.samples) result.sampled.push_back(result.rows.back());
    }
    last_rows_ = result.rows;
    return result;
  }

  // A step that was not launched or failed: the contents of its slots are undefined.
  void fail(const Scheduler& scheduler, const StepPlan& plan) {
    for (const auto& [from, to, kind] : plan.block_copies) {
      for (std::int32_t i = 0; i < block_len_; ++i) slots_[slot_of({&to, 1}, i)] = kSpoilt;
    }
    for (const auto& part : plan.seqs) {
      const auto blocks = scheduler.blocks(part.id);
      for (std::int32_t i = 0; i < part.num_tokens; ++i) slots_[slot_of(blocks, part.first_position + i)] = kSpoilt;
    }
  }

 private:
  static constexpr std::uint64_t kSpoilt = 666;

  TokenId known(TokenId token) const {
    return token >= 0 ? token : last_rows_.at(static_cast<std::size_t>(-1 - token));
  }

  std::size_t slot_of(std::span<const BlockId> blocks, std::int32_t position) const {
    const auto block = blocks[static_cast<std::size_t>(position / block_len_)];
    return static_cast<std::size_t>(block * block_len_ + position % block_len_);
  }

  int block_len_;
  std::vector<std::uint64_t> slots_;
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
      ASSERT_TRUE(scheduler.blocks(id).empty());
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
  Bed(int blocks, int block_len, const Limits& limits, bool prefixes = true)
      : pool(blocks, block_len, prefixes), scheduler(limits, pool) {}

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
