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
using testing::write_tiny_workspace;

class EngineTest : public testing::EngineFixture {};
INSTANTIATE_TEST_SUITE_P(Device, EngineTest, testing::kDevices, testing::device_name);

TEST_P(EngineTest, StreamedAndUnstreamedGiveTheSameTokensTextAndCounts) {
  Engine engine(weights());
  Collector streamed, whole;
  auto one = request({1, 2, 3}, 20);
  engine.submit(one, streamed.callback());
  one.stream = false;
  engine.submit(one, whole.callback());
  EXPECT_EQ(whole.wait().size(), 1U);
  EXPECT_EQ(streamed.wait().size(), 20U);
  EXPECT_EQ(streamed.tokens(), whole.tokens());
  EXPECT_EQ(streamed.text(), whole.text());
  const auto& last = whole.wait().back();
  EXPECT_EQ(last.finish_reason, FinishReason::length);
  EXPECT_EQ(last.num_input_tokens, 3);
  EXPECT_EQ(last.num_output_tokens, 20);
  EXPECT_EQ(last.token_ids.size(), 20U);
  engine.check_integrity();
}

TEST_P(EngineTest, MoreThanTheContextIsRejectedWithTheNumbers) {
  Engine engine(weights());
  Collector unused;
  const auto message = error_of([&] { engine.submit(request(std::vector<TokenId>(200, 1), 100), unused.callback()); },
                                ErrorCode::invalid_argument);
  for (const auto* number : {"200", "100", "300", "256", "56"}) {
    EXPECT_NE(message.find(number), std::string::npos) << message;
  }
  auto open_end = request(std::vector<TokenId>(256, 1), 1);
  open_end.sampling.max_tokens.reset();
  error_of([&] { engine.submit(open_end, unused.callback()); }, ErrorCode::invalid_argument);
  error_of([&] { engine.submit(request({}, 1), unused.callback()); }, ErrorCode::invalid_argument);
  error_of([&] { engine.submit(request({40}, 1), unused.callback()); }, ErrorCode::invalid_argument);
}

TEST_P(EngineTest, WithoutMaxTokensTheContextIsFilled) {
  Engine engine(weights());
  Collector all;
  auto open_end = request({5}, 1);
  open_end.sampling.max_tokens.reset();
  engine.submit(open_end, all.callback());
  EXPECT_EQ(all.tokens().size(), 255U);
  EXPECT_EQ(all.wait().back().finish_reason, FinishReason::length);
}

TEST_P(EngineTest, EndIdEndsAndIsCountedAndHasNoText) {
  Engine engine(weights());
  Collector free_running, ended;
  engine.submit(request({1, 2, 3}, 30), free_running.callback());
  const auto tokens = free_running.tokens();
  auto with_end = request({1, 2, 3}, 30);
  with_end.sampling.ignore_eos = false;
  with_end.sampling.end_ids = {tokens[4]};
  engine.submit(with_end, ended.callback());
  const auto first = std::find(tokens.begin(), tokens.end(), tokens[4]) - tokens.begin();
  EXPECT_EQ(ended.tokens().size(), static_cast<std::size_t>(first) + 1);
  EXPECT_EQ(ended.wait().back().finish_reason, FinishReason::stop);
  EXPECT_EQ(ended.text(), free_running.text().substr(0, ended.text().size()));
  EXPECT_LE(ended.text().size(), static_cast<std::size_t>(first));
}

TEST_P(EngineTest, MinTokensKeepsTheEndAway) {
  Engine engine(weights());
  Collector free_running, held;
  engine.submit(request({1, 2, 3}, 30), free_running.callback());
  auto minimum = request({1, 2, 3}, 30);
  minimum.sampling.ignore_eos = false;
  minimum.sampling.end_ids = {free_running.tokens()[0]};
  minimum.sampling.min_tokens = 12;
  engine.submit(minimum, held.callback());
  EXPECT_GE(held.tokens().size(), 12U);
}

TEST_P(EngineTest, TheFirstTokenAfterMinTokensMayBeTheEnd) {
  Engine engine(weights());
  Collector free_running(engine, request({1, 2, 3}, 30));
  const auto tokens = free_running.tokens();
  int tried = 0;
  for (std::size_t i = 1; i < tokens.size(); ++i) {
    if (std::find(tokens.begin(), tokens.begin() + static_cast<std::ptrdiff_t>(i), tokens[i]) !=
        tokens.begin() + static_cast<std::ptrdiff_t>(i)) {
      continue;
    }
    auto ends = request({1, 2, 3}, 30);
    ends.sampling.ignore_eos = false;
    ends.sampling.end_ids = {tokens[i]};
    ends.sampling.min_tokens = static_cast<int>(i);
    Collector ended(engine, ends);
    EXPECT_EQ(ended.tokens().size(), i + 1);
    ++tried;
  }
  EXPECT_GT(tried, 0);
}

TEST_P(EngineTest, BadWordsAreNeverCompleted) {
  Engine engine(weights());
  Collector free_running, without;
  engine.submit(request({1, 2, 3}, 30), free_running.callback());
  const auto tokens = free_running.tokens();
  auto banned = request({1, 2, 3}, 30);
  banned.sampling.bad_words = {{tokens[3], tokens[4]}, {tokens[0]}};
  engine.submit(banned, without.callback());
  const auto got = without.tokens();
  for (std::size_t i = 0; i < got.size(); ++i) {
    EXPECT_NE(got[i], tokens[0]);
    if (i > 0) {
      EXPECT_FALSE(got[i - 1] == tokens[3] && got[i] == tokens[4]);
    }
  }
}

TEST_P(EngineTest, BiasesOfOneTokenAddUpInAnyOrder) {
  Engine one(weights(), {});
  auto named_once = request({1, 2, 3}, 8);
  named_once.sampling.bad_words = {{20}};
  named_once.sampling.logit_bias = {{5, 60.0F}, {7, 80.0F}, {20, 90.0F}};
  auto named_twice = named_once;
  named_twice.sampling.logit_bias = {{20, 90.0F}, {7, 50.0F}, {5, 60.0F}, {7, 30.0F}};
  Collector first, second;
  one.submit(named_once, first.callback());
  one.submit(named_twice, second.callback());
  EXPECT_EQ(first.tokens(), std::vector<TokenId>(8, 7)) << "20 has more, and is banned";
  EXPECT_EQ(second.tokens(), first.tokens());
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
  for (const bool keeps : {false, true})
    EXPECT_FALSE(keeps ? engine.stop("") : engine.cancel("")) << "no request has this id";
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

TEST_P(EngineTest, DestructionEndsWhatRuns) {
  lengthen();
  Collector cut;
  {
    Engine engine(weights());
    engine.submit(request({1, 2}, 19'000), cut.callback());
    cut.wait_for(1);
  }
  EXPECT_EQ(cut.wait().back().finish_reason, FinishReason::cancelled);
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

TEST_P(EngineTest, ManyThreadsAtOnce) {
  Engine engine(weights(), {{"max_batch_size", "8"}, {"cache_max_entry_count", "40"}});
  std::map<int, std::vector<TokenId>> expected;
  for (int length = 1; length <= 4; ++length) {
    Collector alone(engine, request(std::vector<TokenId>(static_cast<std::size_t>(length), 3), 40));
    expected[length] = alone.tokens();
  }
  std::vector<std::thread> threads;
  for (int t = 0; t < 8; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 10; ++i) {
        const int length = 1 + (t + i) % 4;
        Collector one(engine, request(std::vector<TokenId>(static_cast<std::size_t>(length), 3), 40));
        EXPECT_EQ(one.tokens(), expected[length]);
      }
    });
  }
  for (auto& thread : threads) thread.join();
  engine.check_integrity();
  EXPECT_EQ(engine.stats().blocks_active, 0);
}

TEST_P(EngineTest, NotANumberEndsTheRequestWithAnErrorAndTheEngineLives) {
  TinyModel broken;
  broken.change = [](const std::string& name, float value) {
    return name == "output.weight" ? std::numeric_limits<float>::quiet_NaN() : value;
  };
  write_tiny_workspace(weights(), broken);
  Engine engine(weights());
  for (int i = 0; i < 2; ++i) {
    Collector failed(engine, request({1}, 3));
    EXPECT_EQ(failed.wait().back().finish_reason, FinishReason::error);
    EXPECT_FALSE(failed.wait().back().error.empty());
  }
  engine.check_integrity();
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
  Collector before, beside, poisoned, after;
  engine.submit(clean, before.callback());
  const auto expected = before.tokens();
  engine.submit(clean, beside.callback());
  engine.submit(request({1, 2, kPoison, 3, 4, 5, 6, 7, 8, 9}, 50), poisoned.callback());
  EXPECT_EQ(poisoned.wait().back().finish_reason, FinishReason::error);
  EXPECT_NE(poisoned.wait().back().error.find("logit"), std::string::npos);
  EXPECT_EQ(beside.tokens(), expected);
  Collector repeated(engine, request({1, 2, kPoison, 3, 4, 5, 6, 7, 8, 9}, 50));
  EXPECT_EQ(repeated.last().num_cached_tokens, 0) << "it must be computed again: the fault may have gone";
  for (int i = 0; i < 4; ++i) {  // uses all blocks, also the blocks of the poisoned request
    Collector again;
    auto other = clean;
    other.input_ids = {3, 1 + i};
    engine.submit(other, again.callback());
    EXPECT_EQ(again.wait().back().finish_reason, FinishReason::length);
  }
  engine.submit(clean, after.callback());
  EXPECT_EQ(after.tokens(), expected);
  engine.check_integrity();
}

TEST_P(EngineTest, AWorkspaceThatDoesNotMatchIsRejectedWithTheCommand) {
  std::filesystem::resize_file(weights() / "rank-0.safetensors", 100);
  expect_error(ErrorCode::invalid_argument, {"charonia convert"}, [&] { Engine engine(weights()); });
  std::filesystem::remove(weights() / "manifest.json");
  error_of([&] { Engine engine(weights()); }, ErrorCode::invalid_argument);
}

TEST_P(EngineTest, ACacheThatDoesNotFitIsRejectedBeforeServing) {
  const auto message =
      error_of([&] { Engine engine(weights(), {{"cache_max_entry_count", "900000000"}}); },
               ErrorCode::resource_exhausted);
  EXPECT_NE(message.find("cache_max_entry_count"), std::string::npos) << message;
}

TEST_P(EngineTest, AModelThatDoesNotFitIsRejectedBeforeItsWeightsAreLoaded) {
  expect_error(ErrorCode::resource_exhausted, {"2000000000 tokens (token_budget)"},
               [&] { Engine engine(weights(), {{"token_budget", "2000000000"}}); });
}

TEST_P(EngineTest, FewBlocksLowerTheContextWithAWarning) {
  Engine engine(weights(), {{"cache_max_entry_count", "10"}});
  EXPECT_EQ(engine.info().config.session_len, 40);
  ASSERT_EQ(engine.info().warnings.size(), 1U);
  EXPECT_NE(engine.info().warnings[0].find("cache_max_entry_count"), std::string::npos);
}

TEST_P(EngineTest, SettingsThatThisBuildLacksAreRejectedByName) {
  for (const auto& setting : {Settings{{"device", "cuda"}}, Settings{{"device_ids", "0"}}}) {
    expect_error(ErrorCode::unsupported, {"CUDA"}, [&] { Engine engine(weights(), setting); });
  }
  expect_error(ErrorCode::invalid_argument, {"head_num"}, [&] { Engine engine(weights(), {{"head_num", "3"}}); });
}

}  // namespace
}  // namespace charonia
