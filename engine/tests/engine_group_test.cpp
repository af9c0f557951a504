// Requests with several sequences (n, best_of), and log probabilities of prompts.
#include <algorithm>
#include <cmath>
#include <deque>
#include <map>
#include <memory>

#include "base/text.h"
#include "engine_fixture.h"
#include "runtime/unread_rows.h"

namespace charonia {
namespace {

using testing::Collector;
using testing::request;

class EngineGroupTest : public testing::EngineFixture {};
INSTANTIATE_TEST_SUITE_P(Device, EngineGroupTest, testing::kDevices, testing::device_name);

Request sampled(std::vector<TokenId> ids, int max_tokens, std::uint64_t seed) {
  auto out = request(std::move(ids), max_tokens);
  out.sampling.temperature = 1.0F;
  out.sampling.seed = seed;
  return out;
}

// The result of a request with prompt_logits: rows in the order of positions, and the number of results with rows.
struct PromptRows {
  std::vector<std::vector<float>> logits;
  std::size_t results = 0;
};

PromptRows rows_of(const std::vector<Result>& results) {
  PromptRows out;
  for (std::size_t i = 0; i < results.size(); ++i) {
    const auto& result = results[i];
    if (result.prompt_logits.empty()) continue;
    EXPECT_EQ(i, out.results++);
    EXPECT_TRUE(result.token_ids.empty() && result.finish_reason == FinishReason::none);
    EXPECT_EQ(static_cast<std::size_t>(result.first_logits), out.logits.size());
    out.logits.insert(out.logits.end(), result.prompt_logits.begin(), result.prompt_logits.end());
  }
  return out;
}

double log_softmax(const std::vector<float>& logits, TokenId id) {
  double sum = 0;
  for (const float x : logits) sum += std::exp(static_cast<double>(x));
  return static_cast<double>(logits.at(static_cast<std::size_t>(id))) - std::log(sum);
}

TEST_P(EngineGroupTest, SequenceIHasTheTokensOfTheSeedPlusI) {
  for (const bool stream : {false, true}) {
    for (const auto* blocks :
         {"200", "20"}) {  // with few blocks, sequences are preempted and start without their parent
      const auto together = engine({{"cache_max_entry_count", blocks}, {"token_budget", "9"}, {"session_len", "60"}});
      auto several = sampled({1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13}, 30, 50);
      several.sampling.n = 4;
      several.stream = stream;
      Collector all(*together, several);
      for (int i = 0; i < 4; ++i) {
        EXPECT_EQ(all.tokens(i), alone(sampled(several.input_ids, 30, 50 + static_cast<std::uint64_t>(i)))) << i;
        EXPECT_EQ(all.last(i).finish_reason, FinishReason::length);
        EXPECT_EQ(all.last(i).num_output_tokens, 30);
      }
      together->check_integrity();
      EXPECT_EQ(together->stats().blocks_active, 0);
    }
  }
}

TEST_P(EngineGroupTest, BestOfGivesTheBestOnesInTheirOrder) {
  struct One {
    std::vector<TokenId> tokens;
    double mean;
  };
  std::vector<One> candidates;
  for (std::uint64_t i = 0; i < 5; ++i) {
    const auto single = engine();
    auto asked = sampled({1, 2, 3}, 12, 70 + i);
    asked.sampling.logprobs = 0;
    Collector out(*single, asked);
    double sum = 0;
    for (const auto logprob : out.logprobs()) sum += logprob;
    EXPECT_DOUBLE_EQ(out.last().cumulative_logprob, sum);
    candidates.push_back({out.tokens(), sum / 12});
  }
  const auto by_seed = candidates;
  std::ranges::stable_sort(candidates, std::greater{}, &One::mean);
  for (const int n : {1, 2, 5}) {
    auto best = sampled({1, 2, 3}, 12, 70);
    best.sampling.n = n;
    best.sampling.best_of = 5;
    best.sampling.prompt_logprobs = 0;
    best.stream = false;
    const auto together = engine();
    Collector all(*together, best);
    for (int i = 0; i < n; ++i) {
      // Without a selection, the order is the order of the seeds.
      const auto& expected = (n == 5 ? by_seed : candidates)[static_cast<std::size_t>(i)];
      EXPECT_EQ(all.tokens(i), expected.tokens) << n << ", " << i;
      EXPECT_DOUBLE_EQ(all.last(i).cumulative_logprob / 12, expected.mean);
      EXPECT_TRUE(all.logprobs(i).empty()) << "log probabilities were not requested";
      EXPECT_EQ(all.prompt_logprobs(i).size(), i == 0 ? 2U : 0U);
    }
    EXPECT_EQ(std::ssize(all.wait()), n);
  }
}

TEST_P(EngineGroupTest, CancelEndsAllSequences) {
  lengthen();
  const auto together = engine({{"max_batch_size", "2"}});
  auto several = sampled({1, 2}, 15'000, 3);
  several.sampling.n = 4;
  Collector running(4), waiting(4);
  together->submit(several, running.callback());
  const auto handle = together->submit(several, waiting.callback());
  running.wait_for(3);
  EXPECT_TRUE(together->cancel(handle));
  waiting.wait();
  several.id = "mine";
  Collector named(*together, several);
  EXPECT_TRUE(together->cancel(std::string_view("mine")));
  for (int i = 0; i < 4; ++i) {
    EXPECT_EQ(named.last(i).finish_reason, FinishReason::cancelled);
    EXPECT_EQ(waiting.last(i).finish_reason, FinishReason::cancelled);
  }
  together->shutdown(0);
  for (int i = 0; i < 4; ++i) EXPECT_EQ(running.last(i).finish_reason, FinishReason::cancelled);
}

TEST_P(EngineGroupTest, InvalidCombinationsAreRejectedByName) {
  const auto one = engine();
  const std::vector<std::pair<std::string_view, std::function<void(Request&)>>> wrong = {
      {"n = 0", [](auto& r) { r.sampling.n = 0; }},
      {"n = 129", [](auto& r) { r.sampling.n = 129; }},
      {"best_of = 2", [](auto& r) { r.sampling.n = 3, r.sampling.best_of = 2; }},
      {"stream = false", [](auto& r) { r.sampling.best_of = 2; }},
      {"prompt_logprobs = 21", [](auto& r) { r.sampling.prompt_logprobs = 21; }},
      {"prompt_logprobs >= 0", [](auto& r) { r.prompt_logits = true; }},
      {"timeout_ms = 0", [](auto& r) { r.timeout_ms = 0; }}};
  for (const auto& [named, change] : wrong) {
    auto asked = request({1, 2}, 5);
    change(asked);
    expect_error(ErrorCode::invalid_argument, {named}, [&] { one->submit(asked, {}); });
  }
}

// The log probability of each prompt token equals the log probability of the first token sampled after the tokens
// before it.
TEST_P(EngineGroupTest, PromptLogprobsBelongToTheTokensAtTheirPositions) {
  std::vector<TokenId> prompt;
  for (TokenId i = 0; i < 37; ++i) prompt.push_back((7 * i + 3) % 40);
  std::vector<std::map<TokenId, float>> most_likely;
  const auto reference = engine();
  for (std::size_t length = 1; length < prompt.size(); ++length) {
    auto head = request({prompt.begin(), prompt.begin() + static_cast<std::ptrdiff_t>(length)}, 1);
    head.sampling.logprobs = 20;
    Collector out(*reference, head);
    auto& row = most_likely.emplace_back();
    for (const auto& [id, logprob] : out.last().top_logprobs.at(0)) row[id] = logprob;
  }
  for (const auto* budget : {"5", "512"}) {
    for (const auto* batch : {"1", "3", "64"}) {  // also limits the rows of logits in a step
      SCOPED_TRACE(std::string(budget) + " " + batch);
      const auto asked_of = engine({{"token_budget", budget}, {"max_batch_size", batch}});
      auto asked = request(prompt, 8);
      asked.sampling.prompt_logprobs = 20;
      asked.prompt_logits = true;
      for (int turn = 0; turn < 2; ++turn) {  // the second time everything is in the prefix index
        Collector beside(*asked_of, request({9, 8, 7}, 30)), out(*asked_of, asked);
        const auto rows = rows_of(out.wait());
        const auto& first = out.wait().at(rows.results);
        EXPECT_EQ(out.tokens(), alone(request(prompt, 8)));
        ASSERT_EQ(rows.logits.size(), prompt.size() - 1);
        ASSERT_EQ(first.prompt_logprobs.size(), prompt.size() - 1);
        ASSERT_EQ(first.prompt_top_logprobs.size(), prompt.size() - 1);
        for (std::size_t i = 0; i + 1 < prompt.size(); ++i) {
          ASSERT_EQ(first.prompt_top_logprobs[i].size(), 20U);
          for (const auto& [id, logprob] : first.prompt_top_logprobs[i]) {
            EXPECT_EQ(logprob, most_likely[i].at(id));
            EXPECT_NEAR(logprob, log_softmax(rows.logits[i], id), 1e-5);
          }
          const auto known = most_likely[i].find(prompt[i + 1]);
          if (known != most_likely[i].end()) {
            EXPECT_EQ(first.prompt_logprobs[i], known->second) << i;
          } else {
            EXPECT_LE(first.prompt_logprobs[i], first.prompt_top_logprobs[i].back().logprob);
          }
        }
        EXPECT_TRUE(out.wait().back().prompt_logprobs.empty() || out.wait().size() == rows.results + 1);
        beside.wait();
      }
    }
  }
}

TEST_P(EngineGroupTest, TooManyUnreadRowsEndOnlyTheirRequest) {
  const auto asked_of = engine({{"max_batch_size", "3"}});
  auto asked = request(std::vector<TokenId>(40, 5), 4);
  asked.sampling.prompt_logprobs = 0;
  asked.prompt_logits = true;
  Collector all(*asked_of, asked);
  const auto row = static_cast<std::int64_t>(rows_of(all.wait()).logits.at(0).size() * sizeof(float));
  asked.max_unread_logits_bytes = 20 * row;
  Collector beside(*asked_of, request({9, 8, 7}, 30)), kept(*asked_of, asked);
  const auto& last = kept.last();
  EXPECT_EQ(last.error_code, ErrorCode::resource_exhausted);
  EXPECT_NE(last.error.find(cat("more than ", 20 * row, " (max_unread_logits_bytes)")), std::string::npos);
  EXPECT_LE(rows_of(kept.wait()).logits.size(), 20U);
  EXPECT_EQ(beside.last().finish_reason, FinishReason::length);
}

TEST(UnreadRows, CountUntilTheLastCopyGoes) {
  auto rows = std::make_unique<runtime::UnreadRows>();
  EXPECT_EQ(rows->bytes(), 0);
  auto first = rows->add(5), second = rows->add(7);
  auto copy = first;
  EXPECT_EQ(rows->bytes(), 12);
  first.reset();
  EXPECT_EQ(rows->bytes(), 12);
  copy.reset();
  EXPECT_EQ(rows->bytes(), 7);
  rows.reset();
  second.reset();  // its counter still exists
}

}  // namespace
}  // namespace charonia
