// A run of certain tokens takes one step. The response is the same as with one step for each token.
#include <chrono>
#include <memory>
#include <string>

#include "engine_fixture.h"

namespace charonia {
namespace {

using testing::Collector;
using testing::kVocab;
using testing::request;
using testing::RunsOf;
using testing::tokens_of;
using testing::with_runs;

class EngineForcedTest : public testing::EngineFixture {
 protected:
  static Request random_request(std::vector<TokenId> ids, int max_tokens, std::uint64_t seed) {
    auto out = request(std::move(ids), max_tokens);
    out.sampling.temperature = 1.0F;
    out.sampling.seed = seed;
    if (seed % 2 == 1) out.sampling.repetition_penalty = 1.3F;
    if (seed % 3 == 1) out.sampling.frequency_penalty = 0.5F;
    return out;
  }
  // The request twice, with its certain tokens taken together and one by one: tokens, texts and reasons are the same.
  static std::vector<TokenId> expect_same(Engine& engine, const Request& asked) {
    Collector fast(asked.sampling.n), slow(asked.sampling.n);
    engine.submit(with_runs(asked, kVocab, false), fast.callback());
    fast.wait();
    engine.submit(with_runs(asked, kVocab, true), slow.callback());
    for (int i = 0; i < asked.sampling.n; ++i) {
      EXPECT_EQ(fast.tokens(i), slow.tokens(i)) << "sequence " << i;
      EXPECT_EQ(fast.text(i), slow.text(i));
      EXPECT_EQ(fast.last(i).finish_reason, slow.last(i).finish_reason);
      EXPECT_EQ(fast.last(i).error, slow.last(i).error);
      EXPECT_EQ(fast.last(i).num_output_tokens, slow.last(i).num_output_tokens);
    }
    return fast.tokens();
  }
};
INSTANTIATE_TEST_SUITE_P(Device, EngineForcedTest, testing::kDevices, testing::device_name);

TEST_P(EngineForcedTest, ResponsesEqualStepByStepResponsesAtEveryEnd) {
  const auto one = engine();
  for (std::uint64_t seed = 0; seed < 4; ++seed) {
    for (const int max_tokens : {1, 2, 3, 4, 6, 7, 8, 9, 10, 13, 30}) {
      auto asked = random_request({1, 2, 3}, max_tokens, seed);
      asked.stream = seed % 2 == 0;
      EXPECT_EQ(expect_same(*one, asked).size(), static_cast<std::size_t>(max_tokens));
      asked.sampling.n = 3;
      if (max_tokens == 30) expect_same(*one, asked);
    }
  }
  one->check_integrity();
}

// Stop words, end tokens and bans within a run. A certain token that is banned, or that would end the answer too early,
// cannot be sampled either.
TEST_P(EngineForcedTest, EndsAndPenaltiesCountWithinAForcedRun) {
  const auto one = engine();
  const auto asked = random_request({4, 5}, 28, 3);
  Collector whole(*one, with_runs(asked, kVocab, true));
  const auto text = whole.text();
  const auto tokens = whole.tokens();
  ASSERT_EQ(text.size(), 28U - static_cast<std::size_t>(std::ranges::count(tokens, 0)));
  for (std::size_t at = 0; at + 2 < text.size(); ++at) {
    auto stopped = asked;
    stopped.sampling.stop_words = {text.substr(at, 2)};
    stopped.stream = at % 2 == 0;
    EXPECT_LT(expect_same(*one, stopped).size(), 28U);
  }
  int failed = 0, ended = 0;
  for (std::size_t at = 2; at < 7; ++at) {
    auto single = asked, pair = asked, early = asked;
    single.sampling.bad_words = {{tokens[at]}};
    pair.sampling.bad_words = {{tokens[at - 1], tokens[at]}};
    early.sampling.ignore_eos = false;
    early.sampling.end_ids = {tokens[at]};
    early.sampling.min_tokens = 20;
    for (const auto& steered : {single, pair, early}) expect_same(*one, steered);
    failed += Collector(*one, with_runs(single, kVocab, false)).last().finish_reason == FinishReason::error;
  }
  EXPECT_GT(failed, 0);
  for (std::uint64_t seed = 0; seed < 30; ++seed) {
    auto ends = random_request({4, 5}, 40, seed);
    ends.sampling.ignore_eos = false;
    const auto said = expect_same(*one, ends);
    ended += said.back() == 0 && (said.size() - 1) % 7 >= 2;
  }
  EXPECT_GT(ended, 0);
  one->check_integrity();
}

TEST_P(EngineForcedTest, ASessionGoesOnAfterAnAnswerThatEndedWithinARun) {
  const auto one = engine();
  for (const int max_tokens : {3, 5, 7, 16}) {
    std::vector<std::vector<TokenId>> answers[2];
    for (const bool one_by_one : {false, true}) {
      for (int turn = 0; turn < 3; ++turn) {
        auto asked = random_request({static_cast<TokenId>(8 + turn), 9}, max_tokens, 5);
        asked.session_id = one_by_one ? "slow" : "fast";
        if (turn > 0) asked.continuation_ids = {7};
        answers[one_by_one ? 1 : 0].push_back(tokens_of(*one, with_runs(asked, kVocab, one_by_one)));
      }
    }
    EXPECT_EQ(answers[0], answers[1]) << max_tokens;
    for (const auto* const name : {"slow", "fast"}) EXPECT_TRUE(one->end_session(name));
  }
  one->check_integrity();
}

// More requests than the cache can hold. Some prompts have a common prefix.
TEST_P(EngineForcedTest, ManyForcedSequencesArePreemptedAndGetTheirTokens) {
  for (const auto* const prefixes : {"True", "False"}) {
    const auto one =
        engine({{"cache_max_entry_count", "20"}, {"session_len", "60"}, {"enable_prefix_caching", prefixes}});
    std::vector<Request> all;
    for (std::uint64_t i = 0; i < 8; ++i) {
      std::vector<TokenId> prompt{1, 2, 3, 4, 5, 6};
      if (i % 2 == 1) prompt.push_back(static_cast<TokenId>(i));
      all.push_back(random_request(prompt, 20 + 3 * static_cast<int>(i), i));
    }
    std::vector<Collector> together(all.size());
    for (std::size_t i = 0; i < all.size(); ++i) {
      // One with log probabilities and one without a mask are among them.
      auto asked = i == 6 ? all[i] : with_runs(all[i], kVocab, i == 5);
      one->submit(std::move(asked), together[i].callback());
    }
    for (auto& out : together) out.wait();
    EXPECT_GT(one->stats().num_preemptions, 0);
    one->check_integrity();
    for (std::size_t i = 0; i < all.size(); ++i) {
      EXPECT_EQ(together[i].tokens(), alone(i == 6 ? all[i] : with_runs(all[i], kVocab, true))) << "request " << i;
    }
  }
}

TEST_P(EngineForcedTest, StepsAreFewerButWhereLogProbabilitiesAreAskedFor) {
  const auto one = engine();
  const auto steps = [&](const Request& asked) {
    const auto before = one->stats().num_steps;
    Collector(*one, asked).wait();
    return one->stats().num_steps - before;
  };
  const auto asked = random_request({1, 2, 3}, 70, 0);
  EXPECT_GE(steps(with_runs(asked, kVocab, true)), 70);
  const auto fewer = steps(with_runs(asked, kVocab, false));
  EXPECT_GE(fewer, 30);
  EXPECT_LT(fewer, 36) << "3 for every 7 tokens";
  auto best = asked;
  best.sampling.best_of = 2;
  best.stream = false;
  EXPECT_GE(steps(with_runs(best, kVocab, false)), 70);
}

// Says more than its mask allows.
class Liar : public RunsOf {
 public:
  Liar() : RunsOf(kVocab) {}
  std::span<const TokenId> forced() const override {
    return RunsOf::forced().empty() ? std::span<const TokenId>(kOne) : RunsOf::forced();
  }
  std::unique_ptr<TokenMaskProvider> clone() const override { return std::make_unique<Liar>(); }

 private:
  static constexpr TokenId kOne[] = {1};
};

TEST_P(EngineForcedTest, ForcedTokenNextToOthersIsAnErrorOfTheRequest) {
  const auto one = engine();
  auto asked = request({1, 2, 3}, 10);
  asked.mask = std::make_shared<Liar>();
  Collector wrong(*one, asked), right(*one, request({1, 2}, 5));
  EXPECT_EQ(wrong.last().finish_reason, FinishReason::error);
  EXPECT_NE(wrong.last().error.find("forces token 1"), std::string::npos) << wrong.last().error;
  EXPECT_EQ(right.tokens().size(), 5U);
}

}  // namespace
}  // namespace charonia
