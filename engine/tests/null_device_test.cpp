// device = null: the device computes nothing, and everything else is real.
#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <numeric>
#include <set>

#include "engine_fixture.h"

namespace charonia {
namespace {

using testing::Collector;
using testing::MaskOf;
using testing::request;
using testing::tokens_of;

class NullDeviceTest : public testing::EngineFixtureBase {
 protected:
  void SetUp() override {
    EngineFixtureBase::SetUp();
    testing::write_tiny_workspace(weights());
  }
  std::unique_ptr<Engine> null_engine(Settings more = {}) const {
    more.emplace("device", "null");
    return engine(more);
  }
};

Request sampled(std::uint64_t seed, int max_tokens = 30) {
  auto out = request({1, 2, 3}, max_tokens);
  out.sampling.temperature = 1;
  out.sampling.seed = seed;
  return out;
}

TEST_F(NullDeviceTest, WarnsThatItsAnswersAreMeaningless) {
  const auto null = null_engine();
  EXPECT_EQ(null->info().device, "null");
  EXPECT_EQ(null->info().weight_bytes, 0);
  ASSERT_EQ(null->info().warnings.size(), 1U);
  EXPECT_NE(null->info().warnings[0].find("device = null computes nothing"), std::string::npos);
  EXPECT_EQ(plan_memory(weights(), {{"device", "null"}}).num_blocks, null->info().num_blocks);
}

TEST_F(NullDeviceTest, TokensDependOnSeedAndPosition) {
  const auto null = null_engine();
  auto ends = sampled(7);
  ends.sampling.ignore_eos = false;
  Collector out(*null, ends);
  const auto first = out.tokens();
  EXPECT_EQ(first.size(), 30U);
  EXPECT_EQ(out.last().finish_reason, FinishReason::length);
  EXPECT_EQ(out.text().size(), 30U);
  EXPECT_EQ(std::ranges::count(first, 0), 0) << "the end id must not be sampled";
  EXPECT_GT(std::set(first.begin(), first.end()).size(), 5U);
  EXPECT_EQ(tokens_of(*null, sampled(7)), first);
  EXPECT_NE(tokens_of(*null, sampled(8)), first);
  const auto greedy = tokens_of(*null, request({1, 2, 3}, 30));
  EXPECT_EQ(tokens_of(*null, request({4, 5, 6}, 30)), greedy);

  auto several = sampled(7);
  several.sampling.n = 3;
  Collector all(*null, several);
  EXPECT_EQ(all.tokens(0), first);
  for (const int i : {1, 2}) EXPECT_EQ(all.tokens(i), tokens_of(*null, sampled(7 + static_cast<std::uint64_t>(i))));
  EXPECT_EQ(tokens_of(*null_engine({{"cache_max_entry_count", "4"}, {"cache_block_seq_len", "16"}}), sampled(7)),
            first);
  testing::TinyModel two_ranks;
  two_ranks.ranks = 2;
  testing::write_tiny_workspace(weights(), two_ranks);
  EXPECT_EQ(tokens_of(*null_engine({{"tensor_para_size", "2"}}), sampled(7)), first);
}

TEST_F(NullDeviceTest, LogProbabilitiesFormADistribution) {
  const auto null = null_engine();
  auto one = sampled(7, 10);
  one.sampling.logprobs = 20;
  one.sampling.prompt_logprobs = 1;
  Collector out(*null, one);
  const auto tokens = out.tokens();
  EXPECT_EQ(tokens, tokens_of(*null, sampled(7, 10)));
  EXPECT_EQ(out.prompt_logprobs().size(), 2U);
  std::size_t seen = 0;
  for (const auto& result : out.wait()) {
    for (std::size_t i = 0; i < result.token_ids.size(); ++i) {
      const auto& top = result.top_logprobs[i];
      ASSERT_EQ(top.size(), 20U);
      EXPECT_EQ(top[0].id, tokens[seen++]);
      EXPECT_EQ(top[0].logprob, result.logprobs[i]);
      const double sum = std::accumulate(top.begin(), top.end(), 0.0, [](double s, const auto& t) {
        return s + std::exp(static_cast<double>(t.logprob));
      });
      EXPECT_GT(sum, 0.99);  // 40 tokens, and one is likely
      EXPECT_LT(sum, 1.0);
    }
  }
  EXPECT_EQ(seen, 10U);
}

TEST_F(NullDeviceTest, ForbiddenTokensAreNotSampled) {
  const auto null = null_engine();
  const auto free = tokens_of(*null, sampled(7));
  auto banned = sampled(7);
  banned.sampling.bad_words = {{free[4]}};
  const auto without = tokens_of(*null, banned);
  EXPECT_EQ(without.size(), free.size());
  EXPECT_EQ(std::ranges::count(without, free[4]), 0);
  const auto before = std::ranges::find(free, free[4]) - free.begin();
  EXPECT_TRUE(std::equal(free.begin(), free.begin() + before, without.begin()));

  auto punished = sampled(7, 20);
  punished.sampling.frequency_penalty = 2;
  punished.sampling.presence_penalty = 2;
  punished.sampling.repetition_penalty = 100;
  const auto different = tokens_of(*null, punished);
  EXPECT_EQ(std::set(different.begin(), different.end()).size(), different.size());

  auto masked = sampled(7);
  const auto even = [](TokenId id, std::span<const TokenId>) { return id % 2 == 0; };
  masked.mask = std::make_shared<MaskOf>(40, even);
  for (const auto id : tokens_of(*null, masked)) EXPECT_EQ(id % 2, 0) << id;
}

TEST_F(NullDeviceTest, StepsTakeTheirTime) {
  const auto null = null_engine({{"null_step_ms", "4"}});
  const auto begin = std::chrono::steady_clock::now();
  Collector a(*null, sampled(1, 25)), b(*null, sampled(2, 25));
  for (auto* const one : {&a, &b}) EXPECT_EQ(one->tokens().size(), 25U);
  EXPECT_GE(std::chrono::steady_clock::now() - begin, std::chrono::milliseconds(100));
}

TEST_F(NullDeviceTest, SettingsThatDoNotApplyAreRejected) {
  for (const auto& [settings, named] : std::vector<std::pair<Settings, std::string_view>>{
           {{{"device", "null"}, {"null_step_ms", "-1"}}, "null_step_ms"},
           {{{"device", "null"}, {"null_step_ms", "1001"}}, "null_step_ms"},
           {{{"device", "null"}, {"device_ids", "0"}}, "device_ids = 0 names GPUs"},
           {{{"device", "cpu"}, {"null_step_ms", "8"}}, "null_step_ms = 8 is for device = null"}}) {
    expect_error(ErrorCode::invalid_argument, {named}, [&, &wrong = settings] { engine(wrong); });
  }
}

TEST_F(NullDeviceTest, ManyStreamsHaveFewerResponsesAndEqualTokens) {
  const auto null = null_engine({{"null_step_ms", "1"},
                                 {"stream_interval_ms", "2"},
                                 {"stream_interval_per_stream_ms", "100000"},
                                 {"stream_interval_max_ms", "1000000"}});
  std::array<Collector, 8> out;
  for (std::size_t i = 0; i < out.size(); ++i) {
    auto one = sampled(i, 40);
    one.stream = true;
    null->submit(std::move(one), out[i].callback());
  }
  for (std::size_t i = 0; i < out.size(); ++i) {
    EXPECT_EQ(out[i].tokens(), tokens_of(*null, sampled(i, 40)));
    EXPECT_LE(out[i].wait().size(), 2U) << "only the first and the last result";
  }
}

TEST_F(NullDeviceTest, BlocksPrefixesAndSessionsAreReal) {
  const auto null = null_engine({{"cache_block_seq_len", "4"}});
  const auto turn = [&](std::vector<TokenId> ids) {
    auto one = request(ids, 8);
    one.session_id = "a";
    one.continuation_ids = std::move(ids);
    return Collector(*null, one).last();
  };
  EXPECT_EQ(turn(std::vector<TokenId>(13, 5)).num_session_tokens, 0);
  EXPECT_GT(turn({6, 7}).num_session_tokens, 13);
  EXPECT_EQ(Collector(*null, request(std::vector<TokenId>(13, 5), 2)).last().num_cached_tokens, 12);
  null->end_session("a");
  null->check_integrity();
  EXPECT_EQ(null->stats().blocks_active, 0);
}

}  // namespace
}  // namespace charonia
