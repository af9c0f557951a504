// The scheduler's policy: who computes how much in which step. scheduler_load_test.cpp has random loads.
#include "schedule/scheduler.h"

#include <gtest/gtest.h>

#include "charonia/error.h"
#include "schedule/adapter_slots.h"
#include "scheduler_support.h"

namespace charonia::schedule {
namespace {

TEST(Scheduler, PromptsAreSplitIntoChunksByTheTokenBudget) {
  Bed bed(16, 4, {8, 8});
  bed.scheduler.add(1, numbers(20), 24);
  for (const auto* const expected : {"1:0+8", "1:8+8", "1:16+4s", "1:20+1s"}) EXPECT_EQ(bed.step(), expected);
}

TEST(Scheduler, DecodesGoFirstThenPrefillByPriorityAndArrival) {
  Bed bed(64, 4, {8, 10});
  bed.scheduler.add(1, numbers(2, 100), 20);
  bed.step();
  bed.scheduler.add(2, numbers(6, 200), 20);
  bed.scheduler.add(3, numbers(6, 300), 20);
  bed.scheduler.add(4, numbers(6, 400), 20, {.priority = 1});
  EXPECT_EQ(bed.step(), "1:2+1s 4:0+6s 2:0+3");
  EXPECT_EQ(bed.step(), "4:6+1s 1:3+1s 2:3+3s 3:0+5");
}

TEST(Scheduler, AtMostMaxBatchSizeSequencesRun) {
  Bed bed(64, 4, {2, 100});
  for (SeqId id = 1; id <= 3; ++id) bed.scheduler.add(id, numbers(3, 10 * static_cast<int>(id)), 20);
  EXPECT_EQ(bed.step(), "1:0+3s 2:0+3s");
  EXPECT_EQ(bed.scheduler.num_running(), 2);
  EXPECT_EQ(bed.scheduler.num_waiting(), 1);
  EXPECT_TRUE(bed.scheduler.remove(1));
  EXPECT_EQ(bed.step(), "2:3+1s 3:0+3s");
}

TEST(Scheduler, APrefixHitLeavesTheLastTokenToCompute) {
  Bed bed(64, 4, {4, 100});
  auto& scheduler = bed.scheduler;
  scheduler.add(1, numbers(8), 20);
  EXPECT_EQ(scheduler.num_cached_tokens(1), -1);
  bed.step();
  scheduler.add(2, numbers(8), 20);
  scheduler.add(3, numbers(9), 20);
  scheduler.add(4, numbers(9), 20, {.salt = 1});
  EXPECT_EQ(bed.step(), "1:8+1s 2:4+4s 3:8+1s 4:0+9s");
  for (const auto& [id, cached] : {std::pair{1, 0}, {2, 4}, {3, 8}, {4, 0}}) {
    EXPECT_EQ(scheduler.num_cached_tokens(static_cast<SeqId>(id)), cached) << id;
  }
  EXPECT_EQ(scheduler.prefix_query_tokens(), 8 + 8 + 9 + 9);
  EXPECT_EQ(scheduler.prefix_hit_tokens(), 4 + 8);
}

TEST(Scheduler, SequencesThatComputeTheSameBlocksTogetherShareThem) {
  Bed bed(64, 4, {8, 100});
  for (SeqId id = 1; id <= 3; ++id) bed.scheduler.add(id, numbers(10), 20);
  const auto plan = bed.scheduler.plan();
  EXPECT_EQ(bed.pool.num_active(), 9);
  commit(bed.scheduler, plan, {0, 1, 2});
  bed.scheduler.check_integrity();
  EXPECT_EQ(bed.pool.num_active(), 2 + 3);
  EXPECT_EQ(bed.scheduler.blocks(1)[1], bed.scheduler.blocks(3)[1]);
  EXPECT_NE(bed.scheduler.blocks(1)[2], bed.scheduler.blocks(3)[2]);
}

TEST(Scheduler, GeneratedTokensAreInsertedToo) {
  Bed bed(64, 4, {8, 100});
  bed.scheduler.add(1, numbers(3), 20);
  for (int i = 0; i < 6; ++i) bed.step();
  std::vector<TokenId> next_turn(bed.scheduler.tokens(1).begin(), bed.scheduler.tokens(1).end());
  bed.scheduler.remove(1);
  next_turn.push_back(7);
  bed.scheduler.add(2, next_turn, 20);
  EXPECT_EQ(bed.step(), "2:8+2s");
}

// Three rows are left for proposals.
TEST(Scheduler, ProposalsAreSharedEvenly) {
  Bed bed(64, 4, {4, 100, 10});
  for (SeqId id = 1; id <= 3; ++id) bed.scheduler.add(id, numbers(3, 10 * static_cast<int>(id)), 40);
  bed.step();
  const auto plan_with = [&](const std::vector<SeqId>& proposers) {
    for (const auto id : proposers) bed.scheduler.propose(id, {1, 2, 3, 4, 5});
    return text_of(bed.scheduler.plan());
  };
  EXPECT_EQ(plan_with({1, 2, 3}), "1:3+2sp1 2:3+2sp1 3:3+2sp1");
  EXPECT_EQ(plan_with({1, 2, 3}), "1:3+2sp1 2:3+2sp1 3:3+2sp1");
  bed.scheduler.propose(3, {});
  EXPECT_EQ(plan_with({1, 2}), "1:3+3sp2 2:3+2sp1 3:3+1s");
  EXPECT_EQ(plan_with({1, 2}), "1:3+2sp1 2:3+3sp2 3:3+1s");
}

TEST(Scheduler, TheYoungestIsPreemptedAndRecomputedLater) {
  for (const bool prefixes : {false, true}) {
    Bed bed(6, 2, {8, 100}, prefixes);
    bed.scheduler.add(1, numbers(3, 10), 12);
    bed.scheduler.add(2, numbers(3, 20), 12);
    const auto plan = bed.step_until_preempted();
    EXPECT_EQ(plan.preempted, std::vector<SeqId>{2});
    EXPECT_EQ(ids_of(plan), std::vector<SeqId>{1});
    EXPECT_EQ(bed.scheduler.num_preemptions(), 1);
    while (!prefixes && bed.scheduler.tokens(1).size() < 12) bed.step();
    EXPECT_EQ(bed.scheduler.tokens(2).size(), 7U);
    bed.scheduler.remove(1);
    EXPECT_EQ(bed.step(), prefixes ? "2:4+3s" : "2:0+7s") << "prompt and sampled tokens must be computed again";
    EXPECT_EQ(bed.scheduler.num_cached_tokens(2), 0) << "the value of the first lookup must stay";
  }
}

TEST(Scheduler, ATokenIsSampledAgainAfterForgottenTokensAreComputedAgain) {
  for (const auto& [known_good, step] : {std::pair{0U, "1:0+5s"}, {3U, "1:0+5s"}, {4U, "1:4+1s"}}) {
    Bed bed(64, 4, {8, 100});
    bed.scheduler.add(1, numbers(3), 20);
    for (int i = 0; i < 3; ++i) bed.step();
    const std::vector<TokenId> tokens(bed.scheduler.tokens(1).begin(), bed.scheduler.tokens(1).end());
    bed.scheduler.forget_prefix(1, known_good);
    bed.scheduler.sample_again(1);
    bed.scheduler.check_integrity();
    EXPECT_EQ(bed.scheduler.tokens(1).size(), tokens.size() - 1);
    EXPECT_THROW(bed.scheduler.sample_again(1), Error);
    EXPECT_EQ(bed.step(), step);
    EXPECT_TRUE(std::ranges::equal(bed.scheduler.tokens(1), tokens));
  }
}

TEST(Scheduler, LowPriorityIsPreemptedBeforeYoung) {
  Bed bed(9, 2, {8, 100}, false);
  bed.scheduler.add(1, numbers(3), 18, {.priority = 1});
  bed.scheduler.add(2, numbers(3), 18);
  bed.scheduler.add(3, numbers(3), 18, {.priority = 1});
  EXPECT_EQ(bed.step_until_preempted().preempted, std::vector<SeqId>{2});
  const auto plan = bed.step_until_preempted();
  EXPECT_EQ(plan.preempted, std::vector<SeqId>{3});
  EXPECT_EQ(ids_of(plan), std::vector<SeqId>{1});
}

TEST(Scheduler, AdmissionLeavesABlockForEachSequenceThatWillNeedOne) {
  Bed bed(5, 4, {8, 100}, false);
  bed.scheduler.add(1, numbers(5), 16);
  bed.step();
  EXPECT_EQ(bed.pool.num_available(), 3);
  bed.scheduler.add(2, numbers(6), 12);  // two blocks, one more later; the first sequence will also need one
  bed.step();
  EXPECT_EQ(bed.scheduler.num_waiting(), 1);
  bed.scheduler.remove(2);
  bed.scheduler.add(3, numbers(6), 8);  // needs only two blocks
  bed.step();
  EXPECT_EQ(bed.scheduler.num_waiting(), 0);
}

TEST(Scheduler, EveryDecodeGetsATokenInEveryStepForAnyBudget) {
  Bed bed(64, 4, {8, 3});
  for (SeqId id = 1; id <= 7; ++id) bed.scheduler.add(id, {static_cast<TokenId>(id)}, 60);
  for (int i = 0; i < 59; ++i) EXPECT_EQ(ids_of(step(bed.scheduler)), (std::vector<SeqId>{1, 2, 3}));
  for (SeqId id = 1; id <= 3; ++id) bed.scheduler.remove(id);
  for (int i = 0; i < 10; ++i) EXPECT_EQ(ids_of(step(bed.scheduler)), (std::vector<SeqId>{4, 5, 6}));
}

TEST(Scheduler, AForgottenPlanCannotAdvance) {
  Bed bed(16, 4, {8, 3});
  bed.scheduler.add(1, numbers(5), 20);
  const auto forgotten = bed.scheduler.plan();
  bed.scheduler.add(2, numbers(5), 20, {.priority = 1});
  EXPECT_EQ(ids_of(bed.scheduler.plan()), std::vector<SeqId>{2});
  bed.scheduler.advance(forgotten);
  EXPECT_EQ(bed.scheduler.num_computed(1), 0);
  bed.scheduler.check_integrity();
}

TEST(Scheduler, PlaceholdersOfTheNextPlanNameTheirSample) {
  Bed bed(16, 4, {8, 100});
  auto& scheduler = bed.scheduler;
  scheduler.add(1, numbers(5, 10), 20);
  scheduler.add(2, numbers(5, 20), 20);
  const auto first = scheduler.plan();
  scheduler.advance(first);
  EXPECT_EQ(scheduler.tokens(1).back(), -1);
  EXPECT_EQ(scheduler.tokens(2).back(), -2);
  const auto second = scheduler.plan();
  ASSERT_EQ(text_of(second), "1:5+1s 2:5+1s");
  EXPECT_THROW(scheduler.advance(second), Error) << "the last token is not sampled yet";
  scheduler.remove(1);
  scheduler.add(1, numbers(3, 30), 20);  // another sequence with the same id
  scheduler.resolve(first, std::vector<TokenId>{7, 8});
  EXPECT_EQ(scheduler.tokens(1).size(), 3U);
  EXPECT_EQ(scheduler.num_computed(1), 0);
  EXPECT_EQ(scheduler.tokens(2).back(), 8);
  scheduler.advance(second);
  EXPECT_EQ(scheduler.tokens(2).back(), -2) << "the placeholder must name sample 1 of its step";
  scheduler.resolve(second, std::vector<TokenId>{9, 6});
  EXPECT_EQ(scheduler.tokens(2).back(), 6);
  scheduler.check_integrity();
}

TEST(Scheduler, NoPreemptionIfTheNextResultFreesBlocks) {
  Bed bed(6, 2, {8, 100}, false);
  bed.scheduler.add(1, numbers(3, 10), 6);
  bed.scheduler.add(2, numbers(4, 20), 8);
  bed.step();
  bed.step();
  const auto last_of_1 = bed.scheduler.plan();
  ASSERT_EQ(ids_of(last_of_1), (std::vector<SeqId>{1, 2}));
  bed.scheduler.advance(last_of_1);
  EXPECT_EQ(bed.pool.num_available(), 0);
  EXPECT_TRUE(bed.scheduler.plan().empty()) << "2 needs another block, and 1 gives back three when its token is known";
  bed.scheduler.resolve(last_of_1, std::vector<TokenId>{1, 1});
  bed.scheduler.remove(1);
  EXPECT_EQ(ids_of(bed.scheduler.plan()), std::vector<SeqId>{2});
  EXPECT_EQ(bed.scheduler.num_preemptions(), 0);
}

// Appends tokens 0, 1, ...
void append(Scheduler& scheduler, SeqId id, int count) {
  for (int i = 0; i < count; ++i) scheduler.append(id, i);
}

TEST(Scheduler, AppendedTokensRunAfterDecodesAndBeforeLaterPrefill) {
  Bed bed(64, 4, {8, 10});
  for (const SeqId id : {1, 2}) bed.scheduler.add(id, numbers(2, 100 * static_cast<int>(id)), 40);
  bed.step();
  append(bed.scheduler, 1, 3);
  bed.scheduler.add(3, numbers(9, 300), 20);
  EXPECT_EQ(bed.step(), "2:2+1s 1:2+4sf 3:0+5");
  EXPECT_EQ(bed.scheduler.tokens(1).size(), 7U);
  EXPECT_EQ(bed.step(), "1:6+1s 2:3+1s 3:5+4s");
}

TEST(Scheduler, AppendedTokensThatDoNotFitTheBudgetTakeSeveralSteps) {
  Bed bed(64, 4, {8, 4});
  for (const SeqId id : {1, 2}) bed.scheduler.add(id, numbers(2, 100 * static_cast<int>(id)), 40);
  bed.step();
  append(bed.scheduler, 2, 6);
  for (const auto* const expected : {"1:2+1s 2:2+3f", "1:3+1s 2:5+3f", "1:4+1s 2:8+1sf"}) {
    EXPECT_EQ(bed.step(), expected);
  }
}

TEST(Scheduler, EverySequenceWithAppendedTokensGetsOneInEveryStep) {
  Bed bed(64, 4, {8, 6});
  for (const SeqId id : {1, 2, 3}) bed.scheduler.add(id, numbers(2, 100 * static_cast<int>(id)), 40);
  bed.step();
  for (const SeqId id : {1, 2}) append(bed.scheduler, id, 9);
  EXPECT_EQ(bed.step(), "3:2+1s 1:2+4f 2:2+1f");
}

TEST(Scheduler, PrefillOfHigherPriorityLeavesOneAppendedTokenOfEach) {
  Bed bed(64, 4, {8, 10});
  for (const SeqId id : {1, 2}) bed.scheduler.add(id, numbers(2, 100 * static_cast<int>(id)), 60);
  bed.step();
  for (const SeqId id : {1, 2}) append(bed.scheduler, id, 30);
  bed.scheduler.add(3, numbers(12, 300), 20, {.priority = 1});
  EXPECT_EQ(bed.step(), "1:2+1f 2:2+1f 3:0+8");
  EXPECT_EQ(bed.step(), "1:3+5f 2:3+1f 3:8+4s") << "the first sequence must get the rest of the budget";
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
  scheduler.add(1, numbers(2), 5);
  EXPECT_THROW(scheduler.add(1, numbers(3), 8), Error);
  const auto plan = scheduler.plan();
  scheduler.advance(plan);
  EXPECT_THROW(scheduler.append(1, 1), Error) << "its last token is not sampled yet";
  EXPECT_THROW(scheduler.append(2, 1), Error);
  EXPECT_THROW(scheduler.resolve(plan, {}), Error) << "a sample is missing";
  EXPECT_THROW(scheduler.resolve(plan, std::vector<TokenId>{-4}), Error) << "not a token id";
  scheduler.resolve(plan, std::vector<TokenId>{1});
  StepPlan other = scheduler.plan();
  ++other.seqs[0].num_tokens;
  EXPECT_THROW(scheduler.advance(other), Error);
  EXPECT_THROW(scheduler.advance(plan), Error) << "the plan was already advanced";
  EXPECT_THROW(scheduler.append(1, -1), Error);
  append(scheduler, 1, 2);
  EXPECT_THROW(scheduler.append(1, 1), Error) << "it has all its tokens";
  EXPECT_EQ(scheduler.tokens(1).size(), 5U);
  EXPECT_THROW(scheduler.plan(), Error) << "it has all its tokens, but was not removed";
  EXPECT_TRUE(scheduler.remove(1));
  EXPECT_TRUE(scheduler.plan().empty());
  scheduler.check_integrity();
}

// Sequences that begin with their parent's blocks (n and best_of).

using Copies = std::vector<BlockCopy>;

TEST(SchedulerFork, ChildrenShareTheParentsFullBlocksAndCopyThePartialOne) {
  Bed bed(32, 4, {8, 100});
  auto& scheduler = bed.scheduler;
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
  ASSERT_EQ(text_of(plan), "1:11+1s 2:10+1s 3:10+1s");
  const auto parent = scheduler.blocks(1);
  for (const SeqId child : {2U, 3U}) {
    const auto blocks = scheduler.blocks(child);
    EXPECT_TRUE(std::equal(blocks.begin(), blocks.begin() + 2, parent.begin()));
    EXPECT_NE(blocks[2], parent[2]);
    EXPECT_EQ(scheduler.num_cached_tokens(child), 10);
    EXPECT_EQ(scheduler.inserted(child).size(), 2U);
  }
  EXPECT_EQ(plan.block_copies, (Copies{{parent[2], scheduler.blocks(2)[2]}, {parent[2], scheduler.blocks(3)[2]}}));
  EXPECT_EQ(bed.pool.num_active(), 3 + 2);
  EXPECT_EQ(scheduler.prefix_query_tokens(), 11) << "children must not count";
  commit(scheduler, plan, {1, 2, 3});
  EXPECT_EQ(scheduler.tokens(2).back(), 2);
  EXPECT_TRUE(step(scheduler).block_copies.empty());
  EXPECT_EQ(scheduler.waiting_tokens(), 0);
}

// With `prompt` tokens in blocks of 4.
TEST(SchedulerFork, OnlyTheBlockOfTheLastTokenIsCopied) {
  for (const auto& [prompt, copied] : {std::pair{9, -1}, {8, 1}, {6, 1}}) {
    Bed bed(32, 4, {8, 100});
    bed.scheduler.add(1, numbers(prompt), 20);
    if (prompt != 6) bed.scheduler.add(2, numbers(prompt), 20, {.parent = 1});
    for (int i = prompt == 6 ? 5 : 1; i > 0; --i) bed.step();
    if (prompt == 6) bed.scheduler.add(2, numbers(prompt), 20, {.parent = 1});  // its parent already decodes
    const auto block = [&](SeqId id) { return bed.scheduler.blocks(id)[static_cast<std::size_t>(copied)]; };
    const auto from = copied < 0 ? -1 : block(1);
    const auto plan = bed.scheduler.plan();
    ASSERT_EQ(ids_of(plan), (std::vector<SeqId>{1, 2}));
    EXPECT_EQ(plan.seqs[1].first_position, prompt - 1);
    EXPECT_EQ(plan.block_copies, copied < 0 ? Copies{} : (Copies{{from, block(2)}})) << prompt;
    commit(bed.scheduler, plan, {1, 1});
    bed.scheduler.check_integrity();
    EXPECT_EQ(prompt == 8, copied >= 0 && block(2) == from) << "an equal full block replaces the copy";
  }
}

TEST(SchedulerFork, ChildrenWaitOutsideTheQueueAndKeepTheirPosition) {
  Bed bed(64, 4, {3, 8});
  bed.scheduler.add(1, numbers(20, 100), 30);
  bed.scheduler.add(2, numbers(20, 100), 30, {.parent = 1});
  bed.scheduler.add(3, numbers(5, 200), 30);
  bed.scheduler.add(4, numbers(5, 300), 30);
  for (const auto& ids : std::vector<std::vector<SeqId>>{{1}, {1}, {1, 3}, {1, 3, 2}}) {
    EXPECT_EQ(ids_of(step(bed.scheduler)), ids) << "3 must not wait for a child, and the child came before 4";
  }
  EXPECT_EQ(bed.scheduler.num_waiting(), 1);
}

// The order in which sequences of several owners are admitted, one at a time.
class SchedulerTurns : public testing::Test {
 protected:
  void add(SeqId id, std::uint64_t owner, int priority = 0, SeqId parent = 0) {
    scheduler_.add(id, {1, 2}, 3, {.priority = priority, .owner = owner, .parent = parent});
  }

  std::vector<SeqId> admitted(int times) {
    std::vector<SeqId> ids;
    for (; times > 0; --times) {
      ids.push_back(ids_of(step(scheduler_)).at(0));
      scheduler_.remove(ids.back());
    }
    return ids;
  }

  Bed bed_{64, 4, {1, 100}};
  Scheduler& scheduler_ = bed_.scheduler;
};

TEST_F(SchedulerTurns, OwnersTakeTurnsWithinAPriority) {
  for (SeqId id = 1; id <= 4; ++id) add(id, 1);
  for (SeqId id = 5; id <= 6; ++id) add(id, 2);
  add(7, 0);
  for (SeqId id = 8; id <= 9; ++id) add(id, 1, 1);
  EXPECT_EQ(admitted(9), (std::vector<SeqId>{8, 9, 1, 5, 7, 2, 6, 3, 4}));
}

TEST_F(SchedulerTurns, ANewOwnerWaitsForOneSequenceOfARequestWithMany) {
  add(1, 1);
  for (SeqId id = 2; id <= 128; ++id) add(id, 1, 0, 1);
  EXPECT_EQ(admitted(10).back(), 10U);
  add(200, 2);
  EXPECT_EQ(admitted(3), (std::vector<SeqId>{200, 11, 12}));
}

TEST_F(SchedulerTurns, AnOwnerThatAddsOneAtATimeDoesNotStarveOthers) {
  for (SeqId id = 1; id <= 3; ++id) add(id, 1);
  std::vector<SeqId> order;
  for (SeqId id = 10; id < 15; ++id) {
    add(id, 2);
    order.push_back(admitted(1).at(0));
  }
  EXPECT_EQ(order, (std::vector<SeqId>{1, 10, 2, 11, 3}));
}

TEST_F(SchedulerTurns, SequencesRunInTheOrderOfArrivalIfNoneWaits) {
  Bed bed(64, 4, {8, 100});
  for (SeqId id = 1; id <= 5; ++id) {  // each owner is new, while the first sequence runs
    bed.scheduler.add(id, {1, 2}, 9, {.owner = id == 4 ? 1 : id});
    bed.step();
  }
  EXPECT_EQ(ids_of(step(bed.scheduler)), (std::vector<SeqId>{1, 2, 3, 4, 5}));
}

// Sequences with adapters that never end.
class SchedulerAdapters : public testing::Test {
 protected:
  void add(SeqId id, std::uint64_t adapter, int priority = 0) {
    bed_.scheduler.add(id, {1, 2}, 1000, {.priority = priority, .adapter = adapter});
  }
  std::vector<SeqId> running() {
    const auto plan = step(bed_.scheduler);
    waits_for_slot_ = plan.waits_for_slot;
    auto out = ids_of(plan);
    std::ranges::sort(out);
    return out;
  }
  int slot(SeqId id) const { return bed_.scheduler.adapter_slot(id); }

  Bed bed_{64, 100, {8, 100, 0, 2048, 1, 2}};
  bool waits_for_slot_ = false;
};

TEST_F(SchedulerAdapters, SequencesThatNeedNoNewSlotOvertakeOneWithoutSlot) {
  add(1, 11);
  add(2, 12);
  add(3, 13);
  add(4, 11);
  add(5, 14);
  add(6, 0);
  for (int step = 0; step < 2; ++step) EXPECT_EQ(running(), (std::vector<SeqId>{1, 2, 4, 6}));
  EXPECT_EQ(slot(3), -1);
  EXPECT_EQ(slot(1), slot(4));
  EXPECT_EQ(slot(6), -1);
  EXPECT_TRUE(waits_for_slot_);
  EXPECT_TRUE(bed_.scheduler.remove(2));
  EXPECT_EQ(running(), (std::vector<SeqId>{1, 3, 4, 6}));
  EXPECT_NE(slot(1), slot(3));
}

TEST_F(SchedulerAdapters, APlanWaitsForASlotOnlyIfTheBatchHasAPlace) {
  for (SeqId id = 1; id <= 8; ++id) add(id, id == 8 ? 12 : 11);
  EXPECT_EQ(running().size(), 8U);
  EXPECT_FALSE(waits_for_slot_) << "no sequence waits";
  add(9, 13);
  EXPECT_EQ(running().size(), 8U);
  EXPECT_FALSE(waits_for_slot_);
  EXPECT_TRUE(bed_.scheduler.remove(1));
  EXPECT_EQ(running().size(), 7U);
  EXPECT_TRUE(waits_for_slot_);
  EXPECT_TRUE(bed_.scheduler.remove(8));
  EXPECT_EQ(running().size(), 7U);
  EXPECT_FALSE(waits_for_slot_) << "sequence 9 has its slot";
}

TEST_F(SchedulerAdapters, AfterSomePlansOnlySequencesWithoutAnAdapterOvertakeOneWithoutSlot) {
  add(1, 11);
  add(2, 12);
  EXPECT_EQ(running(), (std::vector<SeqId>{1, 2}));
  add(3, 13);
  for (int step = 1; step < kOvertakenPlans; ++step) running();
  add(4, 11);
  EXPECT_EQ(running(), (std::vector<SeqId>{1, 2, 4}));
  add(5, 11);
  add(6, 0);
  EXPECT_EQ(running(), (std::vector<SeqId>{1, 2, 4, 6}));
  EXPECT_TRUE(bed_.scheduler.remove(2));
  EXPECT_EQ(running(), (std::vector<SeqId>{1, 3, 4, 5, 6}));
}

TEST_F(SchedulerAdapters, ALowerPriorityDoesNotOvertakeOneWithoutSlot) {
  add(1, 11);
  add(2, 12);
  EXPECT_EQ(running(), (std::vector<SeqId>{1, 2}));
  add(3, 13, 1);
  add(4, 0);
  add(5, 11);
  EXPECT_EQ(running(), (std::vector<SeqId>{1, 2}));
  add(6, 0, 1);
  EXPECT_EQ(running(), (std::vector<SeqId>{1, 2, 6}));
}

TEST_F(SchedulerAdapters, TheAdapterThatWasUsedLongestAgoLosesItsSlot) {
  add(1, 11);
  add(2, 12);
  EXPECT_EQ(running(), (std::vector<SeqId>{1, 2}));
  const int of_11 = slot(1), of_12 = slot(2);
  EXPECT_TRUE(bed_.scheduler.remove(1));
  EXPECT_TRUE(bed_.scheduler.remove(2));
  add(3, 12);  // still in its slot
  EXPECT_EQ(running(), (std::vector<SeqId>{3}));
  EXPECT_EQ(slot(3), of_12);
  add(4, 13);
  EXPECT_EQ(running(), (std::vector<SeqId>{3, 4}));
  EXPECT_EQ(slot(4), of_11);
  EXPECT_TRUE(bed_.scheduler.remove(3));
  EXPECT_TRUE(bed_.scheduler.remove(4));
  add(5, 11);
  EXPECT_EQ(running(), (std::vector<SeqId>{5}));
  EXPECT_EQ(slot(5), of_12);
}

TEST(SchedulerFork, AParentMustHaveTheSamePromptAndSalt) {
  Bed bed(32, 4, {8, 100});
  bed.scheduler.add(1, numbers(6), 20);
  EXPECT_THROW(bed.scheduler.add(2, numbers(6), 20, {.parent = 9}), Error);
  EXPECT_THROW(bed.scheduler.add(2, numbers(5), 20, {.parent = 1}), Error);
  EXPECT_THROW(bed.scheduler.add(2, numbers(6, 1), 20, {.parent = 1}), Error);
  EXPECT_THROW(bed.scheduler.add(2, numbers(6), 20, {.salt = 1, .parent = 1}), Error);
  EXPECT_EQ(bed.scheduler.num_waiting(), 1);
  bed.scheduler.check_integrity();
}

// Limits of the rows of logits.

TEST(SchedulerRows, DecodesGetRowsFirstAndPromptsTheRestInOrder) {
  Bed bed(64, 4, {4, 100, 6});
  bed.scheduler.add(1, numbers(3, 100), 20);
  bed.step();
  bed.scheduler.add(2, numbers(9, 200), 20, {.all_rows = true});
  bed.scheduler.add(3, numbers(7, 300), 20);
  // A quarter of all rows, here one, is left for later sequences.
  EXPECT_EQ(bed.step(), "1:3+1s 2:0+4r 3:0+7s");
  EXPECT_EQ(bed.step(), "1:4+1s 3:7+1s 2:4+3r");
  EXPECT_EQ(bed.step(), "1:5+1s 3:8+1s 2:7+2sr");
}

TEST(SchedulerRows, WithoutARowAllTokensExceptTheLastAreComputed) {
  Bed bed(64, 4, {4, 12, 4});
  const auto add = [&](SeqId id, int size, SeqOptions how) {
    bed.scheduler.add(id, numbers(size, 100 * static_cast<int>(id)), size + 12, how);
  };
  const SeqOptions all_rows{.priority = 1, .all_rows = true};
  add(1, 20, {});
  add(2, 8, all_rows);
  add(3, 8, all_rows);
  EXPECT_EQ(bed.step(), "2:0+3r 3:0+1r") << "no sequence is admitted if no row is left";
  bed.scheduler.remove(2);
  bed.scheduler.remove(3);
  bed.step();
  add(4, 8, all_rows);
  add(5, 8, all_rows);
  EXPECT_EQ(bed.step(), "4:0+3r 5:0+1r 1:12+7");
  EXPECT_EQ(bed.step(), "1:19+1s 4:3+2r 5:1+1r");
}

TEST(SchedulerRows, APromptWithAllRowsIsComputedCompletelyAndIndexed) {
  Bed bed(64, 4, {4, 100});
  bed.scheduler.add(1, numbers(10), 20);
  bed.step();
  bed.scheduler.add(2, numbers(10), 20, {.all_rows = true});
  EXPECT_EQ(bed.step(), "1:10+1s 2:0+10sr");
  EXPECT_EQ(bed.scheduler.num_cached_tokens(2), 0);
  EXPECT_EQ(bed.scheduler.prefix_query_tokens(), 10) << "there must be no lookup";
  bed.scheduler.add(3, numbers(10, 500), 20, {.all_rows = true});
  bed.step();
  EXPECT_EQ(bed.scheduler.inserted(3).size(), 2U);
  bed.scheduler.add(4, numbers(10, 500), 20);
  bed.step();
  EXPECT_EQ(bed.scheduler.num_cached_tokens(4), 8);
}

TEST(SchedulerRows, TheBoundAllowsAtLeastOneRowForEachDecode) {
  BlockManager pool(64, 4, false);
  EXPECT_THROW(Scheduler({4, 5, 3}, pool), Error);
  EXPECT_NO_THROW(Scheduler({4, 5, 4}, pool));
}

// Up to 16 blocks of 2 tokens, with memory for some of them.
struct GrowingBed {
  explicit GrowingBed(int memory)
      : pool(16, 2, false, 2, [memory](int n) {
          if (n > memory) throw Error(ErrorCode::resource_exhausted, "no memory is left");
        }) {}
  BlockManager pool;
  Scheduler scheduler{{8, 100}, pool};
};

TEST(SchedulerGrowth, ImpossibleSequencesAreNamedUntilRemovedAndDelayNoOther) {
  GrowingBed bed(4);
  auto& scheduler = bed.scheduler;
  EXPECT_EQ(scheduler.capacity_tokens(), 32);
  scheduler.add(1, numbers(12, 100), 20);
  scheduler.add(2, numbers(12, 100), 20, {.parent = 1});
  scheduler.add(3, numbers(3, 200), 6);
  const auto plan = scheduler.plan();
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
  GrowingBed bed(4);
  bed.scheduler.add(1, numbers(3, 100), 20);
  bed.scheduler.add(2, numbers(3, 200), 20);
  StepPlan plan;
  while (plan = bed.scheduler.plan(), plan.impossible.empty()) {
    commit(bed.scheduler, plan, std::vector<TokenId>(plan.seqs.size(), 0));
  }
  EXPECT_EQ(plan.impossible, std::vector<SeqId>{1});
  EXPECT_EQ(bed.scheduler.tokens(1).size(), 9U);
  EXPECT_EQ(bed.scheduler.num_preemptions(), 1);
  EXPECT_EQ(ids_of(plan), std::vector<SeqId>{2}) << "others must get the blocks at once";
}

TEST(SchedulerGrowth, ThePlanWaitsForATokenThatMayBeTheLast) {
  GrowingBed bed(2);
  bed.scheduler.add(1, numbers(4), 20);
  const auto plan = bed.scheduler.plan();
  ASSERT_EQ(ids_of(plan), std::vector<SeqId>{1});
  bed.scheduler.advance(plan);
  const auto next = bed.scheduler.plan();
  EXPECT_TRUE(next.empty());
  EXPECT_TRUE(next.impossible.empty());
  bed.scheduler.resolve(plan, std::vector<TokenId>{3});
  EXPECT_EQ(bed.scheduler.plan().impossible, std::vector<SeqId>{1});
  EXPECT_EQ(bed.pool.num_active(), 0);
}

int hashed = 0;
std::uint64_t counted_hash(std::uint64_t parent_id, std::uint64_t salt, std::span<const TokenId> tokens) {
  ++hashed;
  return BlockManager::default_hash(parent_id, salt, tokens);
}

TEST(SchedulerQueue, APromptThatDoesNotFitIsLookedUpAgainOnlyWhenBlocksAreReleased) {
  BlockManager pool(20, 4, true, counted_hash);
  Scheduler scheduler({8, 200}, pool);
  scheduler.add(1, numbers(37, 100), 45);
  scheduler.add(2, numbers(21, 200), 40);
  step(scheduler);
  scheduler.add(3, numbers(64, 100), 70);  // has the same prefix as the first one
  hashed = 0;
  scheduler.plan();
  EXPECT_GT(std::exchange(hashed, 0), 8);
  for (int i = 0; i < 3; ++i) scheduler.plan();
  EXPECT_EQ(hashed, 0);
  scheduler.remove(2);
  EXPECT_EQ(text_of(scheduler.plan()), "1:37+1s 3:36+28s");
}

TEST(SchedulerQueue, BlocksInsertedByOthersLetAWaitingPromptFit) {
  Bed bed(14, 4, {8, 16});
  bed.scheduler.add(1, numbers(33, 100), 36);
  bed.scheduler.add(2, numbers(34, 100), 37);
  for (const auto* const expected : {"1:0+16", "1:16+16", "1:32+1s 2:32+2s"}) EXPECT_EQ(bed.step(), expected);
}

// Kinds of cache with a window.

// The size of Gemma 3 27B's windows. 52 of its 62 layers have one; a token takes 8 KiB in each layer (bf16).
TEST(SchedulerWindow, ASequenceOf32kTokensHoldsUnitsForItsWindowAndOneStep) {
  const cache::UnitKind window{.window = 1024, .num_units = 26};
  Bed bed(512, 64, {4, 512}, true, {&window, 1});
  bed.scheduler.add(1, numbers(32'704), 32'768);
  double most_gib = 0, gib = 0;
  while (bed.scheduler.tokens(1).size() < 32'768) {
    bed.step();
    const auto units = bed.scheduler.units(1)[0].units.size();
    ASSERT_LE(units, bed.scheduler.num_computed(1) < 32'704 ? 1U + (1024 + 512) / 64 : 1U + 1024 / 64);
    const auto blocks = bed.scheduler.blocks(1).size();
    gib = static_cast<double>((10 * blocks + 52 * units) * 64 * 8) / (1 << 20);
    most_gib = std::max(most_gib, gib);
  }
  EXPECT_EQ(bed.scheduler.num_preemptions(), 0);
  EXPECT_LT(gib, 2.95) << "with all units it would be 15.5 GiB";
  EXPECT_LT(most_gib, 3.2);
}

TEST(SchedulerWindow, MatchEndsAtTheDeepestNodeWithACachedWindow) {
  const cache::UnitKind window{.window = 8, .num_units = 12};
  Bed bed(40, 4, {4, 64}, true, {&window, 1});
  bed.scheduler.add(1, numbers(25), 26);
  bed.step();
  bed.scheduler.remove(1);
  bed.scheduler.add(2, numbers(33, 100), 34);
  bed.step();
  bed.scheduler.remove(2);
  // The second sequence has evicted the units of the blocks 3, 2 and 1, which were released first.
  bed.scheduler.add(3, numbers(25), 26);
  bed.scheduler.add(4, numbers(13), 14);
  EXPECT_EQ(bed.step(), "3:24+1s 4:4+9s");
  bed.scheduler.remove(3);
  bed.scheduler.remove(4);
  bed.scheduler.add(5, numbers(13), 14);
  EXPECT_EQ(bed.step(), "5:12+1s") << "the nodes have units again";
}

TEST(SchedulerWindow, TheLastSequenceIsPreemptedIfAllWaitForUnits) {
  const cache::UnitKind window{.window = 4, .num_units = 4};
  Bed bed(40, 2, {4, 2}, true, {&window, 1});
  bed.scheduler.add(1, numbers(30), 31);
  for (int i = 0; i < 8; ++i) bed.step();
  auto prompt = numbers(30);
  std::ranges::fill(prompt.begin() + 16, prompt.end(), 0);
  bed.scheduler.add(2, prompt, 31, {.priority = 1});
  EXPECT_EQ(bed.step(), "2:16+2") << "it shares the units of the first one";
  EXPECT_EQ(bed.step(), "2:18+2");
  const auto plan = step(bed.scheduler);
  EXPECT_EQ(text_of(plan), "2:20+2");
  EXPECT_EQ(plan.preempted, std::vector<SeqId>{1});
}

TEST(SchedulerWindow, AChildIsComputedAloneIfItsParentsWindowHasMoved) {
  const cache::UnitKind window{.window = 4, .num_units = 20};
  Bed bed(32, 4, {8, 100}, true, {&window, 1});
  bed.scheduler.add(1, numbers(6), 20);
  for (int i = 0; i < 5; ++i) bed.step();
  bed.scheduler.add(2, numbers(6), 20, {.parent = 1});
  const auto plan = bed.scheduler.plan();
  EXPECT_EQ(text_of(plan), "1:10+1s 2:4+2s");
  EXPECT_TRUE(plan.block_copies.empty());
}

TEST(SchedulerWindow, AChildCopiesTheParentsPartialBlockOfEachKind) {
  const cache::UnitKind window{.window = 4, .num_units = 20};
  Bed bed(32, 4, {8, 100}, true, {&window, 1});
  bed.scheduler.add(1, numbers(7), 20);
  bed.scheduler.add(2, numbers(7), 20, {.parent = 1});
  bed.step();
  const auto plan = bed.scheduler.plan();
  const auto& parent = bed.scheduler.units(1)[0];
  const auto& child = bed.scheduler.units(2)[0];
  EXPECT_EQ(child.units[0], parent.units[0]);
  EXPECT_EQ(plan.block_copies, (Copies{{bed.scheduler.blocks(1)[1], bed.scheduler.blocks(2)[1]},
                                       {parent.units[1], child.units[1], CacheKind::window}}));
}

// The first `shared` tokens of numbers(), then others.
std::vector<TokenId> branching(int shared, int n, int others) {
  auto out = numbers(n, others);
  std::iota(out.begin(), out.begin() + shared, 0);
  return out;
}

TEST(SchedulerState, ATurnBeginsAtTheLastSnapshotAndAPrefixAtTheEndOfThePrompt) {
  const cache::UnitKind state{.num_units = 12, .kind = CacheKind::state};
  Bed bed(64, 4, {4, 64, 0, 16}, true, {&state, 1});
  bed.scheduler.add(1, numbers(26), 60);
  EXPECT_EQ(bed.step(), "1:0+16") << "every snapshot_tokens";
  EXPECT_EQ(bed.step(), "1:16+8") << "the last end of a block of the prompt";
  EXPECT_EQ(bed.step(), "1:24+2s");
  for (int i = 0; i < 9; ++i) bed.step();
  auto turn = std::vector<TokenId>(bed.scheduler.tokens(1).begin(), bed.scheduler.tokens(1).end());
  ASSERT_EQ(turn.size(), 36U);
  bed.scheduler.remove(1);
  EXPECT_EQ(bed.pool.kinds()[0].num_cached(), 3) << "at 16, 24 and 32: decoding keeps the last snapshot only";
  bed.scheduler.add(2, turn, 60);
  EXPECT_EQ(bed.step(), "2:32+4s");
  bed.scheduler.remove(2);
  turn.resize(31);
  bed.scheduler.add(3, turn, 60);
  EXPECT_EQ(bed.step(), "3:24+4");
  EXPECT_EQ(bed.step(), "3:28+3s");
}

TEST(SchedulerState, ASharedBeginningHasASnapshotAfterTheSecondPrompt) {
  const cache::UnitKind state{.num_units = 12, .kind = CacheKind::state};
  Bed bed(64, 4, {4, 64, 0, 16}, true, {&state, 1});
  bed.scheduler.add(1, branching(10, 15, 100), 40);
  EXPECT_EQ(bed.step(), "1:0+12");
  bed.scheduler.add(2, branching(10, 15, 200), 40);
  EXPECT_EQ(bed.step(), "1:12+3s 2:0+8");
  bed.scheduler.add(3, branching(10, 15, 300), 40);
  EXPECT_EQ(bed.step(), "1:15+1s 2:8+4 3:8+4");
}

TEST(SchedulerState, WithoutAFreeUnitASequenceTakesItsSnapshotBack) {
  const cache::UnitKind state{.num_units = 2, .kind = CacheKind::state};
  Bed bed(64, 4, {4, 64, 0, 64}, true, {&state, 1});
  bed.scheduler.add(1, branching(0, 10, 100), 20);
  bed.scheduler.add(2, branching(0, 10, 200), 20);
  EXPECT_EQ(bed.step(), "1:0+8 2:0+8");
  const auto units = bed.scheduler.units(1)[0].units;
  EXPECT_EQ(bed.step(), "1:8+2s 2:8+2s");
  EXPECT_EQ(bed.scheduler.units(1)[0].units, units);
  EXPECT_EQ(bed.pool.kinds()[0].num_cached(), 0);
}

TEST(SchedulerState, AChildBeginsAtTheLastSnapshotOfItsPrompt) {
  const cache::UnitKind state{.num_units = 12, .kind = CacheKind::state};
  Bed bed(64, 4, {4, 64, 0, 64}, true, {&state, 1});
  bed.scheduler.add(1, numbers(11), 20);
  bed.scheduler.add(2, numbers(11), 20, {.parent = 1});
  EXPECT_EQ(bed.step(), "1:0+8");
  EXPECT_EQ(bed.step(), "1:8+3s");
  EXPECT_EQ(bed.step(), "1:11+1s 2:8+3s");
}

}  // namespace
}  // namespace charonia::schedule
