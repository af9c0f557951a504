// The engine after a permanent device failure: nothing hangs, all requests get the error, and the device is not used
// any more.
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <deque>
#include <memory>
#include <string>
#include <tuple>

#include "charonia/engine.h"
#include "engine_fixture.h"

namespace charonia {
namespace {

using testing::Collector;
using testing::error_of;
using testing::request;

class FailedGauge : public MetricsSink {
 public:
  void add(Metric, double, int) override {}
  void set(Metric gauge, double value) override {
    if (gauge == Metric::engine_failed) value_ = value;
  }
  void observe(Metric, double) override {}
  double value() const { return value_; }

 private:
  std::atomic<double> value_ = -1;
};

// Parameters: whether the device computes asynchronously, and its ranks.
class EngineFailureTest : public testing::EngineFixtureBase,
                          public ::testing::WithParamInterface<std::tuple<bool, int>> {
 protected:
  void SetUp() override {
    EngineFixtureBase::SetUp();
    const auto [asynchronous, ranks] = GetParam();
    wrap_devices(asynchronous);
    faults_->code = ErrorCode::device_failed;
    lengthen(ranks);
  }
  std::unique_ptr<Engine> failing_engine() const {
    return std::make_unique<Engine>(weights(), Settings{{"max_batch_size", "4"}, {"session_len", "10000"}}, sink_);
  }

  std::shared_ptr<FailedGauge> sink_ = std::make_shared<FailedGauge>();
};
INSTANTIATE_TEST_SUITE_P(Devices, EngineFailureTest, ::testing::Combine(::testing::Bool(), ::testing::Values(1, 2)),
                         [](const auto& info) {
                           return std::string(std::get<0>(info.param) ? "asynchronous" : "synchronous") + "_" +
                                  std::to_string(std::get<1>(info.param));
                         });

// Checks the error of a request.
void expect_told(const std::string& text) {
  for (const auto* part : {"the device has failed", "the test fails this", "Start a new process"}) {
    EXPECT_NE(text.find(part), std::string::npos) << text;
  }
}

TEST_P(EngineFailureTest, EveryRequestEndsAndLaterOnesAreRejected) {
  for (const bool launch : {false, true}) {
    SCOPED_TRACE(launch ? "at a launch" : "in a step");
    faults_->lost = false;
    faults_->steps_after_loss = 0;
    const auto failing = failing_engine();
    EXPECT_EQ(failing->failure(), "");
    EXPECT_EQ(sink_->value(), 0);
    std::atomic<int> told = 0;
    failing->on_failure([&told] { ++told; });
    // Four run, six wait, and two more of one session wait for its earlier request.
    std::deque<Collector> collectors;
    for (TokenId i = 0; i < 10; ++i) {
      auto one = request({1, i}, 9000);
      if (i >= 7) one.session_id = "s";
      failing->submit(one, collectors.emplace_back().callback());
    }
    collectors.front().wait_for(2);
    (launch ? faults_->launch_in : faults_->collect_in) = 3;
    for (auto& one : collectors) {
      const auto& last = one.last();
      EXPECT_EQ(last.finish_reason, FinishReason::error);
      EXPECT_EQ(last.error_code, ErrorCode::device_failed);
      expect_told(last.error);
    }
    const auto rejected = error_of([&] { failing->submit(request({1, 2}, 5), {}); }, ErrorCode::device_failed);
    expect_told(rejected);
    EXPECT_EQ(failing->failure(), rejected);
    EXPECT_EQ(sink_->value(), 1);
    failing->check_integrity();  // runs on the engine's thread, so it comes after the notification of the failure
    EXPECT_EQ(told, 1);
    EXPECT_EQ(failing->stats().num_running + failing->stats().num_waiting, 0);
    // Each rank may have started the next step, and the other ranks the step itself.
    EXPECT_LE(faults_->steps_after_loss, 2 * std::get<1>(GetParam()) - 1);
    failing->on_failure([&told] { told += 10; });
    EXPECT_EQ(told, 11) << "who asks later is told at once";
  }
}

TEST_P(EngineFailureTest, ShutdownAfterwardsEndsAtOnce) {
  const auto failing = failing_engine();
  Collector out;
  faults_->collect_in = 1;
  failing->submit(request({1, 2}, 9000), out.callback());
  EXPECT_EQ(out.last().error_code, ErrorCode::device_failed);
  failing->shutdown(1'000'000'000);
  expect_told(error_of([&] { failing->submit(request({1, 2}, 5), {}); }, ErrorCode::device_failed));
}

}  // namespace
}  // namespace charonia
