// Rows of logits, pools that run out of memory, and the cost of waiting.
#include <gtest/gtest.h>

#include "charonia/error.h"
#include "scheduler_support.h"

namespace charonia::schedule {
namespace {

ScheduledSeq part(SeqId id, std::int32_t first, std::int32_t num, bool samples, bool all_rows) {
  return {.id = id, .first_position = first, .num_tokens = num, .samples = samples, .all_rows = all_rows};
}

void expect_parts(const StepPlan& plan, const std::vector<ScheduledSeq>& expected) {
  ASSERT_EQ(plan.seqs.size(), expected.size());
  for (std::size_t i = 0; i < expected.size(); ++i) {
    const auto &is = plan.seqs[i], &should = expected[i];
    EXPECT_TRUE(is.id == should.id && is.first_position == should.first_position &&
                is.num_tokens == should.num_tokens && is.samples == should.samples && is.all_rows == should.all_rows)
        << "part " << i << ": " << is.num_tokens << " of sequence " << is.id << " from " << is.first_position;
  }
}

TEST(SchedulerRows, DecodesGetRowsFirstAndPromptsTheRestInOrder) {
  BlockManager pool(64, 4, true);
  Scheduler scheduler({4, 100, 6}, pool);
  scheduler.add(1, numbers(3, 100), 20);
  step(scheduler);
  scheduler.add(2, numbers(9, 200), 20, {.all_rows = true});
  scheduler.add(3, numbers(7, 300), 20);
  // A quarter of all rows, here one, is left for later sequences.
  expect_parts(step(scheduler), {part(1, 3, 1, true, false), part(2, 0, 4, false, true), part(3, 0, 7, true, false)});
  expect_parts(step(scheduler), {part(1, 4, 1, true, false), part(3, 7, 1, true, false), part(2, 4, 3, false, true)});
  expect_parts(step(scheduler), {part(1, 5, 1, true, false), part(3, 8, 1, true, false), part(2, 7, 2, true, true)});
}

TEST(SchedulerRows, WithoutARowAllTokensExceptTheLastAreComputed) {
  BlockManager pool(64, 4, true);
  Scheduler scheduler({4, 12, 4}, pool);
  scheduler.add(1, numbers(20, 100), 30);
  scheduler.add(2, numbers(8, 200), 20, {.priority = 1, .all_rows = true});
  scheduler.add(3, numbers(8, 300), 20, {.priority = 1, .all_rows = true});
  // No sequence is admitted if no row is left.
  expect_parts(step(scheduler), {part(2, 0, 3, false, true), part(3, 0, 1, false, true)});
  scheduler.remove(2);
  scheduler.remove(3);
  step(scheduler);
  scheduler.add(4, numbers(8, 400), 20, {.priority = 1, .all_rows = true});
  scheduler.add(5, numbers(8, 500), 20, {.priority = 1, .all_rows = true});
  expect_parts(step(scheduler),
               {part(4, 0, 3, false, true), part(5, 0, 1, false, true), part(1, 12, 7, false, false)});
  expect_parts(step(scheduler), {part(1, 19, 1, true, false), part(4, 3, 2, false, true), part(5, 1, 1, false, true)});
}

TEST(SchedulerRows, PlaceholdersCountTheRowsOfTheStep) {
  BlockManager pool(64, 4, true);
  Scheduler scheduler({4, 100, 50}, pool);
  scheduler.add(1, numbers(3, 100), 20);
  scheduler.add(2, numbers(5, 200), 20, {.all_rows = true});
  scheduler.add(3, numbers(4, 300), 20);
  const auto plan = scheduler.plan();
  scheduler.advance(plan);
  EXPECT_EQ(scheduler.tokens(1).back(), -1);
  EXPECT_EQ(scheduler.tokens(2).back(), -1 - 5);
  EXPECT_EQ(scheduler.tokens(3).back(), -1 - 6);
  scheduler.resolve(plan, std::vector<TokenId>{7, 8, 9});
  EXPECT_EQ(scheduler.tokens(2).back(), 8);
  EXPECT_EQ(scheduler.tokens(3).back(), 9);
}

TEST(SchedulerRows, APromptWithAllRowsIsComputedCompletelyAndIndexed) {
  BlockManager pool(64, 4, true);
  Scheduler scheduler({4, 100}, pool);
  scheduler.add(1, numbers(10), 20);
  step(scheduler);
  scheduler.add(2, numbers(10), 20, {.all_rows = true});
  expect_parts(step(scheduler), {part(1, 10, 1, true, false), part(2, 0, 10, true, true)});
  EXPECT_EQ(scheduler.num_cached_tokens(2), 0);
  EXPECT_EQ(scheduler.prefix_query_tokens(), 10) << "there must be no lookup";
  scheduler.add(3, numbers(10, 500), 20, {.all_rows = true});
  step(scheduler);
  EXPECT_EQ(scheduler.inserted(3).size(), 2U);
  scheduler.add(4, numbers(10, 500), 20);
  step(scheduler);
  EXPECT_EQ(scheduler.num_cached_tokens(4), 8);
}

TEST(SchedulerRows, TheBoundAllowsAtLeastOneRowForEachDecode) {
  BlockManager pool(64, 4, false);
  EXPECT_THROW(Scheduler({4, 5, 3}, pool), Error);
  EXPECT_NO_THROW(Scheduler({4, 5, 4}, pool));
}

// A pool of up to `num_blocks` blocks, with memory for `memory` of them.
BlockManager growing(int num_blocks, int block_len, int chunk, int memory) {
  return BlockManager(num_blocks, block_len, false, chunk, [memory](int n) {
    if (n > memory) throw Error(ErrorCode::resource_exhausted, "no memory is left");
  });
}

TEST(SchedulerGrowth, ImpossibleSequencesAreNamedUntilRemovedAndDelayNoOther) {
  auto pool = growing(16, 2, 2, 4);
  Scheduler scheduler({8, 100}, pool);
  EXPECT_EQ(scheduler.capacity_tokens(), 32);
  scheduler.add(1, numbers(12, 100), 20);
  scheduler.add(2, numbers(12, 100), 20, {.parent = 1});
  scheduler.add(3, numbers(3, 200), 6);
  auto plan = scheduler.plan();
  scheduler.check_integrity();
  EXPECT_EQ(scheduler.capacity_tokens(), 8);
  EXPECT_EQ(plan.impossible, (std::vector<SeqId>{1, 2}));
  EXPECT_EQ(ids_of(plan), std::vector<SeqId>{3});
  commit(scheduler, plan, {0});
  scheduler.remove(1);
  EXPECT_EQ(step(scheduler).impossible, std::vector<SeqId>{2});
  scheduler.remove(2);
  EXPECT_TRUE(scheduler.plan().impossible.empty());
  scheduler.add(4, numbers(9, 300), 20);  // its caller does not know yet
  EXPECT_EQ(step(scheduler).impossible, std::vector<SeqId>{4});
}

TEST(SchedulerGrowth, ASequenceRunsUntilItNeedsMoreBlocksThanThereAre) {
  auto pool = growing(16, 2, 2, 4);
  Scheduler scheduler({8, 100}, pool);
  scheduler.add(1, numbers(3, 100), 20);
  scheduler.add(2, numbers(3, 200), 20);
  StepPlan plan;
  std::size_t preempted = 0;
  while (true) {
    plan = scheduler.plan();
    scheduler.check_integrity();
    preempted += plan.preempted.size();
    if (!plan.impossible.empty()) break;
    commit(scheduler, plan, std::vector<TokenId>(plan.seqs.size(), 0));
  }
  EXPECT_EQ(plan.impossible, std::vector<SeqId>{1});
  EXPECT_EQ(scheduler.tokens(1).size(), 9U);
  EXPECT_EQ(preempted, 1U);
  EXPECT_EQ(ids_of(plan), std::vector<SeqId>{2}) << "others must get the blocks at once";
  EXPECT_EQ(pool.num_blocks(), 4);
}

TEST(SchedulerGrowth, ThePlanWaitsForATokenThatMayBeTheLast) {
  auto pool = growing(16, 2, 2, 2);
  Scheduler scheduler({8, 100}, pool);
  scheduler.add(1, numbers(4), 20);
  const auto plan = scheduler.plan();
  ASSERT_EQ(ids_of(plan), std::vector<SeqId>{1});
  scheduler.advance(plan);
  const auto next = scheduler.plan();
  EXPECT_TRUE(next.empty());
  EXPECT_TRUE(next.impossible.empty());
  scheduler.resolve(plan, std::vector<TokenId>{3});
  EXPECT_EQ(scheduler.plan().impossible, std::vector<SeqId>{1});
  scheduler.check_integrity();
  EXPECT_EQ(pool.num_active(), 0);
}

int hashed = 0;
std::uint64_t counted_hash(std::uint64_t parent_id, std::uint64_t salt, std::span<const TokenId> tokens) {
  ++hashed;
  return BlockManager::default_hash(parent_id, salt, tokens);
}

TEST(SchedulerQueue, APromptThatDoesNotFitIsLookedUpAgainOnlyWhenBlocksAreReleased) {
  BlockManager pool(20, 4, true, counted_hash);
  Scheduler scheduler({8, 200}, pool);
  const auto looked_up = [&](auto&& call) {
    hashed = 0;
    call();
    return hashed;
  };
  scheduler.add(1, numbers(37, 100), 45);
  scheduler.add(2, numbers(21, 200), 40);
  step(scheduler);
  scheduler.add(3, numbers(64, 100), 70);  // has the same prefix as the first one
  EXPECT_GT(looked_up([&] { scheduler.plan(); }), 8);
  for (int i = 0; i < 3; ++i) EXPECT_EQ(looked_up([&] { scheduler.plan(); }), 0);
  scheduler.remove(2);
  const auto plan = scheduler.plan();
  EXPECT_EQ(ids_of(plan), (std::vector<SeqId>{1, 3}));
  EXPECT_EQ(plan.seqs[1].first_position, 36);
}

TEST(SchedulerQueue, BlocksInsertedByOthersLetAWaitingPromptFit) {
  BlockManager pool(14, 4, true);
  Scheduler scheduler({8, 16}, pool);
  scheduler.add(1, numbers(33, 100), 36);
  scheduler.add(2, numbers(34, 100), 37);
  EXPECT_EQ(ids_of(step(scheduler)), std::vector<SeqId>{1});
  EXPECT_EQ(ids_of(step(scheduler)), std::vector<SeqId>{1});
  const auto plan = step(scheduler);
  ASSERT_EQ(ids_of(plan), (std::vector<SeqId>{1, 2})) << "it must fit with the blocks that the first has inserted";
  EXPECT_EQ(plan.seqs[1].first_position, 32);
}

}  // namespace
}  // namespace charonia::schedule
