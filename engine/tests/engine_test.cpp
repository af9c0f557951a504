#include "charonia/engine.h"

#include <future>
#include <limits>
#include <map>
#include <thread>

#include "engine_fixture.h"

namespace charonia {
namespace {

using testing::Collector;
using testing::error_of;
using testing::request;
using testing::TinyModel;
using testing::tokens_of;
using testing::write_tiny_workspace;

class EngineTest : public testing::EngineFixture {};
INSTANTIATE_TEST_SUITE_P(Device, EngineTest, testing::kDevices, testing::device_name);

TEST_P(EngineTest, StreamedAndUnstreamedGiveTheSameTokensTextAndCounts) {
  Engine engine(weights());
  auto one = request({1, 2, 3}, 20);
  Collector streamed(engine, one);
  one.stream = false;
  Collector whole(engine, one);
  EXPECT_EQ(whole.wait().size(), 1U);
  EXPECT_EQ(streamed.wait().size(), 20U);
  EXPECT_EQ(streamed.tokens(), whole.tokens());
  EXPECT_EQ(streamed.text(), whole.text());
  EXPECT_EQ(whole.last().finish_reason, FinishReason::length);
  EXPECT_EQ(whole.last().num_input_tokens, 3);
  EXPECT_EQ(whole.last().num_output_tokens, 20);
  EXPECT_EQ(whole.tokens().size(), 20U);
  engine.check_integrity();
}

TEST_P(EngineTest, ProgressOfALongPromptComesBeforeItsTokens) {
  Engine engine(weights(), {{"token_budget", "16"}});
  std::vector<TokenId> prompt(50);
  for (std::size_t i = 0; i < prompt.size(); ++i) prompt[i] = static_cast<TokenId>(1 + i % 30);
  auto one = request(prompt, 3);
  Collector plain(engine, one);
  EXPECT_EQ(plain.wait().size(), 3U);
  one.prompt_progress = true;
  one.input_ids.front() = 31;  // nothing is in the prefix cache
  Collector reported(engine, one);
  std::vector<int> computed;
  for (const auto& result : reported.wait()) {
    computed.push_back(result.num_computed_tokens);
    EXPECT_EQ(result.token_ids.empty(), result.num_computed_tokens > 0);
    EXPECT_EQ(result.num_input_tokens, 50);
  }
  EXPECT_EQ(computed, (std::vector<int>{16, 32, 48, 0, 0, 0}));
  one.stream = false;
  EXPECT_EQ(Collector(engine, one).wait().size(), 1U);
}

TEST_P(EngineTest, TheContextBoundsPromptAndResponse) {
  Engine engine(weights());
  const auto refused = [&](const Request& asked, std::initializer_list<std::string_view> parts) {
    expect_error(ErrorCode::invalid_argument, parts, [&] { engine.submit(asked, {}); });
  };
  refused(request(std::vector<TokenId>(200, 1), 100), {"200", "100", "300", "256", "56"});
  auto open_end = request(std::vector<TokenId>(256, 1), 1);
  open_end.sampling.max_tokens.reset();
  refused(open_end, {});
  refused(request({}, 1), {});
  refused(request({40}, 1), {});
  open_end.input_ids = {5};
  Collector all(engine, open_end);
  EXPECT_EQ(all.tokens().size(), 255U);
  EXPECT_EQ(all.last().finish_reason, FinishReason::length);
}

TEST_P(EngineTest, EndIdEndsAndIsCountedAndHasNoText) {
  Engine engine(weights());
  Collector free_running(engine, request({1, 2, 3}, 30));
  const auto tokens = free_running.tokens();
  auto with_end = request({1, 2, 3}, 30);
  with_end.sampling.ignore_eos = false;
  with_end.sampling.end_ids = {tokens[4]};
  Collector ended(engine, with_end);
  const auto first = std::ranges::find(tokens, tokens[4]) - tokens.begin();
  EXPECT_EQ(std::ssize(ended.tokens()), first + 1);
  EXPECT_EQ(ended.last().finish_reason, FinishReason::stop);
  EXPECT_EQ(ended.text(), free_running.text().substr(0, ended.text().size()));
  EXPECT_LE(std::ssize(ended.text()), first);
}

TEST_P(EngineTest, TheFirstTokenAfterMinTokensMayBeTheEndAndNoneBefore) {
  Engine engine(weights());
  const auto tokens = tokens_of(engine, request({1, 2, 3}, 30));
  int tried = 0;
  for (std::size_t i = 1; i < tokens.size(); ++i) {
    if (std::ranges::find(tokens, tokens[i]) != tokens.begin() + static_cast<std::ptrdiff_t>(i)) continue;
    auto ends = request({1, 2, 3}, 30);
    ends.sampling.ignore_eos = false;
    ends.sampling.end_ids = {tokens[i]};
    ends.sampling.min_tokens = static_cast<int>(i);
    EXPECT_EQ(tokens_of(engine, ends).size(), i + 1);
    ends.sampling.end_ids = {tokens[0]};
    EXPECT_GE(tokens_of(engine, ends).size(), i);
    ++tried;
  }
  EXPECT_GT(tried, 0);
}

TEST_P(EngineTest, BiasesAddUpInAnyOrderAndBadWordsAreNeverCompleted) {
  Engine engine(weights());
  auto asked = request({1, 2, 3}, 6);
  asked.sampling.bad_words = {{20}};
  asked.sampling.logit_bias = {{5, 60.0F}, {7, 80.0F}, {20, 90.0F}};
  EXPECT_EQ(tokens_of(engine, asked), std::vector<TokenId>(6, 7)) << "20 has more, and is banned";
  asked.sampling.logit_bias = {{20, 90.0F}, {7, 50.0F}, {5, 60.0F}, {7, 30.0F}};
  EXPECT_EQ(tokens_of(engine, asked), std::vector<TokenId>(6, 7));
  asked.sampling.bad_words = {{20}, {7, 7}, {7, 5}, {3, 7}};
  asked.sampling.logit_bias.emplace_back(9, 40.0F);
  EXPECT_EQ(tokens_of(engine, asked), (std::vector<TokenId>{5, 7, 9, 7, 9, 7})) << "a word may begin in the prompt";
}

TEST_P(EngineTest, CancelByHandleAndByIdGivesOneLastResultAndFreesBlocks) {
  lengthen();
  Engine engine(weights());
  Collector by_handle, by_id;
  auto long_one = request({1, 2}, 19'000);
  const auto handle = engine.submit(long_one, by_handle.callback());
  long_one.id = "mine";
  engine.submit(long_one, by_id.callback());
  by_handle.wait_for(1);
  by_id.wait_for(1);
  EXPECT_FALSE(engine.stop("")) << "no request has this id";
  EXPECT_FALSE(engine.cancel(""));
  EXPECT_FALSE(by_handle.ended());
  faults_->hold = true;  // no step ends before both are cancelled
  const auto steps = engine.stats().num_steps;
  EXPECT_TRUE(engine.cancel(handle));
  EXPECT_TRUE(engine.cancel(std::string_view("mine")));
  faults_->hold = false;
  faults_->hold.notify_all();
  EXPECT_EQ(by_handle.wait().back().finish_reason, FinishReason::cancelled);
  EXPECT_EQ(by_id.wait().back().finish_reason, FinishReason::cancelled);
  engine.check_integrity();  // runs on the engine thread, after both
  const auto stats = engine.stats();
  EXPECT_EQ(stats.num_running + stats.num_waiting, 0);
  EXPECT_EQ(stats.blocks_active, 0);
  EXPECT_LE(stats.num_steps - steps, 2);
  EXPECT_FALSE(engine.cancel(handle));
  EXPECT_FALSE(engine.cancel(std::string_view("mine")));
}

TEST_P(EngineTest, AFullQueueIsAnsweredWithWhenToComeBack) {
  Engine engine(weights(), {{"max_queue_size", "2"}, {"max_batch_size", "1"}});
  faults_->hold = true;
  std::vector<std::unique_ptr<Collector>> admitted;
  std::string message;
  while (message.empty() && admitted.size() < 10) {
    auto one = std::make_unique<Collector>();
    try {
      engine.submit(request({1, 2}, 200), one->callback());
      admitted.push_back(std::move(one));
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::resource_exhausted);
      message = error.what();
    }
  }
  faults_->hold = false;
  faults_->hold.notify_all();
  EXPECT_NE(message.find("retry after"), std::string::npos) << message;
  EXPECT_GE(admitted.size(), 2U);
  for (auto& one : admitted) EXPECT_EQ(one->tokens().size(), 200U);
}

TEST_P(EngineTest, ShutdownLetsFinishWithinItsLimitAndThenCancels) {
  Engine engine(weights());
  Collector finishes(engine, request({1, 2}, 100));
  engine.shutdown(60'000);
  EXPECT_EQ(finishes.wait().back().finish_reason, FinishReason::length);
  Collector unused;
  error_of([&] { engine.submit(request({1}, 1), unused.callback()); }, ErrorCode::unavailable);
}

TEST_P(EngineTest, ACallbackMaySubmitAndCancel) {
  Collector second;
  Engine engine(weights());
  std::promise<void> first_done;
  std::promise<Engine::Handle> own;
  const auto handle = own.get_future().share();
  own.set_value(engine.submit(request({1, 2}, 50), [&, handle](Result&& result) {
    if (result.finish_reason == FinishReason::none) return;
    engine.submit(request({3}, 5), second.callback());
    engine.cancel(handle.get());
    first_done.set_value();
  }));
  first_done.get_future().wait();
  EXPECT_EQ(second.tokens().size(), 5U);
}

TEST_P(EngineTest, ASlowConsumerDelaysNoOther) {
  Engine engine(weights());
  std::promise<void> release;
  auto released = release.get_future().share();
  std::promise<void> slow_done;
  engine.submit(request({1}, 3), [&, released](Result&& result) {
    released.wait();
    if (result.finish_reason != FinishReason::none) slow_done.set_value();
  });
  Collector other(engine, request({2}, 50));
  while (engine.stats().generation_tokens < 53) std::this_thread::yield();  // computed although no result was taken
  release.set_value();
  slow_done.get_future().wait();
  EXPECT_EQ(other.tokens().size(), 50U);
}

TEST_P(EngineTest, ServesManyThreads) {
  Engine engine(weights(), {{"max_batch_size", "8"}, {"cache_max_entry_count", "40"}});
  std::map<int, std::vector<TokenId>> expected;
  const auto asked = [](int length) { return request(std::vector<TokenId>(static_cast<std::size_t>(length), 3), 40); };
  for (int length = 1; length <= 4; ++length) expected[length] = tokens_of(engine, asked(length));
  std::vector<std::thread> threads;
  for (int t = 0; t < 8; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 10; ++i) {
        const int length = 1 + (t + i) % 4;
        EXPECT_EQ(tokens_of(engine, asked(length)), expected[length]);
      }
    });
  }
  for (auto& thread : threads) thread.join();
  engine.check_integrity();
  EXPECT_EQ(engine.stats().blocks_active, 0);
}

TEST_P(EngineTest, ARequestThatCannotBeComputedFailsAloneAndSpoilsNoBlock) {
  constexpr TokenId kPoison = 39;
  TinyModel broken;
  int element = 0;
  broken.change = [&](const std::string& name, float value) {
    const bool poisoned = name == "tok_embeddings.weight" && element++ / broken.hidden == kPoison;
    return poisoned ? std::numeric_limits<float>::quiet_NaN() : value;
  };
  write_tiny_workspace(weights(), broken);
  Engine engine(weights(), {{"cache_max_entry_count", "60"}});
  auto clean = request({1, 2}, 100);
  clean.sampling.bad_words = {{kPoison}};
  const auto expected = tokens_of(engine, clean);
  const auto poison = request({1, 2, kPoison, 3, 4, 5, 6, 7, 8, 9}, 50);
  Collector beside(engine, clean), poisoned(engine, poison);
  EXPECT_EQ(poisoned.last().finish_reason, FinishReason::error);
  EXPECT_NE(poisoned.last().error.find("logit"), std::string::npos);
  EXPECT_EQ(beside.tokens(), expected);
  Collector repeated(engine, poison);
  EXPECT_EQ(repeated.last().num_cached_tokens, 0) << "it must be computed again: the fault may have gone";
  for (int i = 0; i < 4; ++i) {  // uses all blocks, also the blocks of the poisoned request
    auto other = clean;
    other.input_ids = {3, 1 + i};
    EXPECT_EQ(Collector(engine, other).last().finish_reason, FinishReason::length);
  }
  EXPECT_EQ(tokens_of(engine, clean), expected);
  engine.check_integrity();
}

TEST_P(EngineTest, AWorkspaceThatDoesNotMatchIsRejectedWithTheCommand) {
  std::filesystem::resize_file(weights() / "rank-0.safetensors", 100);
  expect_error(ErrorCode::invalid_argument, {"charonia convert"}, [&] { Engine engine(weights()); });
  std::filesystem::remove(weights() / "manifest.json");
  error_of([&] { Engine engine(weights()); }, ErrorCode::invalid_argument);
}

TEST_P(EngineTest, FewBlocksLowerTheContextWithAWarning) {
  Engine engine(weights(), {{"cache_max_entry_count", "10"}});
  EXPECT_EQ(engine.info().config.session_len, 40);
  ASSERT_EQ(engine.info().warnings.size(), 1U);
  EXPECT_NE(engine.info().warnings[0].find("cache_max_entry_count"), std::string::npos);
}

TEST_P(EngineTest, SettingsThatDoNotWorkHereAreRejectedByName) {
  struct Case {
    Settings settings;
    ErrorCode code;
    std::string_view named;
  };
  for (const auto& [settings, code, named] : std::vector<Case>{
           {{{"device", "cuda"}}, ErrorCode::unsupported, "CUDA"},
           {{{"device_ids", "0"}}, ErrorCode::unsupported, "CUDA"},
           {{{"head_num", "3"}}, ErrorCode::invalid_argument, "head_num"},
           {{{"cache_max_entry_count", "900000000"}}, ErrorCode::resource_exhausted, "cache_max_entry_count"},
           {{{"token_budget", "2000000000"}}, ErrorCode::resource_exhausted, "2000000000 tokens (token_budget)"}}) {
    expect_error(code, {named}, [&] { Engine engine(weights(), settings); });
  }
}

}  // namespace
}  // namespace charonia
