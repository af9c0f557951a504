// The time limit of steps with decodes, with simulated devices, so that no clock is involved. Compares the scheduler's
// prefill with a slow search for the amount that fits.
#include "schedule/step_time.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "scheduler_support.h"

namespace charonia::schedule {
namespace {

// Seconds of a step: `fixed`, plus the time of its tokens with attention over earlier positions.
struct Device {
  double fixed, per_decode, per_token, per_position;
  double noise = 0;  // standard deviation of the logarithm
  double seconds(const StepPlan& plan) const {
    double out = fixed;
    for (const auto& part : plan.seqs) {
      const bool decode = part.samples && part.num_tokens == 1;
      out += decode ? per_decode
                    : part.num_tokens * (per_token + per_position * (part.first_position + part.num_tokens / 2.0));
    }
    return out;
  }
};
// m05 on two cores, and a model of 8 billion parameters on an H100.
constexpr Device kCpu = {.fixed = 19e-3, .per_decode = 4.5e-3, .per_token = 1e-3, .per_position = 0.25e-6};
constexpr Device kGpu = {.fixed = 6e-3, .per_decode = 0.1e-3, .per_token = 28e-6, .per_position = 3e-9};

StepWork work_of(const StepPlan& plan) {
  StepWork out;
  std::int64_t positions = 0;
  for (const auto& part : plan.seqs) {
    if (part.samples && part.num_tokens == 1) {
      ++out.decodes;
    } else {
      out.prefill_tokens += part.num_tokens;
      positions += std::int64_t{part.num_tokens} * part.first_position;
    }
  }
  if (out.prefill_tokens > 0) out.prefill_position = positions / out.prefill_tokens;
  return out;
}

constexpr int kPrompt = 4000;

// Four decoding sequences and arriving prompts.
class Streams {
 public:
  Streams(const Device& device, StepTime& time, int token_budget)
      : device_(device), time_(time), scheduler_({16, token_budget, 0}, pool_, &time) {
    for (SeqId id = 1; id <= 4; ++id) scheduler_.add(id, numbers(30, static_cast<int>(id) * 100), 100'000);
  }
  void arrive(SeqId id) { scheduler_.add(id, numbers(kPrompt, static_cast<int>(id) * 10'000), kPrompt + 1); }

  struct Ran {
    StepWork work;
    double seconds;
  };
  Ran step() {
    const auto plan = scheduler_.plan();
    const auto samples = std::ranges::count_if(plan.seqs, [](const auto& part) { return part.samples; });
    commit(scheduler_, plan, std::vector<TokenId>(static_cast<std::size_t>(samples), 0));
    for (const auto& part : plan.seqs) {
      if (part.samples && part.id > 4) scheduler_.remove(part.id);
    }
    const Ran ran{work_of(plan), device_.seconds(plan) * std::exp(device_.noise * normal_(random_))};
    time_.measured(ran.work, ran.seconds);
    return ran;
  }
  int waiting_prompts() const { return scheduler_.num_running() + scheduler_.num_waiting() - 4; }
  Device& device() { return device_; }

 private:
  Device device_;
  StepTime& time_;
  BlockManager pool_{2000, 64, false};
  Scheduler scheduler_;
  std::mt19937_64 random_{1};
  std::normal_distribution<double> normal_;
};

double quantile(std::vector<double> values, double share) {
  std::ranges::sort(values);
  return values.at(static_cast<std::size_t>(share * static_cast<double>(values.size() - 1)));
}

TEST(StepTime, StreamsWaitThreeTimesAsLongForTokensWhilePromptsAreComputed) {
  for (auto device : {kCpu, kGpu}) {
    for (const double noise : {0.0, 0.15}) {
      device.noise = noise;
      SCOPED_TRACE(testing::Message() << device.fixed << " s, noise " << noise);
      const int budget = device.fixed == kCpu.fixed ? 512 : 2048;
      StepTime time(-1, 0, budget);
      Streams streams(device, time, budget);
      std::vector<double> alone, beside;
      for (int i = 0; i < 300; ++i) {
        const auto ran = streams.step();
        if (ran.work.prefill_tokens == 0) alone.push_back(ran.seconds);
      }
      int prompts = 0, at_most = 0;
      double total = 0, prefill = 0;
      for (; prompts < 10 || streams.waiting_prompts() > 0; ++at_most) {
        ASSERT_LT(at_most, 5000) << "prefill makes no progress";
        if (prompts < 10 && streams.waiting_prompts() < 2) streams.arrive(static_cast<SeqId>(10 + prompts++));
        const auto ran = streams.step();
        beside.push_back(ran.seconds);
        total += ran.seconds;
        prefill += ran.work.prefill_tokens;
      }
      EXPECT_EQ(prefill, 10 * kPrompt);
      EXPECT_LE(quantile(beside, 0.99), 3.15 * quantile(alone, 0.99));
      // Prefill is not delayed more than necessary: it gets two thirds of the time.
      EXPECT_GE(total / static_cast<double>(beside.size()), 2.5 * quantile(alone, 0.5));
    }
  }
}

// The most tokens that fit, by trying all numbers.
TEST(StepTime, APromptGetsAllTokensThatFitAfterMeasurements) {
  for (const int target_ms : {60, 100, 250}) {
    SCOPED_TRACE(target_ms);
    StepTime time(target_ms, 0, 512);
    Streams streams(kCpu, time, 512);
    for (int i = 0; i < 20; ++i) streams.step();
    streams.arrive(10);
    std::int64_t position = 0;
    for (int i = 0; streams.waiting_prompts() > 0; ++i) {
      const auto got = streams.step().work.prefill_tokens;
      std::int32_t fits = 0;
      for (std::int32_t n = 1; n + 4 <= 512; ++n) {
        const auto seconds = kCpu.fixed + 4 * kCpu.per_decode +
                             n * (kCpu.per_token + kCpu.per_position * (static_cast<double>(position) + n / 2.0));
        if (seconds <= target_ms * 1e-3) fits = n;
      }
      const bool measures = got == 0;  // decodes alone
      if (i >= 5 && !measures && streams.waiting_prompts() > 0) {  // the first ones are small; the last one is the rest
        EXPECT_LE(got, std::max(fits * 1.1, 16.0)) << "at " << position;
        // Rounded down to whole tiles; a window of measurements lags behind the position.
        EXPECT_GE(got, std::min(fits * 0.9 - 16, 508.0)) << "at " << position;
        EXPECT_TRUE((got + 4) % 16 == 0 || got == 16) << got;
      }
      position += got;
    }
  }
}

TEST(StepTime, OneSlowStepIsIgnoredAndASlowerDeviceIsNoticed) {
  StepTime time(-1, 0, 512);
  Streams streams(kCpu, time, 512);
  for (int i = 0; i < 20; ++i) streams.step();
  const auto target = time.target_s(4);
  EXPECT_NEAR(target, 3 * (kCpu.fixed + 4 * kCpu.per_decode), 1e-9);
  for (SeqId id = 10; id < 40; ++id) streams.arrive(id);
  for (int i = 0; i < 20; ++i) streams.step();
  const auto before = streams.step().work.prefill_tokens;
  time.measured({.decodes = 4}, 5.0);
  time.measured({.decodes = 4, .prefill_tokens = before, .prefill_position = 1000}, 5.0);
  EXPECT_DOUBLE_EQ(time.target_s(4), target);
  EXPECT_NEAR(streams.step().work.prefill_tokens, before, 16);

  auto& device = streams.device();
  device.fixed *= 3, device.per_decode *= 3, device.per_token *= 3, device.per_position *= 3;
  int alone = 0;
  for (int i = 0; i < 1500; ++i) alone += streams.step().work.prefill_tokens == 0;
  EXPECT_NEAR(time.target_s(4), 3 * target, 0.1 * target)
      << "steps of decodes alone must be measured again from time to time";
  EXPECT_GE(alone, 13);
  EXPECT_LE(alone, 16);
}

// As if the first step loads what the device needs.
TEST(StepTime, ASlowFirstMeasurementIsForgottenSoon) {
  StepTime time(-1, 0, 512);
  time.measured({.decodes = 4}, 5.0);
  int steps = 0;
  for (int alone = 1; alone < 14; ++steps) {
    ASSERT_LT(steps, 1000);
    time.begin_prefill(4);
    if (time.any_left()) {
      time.measured({.decodes = 4, .prefill_tokens = 100, .prefill_position = 50}, 0.2);
    } else {
      time.measured({.decodes = 4}, 0.05);
      if (++alone == 2) {
        EXPECT_EQ(steps, 8) << "steps with prefill before the next measurement of decodes alone";
        EXPECT_DOUBLE_EQ(time.target_s(4), 0.15);
      }
    }
  }
  EXPECT_EQ(steps, 8 + 16 + 24 + 32 + 40 + 48 + 56 + 64 + 72 + 80 + 88 + 96 + 100 + 13)
      << "and the 13 steps of decodes alone";
}

TEST(StepTime, HasNoLimitWithoutDecodesOrWhenDisabled) {
  for (const int target_ms : {-1, 0, 1}) {
    StepTime time(target_ms, 20, 512);
    for (const int decodes : {0, 5}) {
      if (decodes > 0 && target_ms != 0) continue;
      time.begin_prefill(decodes);
      EXPECT_TRUE(time.any_left());
      EXPECT_EQ(time.fit(0, 500), 500);
      time.take(0, 500);
      EXPECT_TRUE(time.any_left());
    }
  }
}

TEST(StepTime, PrefillAlwaysProgressesAlsoWithoutMeasurements) {
  StepTime slow(1, 0, 512), blind(-1, 0, 512);
  slow.measured({.decodes = 1}, 2.0);
  slow.measured({.decodes = 1, .prefill_tokens = 100}, 100.0);
  slow.begin_prefill(1);
  EXPECT_TRUE(slow.any_left());
  EXPECT_EQ(slow.fit(0, 1000), 15) << "the prefill and the decode must fill a tile";
  slow.take(0, 10);
  EXPECT_TRUE(slow.any_left());
  EXPECT_EQ(slow.fit(0, 1000), 5) << "the second sequence must fill the tile";
  slow.take(0, 6);
  EXPECT_FALSE(slow.any_left());

  // With this number of decodes, 16 more tokens exceed a tile, so the step gets fewer; the rest would wait for the next
  // step.
  for (const auto& [decodes, tokens] : {std::pair{8, 8}, {9, 16}, {15, 16}, {16, 16}, {31, 16}}) {
    StepTime time(1, 0, 512);
    time.measured({.decodes = decodes}, 2.0);
    time.measured({.decodes = decodes, .prefill_tokens = 100}, 100.0);
    time.begin_prefill(decodes);
    EXPECT_EQ(time.fit(0, 1000), tokens) << decodes;
  }

  std::vector<bool> any;
  for (int i = 0; i < 4; ++i) {
    blind.begin_prefill(1);
    any.push_back(blind.any_left());
  }
  EXPECT_EQ(any, (std::vector{false, false, true, true}));
  EXPECT_EQ(blind.fit(0, 1000), 31);
}

// The response time of a client that gets at most one response in 20 ms is not affected by steps of 60 ms.
TEST(StepTime, AFastDeviceUsesTheTimeBetweenResponses) {
  StepTime time(-1, 20, 2048);
  time.measured({.decodes = 4}, 0.005);
  EXPECT_DOUBLE_EQ(time.target_s(4), 0.06);
  EXPECT_DOUBLE_EQ(time.target_s(3), 0.06) << "3 and 4 decodes must share their measurements";
  EXPECT_EQ(time.target_s(5), 0) << "there are no measurements of 5 decodes yet";
  time.measured({.decodes = 8}, 0.05);
  EXPECT_DOUBLE_EQ(time.target_s(5), 0.15);
}

}  // namespace
}  // namespace charonia::schedule
