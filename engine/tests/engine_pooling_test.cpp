// Embeddings and scores: requests without generated tokens.
#include <cmath>
#include <deque>
#include <thread>

#include "base/text.h"
#include "engine_fixture.h"
#include "runtime/pooling.h"

namespace charonia {
namespace {

using testing::Collector;
using testing::error_of;
using testing::request;

std::vector<TokenId> tokens(std::size_t count, TokenId last) {
  std::vector<TokenId> out(count);
  for (std::size_t i = 0; i < count; ++i) out[i] = static_cast<TokenId>(1 + i * 7 % 30);
  out.back() = last;
  return out;
}

Request pooled(std::string task, std::vector<TokenId> ids, int dimensions = 0) {
  Request out;
  out.input_ids = std::move(ids);
  out.pooling = std::move(task);
  out.dimensions = dimensions;
  out.sampling.max_tokens = 2;
  return out;
}

class EnginePoolingTest : public testing::EngineFixture {
 protected:
  void write(std::string attributes, int labels = 0) {
    testing::TinyModel model;
    model.more = std::move(attributes);
    model.labels = labels;
    write_tiny_workspace(weights(), model);
  }
};
INSTANTIATE_TEST_SUITE_P(Device, EnginePoolingTest, testing::kDevices, testing::device_name);

TEST_P(EnginePoolingTest, BatchesChunksAndPrefixHitsChangeNoBit) {
  write("model_task = embed\n");
  std::deque<Request> requests;
  for (const std::size_t size : {1U, 4U, 9U, 30U, 31U}) requests.push_back(pooled("embed", tokens(size, 33)));
  std::vector<std::vector<float>> expected;
  for (const auto& one : requests) {
    const auto fresh = engine({{"enable_prefix_caching", "0"}});
    expected.push_back(Collector(*fresh, one).last().pooled);
  }
  const auto shared = engine({{"cache_block_seq_len", "4"}, {"token_budget", "8"}, {"max_batch_size", "4"}});
  for (int round = 0; round < 2; ++round) {
    std::deque<Collector> results;
    for (const auto& one : requests) results.emplace_back(*shared, one);
    for (std::size_t i = 0; i < requests.size(); ++i) {
      const auto& last = results[i].last();
      EXPECT_EQ(last.pooled, expected[i]) << i;
      EXPECT_EQ(last.finish_reason, FinishReason::stop);
      EXPECT_EQ(results[i].wait().size(), 1U);
      EXPECT_EQ(last.num_input_tokens, std::ssize(requests[i].input_ids));
      EXPECT_EQ(last.num_output_tokens, 0);
      EXPECT_GE(last.num_cached_tokens, round == 1 && i > 2 ? 28 : 0);
    }
  }
  shared->check_integrity();
  EXPECT_EQ(shared->stats().generation_tokens, 0);
  EXPECT_EQ(shared->stats().prompt_tokens, 2 * (1 + 4 + 9 + 30 + 31));
}

TEST_P(EnginePoolingTest, AMeanOfAllTokensDependsOnTheInputAlone) {
  constexpr int kTokens = 30;
  const auto whole = tokens(kTokens, 33);
  write("model_task = embed\nnormalize_embedding = false\n");
  std::vector<double> sums(32);
  for (int size = 1; size <= kTokens; ++size) {
    const auto row = Collector(*engine(), pooled("embed", {whole.begin(), whole.begin() + size})).last().pooled;
    for (std::size_t i = 0; i < sums.size(); ++i) sums[i] += double{row.at(i)};
  }
  write("model_task = embed\nnormalize_embedding = false\npooling = mean\n");
  std::vector<float> expected;
  for (const double sum : sums) expected.push_back(static_cast<float>(sum / kTokens));
  const auto shared = engine({{"cache_block_seq_len", "4"}, {"token_budget", "8"}, {"max_batch_size", "4"}});
  for (int round = 0; round < 2; ++round) {
    std::deque<Collector> results;
    for (int i = 0; i < 3; ++i) results.emplace_back(*shared, pooled("embed", whole));
    for (auto& result : results) EXPECT_EQ(result.last().pooled, expected);
  }
  shared->check_integrity();
}

// Only decodes preempt, because a prompt gets all its blocks when it is admitted. The tests of the scheduler preempt
// sequences with all rows.
TEST_P(EnginePoolingTest, MeansThatWaitForBlocksChangeNoBit) {
  testing::TinyModel model;
  model.more = "model_task = embed\npooling = mean\n";
  std::deque<Request> requests;
  for (const TokenId last : {31, 32, 33, 34, 35, 36}) requests.push_back(pooled("embed", tokens(30, last)));
  for (const auto& windows : {std::vector{0}, {6, 0}}) {
    model.windows = windows;
    write_tiny_workspace(weights(), model);
    const auto few = engine({{"cache_block_seq_len", "4"},
                             {"cache_max_entry_count", "10"},
                             {"cache_user_tokens", "40"},
                             {"token_budget", "8"},
                             {"max_batch_size", "4"}});
    std::deque<Collector> results;
    for (std::size_t i = 0; i < requests.size(); ++i) {
      requests[i].priority = static_cast<int>(i);
      results.emplace_back(*few, requests[i]);
    }
    for (std::size_t i = 0; i < requests.size(); ++i) {
      EXPECT_EQ(results[i].last().pooled, Collector(*engine(), requests[i]).last().pooled) << i;
    }
    few->check_integrity();
    EXPECT_EQ(few->stats().num_preemptions, 0);
  }
}

TEST(MeanRow, ARowOfAnotherTokenIsAnError) {
  runtime::MeanRow mean;
  mean.add(0, std::vector{1.0F, 2.0F});
  for (const int position : {0, 2}) {
    expect_error(ErrorCode::internal, {"the row of token " + std::to_string(position) + ", expected 1"},
                 [&] { mean.add(position, std::vector{5.0F, 6.0F}); });
  }
  mean.add(1, std::vector{3.0F, 5.0F});
  EXPECT_EQ(mean.mean(), (std::vector{2.0F, 3.5F}));
}

TEST_P(EnginePoolingTest, DimensionsAreTheFirstNumbersNormalisedAgain) {
  write("model_task = embed\nnormalize_embedding = false\n");
  const auto raw = Collector(*engine(), pooled("embed", tokens(5, 3))).last().pooled;
  const auto cut = Collector(*engine(), pooled("embed", tokens(5, 3), 3)).last().pooled;
  ASSERT_EQ(raw.size(), 32U);
  EXPECT_EQ(cut, std::vector<float>(raw.begin(), raw.begin() + 3)) << "without a norm they must not change";
  write("model_task = embed\n");
  const auto normal = Collector(*engine(), pooled("embed", tokens(5, 3), 3)).last().pooled;
  const double length = std::sqrt(double{raw[0]} * raw[0] + double{raw[1]} * raw[1] + double{raw[2]} * raw[2]);
  ASSERT_EQ(normal.size(), 3U);
  for (std::size_t i = 0; i < 3; ++i) EXPECT_FLOAT_EQ(normal[i], static_cast<float>(raw[i] / length));
}

TEST_P(EnginePoolingTest, AScoreIsTheSigmoidOfItsLogit) {
  const auto score = [&](int labels, std::string_view more) {
    write(cat("model_task = score\nscore_labels = ", labels, "\n", more), labels);
    const auto pooled_output = Collector(*engine(), pooled("score", tokens(9, 3))).last().pooled;
    EXPECT_EQ(pooled_output.size(), 1U);
    return pooled_output.at(0);
  };
  const auto sigmoid = [](float x) { return 1 / (1 + std::exp(-x)); };
  const float one = score(1, "score_sigmoid = false\n"), difference = score(2, "score_sigmoid = false\n");
  EXPECT_NE(one, difference);
  EXPECT_FLOAT_EQ(score(1, ""), sigmoid(one));
  EXPECT_FLOAT_EQ(score(2, ""), sigmoid(difference));
  EXPECT_NE(error_of([&] { score(3, ""); }, ErrorCode::invalid_argument).find("score_labels = 3: it must be 1 or 2"),
            std::string::npos);
}

TEST_P(EnginePoolingTest, AnInputMayFillTheContextAndALongerOneIsRejected) {
  write("model_task = embed\n");
  const auto one = engine({{"session_len", "20"}, {"cache_block_seq_len", "4"}});
  EXPECT_EQ(Collector(*one, pooled("embed", tokens(20, 3))).last().pooled.size(), 32U);
  EXPECT_EQ(error_of([&] { Collector(*one, pooled("embed", tokens(21, 3))); }, ErrorCode::invalid_argument),
            "the input does not fit: it has 21 tokens and at most 20 fit into the context (session_len). Shorten it by "
            "at least 1 tokens");
  while (one->stats().num_running > 0) std::this_thread::yield();  // a step settles after its result is delivered
}

TEST_P(EnginePoolingTest, RequestsOfOtherTasksAreRejected) {
  const auto generates = engine();
  const auto of_text = error_of([&] { Collector(*generates, pooled("embed", {3})); }, ErrorCode::invalid_argument);
  EXPECT_NE(of_text.find("gives text and no embeddings: load it with the setting task = embed"), std::string::npos);
  EXPECT_TRUE(Collector(*generates, pooled("any", {3})).last().pooled.empty());
  write("model_task = embed\n");
  const auto embeds = engine();
  EXPECT_FALSE(Collector(*embeds, pooled("any", {3})).last().pooled.empty());
  const auto rejected = [&](Request one, std::string_view why) {
    const auto text = error_of([&] { Collector(*embeds, std::move(one)); }, ErrorCode::invalid_argument);
    EXPECT_NE(text.find(why), std::string::npos) << text;
  };
  rejected(request({3}, 1), "gives embeddings and no text: load it with the setting task = generate");
  rejected(pooled("score", {3}), "gives embeddings and no scores: load it with the setting task = score");
  rejected(pooled("embed", {3}, 33), "dimensions: 33 is out of range: the embeddings of this model have up to 32");
  auto several = pooled("embed", {3});
  several.sampling.n = 2;
  rejected(several, "pooling: it cannot be combined with n or best_of");
  auto session = pooled("embed", {3});
  session.session_id = "s";
  rejected(session, "pooling: it cannot be combined with session_id");
  EXPECT_EQ(error_of([&] { engine({{"task", "score"}}); }, ErrorCode::invalid_argument),
            "task = score, but this workspace was converted for task = embed. Leave task out, or convert the model "
            "again with: charonia convert MODEL --task score");
}

}  // namespace
}  // namespace charonia
