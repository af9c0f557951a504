// Admission, time limits of waiting and running requests, and the metrics about them.
#include <chrono>
#include <deque>
#include <map>
#include <thread>

#include "engine_fixture.h"
#include "runtime/load_tracker.h"

namespace charonia {
namespace {

using testing::Collector;
using testing::request;
using testing::tokens_of;

// Records the reported values.
class Recorder : public MetricsSink {
 public:
  void add(Metric metric, double value, int label) override {
    const std::lock_guard lock(mutex_);
    sums_[{metric, label}] += value;
    if (metric == Metric::engine_steps && requests_at_first_step_ < 0) {
      requests_at_first_step_ = sums_[{Metric::num_requests_running, 0}] + sums_[{Metric::num_requests_waiting, 0}];
    }
  }
  void set(Metric metric, double value) override {
    const std::lock_guard lock(mutex_);
    sums_[{metric, 0}] = value;
  }
  void observe(Metric metric, double value) override {
    const std::lock_guard lock(mutex_);
    ++sums_[{metric, 0}];
    observed_[metric] += value;
    greatest_[metric] = std::max(greatest_[metric], value);
  }
  double of(Metric metric, int label = 0) {
    const std::lock_guard lock(mutex_);
    return sums_[{metric, label}];
  }
  double sum_observed(Metric metric) {
    const std::lock_guard lock(mutex_);
    return observed_[metric];
  }
  double greatest_observed(Metric metric) {
    const std::lock_guard lock(mutex_);
    return greatest_[metric];
  }
  // Negative before the first step.
  double requests_at_first_step() {
    const std::lock_guard lock(mutex_);
    return requests_at_first_step_;
  }
  double rejected(runtime::Rejection reason) { return of(Metric::requests_rejected, static_cast<int>(reason)); }

 private:
  std::mutex mutex_;
  std::map<std::pair<Metric, int>, double> sums_;  // for a histogram: number of observations
  std::map<Metric, double> observed_, greatest_;
  double requests_at_first_step_ = -1;
};

class EngineLimitsTest : public testing::EngineFixture {
 protected:
  std::unique_ptr<Engine> engine(const Settings& settings) {
    return std::make_unique<Engine>(weights(), settings, recorder_);
  }
  std::shared_ptr<Recorder> recorder_ = std::make_shared<Recorder>();
};
INSTANTIATE_TEST_SUITE_P(Device, EngineLimitsTest, testing::kDevices, testing::device_name);

// Code that unloads a model reads these values.
TEST_P(EngineLimitsTest, AnEngineThatTakesARequestDoesNotLookIdleDuringTheFirstStep) {
  const auto one = engine({});
  EXPECT_LT(recorder_->requests_at_first_step(), 0);
  EXPECT_EQ(std::ssize(tokens_of(*one, request({1, 2, 3}, 2))), 2);
  EXPECT_EQ(recorder_->requests_at_first_step(), 1);
}

TEST_P(EngineLimitsTest, MaxTokensMayBeMoreThanTheContextLeavesWhereThatIsAskedFor) {
  const auto one = engine({});
  const int limit = one->info().config.session_len;
  auto more = request({1, 2, 3}, 1 << 30);
  expect_error(ErrorCode::invalid_argument, {"do not fit"}, [&] { one->submit(more, {}); });
  more.fit_max_tokens = true;
  Collector all(*one, more);
  EXPECT_EQ(all.last().finish_reason, FinishReason::length);
  EXPECT_EQ(std::ssize(all.tokens()), limit - 3);
  more.input_ids.assign(static_cast<std::size_t>(limit), 1);
  expect_error(ErrorCode::invalid_argument, {"the prompt does not fit"}, [&] { one->submit(more, {}); });
  auto few = request({1, 2, 3}, 2);
  few.fit_max_tokens = true;
  EXPECT_EQ(std::ssize(tokens_of(*one, few)), 2);
}

TEST_P(EngineLimitsTest, DeadlineEndsRunningAndWaitingRequestsAndFreesTheirBlocks) {
  lengthen();
  const auto one = engine({{"max_batch_size", "1"}});
  auto late = request({1, 2, 3}, 19'000);
  // Doubles the limit until a request begins within it, on a machine of any speed.
  for (int limit_ms = 60, tries = 1;; limit_ms *= 2, ++tries) {
    late.timeout_ms = limit_ms;
    late.sampling.n = 1;
    Collector running, waiting, several(3);
    one->submit(late, running.callback());
    one->submit(late, waiting.callback());
    late.sampling.n = 3;
    one->submit(late, several.callback());
    for (auto* ended : {&running, &waiting, &several}) {
      EXPECT_EQ(ended->last().finish_reason, FinishReason::error);
      EXPECT_EQ(ended->last().error_code, ErrorCode::deadline_exceeded);
      EXPECT_NE(ended->last().error.find(std::to_string(limit_ms) + " ms"), std::string::npos) << ended->last().error;
    }
    one->check_integrity();
    EXPECT_EQ(one->stats().blocks_active, 0);
    EXPECT_EQ(recorder_->rejected(runtime::Rejection::deadline), 3 * tries);
    if (!running.tokens().empty()) break;  // its tokens are delivered
    ASSERT_LT(limit_ms, 60'000);
  }
}

TEST_P(EngineLimitsTest, TheSettingIsTheDeadlineOfRequestsThatNameNone) {
  lengthen();
  const auto one = engine({{"request_timeout_s", "0.05"}});
  EXPECT_EQ(Collector(*one, request({1, 2, 3}, 19'000)).last().error_code, ErrorCode::deadline_exceeded);
  auto longer = request({1, 2, 3}, 20);
  longer.timeout_ms = 60'000;
  EXPECT_EQ(Collector(*one, longer).last().finish_reason, FinishReason::length);
}

TEST_P(EngineLimitsTest, DeadlineEqualToTheQueueLimitEndsARunningRequest) {
  lengthen();
  // Doubles the limit until a request begins within it, on a machine of any speed.
  for (int limit_ms = 250;; limit_ms *= 2) {
    const auto one = engine({{"max_queue_time_s", std::to_string(limit_ms / 1000.0)}});
    auto late = request({1, 2, 3}, 19'000);
    late.timeout_ms = limit_ms;
    Collector running(*one, late);
    if (running.tokens().empty() && limit_ms < 60'000) continue;
    EXPECT_EQ(running.last().error_code, ErrorCode::deadline_exceeded) << running.last().error;
    EXPECT_GT(running.tokens().size(), 0U);
    return;
  }
}

TEST_P(EngineLimitsTest, AWaitTimeoutErrorHasARetryTime) {
  lengthen();
  // Doubles the limit until a request begins within it, on a machine of any speed.
  for (int limit_ms = 50;; limit_ms *= 2) {
    recorder_ = std::make_shared<Recorder>();
    const auto one = engine({{"max_batch_size", "1"}, {"max_queue_time_s", std::to_string(limit_ms / 1000.0)}});
    Collector running, waiting;
    const auto handle = one->submit(request({1, 2}, 19'000), running.callback());
    running.wait_for(1);
    if (running.ended() && limit_ms < 60'000) continue;
    one->submit(request({3, 4}, 5), waiting.callback());
    EXPECT_EQ(waiting.last().finish_reason, FinishReason::error);
    EXPECT_EQ(waiting.last().error_code, ErrorCode::resource_exhausted);
    EXPECT_NE(waiting.last().error.find("; retry after "), std::string::npos) << waiting.last().error;
    EXPECT_TRUE(waiting.last().error.ends_with(" s"));
    EXPECT_FALSE(running.ended()) << "the limit must not end a running request";
    EXPECT_EQ(recorder_->rejected(runtime::Rejection::queue_time), 1);
    one->cancel(handle);
    running.wait();
    return;
  }
}

TEST_P(EngineLimitsTest, TheQueueIsBoundedByTokens) {
  lengthen();
  const auto one = engine({{"max_batch_size", "1"}, {"max_queue_tokens", "100"}});
  Collector running, long_one, short_one;
  const auto first = one->submit(request({1, 2}, 19'000), running.callback());
  running.wait_for(1);
  // Longer than the limit: admitted if nothing waits.
  const auto second = one->submit(request(std::vector<TokenId>(150, 3), 5), long_one.callback());
  expect_error(ErrorCode::resource_exhausted, {"150", "4", "100", "max_queue_tokens", "; retry after "},
               [&] { one->submit(request({1, 2, 3, 4}, 5), {}); });
  EXPECT_EQ(recorder_->rejected(runtime::Rejection::queue_tokens), 1);
  one->cancel(second);
  long_one.wait();
  for (const auto handle : {one->submit(request({1, 2, 3, 4}, 5), short_one.callback()), first}) one->cancel(handle);
  short_one.wait();
  running.wait();
}

TEST_P(EngineLimitsTest, RejectionsRequestsAndStepsAreCounted) {
  auto one = engine({});
  expect_error(ErrorCode::invalid_argument, {}, [&] { one->submit(request(std::vector<TokenId>(300, 1), 1), {}); });
  EXPECT_EQ(recorder_->rejected(runtime::Rejection::never_fits), 1);
  auto three = request({1, 2, 3}, 10);
  three.sampling.n = 3;
  Collector(*one, three).wait();
  one.reset();  // the last step is counted after its results
  for (const auto& [metric, count] : {std::pair{Metric::e2e_request_latency_seconds, 1},
                                      {Metric::time_to_first_token_seconds, 1},
                                      {Metric::request_queue_time_seconds, 1},
                                      {Metric::generation_tokens, 30},
                                      {Metric::prompt_tokens, 3}}) {
    EXPECT_EQ(recorder_->of(metric), count) << "requests count, not their sequences";
  }
  EXPECT_EQ(recorder_->of(Metric::request_success, 1), 1) << "finish reason: length";
  const auto steps = recorder_->of(Metric::engine_steps);
  EXPECT_GE(steps, 10);
  for (const auto metric : {Metric::engine_step_seconds, Metric::engine_step_sequences, Metric::engine_step_tokens}) {
    EXPECT_EQ(recorder_->of(metric), steps);
  }
  // Each sequence has nine computed tokens after its prompt; the tenth ends it. A step that was launched before the end
  // was known computes one more.
  const auto computed = recorder_->sum_observed(Metric::engine_step_tokens);
  EXPECT_GE(computed, 3 + 3 * 9);
  EXPECT_LE(computed, 3 * 3 + 3 * 10);
  const auto sequences = recorder_->sum_observed(Metric::engine_step_sequences);
  EXPECT_GE(sequences, 3 * 9 + 1);
  EXPECT_LE(sequences, 3 * 11);
  EXPECT_GT(recorder_->sum_observed(Metric::engine_step_seconds), 0);
}

// A device whose steps take longer than the bound allows: each step gets the smallest part of a prompt.
TEST_P(EngineLimitsTest, AStepTimeLimitSplitsPromptsAndChangesNoToken) {
  lengthen();
  std::vector<TokenId> prompt(900);
  for (std::size_t i = 0; i < prompt.size(); ++i) prompt[i] = static_cast<TokenId>(i * i % 37 + 1);
  std::vector<std::vector<TokenId>> tokens;
  std::vector<double> most_at_once;
  for (const auto* step_time_ms : {"0", "1"}) {
    const auto one = engine({{"step_time_ms", step_time_ms}, {"enable_prefix_caching", "False"}});
    Collector decodes;
    const auto handle = one->submit(request({1, 2, 3}, 15'000), decodes.callback());
    decodes.wait_for(1);
    tokens.push_back(tokens_of(*one, request(prompt, 1)));
    one->cancel(handle);
    decodes.wait();
    one->shutdown(1000);
    most_at_once.push_back(recorder_->greatest_observed(Metric::engine_step_tokens));
    recorder_ = std::make_shared<Recorder>();
    const auto fresh = engine({{"step_time_ms", step_time_ms}});
    EXPECT_EQ(tokens_of(*fresh, request(prompt, 1)), tokens.back());
    fresh->shutdown(1000);
    EXPECT_EQ(recorder_->greatest_observed(Metric::engine_step_tokens), 512) << "a step without decodes has no limit";
    recorder_ = std::make_shared<Recorder>();
  }
  EXPECT_EQ(tokens[0], tokens[1]);
  EXPECT_EQ(most_at_once[0], 512);
  EXPECT_EQ(most_at_once[1], 512 / 16) << "the first steps measure with the whole budget; later steps have 16 tokens";
}

TEST_P(EngineLimitsTest, ANewEngineResetsAllGaugesOfThePreviousEngine) {
  for (const auto& info : metric_catalogue()) {
    if (info.kind == MetricKind::gauge) recorder_->set(info.metric, -7);
  }
  const auto one = engine({});
  for (const auto& info : metric_catalogue()) {
    if (info.kind != MetricKind::gauge || info.metric == Metric::subscriptions) continue;
    EXPECT_GE(recorder_->of(info.metric), 0) << info.name;
  }
}

// Allows only the end id, so that its sequence ends immediately. Its clone, for another sequence, allows all other
// tokens. The clone is destroyed slowly: this is still in progress on the engine thread when the request's last result
// has been delivered.
class SlowToGo : public testing::MaskOf {
 public:
  SlowToGo() : MaskOf(40, [](TokenId token, auto) { return token == 5; }) {}
  ~SlowToGo() override { std::this_thread::sleep_for(std::chrono::milliseconds(100)); }
  std::unique_ptr<TokenMaskProvider> clone() const override {
    return std::make_unique<MaskOf>(40, [](TokenId token, auto) { return token != 5; });
  }
};

TEST_P(EngineLimitsTest, CloseWaitsUntilNothingHoldsACallbackAnyMore) {
  const auto one = engine({});
  auto owned = std::make_shared<int>();
  const std::weak_ptr<int> held = owned;
  auto asked = request({1, 2, 3}, 10);
  asked.mask = std::make_shared<SlowToGo>();
  asked.sampling.n = 2;
  asked.sampling.end_ids = {5};
  asked.sampling.ignore_eos = false;
  one->submit(std::move(asked), [owned = std::move(owned)](Result&& result) { EXPECT_EQ(result.error, ""); });
  one->shutdown(10'000);
  one->close();
  EXPECT_TRUE(held.expired());
}

TEST_P(EngineLimitsTest, WaitingRequestsRunByPriorityThenArrival) {
  lengthen();
  const auto one = engine({{"max_batch_size", "1"}});
  std::mutex mutex;
  std::vector<int> order;  // priorities, in the order in which they end
  Collector first;
  const auto handle = one->submit(request({1, 2}, 19'000), first.callback());
  first.wait_for(1);
  std::deque<Collector> waiting;
  for (const int priority : {0, -1, 5, 2, 5}) {
    auto next = request({3, static_cast<TokenId>(waiting.size())}, 4);
    next.priority = priority;
    one->submit(next, [&, priority, callback = waiting.emplace_back().callback()](Result&& result) {
      if (result.finish_reason != FinishReason::none) {
        const std::lock_guard lock(mutex);
        order.push_back(priority);
      }
      callback(std::move(result));
    });
  }
  one->cancel(handle);
  for (auto& collector : waiting) collector.wait();
  const std::lock_guard lock(mutex);
  EXPECT_EQ(order, (std::vector<int>{5, 5, 2, 0, -1}));
}

TEST_P(EngineLimitsTest, AShareOfBlocksGetsItsMemoryAsItIsNeeded) {
  const auto one = engine({{"cache_max_entry_count", "60"}, {"cache_chunk_size", "10"}});
  tokens_of(*one, request({1, 2}, 5));
  one->check_integrity();
  EXPECT_EQ(recorder_->of(Metric::kv_blocks_committed), 10);
  const auto asked = request(std::vector<TokenId>(150, 3), 50);
  EXPECT_EQ(tokens_of(*one, asked), alone(asked));
  one->check_integrity();
  EXPECT_EQ(recorder_->of(Metric::kv_blocks_committed), 60);
  EXPECT_EQ(recorder_->of(Metric::kv_blocks_total), 60);
}

TEST(AdmissionTest, SmallPrefillsHardlyChangeTheMeasuredSpeed) {
  runtime::LoadTracker load{EngineConfig{}};
  load.step(1000, 0, 1.0);
  for (int i = 0; i < 20; ++i) load.step(1, 0, 0.01);  // the last token of loaded prompts
  EXPECT_GT(load.prefill_per_s(), 800);
}

TEST(AdmissionTest, RetryAfterFollowsFromTheSpeedAndTheWorkThatIsLeft) {
  EngineConfig config;
  config.max_queue_size = 10;
  runtime::LoadTracker admission(config);
  EXPECT_EQ(admission.retry_after_s(), 1) << "there are no measurements yet";
  runtime::Work work, other;
  ASSERT_FALSE(admission.admit(0, 1000, 1, 300, work));
  admission.step(500, 0, 5.0);  // 100 prompt tokens per second
  EXPECT_EQ(admission.retry_after_s(), 10);
  admission.step(0, 20, 2.0);  // 10 sampled tokens per second
  EXPECT_EQ(admission.retry_after_s(), 40);
  admission.begun(work);
  admission.computed(work, 1000);
  EXPECT_EQ(admission.retry_after_s(), 30);
  for (int i = 0; i < 100; ++i) admission.sampled(work);
  EXPECT_EQ(admission.retry_after_s(), 20);
  admission.ended(work, 100);
  EXPECT_EQ(admission.retry_after_s(), 1);
  // The next request is expected to be as long as those that ended, not as its limit.
  ASSERT_FALSE(admission.admit(0, 0, 2, 300, other));
  EXPECT_EQ(admission.retry_after_s(), 20);
  ASSERT_FALSE(admission.admit(0, 1'000'000, 1, 300, work));
  EXPECT_EQ(admission.retry_after_s(), 600);
  const auto rejected = admission.admit(10, 5, 1, 5, work);
  ASSERT_TRUE(rejected);
  EXPECT_EQ(rejected->reason, runtime::Rejection::queue_full);
  EXPECT_FALSE(admission.admit(10, 5, 1, 5, work, true)) << "another engine has admitted this request";
  EXPECT_TRUE(rejected->text.ends_with("; retry after 600 s")) << rejected->text;
}

// Five of every seven tokens of a run are certain; the first of them is sampled.
TEST_P(EngineLimitsTest, TokensThatTakeNoStepOfTheirOwnAreCounted) {
  const auto one = engine({});
  struct Case {
    int max_tokens, n, expected;
    bool one_by_one;
  };
  for (const auto& [max_tokens, n, expected, one_by_one] :
       {Case{70, 1, 40, false}, Case{69, 1, 39, false}, Case{3, 1, 0, false}, Case{4, 1, 1, false},
        Case{14, 2, 16, false}, Case{70, 1, 0, true}}) {
    auto asked = request({1, 2, 3}, max_tokens);
    asked.sampling.n = n;
    const auto before = recorder_->of(Metric::jump_forward_tokens);
    const auto before_stats = one->stats().jump_forward_tokens;
    Collector(*one, testing::with_runs(asked, 40, one_by_one)).wait();
    EXPECT_EQ(recorder_->of(Metric::jump_forward_tokens) - before, expected) << max_tokens;
    EXPECT_EQ(one->stats().jump_forward_tokens - before_stats, expected) << max_tokens;
  }
}

}  // namespace
}  // namespace charonia
