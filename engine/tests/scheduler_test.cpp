#include "schedule/scheduler.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <optional>
#include <ostream>
#include <random>
#include <set>
#include <utility>

#include "charonia/error.h"

namespace charonia::schedule {
namespace {

using cache::BlockId;
using cache::BlockManager;

constexpr int kVocab = 5;

std::uint64_t mix(std::uint64_t hash, std::uint64_t value) {
  hash = (hash ^ (value + 0x9e3779b97f4a7c15ULL)) * 0xbf58476d1ce4e5b9ULL;
  return hash ^ (hash >> 29);
}

// The "model": what it knows of a token is a hash of all tokens up to it, and the next token follows from that.
std::uint64_t state_before_first_token(std::uint64_t salt) { return mix(17, salt); }
TokenId next_token(std::uint64_t state) { return static_cast<TokenId>((state >> 20) % kVocab); }

std::vector<TokenId> generate_alone(const std::vector<TokenId>& prompt, std::size_t total, std::uint64_t salt) {
  auto tokens = prompt;
  auto state = state_before_first_token(salt);
  for (std::size_t i = 0; tokens.size() < total; ++i) {
    state = mix(state, static_cast<std::uint64_t>(tokens[i]));
    if (i + 1 == tokens.size()) tokens.push_back(next_token(state));
  }
  return tokens;
}

// Runs plans as the engine does, on a cache that holds a state for each position. Like the engine's devices, it knows
// the tokens that the step before sampled, where the scheduler has placeholders.
class Device {
 public:
  Device(const BlockManager& pool)
      : block_len_(pool.block_len()), slots_(static_cast<std::size_t>(pool.num_blocks() * pool.block_len())) {}

  // Returns the sampled tokens. Every position before a computed one must be in the cache, as attention needs it.
  std::vector<TokenId> step(const Scheduler& scheduler, const StepPlan& plan,
                            const std::map<SeqId, std::uint64_t>& salts) {
    std::vector<TokenId> sampled;
    std::set<std::size_t> written;
    const auto known = [this](TokenId token) {
      return token >= 0 ? token : last_sampled_.at(static_cast<std::size_t>(-1 - token));
    };
    for (const auto& part : plan.seqs) {
      const auto tokens = scheduler.tokens(part.id);
      const auto blocks = scheduler.blocks(part.id);
      const auto end = part.first_position + part.num_tokens;
      auto state = state_before_first_token(salts.at(part.id));
      for (std::int32_t position = 0; position < end; ++position) {
        const auto slot = slot_of(blocks, position);
        state = mix(state, static_cast<std::uint64_t>(known(tokens[static_cast<std::size_t>(position)])));
        if (position < part.first_position) {
          EXPECT_EQ(slots_[slot], state) << "sequence " << part.id << " does not find its position " << position;
        } else {
          EXPECT_TRUE(written.insert(slot).second) << "two sequences write to one slot";
          slots_[slot] = state;
        }
      }
      if (part.samples) sampled.push_back(next_token(slots_[slot_of(blocks, end - 1)]));
    }
    written_.erase(written_.begin());
    written_.emplace_back(written.begin(), written.end());
    last_sampled_ = sampled;
    return sampled;
  }

  // The last two steps failed: what they wrote is anything.
  void spoil() {
    for (const auto& slots : written_) {
      for (const auto slot : slots) slots_[slot] = 666;
    }
  }

 private:
  std::size_t slot_of(std::span<const BlockId> blocks, std::int32_t position) const {
    const auto block = blocks[static_cast<std::size_t>(position / block_len_)];
    return static_cast<std::size_t>(block * block_len_ + position % block_len_);
  }

  int block_len_;
  std::vector<std::uint64_t> slots_;
  std::vector<std::vector<std::size_t>> written_{2};  // slots, by the last two steps
  std::vector<TokenId> last_sampled_;
};

// What holds for every plan, whatever the load.
void check_plan(const Scheduler& scheduler, const StepPlan& plan, const Limits& limits) {
  std::int32_t tokens = 0;
  std::set<SeqId> ids;
  for (const auto& part : plan.seqs) {
    ASSERT_TRUE(ids.insert(part.id).second) << "a sequence is planned twice";
    ASSERT_GE(part.num_tokens, 1);
    ASSERT_EQ(part.first_position, scheduler.num_computed(part.id));
    const auto end = part.first_position + part.num_tokens;
    ASSERT_LE(end, static_cast<std::int32_t>(scheduler.tokens(part.id).size()));
    ASSERT_EQ(part.samples, end == static_cast<std::int32_t>(scheduler.tokens(part.id).size()));
    tokens += part.num_tokens;
  }
  ASSERT_EQ(tokens, plan.num_tokens);
  ASSERT_LE(tokens, limits.token_budget);
  ASSERT_LE(scheduler.num_running(), limits.max_batch_size);
  for (const auto id : plan.preempted) {
    ASSERT_FALSE(ids.contains(id)) << "planned and preempted";
    ASSERT_TRUE(scheduler.blocks(id).empty());
  }
}

// A step whose samples are known at once.
void commit(Scheduler& scheduler, const StepPlan& plan, const std::vector<TokenId>& sampled) {
  scheduler.advance(plan);
  scheduler.resolve(plan, sampled);
}

std::vector<TokenId> numbers(int n, int first = 0) {
  std::vector<TokenId> tokens(static_cast<std::size_t>(n));
  std::iota(tokens.begin(), tokens.end(), first);
  return tokens;
}

// Plans and commits a step in which every sample is token 0.
StepPlan step(Scheduler& scheduler) {
  auto plan = scheduler.plan();
  scheduler.check_integrity();
  const auto samples = std::ranges::count_if(plan.seqs, [](const auto& part) { return part.samples; });
  commit(scheduler, plan, std::vector<TokenId>(static_cast<std::size_t>(samples), 0));
  scheduler.check_integrity();
  return plan;
}

std::vector<SeqId> ids_of(const StepPlan& plan) {
  std::vector<SeqId> ids;
  for (const auto& part : plan.seqs) ids.push_back(part.id);
  return ids;
}

TEST(Scheduler, PromptsAreCutIntoChunksUnderTheTokenBudget) {
  BlockManager pool(16, 4, true);
  Scheduler scheduler({8, 8}, pool);
  scheduler.add(1, numbers(20), 24);
  auto plan = step(scheduler);
  ASSERT_EQ(plan.seqs.size(), 1U);
  EXPECT_EQ(plan.seqs[0].num_tokens, 8);
  EXPECT_FALSE(plan.seqs[0].samples);
  plan = step(scheduler);
  EXPECT_EQ(plan.seqs[0].first_position, 8);
  plan = step(scheduler);
  EXPECT_EQ(plan.seqs[0].num_tokens, 4);
  EXPECT_TRUE(plan.seqs[0].samples);
  EXPECT_EQ(scheduler.tokens(1).size(), 21U);
  plan = step(scheduler);
  EXPECT_EQ(plan.seqs[0].first_position, 20);
  EXPECT_EQ(plan.seqs[0].num_tokens, 1);
}

TEST(Scheduler, DecodesGoFirstThenPrefillByPriorityAndArrival) {
  BlockManager pool(64, 4, true);
  Scheduler scheduler({8, 10}, pool);
  scheduler.add(1, numbers(2, 100), 20);
  step(scheduler);
  scheduler.add(2, numbers(6, 200), 20);
  scheduler.add(3, numbers(6, 300), 20);
  scheduler.add(4, numbers(6, 400), 20, 1);
  auto plan = step(scheduler);
  EXPECT_EQ(ids_of(plan), (std::vector<SeqId>{1, 4, 2}));
  EXPECT_EQ(plan.seqs[2].num_tokens, 3);
  EXPECT_EQ(ids_of(step(scheduler)), (std::vector<SeqId>{4, 1, 2, 3}));
}

TEST(Scheduler, AtMostMaxBatchSizeSequencesRun) {
  BlockManager pool(64, 4, true);
  Scheduler scheduler({2, 100}, pool);
  for (SeqId id = 1; id <= 3; ++id) scheduler.add(id, numbers(3, 10 * static_cast<int>(id)), 20);
  EXPECT_EQ(ids_of(step(scheduler)), (std::vector<SeqId>{1, 2}));
  EXPECT_EQ(scheduler.num_running(), 2);
  EXPECT_EQ(scheduler.num_waiting(), 1);
  EXPECT_TRUE(scheduler.remove(1));
  EXPECT_EQ(ids_of(step(scheduler)), (std::vector<SeqId>{2, 3}));
}

TEST(Scheduler, APrefixHitLeavesTheLastTokenToCompute) {
  BlockManager pool(64, 4, true);
  Scheduler scheduler({4, 100}, pool);
  scheduler.add(1, numbers(8), 20);
  EXPECT_EQ(scheduler.num_cached_tokens(1), -1);
  step(scheduler);
  EXPECT_EQ(scheduler.num_cached_tokens(1), 0);
  scheduler.add(2, numbers(8), 20);
  scheduler.add(3, numbers(9), 20);
  scheduler.add(4, numbers(9), 20, 0, 1);  // of another salt
  const auto plan = step(scheduler);
  EXPECT_EQ(ids_of(plan), (std::vector<SeqId>{1, 2, 3, 4}));
  EXPECT_EQ(plan.seqs[1].first_position, 4);
  EXPECT_EQ(plan.seqs[2].first_position, 8);
  EXPECT_EQ(plan.seqs[3].first_position, 0);
  EXPECT_EQ(scheduler.num_cached_tokens(2), 4);
  EXPECT_EQ(scheduler.num_cached_tokens(3), 8);
  EXPECT_EQ(scheduler.num_cached_tokens(4), 0);
  EXPECT_EQ(scheduler.prefix_query_tokens(), 8 + 8 + 9 + 9);
  EXPECT_EQ(scheduler.prefix_hit_tokens(), 4 + 8);
}

TEST(Scheduler, SequencesThatComputeTheSameBlocksAtOnceShareThemAfterwards) {
  BlockManager pool(64, 4, true);
  Scheduler scheduler({8, 100}, pool);
  for (SeqId id = 1; id <= 3; ++id) scheduler.add(id, numbers(10), 20);
  auto plan = scheduler.plan();
  EXPECT_EQ(pool.num_active(), 9);
  commit(scheduler, plan, {0, 1, 2});
  scheduler.check_integrity();
  EXPECT_EQ(pool.num_active(), 2 + 3);
  EXPECT_EQ(scheduler.blocks(1)[1], scheduler.blocks(3)[1]);
  EXPECT_NE(scheduler.blocks(1)[2], scheduler.blocks(3)[2]);
}

TEST(Scheduler, GeneratedTokensArePublishedToo) {
  BlockManager pool(64, 4, true);
  Scheduler scheduler({8, 100}, pool);
  scheduler.add(1, numbers(3), 20);
  for (int i = 0; i < 6; ++i) step(scheduler);
  std::vector<TokenId> next_turn(scheduler.tokens(1).begin(), scheduler.tokens(1).end());
  scheduler.remove(1);
  next_turn.push_back(7);
  scheduler.add(2, next_turn, 20);
  EXPECT_EQ(step(scheduler).seqs[0].first_position, 8);
}

TEST(Scheduler, TheYoungestIsPreemptedAndComputedAnewLater) {
  BlockManager pool(6, 2, false);
  Scheduler scheduler({8, 100}, pool);
  scheduler.add(1, numbers(3), 12);
  scheduler.add(2, numbers(3), 12);
  step(scheduler);
  EXPECT_EQ(scheduler.num_running(), 2);
  StepPlan plan;
  do {
    plan = step(scheduler);
  } while (plan.preempted.empty());
  EXPECT_EQ(plan.preempted, std::vector<SeqId>{2});
  EXPECT_EQ(ids_of(plan), std::vector<SeqId>{1});
  EXPECT_EQ(scheduler.num_preemptions(), 1);
  EXPECT_EQ(scheduler.tokens(2).size(), 7U);
  while (scheduler.tokens(1).size() < 12) step(scheduler);
  EXPECT_EQ(scheduler.tokens(2).size(), 7U);
  scheduler.remove(1);
  plan = step(scheduler);
  EXPECT_EQ(ids_of(plan), std::vector<SeqId>{2});
  EXPECT_EQ(plan.seqs[0].num_tokens, 7) << "prompt and sampled tokens are computed anew";
}

TEST(Scheduler, LowPriorityIsPreemptedBeforeYoung) {
  BlockManager pool(9, 2, false);
  Scheduler scheduler({8, 100}, pool);
  scheduler.add(1, numbers(3), 18, 1);
  scheduler.add(2, numbers(3), 18, 0);
  scheduler.add(3, numbers(3), 18, 1);
  step(scheduler);
  EXPECT_EQ(scheduler.num_running(), 3);
  StepPlan plan;
  do {
    plan = step(scheduler);
  } while (plan.preempted.empty());
  EXPECT_EQ(plan.preempted, std::vector<SeqId>{2});
  do {
    plan = step(scheduler);
  } while (plan.preempted.empty());
  EXPECT_EQ(plan.preempted, std::vector<SeqId>{3});
  EXPECT_EQ(ids_of(plan), std::vector<SeqId>{1});
}

TEST(Scheduler, APreemptedSequenceFindsItsOwnBlocksAgain) {
  BlockManager pool(6, 2, true);
  Scheduler scheduler({8, 100}, pool);
  scheduler.add(1, numbers(3, 10), 8);
  scheduler.add(2, numbers(3, 20), 8);
  StepPlan plan;
  do {
    plan = step(scheduler);
  } while (plan.preempted.empty());
  EXPECT_EQ(plan.preempted, std::vector<SeqId>{2});
  scheduler.remove(1);
  plan = step(scheduler);
  EXPECT_EQ(plan.seqs[0].first_position, 4);
  EXPECT_EQ(scheduler.num_cached_tokens(2), 0) << "stays what was found first";
}

TEST(Scheduler, AnAdmittedSequenceLeavesABlockForEachThatWillNeedOne) {
  BlockManager pool(5, 4, false);
  Scheduler scheduler({8, 100}, pool);
  scheduler.add(1, numbers(5), 16);
  step(scheduler);
  EXPECT_EQ(pool.num_available(), 3);
  scheduler.add(2, numbers(6), 12);  // two blocks, one more later; and the first one will need one as well
  step(scheduler);
  EXPECT_EQ(scheduler.num_waiting(), 1);
  scheduler.remove(2);
  scheduler.add(3, numbers(6), 8);  // two blocks are all it needs
  step(scheduler);
  EXPECT_EQ(scheduler.num_waiting(), 0);
}

TEST(Scheduler, EveryDecodeGetsATokenInEveryStepHoweverSmallTheBudget) {
  BlockManager pool(64, 4, true);
  Scheduler scheduler({8, 3}, pool);
  for (SeqId id = 1; id <= 7; ++id) scheduler.add(id, {static_cast<TokenId>(id)}, 60);
  for (int i = 0; i < 59; ++i) EXPECT_EQ(ids_of(step(scheduler)), (std::vector<SeqId>{1, 2, 3}));
  for (SeqId id = 1; id <= 3; ++id) scheduler.remove(id);
  for (int i = 0; i < 10; ++i) EXPECT_EQ(ids_of(step(scheduler)), (std::vector<SeqId>{4, 5, 6}));
}

TEST(Scheduler, SequencesMayBeRemovedBetweenPlanAndAdvance) {
  BlockManager pool(16, 4, true);
  Scheduler scheduler({8, 100}, pool);
  for (SeqId id = 1; id <= 3; ++id) scheduler.add(id, numbers(5, 10 * static_cast<int>(id)), 20);
  const auto plan = scheduler.plan();
  scheduler.remove(2);
  scheduler.remove(1);
  scheduler.add(1, numbers(4), 20);  // another one under the same id
  commit(scheduler, plan, {7, 8, 9});
  scheduler.check_integrity();
  EXPECT_EQ(scheduler.tokens(3).back(), 9);
  EXPECT_EQ(scheduler.tokens(1).size(), 4U);
  EXPECT_EQ(scheduler.num_computed(1), 0);
}

TEST(Scheduler, APlanThatDoesNotAdvanceIsPlannedAgain) {
  BlockManager pool(16, 4, true);
  Scheduler scheduler({8, 3}, pool);
  scheduler.add(1, numbers(5), 20);
  scheduler.plan();
  const auto plan = step(scheduler);
  EXPECT_EQ(plan.seqs[0].first_position, 0);
  const auto next = scheduler.plan();
  EXPECT_THROW(scheduler.advance({{{1, 3, 1, false}}, 1, {}}), Error);
  EXPECT_THROW(scheduler.advance(plan), Error) << "of a step that is over";
  scheduler.advance(next);
  EXPECT_THROW(scheduler.resolve(next, {}), Error) << "a sample is missing";
  EXPECT_THROW(scheduler.resolve(next, std::vector<TokenId>{-4}), Error) << "no token";
  scheduler.resolve(next, std::vector<TokenId>{4});
  scheduler.check_integrity();
  EXPECT_EQ(scheduler.tokens(1).back(), 4);
}

TEST(Scheduler, AForgottenPlanCannotAdvance) {
  BlockManager pool(16, 4, true);
  Scheduler scheduler({8, 3}, pool);
  scheduler.add(1, numbers(5), 20);
  const auto forgotten = scheduler.plan();
  scheduler.add(2, numbers(5), 20, 1);
  EXPECT_EQ(ids_of(scheduler.plan()), std::vector<SeqId>{2});
  scheduler.advance(forgotten);
  EXPECT_EQ(scheduler.num_computed(1), 0);
  scheduler.check_integrity();
}

TEST(Scheduler, TheNextStepIsPlannedOverPlaceholdersThatSayWhichSampleTheyAre) {
  BlockManager pool(16, 4, true);
  Scheduler scheduler({8, 100}, pool);
  scheduler.add(1, numbers(5, 10), 20);
  scheduler.add(2, numbers(5, 20), 20);
  const auto first = scheduler.plan();
  scheduler.advance(first);
  EXPECT_EQ(scheduler.tokens(1).back(), -1);
  EXPECT_EQ(scheduler.tokens(2).back(), -2);
  const auto second = scheduler.plan();
  ASSERT_EQ(ids_of(second), (std::vector<SeqId>{1, 2}));
  EXPECT_EQ(second.seqs[0].first_position, 5);
  EXPECT_TRUE(second.seqs[0].samples);
  EXPECT_THROW(scheduler.advance(second), Error) << "over tokens that are not known";
  scheduler.remove(1);
  scheduler.add(1, numbers(3, 30), 20);  // another one under the same id
  scheduler.resolve(first, std::vector<TokenId>{7, 8});
  EXPECT_EQ(scheduler.tokens(1).size(), 3U);
  EXPECT_EQ(scheduler.tokens(2).back(), 8);
  scheduler.advance(second);
  EXPECT_EQ(scheduler.tokens(2).back(), -2) << "sample 1 of its step, whoever left";
  scheduler.resolve(second, std::vector<TokenId>{9, 6});
  EXPECT_EQ(scheduler.tokens(2).back(), 6);
  scheduler.check_integrity();
}

TEST(Scheduler, ASequenceWhosePlaceholderIsItsLastTokenIsNotPlannedAgain) {
  BlockManager pool(16, 4, true);
  Scheduler scheduler({8, 100}, pool);
  scheduler.add(1, numbers(5), 6);
  const auto plan = scheduler.plan();
  scheduler.advance(plan);
  EXPECT_TRUE(scheduler.plan().empty());
  scheduler.resolve(plan, std::vector<TokenId>{3});
  EXPECT_THROW(scheduler.plan(), Error) << "it has all its tokens and was not removed";
}

TEST(Scheduler, NobodyIsPreemptedForBlocksThatComeFreeWithTheNextResult) {
  BlockManager pool(6, 2, false);
  Scheduler scheduler({8, 100}, pool);
  scheduler.add(1, numbers(3, 10), 6);
  scheduler.add(2, numbers(4, 20), 8);
  step(scheduler);
  step(scheduler);
  const auto last_of_1 = scheduler.plan();
  ASSERT_EQ(ids_of(last_of_1), (std::vector<SeqId>{1, 2}));
  scheduler.advance(last_of_1);
  EXPECT_EQ(pool.num_available(), 0);
  EXPECT_TRUE(scheduler.plan().empty()) << "2 needs another block, and 1 gives back three when its token is known";
  scheduler.resolve(last_of_1, std::vector<TokenId>{1, 1});
  scheduler.remove(1);
  EXPECT_EQ(ids_of(scheduler.plan()), std::vector<SeqId>{2});
  EXPECT_EQ(scheduler.num_preemptions(), 0);
}

TEST(Scheduler, APreemptedSequenceWaitsForItsLastTokenToBeKnown) {
  BlockManager pool(6, 2, false);
  Scheduler scheduler({8, 100}, pool);
  scheduler.add(1, numbers(3, 10), 12);
  scheduler.add(2, numbers(3, 20), 12);
  while (scheduler.tokens(2).size() < 6) step(scheduler);
  const auto first = scheduler.plan();
  ASSERT_EQ(ids_of(first), (std::vector<SeqId>{1, 2}));
  scheduler.advance(first);
  const auto second = scheduler.plan();
  EXPECT_EQ(second.preempted, std::vector<SeqId>{2});
  scheduler.remove(1);  // there is room again
  EXPECT_TRUE(scheduler.plan().empty());
  scheduler.resolve(first, std::vector<TokenId>{3, 4});
  const auto third = scheduler.plan();
  ASSERT_EQ(ids_of(third), std::vector<SeqId>{2});
  EXPECT_EQ(third.seqs[0].num_tokens, 7);
  EXPECT_EQ(scheduler.tokens(2).back(), 4);
}

TEST(Scheduler, AfterAFailedStepEverythingIsComputedAnewAndNothingOldIsFound) {
  BlockManager pool(32, 2, true);
  Scheduler scheduler({8, 100}, pool);
  scheduler.add(1, numbers(6), 20);
  step(scheduler);
  scheduler.add(2, numbers(6), 20);
  const auto failed = scheduler.plan();
  EXPECT_EQ(failed.seqs[1].first_position, 4);
  scheduler.advance(failed);
  EXPECT_THROW(scheduler.restart(), Error) << "sequences of the failed step are still there";
  scheduler.remove(2);
  scheduler.resolve(failed, std::vector<TokenId>{1, 1});
  scheduler.restart();
  scheduler.check_integrity();
  EXPECT_EQ(pool.num_free(), 32);
  scheduler.add(3, numbers(6), 20);
  const auto plan = step(scheduler);
  EXPECT_EQ(ids_of(plan), (std::vector<SeqId>{1, 3}));
  EXPECT_EQ(plan.seqs[0].num_tokens, 8);
  EXPECT_EQ(plan.seqs[1].first_position, 0);
}

TEST(Scheduler, MisuseIsAnError) {
  BlockManager pool(4, 4, true);
  EXPECT_THROW(Scheduler({0, 1}, pool), Error);
  EXPECT_THROW(Scheduler({1, 0}, pool), Error);
  Scheduler scheduler({8, 100}, pool);
  EXPECT_EQ(scheduler.capacity_tokens(), 16);
  EXPECT_TRUE(scheduler.plan().empty());
  EXPECT_THROW(scheduler.add(1, {}, 4), Error);
  EXPECT_THROW(scheduler.add(1, numbers(4), 4), Error);
  EXPECT_THROW(scheduler.add(1, numbers(4), 17), Error);
  EXPECT_THROW(scheduler.tokens(1), Error);
  EXPECT_FALSE(scheduler.remove(1));
  scheduler.add(1, numbers(15), 16);
  EXPECT_THROW(scheduler.add(1, numbers(3), 8), Error);
  step(scheduler);
  EXPECT_THROW(scheduler.plan(), Error) << "it has all its tokens and was not removed";
  EXPECT_TRUE(scheduler.remove(1));
  EXPECT_TRUE(scheduler.plan().empty());
}

// ---- property test ----

struct Load {
  const char* name;
  int num_blocks, block_len;
  Limits limits;
  int max_total;
  bool prefix_caching;
  bool preempts;  // it comes to that
};

void PrintTo(const Load& load, std::ostream* out) { *out << load.name; }

// The last parameter: how many steps run while the next one is planned.
class RandomLoad : public testing::TestWithParam<std::tuple<Load, std::uint64_t, int>> {
 protected:
  int below(int n) { return std::uniform_int_distribution<int>(0, n - 1)(random_); }
  std::mt19937_64 random_{std::get<1>(GetParam())};
};

TEST_P(RandomLoad, EverySequenceGetsTheTokensThatItGetsAlone) {
  struct Client {
    std::vector<TokenId> expected;
    std::size_t prompt_tokens;
    std::int32_t cached_tokens = -1;
  };
  const auto& load = std::get<0>(GetParam());
  BlockManager pool(load.num_blocks, load.block_len, load.prefix_caching);
  Scheduler scheduler(load.limits, pool);
  Device device(pool);
  std::map<SeqId, Client> clients;
  std::map<SeqId, std::uint64_t> salts;
  std::vector<std::vector<TokenId>> texts;  // of finished ones, to be continued by later prompts
  SeqId next_id = 1;
  int steps_since_end = 0, finished = 0;
  const auto capacity = static_cast<int>(scheduler.capacity_tokens());
  const int most = std::min(load.max_total, capacity);

  const auto arrive = [&] {
    std::vector<TokenId> prompt;
    if (!texts.empty() && below(2) == 0) {
      prompt = texts[static_cast<std::size_t>(below(static_cast<int>(texts.size())))];
      prompt.resize(static_cast<std::size_t>(1 + below(static_cast<int>(prompt.size()))));
    }
    // Half of them short, so that they grow while they decode.
    const int more = below(2) == 0 ? below(3) : below(most - 1 - std::min(most - 2, static_cast<int>(prompt.size())));
    for (int i = 0; i < more; ++i) prompt.push_back(below(10) == 0 ? below(kVocab) : 0);
    if (prompt.empty()) prompt.push_back(below(kVocab));
    prompt.resize(std::min(prompt.size(), static_cast<std::size_t>(most - 1)));
    const auto size = static_cast<int>(prompt.size());
    const int total = size + 1 + below(most - size);
    const auto salt = static_cast<std::uint64_t>(below(4) == 0);
    clients[next_id] = {generate_alone(prompt, static_cast<std::size_t>(total), salt), prompt.size()};
    salts[next_id] = salt;
    scheduler.add(next_id++, std::move(prompt), total, below(3) - 1, salt);
  };
  const auto leave = [&](SeqId id) {
    ASSERT_TRUE(scheduler.remove(id));
    clients.erase(id);
    steps_since_end = 0;
  };

  struct InFlight {
    StepPlan plan;
    std::vector<TokenId> sampled;
  };
  const int depth = std::get<2>(GetParam());
  std::optional<InFlight> in_flight;
  const auto settle = [&] {
    const auto settled = std::exchange(in_flight, std::nullopt);
    scheduler.resolve(settled->plan, settled->sampled);
    ASSERT_NO_THROW(scheduler.check_integrity());
    for (const auto& part : settled->plan.seqs) {
      const auto found = clients.find(part.id);
      if (found == clients.end()) continue;
      auto& client = found->second;
      const auto tokens = scheduler.tokens(part.id);
      ASSERT_LE(tokens.size(), client.expected.size());
      ASSERT_TRUE(std::equal(tokens.begin(), tokens.end(), client.expected.begin())) << "sequence " << part.id;
      const auto cached = scheduler.num_cached_tokens(part.id);
      ASSERT_TRUE(cached >= 0 && cached < static_cast<std::int32_t>(client.prompt_tokens));
      ASSERT_TRUE(client.cached_tokens == -1 || client.cached_tokens == cached);
      client.cached_tokens = cached;
      if (tokens.size() < client.expected.size()) continue;
      if (texts.size() > 20) texts.erase(texts.begin());
      texts.push_back(client.expected);
      leave(part.id);
      ++finished;
    }
  };
  const auto maybe_one_leaves = [&] {
    if (clients.empty() || below(80) != 0) return;
    leave(std::next(clients.begin(), below(static_cast<int>(clients.size())))->first);
  };

  constexpr int kSteps = 3000;
  for (int i = 0; i < kSteps || !clients.empty(); ++i) {
    if (i < kSteps) {
      const bool burst = i % 200 < 10;
      while (clients.size() < 40 && below(burst ? 2 : 8) == 0) arrive();
      maybe_one_leaves();
    }
    // Now and then the result is waited for before the next step is planned.
    if (in_flight && below(10) == 0) settle();
    std::vector<SeqId> decodes;
    bool ending = false;
    for (const auto& [id, client] : clients) {
      const auto computed = scheduler.num_computed(id);
      const auto size = scheduler.tokens(id).size();
      ending |= size == client.expected.size();
      if (computed > 0 && computed + 1 == static_cast<std::int32_t>(size) && size < client.expected.size()) {
        decodes.push_back(id);
      }
    }
    auto plan = scheduler.plan();
    ASSERT_NO_THROW(scheduler.check_integrity());
    const auto planned = ids_of(plan);
    for (const auto id : decodes) {
      const auto times = std::ranges::count(planned, id) + std::ranges::count(plan.preempted, id);
      ASSERT_TRUE(times == 1 || (ending && times == 0 && plan.preempted.empty())) << "a decode was left out";
    }
    check_plan(scheduler, plan, load.limits);
    if (HasFatalFailure()) return;
    ASSERT_TRUE(!plan.empty() || clients.empty() || in_flight);
    const bool fails = below(50) == 0;
    std::vector<TokenId> sampled;
    if (!fails) sampled = device.step(scheduler, plan, salts);
    ASSERT_FALSE(HasFailure());
    maybe_one_leaves();
    if (in_flight && below(100) == 0) {
      // The step that runs fails after it has advanced, and the one behind it is worth nothing.
      const auto failed = std::exchange(in_flight, std::nullopt);
      for (const auto& part : failed->plan.seqs) {
        if (clients.contains(part.id)) leave(part.id);
      }
      device.spoil();
      scheduler.restart();
      ASSERT_NO_THROW(scheduler.check_integrity());
      continue;
    }
    if (in_flight) settle();
    if (HasFatalFailure()) return;
    if (fails) continue;  // the step is planned anew
    scheduler.advance(plan);
    ASSERT_NO_THROW(scheduler.check_integrity());
    in_flight = InFlight{std::move(plan), std::move(sampled)};
    if (depth == 0) settle();
    if (HasFatalFailure()) return;

    // At worst every running sequence comes to its last token but one before the first of them ends.
    const int bound = 2 * most * (load.limits.max_batch_size + 1) + 50;
    ASSERT_LT(++steps_since_end, bound) << "nothing comes to an end";
  }
  EXPECT_EQ(scheduler.num_running() + scheduler.num_waiting(), 0);
  EXPECT_EQ(pool.num_active(), 0);
  EXPECT_EQ(pool.num_available(), load.num_blocks);
  EXPECT_GT(finished, 50);
  RecordProperty("finished", finished);
  RecordProperty("preemptions", static_cast<int>(scheduler.num_preemptions()));
  RecordProperty("prefix_hit_tokens", static_cast<int>(scheduler.prefix_hit_tokens()));
  EXPECT_EQ(scheduler.num_preemptions() > 0, load.preempts);
  EXPECT_EQ(scheduler.prefix_hit_tokens() > 0, load.prefix_caching);
}

INSTANTIATE_TEST_SUITE_P(Loads, RandomLoad,
                         testing::Combine(testing::Values(Load{"roomy", 700, 4, {16, 64}, 40, true, false},
                                                          Load{"tight", 16, 2, {8, 16}, 24, true, true},
                                                          Load{"tiny", 6, 2, {8, 8}, 12, true, true},
                                                          Load{"long", 40, 2, {20, 30}, 70, true, true},
                                                          Load{"blocks_of_one", 18, 1, {6, 10}, 18, true, true},
                                                          Load{"budget_of_one", 10, 2, {5, 1}, 16, true, true},
                                                          Load{"budget_below_batch", 12, 3, {12, 4}, 24, true, true},
                                                          Load{"one_at_a_time", 30, 4, {1, 16}, 30, true, false},
                                                          Load{"no_prefixes", 16, 2, {8, 16}, 24, false, true}),
                                          testing::Range<std::uint64_t>(1, 6), testing::Values(0, 1)),
                         [](const auto& info) {
                           return std::string(std::get<0>(info.param).name) + "_" +
                                  std::to_string(std::get<1>(info.param)) + "_depth_" +
                                  std::to_string(std::get<2>(info.param));
                         });

}  // namespace
}  // namespace charonia::schedule
