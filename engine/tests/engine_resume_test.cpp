// A response that another engine began is continued with the same tokens, wherever it was cut.
#include <map>
#include <string>
#include <vector>

#include "engine_fixture.h"

namespace charonia {
namespace {

using testing::Collector;
using testing::kVocab;
using testing::request;
using testing::with_runs;

// The tokens and texts of one sequence that a client has received.
struct Received {
  std::vector<TokenId> tokens;
  std::string text;
  std::vector<float> logprobs, prompt_logprobs;
  FinishReason reason = FinishReason::none;
  int num_output = 0;
  bool operator==(const Received&) const = default;

  void take(const Result& result) {
    tokens.insert(tokens.end(), result.token_ids.begin(), result.token_ids.end());
    text += result.text;
    logprobs.insert(logprobs.end(), result.logprobs.begin(), result.logprobs.end());
    prompt_logprobs.insert(prompt_logprobs.end(), result.prompt_logprobs.begin(), result.prompt_logprobs.end());
    reason = result.finish_reason;
    num_output = result.num_output_tokens;
  }
};

// Records the labels of finished requests.
class FinishedRequests : public MetricsSink {
 public:
  void add(Metric metric, double, int label) override {
    if (metric == Metric::request_success) labels.push_back(label);
  }
  void set(Metric, double) override {}
  void observe(Metric, double) override {}

  std::vector<int> labels;  // only the engine thread writes it
};

class EngineResumeTest : public testing::EngineFixture {
 protected:
  static Request sampled(int max_tokens = 40) {
    auto out = request({3, 1, 4, 1, 5}, max_tokens);
    out.sampling.temperature = 1.0F;
    out.sampling.seed = 7;
    return out;
  }

  // Cuts the response after each of its results, continues it in another engine, and expects the same response.
  void expect_same_after_every_cut(Request asked) const {
    const auto first = engine(), second = engine();
    asked.stream = true;
    const auto count = static_cast<std::size_t>(asked.sampling.n);
    Collector whole(*first, asked);
    const auto results = whole.wait();
    std::vector<Received> expected(count);
    for (const auto& result : results) expected[static_cast<std::size_t>(result.index)].take(result);
    std::vector<Received> received(count);
    for (const auto& result : results) {
      auto goes_on = asked;
      auto joined = received;
      for (const auto& one : received) {
        goes_on.resumed.push_back(one.reason == FinishReason::none ? std::optional(one.tokens) : std::nullopt);
      }
      Collector rest(asked.sampling.n);
      for (std::size_t i = 0; i < count; ++i) {
        if (!goes_on.resumed[i]) rest.leave_out(i);
      }
      second->submit(goes_on, rest.callback());
      for (const auto& more : rest.wait()) joined[static_cast<std::size_t>(more.index)].take(more);
      for (std::size_t i = 0; i < count; ++i) {
        EXPECT_EQ(joined[i], expected[i]) << "sequence " << i << " was cut after " << received[i].tokens.size()
                                          << " tokens";
      }
      received[static_cast<std::size_t>(result.index)].take(result);
    }
    second->check_integrity();
  }
};
INSTANTIATE_TEST_SUITE_P(Device, EngineResumeTest, testing::kDevices, testing::device_name);

TEST_P(EngineResumeTest, ContinuesGreedyAndSampledResponses) {
  expect_same_after_every_cut(sampled());
  auto greedy = sampled();
  greedy.sampling.temperature = 0;
  expect_same_after_every_cut(greedy);
}

TEST_P(EngineResumeTest, ContinuesWithPenaltiesBansAndMinTokens) {
  auto asked = sampled();
  asked.sampling.repetition_penalty = 1.3F;
  asked.sampling.presence_penalty = 0.4F;
  asked.sampling.frequency_penalty = 0.2F;
  asked.sampling.bad_words = {{1, 2}, {9}, {5, 6, 7}};
  asked.sampling.logit_bias = {{4, 2.0F}, {8, -3.0F}};
  asked.sampling.ignore_eos = false;
  asked.sampling.min_tokens = 12;
  expect_same_after_every_cut(asked);
}

TEST_P(EngineResumeTest, ContinuesWithStopWordsThatBeginBeforeTheCut) {
  const auto text = Collector(*engine(), sampled()).text();
  for (const std::size_t length : {1U, 3U, 8U}) {
    auto asked = sampled();
    asked.sampling.stop_words = {text.substr(text.size() / 2, length), text.substr(4, 3) + "?",
                                 text.substr(9, 1) + "!"};
    expect_same_after_every_cut(asked);
    asked.stop_until = {text.substr(text.size() / 3, 4)};
    expect_same_after_every_cut(asked);
  }
}

TEST_P(EngineResumeTest, ContinuesSeveralSequencesSomeOfWhichHaveEnded) {
  auto asked = sampled();
  asked.sampling.n = 4;
  asked.sampling.ignore_eos = false;
  asked.sampling.end_ids = {1, 2, 3};
  asked.sampling.logprobs = 2;
  asked.sampling.prompt_logprobs = 1;
  expect_same_after_every_cut(asked);
}

// An invalid label ends the server's process.
TEST_P(EngineResumeTest, RequestCountsWithTheReasonOfItsNextRunningSequence) {
  const auto sink = std::make_shared<FinishedRequests>();
  Engine one(weights(), {}, sink);
  auto asked = sampled(10);
  asked.sampling.n = 3;
  asked.resumed = {std::nullopt, {{1, 2}}, std::nullopt};
  Collector out(3);
  out.leave_out(0);
  out.leave_out(2);
  one.submit(asked, out.callback());
  EXPECT_EQ(out.last(1).finish_reason, FinishReason::length);
  one.close();
  EXPECT_EQ(sink->labels, (std::vector<int>{static_cast<int>(FinishReason::length) - 1}));
}

TEST_P(EngineResumeTest, ContinuesWithinForcedTokens) {
  expect_same_after_every_cut(with_runs(sampled(), kVocab, false));
  expect_same_after_every_cut(with_runs(sampled(), kVocab, true));
}

TEST_P(EngineResumeTest, ContinuesWithinAGrammar) {
  auto asked = sampled(100);
  asked.sampling.ignore_eos = false;
  asked.guide = Guide{GuideType::regex, "(ab|c){3,5}[a-d]{10,20}z"};
  expect_same_after_every_cut(asked);
  asked.sampling.n = 2;
  expect_same_after_every_cut(asked);
}

TEST_P(EngineResumeTest, ContinuesAWholeConversationInASession) {
  const auto one = engine();
  auto asked = sampled(20);
  const auto tokens = testing::tokens_of(*one, asked);
  asked.session_id = "moved";
  asked.resumed = {{{tokens.begin(), tokens.begin() + 8}}};
  EXPECT_EQ(testing::tokens_of(*one, asked), (std::vector<TokenId>{tokens.begin() + 8, tokens.end()}));
  ASSERT_EQ(one->sessions().size(), 1U);
  EXPECT_EQ(one->sessions().front().num_tokens, 25);
}

TEST_P(EngineResumeTest, RejectsRequestsThatCannotBeContinued) {
  const auto one = engine();
  const auto rejected = [&](auto change, const std::string& part) {
    auto asked = sampled(10);
    asked.resumed = {{{1, 2, 3}}};
    change(asked);
    expect_error(ErrorCode::invalid_argument, {part}, [&] { one->submit(asked, [](Result&&) {}); });
  };
  rejected([](auto& asked) { asked.stream = false; }, "stream");
  rejected([](auto& asked) { asked.sampling.seed.reset(); }, "seed");
  rejected([](auto& asked) { asked.sampling.n = 2; }, "1 sequences, and n = 2");
  rejected([](auto& asked) { asked.resumed = {std::nullopt}; }, "ended");
  rejected([](auto& asked) { asked.resumed.front()->push_back(kVocab); }, "vocabulary");
  rejected([](auto& asked) { asked.sampling.max_tokens = 3; }, "ends after at most 3");
  rejected([](auto& asked) { asked.sampling.max_tokens.reset(), asked.resumed.front()->resize(1 << 20); }, "at most");
  auto ended = sampled(10);
  ended.sampling.n = 2;
  ended.sampling.ignore_eos = false;
  ended.sampling.end_ids = {2};
  ended.resumed = {{{1, 3}}, {{1, 2, 3}}};
  Collector out(*one, ended);
  for (const auto& last : out.wait()) {
    EXPECT_EQ(last.error_code, ErrorCode::invalid_argument);
    EXPECT_NE(last.error.find("sequence 1 has ended within its"), std::string::npos) << last.error;
  }
  Collector after(*one, sampled(5));
  EXPECT_EQ(after.tokens().size(), 5U);
  one->check_integrity();
}

}  // namespace
}  // namespace charonia
