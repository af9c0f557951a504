// The engine on a device that computes one step while the next is planned and launched, compared with the engine on a
// synchronous device: the tokens are the same, bit by bit, and errors affect the same requests.
#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <functional>
#include <string>
#include <string_view>
#include <thread>

#include "charonia/engine.h"
#include "engine_fixture.h"
#include "mixed_requests.h"

namespace charonia {
namespace {

using testing::Collector;
using testing::Faults;
using testing::Outcome;
using testing::outcomes;
using testing::request;
using testing::write_tiny_workspace;

// With one rank, and with two ranks, which wait for each other within a step.
class OverlapTest : public testing::EngineFixtureBase, public ::testing::WithParamInterface<int> {
 protected:
  void SetUp() override {
    EngineFixtureBase::SetUp();
    testing::TinyModel model;
    model.ranks = GetParam();
    model.special = testing::kHeaderMarks;
    write_tiny_workspace(weights(), model);
  }

  std::unique_ptr<Engine> engine(bool asynchronous, const Settings& settings = {}) {
    faults_ = std::make_shared<Faults>();
    wrap_devices(asynchronous);
    return EngineFixtureBase::engine(settings);
  }

  // Runs the requests with overlapping steps, with enough blocks and with few, in large and in small steps. Plans do
  // not depend on ranks. So one rank runs every combination. Several ranks, which wait for each other some 50 times per
  // step, run two of them.
  void expect_outcomes(const std::vector<Request>& all, const std::vector<Outcome>& expected, const Settings& settings,
                       const std::function<void(const EngineStats&)>& check = {}) {
    for (const auto& [blocks, budget] : {std::pair{"2000", "200"}, {"30", "7"}, {"2000", "7"}, {"30", "200"}}) {
      const bool enough = std::string_view(blocks) == "2000", large = std::string_view(budget) == "200";
      if (GetParam() > 1 && enough != large) continue;
      SCOPED_TRACE(std::string(blocks) + " blocks, budget " + budget);
      auto more = settings;
      more.insert({{"cache_max_entry_count", blocks}, {"token_budget", budget}, {"session_len", "100"}});
      const auto overlapping = engine(true, more);
      const auto got = outcomes(*overlapping, all);
      for (std::size_t i = 0; i < all.size(); ++i) ASSERT_EQ(got[i], expected[i]) << "request " << i;
      const auto stats = overlapping->stats();
      EXPECT_GT(stats.prefix_hit_tokens, 0);
      EXPECT_EQ(stats.num_preemptions > 0, !enough);
      if (check) check(stats);
    }
  }
};
INSTANTIATE_TEST_SUITE_P(Ranks, OverlapTest, ::testing::Values(1, 2),
                         [](const auto& info) { return std::to_string(info.param); });

TEST_P(OverlapTest, EveryRequestGetsTheSameTokensWithPreemptionAndPrefixHits) {
  auto all = testing::mixed_requests(150);
  // The first batch. Its steps overlap, also if the engine begins when all requests wait.
  for (int i = 0; i < 16; ++i) {
    auto plain = request({1, 2, 3, i}, 30);
    plain.priority = 2;
    all.insert(all.begin(), plain);
  }
  const auto synchronous = engine(false);
  const auto expected = outcomes(*synchronous, all);
  const auto expected_tokens = synchronous->stats().generation_tokens;
  int headers = 0;
  for (std::size_t i = 0; i < all.size(); ++i) {
    const auto& header = all[i].sampling.thinking_begin_ids;
    headers += header.size() > 1 && !std::ranges::search(expected[i].tokens[0], header).empty() ? 1 : 0;
  }
  EXPECT_GT(headers, 0) << "no response has a message of thinking";
  for (const auto* batch : {"3", "16"}) {
    expect_outcomes(all, expected, {{"max_batch_size", batch}}, [&](const EngineStats& stats) {
      EXPECT_EQ(stats.generation_tokens, expected_tokens)
          << "tokens sampled after the end of a sequence must not count";
      EXPECT_EQ(faults_->most_in_flight, 2);
    });
  }
}

// A prefill attends to its own rows through the cache's integers, so that chunking has no effect.
TEST_P(OverlapTest, TokensWithAQuantisedCacheDoNotDependOnOtherRequests) {
  const auto all = testing::mixed_requests(60);
  const auto plain = outcomes(*engine(false), all);
  for (const auto* policy : {"8", "4", "16"}) {
    const auto expected = outcomes(*engine(false, {{"quant_policy", policy}}), all);
    EXPECT_NE(expected, plain);
    expect_outcomes(all, expected, {{"quant_policy", policy}, {"max_batch_size", "12"}});
  }
}

TEST_P(OverlapTest, SamplingThatNeedsTheLastTokenIsNotOverlapped) {
  const auto overlapping = engine(true);
  auto banned = request({1, 2, 3}, 30);
  banned.sampling.bad_words = {{5, 6}};
  Collector(*overlapping, banned).wait();
  EXPECT_EQ(faults_->most_in_flight, 1);
  Collector(*overlapping, request({1, 2, 3}, 30)).wait();
  EXPECT_EQ(faults_->most_in_flight, 2);
}

// Bans from all sources in any order: end ids, words of one token and of several. (StepCopy checks every step.)
TEST_P(OverlapTest, BansReachTheDeviceAscending) {
  const auto one = engine(true);
  auto banned = request({1, 2, 3}, 30);
  banned.sampling.ignore_eos = false;
  banned.sampling.min_tokens = 20;
  banned.sampling.end_ids = {30, 7, 30, 21};
  banned.sampling.bad_words = {{22}, {3, 39}, {9}, {3, 4}, {22}};
  const auto tokens = testing::tokens_of(*one, banned);
  EXPECT_GE(tokens.size(), 20U);
  for (const TokenId id : {22, 9}) EXPECT_EQ(std::ranges::count(tokens, id), 0) << id;
  for (const TokenId id : {30, 7, 21}) EXPECT_LE(std::ranges::count(tokens, id), 1) << id << " ends the sequence";
}

TEST_P(OverlapTest, CancelsLeaveTheOthersAsTheyAre) {
  auto all = testing::mixed_requests(60);
  for (auto& one : all) {
    one.stream = true;
    one.sampling.best_of = 0;
  }
  const auto expected = outcomes(*engine(false), all);
  const auto overlapping = engine(true, {{"cache_max_entry_count", "60"}, {"max_batch_size", "16"}});
  std::deque<Collector> collectors;
  std::vector<Engine::Handle> handles;
  for (const auto& one : all)
    handles.push_back(overlapping->submit(one, collectors.emplace_back(one.sampling.n).callback()));
  for (std::size_t i = 0; i < all.size(); i += 3) {
    collectors[i].wait_for(1 + i % 5);
    overlapping->cancel(handles[i]);
  }
  for (std::size_t i = 0; i < all.size(); ++i) {
    for (int k = 0; k < all[i].sampling.n; ++k) {
      const auto tokens = collectors[i].tokens(k);
      const auto& whole = expected[i].tokens[static_cast<std::size_t>(k)];
      if (collectors[i].last(k).finish_reason != FinishReason::cancelled) {
        EXPECT_EQ(tokens, whole) << "request " << i << ", sequence " << k;
      } else {
        ASSERT_LE(tokens.size(), whole.size());
        EXPECT_TRUE(std::equal(tokens.begin(), tokens.end(), whole.begin())) << "request " << i << ", sequence " << k;
      }
    }
  }
  overlapping->check_integrity();
  EXPECT_EQ(overlapping->stats().blocks_active, 0);
}

TEST_P(OverlapTest, ShutdownAndDestructionWithAStepInFlight) {
  for (const int timeout_ms : {0, 60'000}) {
    Collector last;
    const auto overlapping = engine(true);
    if (timeout_ms == 0) faults_->step_ms = 50;
    overlapping->submit(request({1, 2}, 200), last.callback());
    last.wait_for(3);
    overlapping->shutdown(timeout_ms);
    EXPECT_EQ(last.wait().back().finish_reason, timeout_ms == 0 ? FinishReason::cancelled : FinishReason::length);
  }
  Collector cut;
  {
    const auto overlapping = engine(true);
    overlapping->submit(request({1, 2}, 200), cut.callback());
    cut.wait_for(1);
  }
  EXPECT_NE(cut.wait().back().finish_reason, FinishReason::none);
}

}  // namespace
}  // namespace charonia
