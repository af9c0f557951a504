// Sequences that begin with their parent's blocks (n and best_of).
#include <gtest/gtest.h>

#include "charonia/error.h"
#include "scheduler_support.h"

namespace charonia::schedule {
namespace {

using Copies = std::vector<std::pair<BlockId, BlockId>>;

TEST(SchedulerFork, ChildrenShareTheParentsFullBlocksAndCopyThePartialOne) {
  BlockManager pool(32, 4, true);
  Scheduler scheduler({8, 100}, pool);
  scheduler.add(1, numbers(11), 20);
  scheduler.add(2, numbers(11), 20, {.parent = 1});
  scheduler.add(3, numbers(11), 20, {.parent = 1});
  EXPECT_EQ(scheduler.waiting_tokens(), 33);
  auto plan = step(scheduler);
  EXPECT_EQ(ids_of(plan), std::vector<SeqId>{1}) << "the prompt is computed once";
  EXPECT_TRUE(plan.block_copies.empty());
  EXPECT_EQ(scheduler.num_waiting(), 2);
  plan = scheduler.plan();
  scheduler.check_integrity();
  ASSERT_EQ(ids_of(plan), (std::vector<SeqId>{1, 2, 3}));
  for (const std::size_t child : {1U, 2U}) {
    EXPECT_EQ(plan.seqs[child].first_position, 10);
    EXPECT_EQ(plan.seqs[child].num_tokens, 1);
    EXPECT_TRUE(plan.seqs[child].samples);
  }
  const auto parent = scheduler.blocks(1);
  for (const SeqId child : {2U, 3U}) {
    const auto blocks = scheduler.blocks(child);
    EXPECT_TRUE(std::equal(blocks.begin(), blocks.begin() + 2, parent.begin()));
    EXPECT_NE(blocks[2], parent[2]);
    EXPECT_EQ(scheduler.num_cached_tokens(child), 10);
    EXPECT_EQ(scheduler.inserted(child).size(), 2U);
  }
  EXPECT_EQ(plan.block_copies, (Copies{{parent[2], scheduler.blocks(2)[2]}, {parent[2], scheduler.blocks(3)[2]}}));
  EXPECT_EQ(pool.num_active(), 3 + 2);
  EXPECT_EQ(scheduler.prefix_query_tokens(), 11) << "children must not count";
  commit(scheduler, plan, {1, 2, 3});
  scheduler.check_integrity();
  EXPECT_EQ(scheduler.tokens(2).back(), 2);
  EXPECT_TRUE(step(scheduler).block_copies.empty());
  EXPECT_EQ(scheduler.waiting_tokens(), 0);
}

TEST(SchedulerFork, NothingIsCopiedWhenOnlyTheLastTokenIsBeyondTheFullBlocks) {
  BlockManager pool(32, 4, true);
  Scheduler scheduler({8, 100}, pool);
  scheduler.add(1, numbers(9), 20);
  scheduler.add(2, numbers(9), 20, {.parent = 1});
  step(scheduler);
  const auto plan = step(scheduler);
  ASSERT_EQ(ids_of(plan), (std::vector<SeqId>{1, 2}));
  EXPECT_EQ(plan.seqs[1].first_position, 8);
  EXPECT_TRUE(plan.block_copies.empty());
  EXPECT_NE(scheduler.blocks(1)[2], scheduler.blocks(2)[2]);
}

TEST(SchedulerFork, ABlockThatTheLastTokenFillsIsCopiedAsWell) {
  BlockManager pool(32, 4, true);
  Scheduler scheduler({8, 100}, pool);
  scheduler.add(1, numbers(8), 20);
  scheduler.add(2, numbers(8), 20, {.parent = 1});
  step(scheduler);
  const auto from = scheduler.blocks(1)[1];
  const auto plan = scheduler.plan();
  EXPECT_EQ(plan.block_copies, (Copies{{from, scheduler.blocks(2)[1]}}));
  commit(scheduler, plan, {1, 1});
  scheduler.check_integrity();
  EXPECT_EQ(scheduler.blocks(2)[1], from) << "the copy must be replaced by the parent's equal block";
}

TEST(SchedulerFork, ChildrenWaitOutsideTheQueueAndKeepTheirPosition) {
  BlockManager pool(64, 4, true);
  Scheduler scheduler({3, 8}, pool);
  scheduler.add(1, numbers(20, 100), 30);
  scheduler.add(2, numbers(20, 100), 30, {.parent = 1});
  scheduler.add(3, numbers(5, 200), 30);
  scheduler.add(4, numbers(5, 300), 30);
  EXPECT_EQ(ids_of(step(scheduler)), std::vector<SeqId>{1});
  EXPECT_EQ(ids_of(step(scheduler)), std::vector<SeqId>{1});
  EXPECT_EQ(ids_of(step(scheduler)), (std::vector<SeqId>{1, 3})) << "a later sequence must not wait for a child";
  EXPECT_EQ(ids_of(step(scheduler)), (std::vector<SeqId>{1, 3, 2})) << "the child came before 4";
  EXPECT_EQ(scheduler.num_waiting(), 1);
}

TEST(SchedulerFork, WithoutItsParentAChildIsAnOrdinarySequence) {
  BlockManager pool(8, 2, false);
  Scheduler scheduler({8, 3}, pool);
  scheduler.add(1, numbers(5), 10);
  scheduler.add(2, numbers(5), 10, {.parent = 1});
  scheduler.add(3, numbers(5), 10, {.parent = 2});
  EXPECT_EQ(ids_of(step(scheduler)), std::vector<SeqId>{1});
  EXPECT_TRUE(scheduler.remove(1));
  scheduler.check_integrity();
  auto plan = step(scheduler);
  EXPECT_EQ(ids_of(plan), std::vector<SeqId>{2});
  EXPECT_EQ(plan.seqs[0].first_position, 0);
  EXPECT_TRUE(scheduler.remove(3));
  EXPECT_TRUE(scheduler.remove(2));
  scheduler.check_integrity();
  EXPECT_EQ(pool.num_free(), 8);
}

TEST(SchedulerFork, ChildrenOfAPreemptedParentBecomeOrdinarySequences) {
  BlockManager pool(7, 2, false);
  Scheduler scheduler({2, 100}, pool);
  scheduler.add(1, numbers(3, 10), 12, {.priority = 1});
  scheduler.add(2, numbers(5, 20), 12);
  // Its parent's prompt is already computed, but there is no space.
  scheduler.add(3, numbers(5, 20), 12, {.parent = 2});
  StepPlan plan;
  do {
    plan = step(scheduler);
  } while (plan.preempted.empty());
  EXPECT_EQ(plan.preempted, std::vector<SeqId>{2});
  scheduler.remove(1);
  scheduler.remove(2);
  plan = step(scheduler);
  ASSERT_EQ(ids_of(plan), std::vector<SeqId>{3});
  EXPECT_EQ(plan.seqs[0].first_position, 0);
  EXPECT_TRUE(plan.block_copies.empty());
}

TEST(SchedulerFork, AfterAForgottenPlanNoBlockLacksItsCopy) {
  BlockManager pool(32, 4, true);
  Scheduler scheduler({8, 100}, pool);
  scheduler.add(1, numbers(11), 20);
  scheduler.add(2, numbers(11), 20, {.parent = 1});
  step(scheduler);
  EXPECT_EQ(scheduler.plan().block_copies.size(), 1U);  // its step is never launched
  auto plan = scheduler.plan();
  scheduler.check_integrity();
  EXPECT_EQ(plan.block_copies.size(), 1U) << "the plan must copy the block again";
  EXPECT_EQ(ids_of(plan), (std::vector<SeqId>{1, 2}));
  scheduler.remove(1);
  plan = scheduler.plan();  // now there is nothing to copy from
  scheduler.check_integrity();
  EXPECT_TRUE(plan.block_copies.empty());
  ASSERT_EQ(ids_of(plan), std::vector<SeqId>{2});
  EXPECT_EQ(plan.seqs[0].first_position, 8) << "full blocks must be found in the index";
  EXPECT_EQ(scheduler.num_cached_tokens(2), 8);
}

TEST(SchedulerFork, AChildMayArriveWhileItsParentDecodes) {
  BlockManager pool(32, 4, true);
  Scheduler scheduler({8, 100}, pool);
  scheduler.add(1, numbers(6), 20);
  for (int i = 0; i < 5; ++i) step(scheduler);
  scheduler.add(2, numbers(6), 20, {.parent = 1});
  const auto plan = step(scheduler);
  ASSERT_EQ(ids_of(plan), (std::vector<SeqId>{1, 2}));
  EXPECT_EQ(plan.seqs[1].first_position, 5);
  EXPECT_EQ(plan.block_copies.size(), 1U);
}

TEST(SchedulerFork, AParentMustHaveTheSamePromptAndSalt) {
  BlockManager pool(32, 4, true);
  Scheduler scheduler({8, 100}, pool);
  scheduler.add(1, numbers(6), 20);
  EXPECT_THROW(scheduler.add(2, numbers(6), 20, {.parent = 9}), Error);
  EXPECT_THROW(scheduler.add(2, numbers(5), 20, {.parent = 1}), Error);
  EXPECT_THROW(scheduler.add(2, numbers(6, 1), 20, {.parent = 1}), Error);
  EXPECT_THROW(scheduler.add(2, numbers(6), 20, {.salt = 1, .parent = 1}), Error);
  EXPECT_EQ(scheduler.num_waiting(), 1);
  scheduler.check_integrity();
}

}  // namespace
}  // namespace charonia::schedule
