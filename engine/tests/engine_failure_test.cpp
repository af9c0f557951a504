// After a step has failed, every request ends with the error and the engine takes no more.
#include <gtest/gtest.h>

#include <cstdlib>
#include <deque>
#include <memory>
#include <string>
#include <tuple>

#include "charonia/engine.h"
#include "engine_fixture.h"
#include "errors.h"

namespace charonia {
namespace {

using testing::Collector;
using testing::error_of;
using testing::request;

// Parameters: whether the device computes asynchronously, and the number of ranks.
class EngineFailureTest : public testing::EngineFixtureBase,
                          public ::testing::WithParamInterface<std::tuple<bool, int>> {
 protected:
  void SetUp() override {
    EngineFixtureBase::SetUp();
    const auto [asynchronous, ranks] = GetParam();
    wrap_devices(asynchronous);
    lengthen(ranks);
  }
  std::unique_ptr<Engine> failing_engine() const { return engine({{"max_batch_size", "4"}, {"session_len", "10000"}}); }
};
INSTANTIATE_TEST_SUITE_P(Devices, EngineFailureTest, ::testing::Combine(::testing::Bool(), ::testing::Values(1, 2)),
                         [](const auto& info) {
                           return std::string(std::get<0>(info.param) ? "asynchronous" : "synchronous") + "_" +
                                  std::to_string(std::get<1>(info.param));
                         });

void expect_failure(const std::string& text) {
  for (const auto* part : {"the engine has failed", "the test fails this", "must be started again"}) {
    EXPECT_NE(text.find(part), std::string::npos) << text;
  }
}

TEST_P(EngineFailureTest, EveryRequestEndsAndLaterOnesAreRejected) {
  for (const bool launch : {false, true}) {
    SCOPED_TRACE(launch ? "at a launch" : "in a step");
    const auto failing = failing_engine();
    int calls = 0;
    failing->on_failure([&calls] { ++calls; });
    // Four requests run, six wait, and two requests of a session wait for the one before them.
    std::deque<Collector> collectors;
    for (TokenId i = 0; i < 10; ++i) {
      auto one = request({1, i}, 9000);
      if (i >= 7) one.session_id = "s";
      failing->submit(one, collectors.emplace_back().callback());
    }
    collectors.front().wait_for(2);
    (launch ? faults_->launch_in : faults_->collect_in) = 3;
    for (auto& one : collectors) {
      EXPECT_EQ(one.last().finish_reason, FinishReason::error);
      EXPECT_EQ(one.last().error_code, ErrorCode::unavailable);
      expect_failure(one.last().error);
    }
    expect_failure(error_of([&] { failing->submit(request({1, 2}, 5), {}); }, ErrorCode::unavailable));
    failing->check_integrity();  // runs on the engine's thread, after on_failure
    EXPECT_EQ(calls, 1);
    EXPECT_EQ(failing->stats().num_running + failing->stats().num_waiting, 0);
    failing->shutdown(1'000'000'000);
  }
}

// As the Triton backend does.
TEST_P(EngineFailureTest, OnFailureMayEndTheProcess) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto fail = [this] {
    const auto failing = failing_engine();
    failing->on_failure([] { std::_Exit(3); });
    faults_->collect_in = 1;
    Collector(*failing, request({1, 2}, 9000)).wait();
  };
  EXPECT_EXIT(fail(), ::testing::ExitedWithCode(3), "the engine has failed");
}

}  // namespace
}  // namespace charonia
