#include "schedule/scheduler.h"

#include <gtest/gtest.h>

#include "charonia/error.h"
#include "scheduler_support.h"

namespace charonia::schedule {
namespace {

TEST(Scheduler, PromptsAreSplitIntoChunksByTheTokenBudget) {
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
  scheduler.add(4, numbers(6, 400), 20, {.priority = 1});
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
  scheduler.add(4, numbers(9), 20, {.salt = 1});  // with another salt
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

TEST(Scheduler, GeneratedTokensAreInsertedToo) {
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

TEST(Scheduler, TheYoungestIsPreemptedAndRecomputedLater) {
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
  EXPECT_EQ(plan.seqs[0].num_tokens, 7) << "prompt and sampled tokens must be computed again";
}

TEST(Scheduler, LowPriorityIsPreemptedBeforeYoung) {
  BlockManager pool(9, 2, false);
  Scheduler scheduler({8, 100}, pool);
  scheduler.add(1, numbers(3), 18, {.priority = 1});
  scheduler.add(2, numbers(3), 18);
  scheduler.add(3, numbers(3), 18, {.priority = 1});
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
  EXPECT_EQ(scheduler.num_cached_tokens(2), 0) << "the value of the first lookup must stay";
}

TEST(Scheduler, AdmissionLeavesABlockForEachSequenceThatWillNeedOne) {
  BlockManager pool(5, 4, false);
  Scheduler scheduler({8, 100}, pool);
  scheduler.add(1, numbers(5), 16);
  step(scheduler);
  EXPECT_EQ(pool.num_available(), 3);
  scheduler.add(2, numbers(6), 12);  // two blocks, one more later; the first sequence will also need one
  step(scheduler);
  EXPECT_EQ(scheduler.num_waiting(), 1);
  scheduler.remove(2);
  scheduler.add(3, numbers(6), 8);  // needs only two blocks
  step(scheduler);
  EXPECT_EQ(scheduler.num_waiting(), 0);
}

TEST(Scheduler, EveryDecodeGetsATokenInEveryStepForAnyBudget) {
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
  scheduler.add(1, numbers(4), 20);  // another sequence with the same id
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
  StepPlan other = next;
  other.seqs[0].num_tokens = 1;
  EXPECT_THROW(scheduler.advance(other), Error);
  EXPECT_THROW(scheduler.advance(plan), Error) << "the plan was already advanced";
  scheduler.advance(next);
  EXPECT_THROW(scheduler.resolve(next, {}), Error) << "a sample is missing";
  EXPECT_THROW(scheduler.resolve(next, std::vector<TokenId>{-4}), Error) << "not a token id";
  scheduler.resolve(next, std::vector<TokenId>{4});
  scheduler.check_integrity();
  EXPECT_EQ(scheduler.tokens(1).back(), 4);
}

TEST(Scheduler, AForgottenPlanCannotAdvance) {
  BlockManager pool(16, 4, true);
  Scheduler scheduler({8, 3}, pool);
  scheduler.add(1, numbers(5), 20);
  const auto forgotten = scheduler.plan();
  scheduler.add(2, numbers(5), 20, {.priority = 1});
  EXPECT_EQ(ids_of(scheduler.plan()), std::vector<SeqId>{2});
  scheduler.advance(forgotten);
  EXPECT_EQ(scheduler.num_computed(1), 0);
  scheduler.check_integrity();
}

TEST(Scheduler, PlaceholdersOfTheNextPlanNameTheirSample) {
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
  EXPECT_THROW(scheduler.advance(second), Error) << "the last token is not sampled yet";
  scheduler.remove(1);
  scheduler.add(1, numbers(3, 30), 20);  // another sequence with the same id
  scheduler.resolve(first, std::vector<TokenId>{7, 8});
  EXPECT_EQ(scheduler.tokens(1).size(), 3U);
  EXPECT_EQ(scheduler.tokens(2).back(), 8);
  scheduler.advance(second);
  EXPECT_EQ(scheduler.tokens(2).back(), -2) << "the placeholder must name sample 1 of its step";
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
  EXPECT_THROW(scheduler.plan(), Error) << "it has all its tokens, but was not removed";
}

TEST(Scheduler, NoPreemptionIfTheNextResultFreesBlocks) {
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

TEST(Scheduler, APreemptedSequenceWaitsForItsLastToken) {
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
  scheduler.remove(1);  // there is space again
  EXPECT_TRUE(scheduler.plan().empty());
  scheduler.resolve(first, std::vector<TokenId>{3, 4});
  const auto third = scheduler.plan();
  ASSERT_EQ(ids_of(third), std::vector<SeqId>{2});
  EXPECT_EQ(third.seqs[0].num_tokens, 7);
  EXPECT_EQ(scheduler.tokens(2).back(), 4);
}

TEST(Scheduler, AppendedTokensRunAfterDecodesAndBeforeLaterPrefill) {
  BlockManager pool(64, 4, true);
  Scheduler scheduler({8, 10}, pool);
  scheduler.add(1, numbers(2, 100), 40);
  scheduler.add(2, numbers(2, 200), 40);
  step(scheduler);
  for (const TokenId token : {7, 8, 9}) scheduler.append(1, token);
  scheduler.add(3, numbers(9, 300), 20);
  auto plan = step(scheduler);
  EXPECT_EQ(ids_of(plan), (std::vector<SeqId>{2, 1, 3}));
  EXPECT_EQ(plan.seqs[1].first_position, 2);
  EXPECT_EQ(plan.seqs[1].num_tokens, 4);
  EXPECT_TRUE(plan.seqs[1].samples);
  EXPECT_TRUE(plan.seqs[1].forced);
  EXPECT_EQ(plan.seqs[2].num_tokens, 5);
  EXPECT_FALSE(plan.seqs[2].forced);
  EXPECT_EQ(scheduler.tokens(1).size(), 7U);
  plan = step(scheduler);
  EXPECT_EQ(plan.seqs[0].num_tokens, 1);
  EXPECT_FALSE(plan.seqs[0].forced);
}

TEST(Scheduler, AppendedTokensThatDoNotFitTheBudgetTakeSeveralSteps) {
  BlockManager pool(64, 4, true);
  Scheduler scheduler({8, 4}, pool);
  scheduler.add(1, numbers(2, 100), 40);
  scheduler.add(2, numbers(2, 200), 40);
  step(scheduler);
  for (int i = 0; i < 6; ++i) scheduler.append(2, i);
  std::vector<std::int32_t> parts;
  for (int i = 0; i < 3; ++i) {
    const auto plan = step(scheduler);
    ASSERT_EQ(ids_of(plan), (std::vector<SeqId>{1, 2})) << "every step must have all decodes";
    parts.push_back(plan.seqs[1].num_tokens);
    EXPECT_EQ(plan.seqs[1].samples, i == 2);
  }
  EXPECT_EQ(parts, (std::vector<std::int32_t>{3, 3, 1}));
}

TEST(Scheduler, EverySequenceWithAppendedTokensGetsOneInEveryStep) {
  BlockManager pool(64, 4, true);
  Scheduler scheduler({8, 6}, pool);
  for (const SeqId id : {1, 2, 3}) scheduler.add(id, numbers(2, 100 * static_cast<int>(id)), 40);
  step(scheduler);
  for (const SeqId id : {1, 2}) {
    for (int i = 0; i < 9; ++i) scheduler.append(id, i);
  }
  const auto plan = step(scheduler);
  ASSERT_EQ(ids_of(plan), (std::vector<SeqId>{3, 1, 2}));
  EXPECT_EQ(plan.seqs[1].num_tokens, 4);
  EXPECT_EQ(plan.seqs[2].num_tokens, 1);
}

TEST(Scheduler, PrefillOfHigherPriorityLeavesOneAppendedTokenOfEach) {
  BlockManager pool(64, 4, true);
  Scheduler scheduler({8, 10}, pool);
  for (const SeqId id : {1, 2}) scheduler.add(id, numbers(2, 100 * static_cast<int>(id)), 60);
  step(scheduler);
  for (const SeqId id : {1, 2}) {
    for (int i = 0; i < 30; ++i) scheduler.append(id, i);
  }
  scheduler.add(3, numbers(12, 300), 20, {.priority = 1});
  auto plan = step(scheduler);
  ASSERT_EQ(ids_of(plan), (std::vector<SeqId>{1, 2, 3}));
  EXPECT_EQ(plan.seqs[0].num_tokens, 1);
  EXPECT_EQ(plan.seqs[1].num_tokens, 1);
  EXPECT_EQ(plan.seqs[2].num_tokens, 8);
  plan = step(scheduler);
  ASSERT_EQ(ids_of(plan), (std::vector<SeqId>{1, 2, 3}));
  EXPECT_EQ(plan.seqs[0].num_tokens, 5) << "the first sequence must get the rest of the budget";
  EXPECT_EQ(plan.seqs[0].first_position, 3);
  EXPECT_EQ(plan.seqs[1].num_tokens, 1);
  EXPECT_EQ(plan.seqs[2].num_tokens, 4);
  EXPECT_TRUE(plan.seqs[2].samples);
  EXPECT_EQ(plan.num_tokens, 10);
}

TEST(Scheduler, AppendingToAFullOrPendingSequenceIsAnError) {
  BlockManager pool(64, 4, true);
  Scheduler scheduler({8, 100}, pool);
  scheduler.add(1, numbers(2), 5);
  EXPECT_THROW(scheduler.append(2, 1), Error);
  const auto plan = scheduler.plan();
  scheduler.advance(plan);
  EXPECT_THROW(scheduler.append(1, 1), Error) << "its last token is not sampled yet";
  scheduler.resolve(plan, std::vector<TokenId>{1});
  EXPECT_THROW(scheduler.append(1, -1), Error);
  scheduler.append(1, 1);
  scheduler.append(1, 1);
  EXPECT_THROW(scheduler.append(1, 1), Error) << "it has all its tokens";
  EXPECT_EQ(scheduler.tokens(1).size(), 5U);
  EXPECT_TRUE(scheduler.remove(1));
  scheduler.check_integrity();
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
  EXPECT_THROW(scheduler.plan(), Error) << "it has all its tokens, but was not removed";
  EXPECT_TRUE(scheduler.remove(1));
  EXPECT_TRUE(scheduler.plan().empty());
}

}  // namespace
}  // namespace charonia::schedule
