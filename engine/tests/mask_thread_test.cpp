// The masks of sequences beside the steps that wait for them: what one rank is told, all ranks are told.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <ctime>
#include <functional>
#include <future>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "charonia/error.h"
#include "runtime/mask_thread.h"

namespace charonia::runtime {
namespace {

constexpr int kLate = -1;

// What two ranks are told of masks: the first word of each, or that it is late.
std::vector<int> told(const std::vector<std::shared_ptr<SequenceMask>>& masks) {
  const auto rank = [&masks] {
    std::vector<int> out;
    for (const auto& mask : masks) {
      try {
        out.push_back(static_cast<int>(mask->wait()[0]));
      } catch (const Error& error) {
        EXPECT_TRUE(is_late_mask(error.what())) << error.what();
        out.push_back(kLate);
      }
    }
    return out;
  };
  auto other = std::async(std::launch::async, rank);
  const auto out = rank();
  EXPECT_EQ(out, other.get());
  return out;
}

class Masks : public TokenMaskProvider {
 public:
  using Wait = std::function<void(std::size_t)>;
  explicit Masks(Wait wait) : wait_(std::move(wait)) {}
  void fill(std::span<const std::int32_t> output, std::span<std::uint32_t> mask) override {
    wait_(output.size());
    mask[0] = static_cast<std::uint32_t>(output.size()) + 1;
  }
  std::unique_ptr<TokenMaskProvider> clone() const override { return std::make_unique<Masks>(wait_); }

 private:
  Wait wait_;
};

TEST(MaskThreadTest, AMaskThatIsLateIsLateForAllRanksAndComesAfterwards) {
  std::promise<void> go;
  std::promise<void> known;
  const auto wait = [going = go.get_future().share()](std::size_t) { going.wait(); };
  const auto mask = std::make_shared<SequenceMask>(std::make_shared<Masks>(wait), 32);
  MaskThread thread([](double) {}, [&] { known.set_value(); });
  thread.begin(mask);
  thread.hand_over();
  mask->set_deadline(std::make_shared<MaskDeadline>());
  EXPECT_EQ(told({mask}), std::vector<int>{kLate});
  EXPECT_TRUE(mask->sit_out());
  go.set_value();
  known.get_future().wait();
  EXPECT_TRUE(mask->known());
  EXPECT_FALSE(mask->sit_out());
  mask->set_deadline(std::make_shared<MaskDeadline>());
  EXPECT_EQ(told({mask}), std::vector<int>{1});
}

TEST(MaskThreadTest, RanksAreToldTheSameWhateverMasksTake) {
  std::mt19937 random(1);
  const auto wait = [&random](std::size_t) {  // of one thread at a time: the sequences that are slow
    if (random() % 4 != 0) return;
    const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(random() % 8 == 0 ? 230 : 25);
    while (std::chrono::steady_clock::now() < end) {
    }
  };
  std::atomic<int> worked = 0;
  MaskThread thread([&](double) { ++worked; }, [] {});
  const auto slow = std::make_shared<SequenceMask>(std::make_shared<Masks>(wait), 32);
  const auto fast = std::make_shared<SequenceMask>(std::make_shared<Masks>([](std::size_t) {}), 32);
  thread.begin(slow);
  thread.begin(fast);
  thread.hand_over();
  int steps_of_slow = 0, steps_of_fast = 0;
  for (int step = 0; step < 40; ++step) {
    const auto deadline = std::make_shared<MaskDeadline>();
    std::vector<std::shared_ptr<SequenceMask>> in;
    for (const auto& mask : {slow, fast}) {
      if (mask->slow() && !mask->known()) continue;
      mask->set_deadline(deadline);
      in.push_back(mask);
    }
    const auto words = told(in);
    for (std::size_t i = 0; i < in.size(); ++i) {
      if (words[i] == kLate) {
        if (in[i]->sit_out()) {
          while (!in[i]->known()) std::this_thread::yield();
        }
        continue;
      }
      auto& steps = in[i] == slow ? steps_of_slow : steps_of_fast;
      EXPECT_EQ(words[i], ++steps);
      thread.next(in[i], std::vector<TokenId>{1});
    }
    thread.hand_over();
  }
  EXPECT_GT(steps_of_fast, 20);
}

// Takes computing time, as what is slow does.
void compute(double seconds) {
  const auto now = [] {
    timespec time{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
  };
  for (const double end = now() + seconds; now() < end;) {
  }
}

TEST(MaskThreadTest, TheFirstSlowMaskOfARequestTellsOfItsOthersAndDelaysNoOtherRequest) {
  const auto pace = std::make_shared<MaskPace>();
  std::promise<void> go;
  const auto wait = [going = go.get_future().share()](std::size_t) { going.wait(); };
  const auto first = std::make_shared<SequenceMask>(std::make_shared<Masks>([](auto) { compute(0.03); }), 32, pace);
  const auto second = std::make_shared<SequenceMask>(std::make_shared<Masks>(wait), 32, pace);
  const auto other = std::make_shared<SequenceMask>(std::make_shared<Masks>([](auto) {}), 32);
  MaskThread thread([](double) {}, [] {});
  for (const auto& mask : {first, second, other}) thread.begin(mask);
  thread.hand_over();
  EXPECT_EQ(told({other}), std::vector<int>{1});  // while the second one is not known
  EXPECT_TRUE(first->slow() && second->slow());
  EXPECT_FALSE(other->slow() || second->known());
  go.set_value();
  EXPECT_EQ(told({second}), std::vector<int>{1});
}

TEST(MaskThreadTest, ARequestIsSlowUntilManyMasksWereQuick) {
  MaskPace pace;
  pace.took(0.03);
  for (int quick = 0; quick < 15; ++quick) pace.took(0.001);
  EXPECT_TRUE(pace.slow());
  pace.took(0.03);
  for (int quick = 0; quick < 15; ++quick) pace.took(0.001);
  EXPECT_TRUE(pace.slow());
  pace.took(0.001);
  EXPECT_FALSE(pace.slow());
}

TEST(MaskThreadTest, WhatNobodyHoldsAnyMoreIsNotWorkedOut) {
  std::promise<void> go;
  const auto wait = [going = go.get_future().share()](std::size_t) { going.wait(); };
  std::atomic<int> filled = 0;
  const auto first = std::make_shared<SequenceMask>(std::make_shared<Masks>(wait), 32);
  const auto last = std::make_shared<SequenceMask>(std::make_shared<Masks>([](auto) {}), 32);
  MaskThread thread([](double) {}, [] {});
  thread.begin(first);
  thread.begin(std::make_shared<SequenceMask>(std::make_shared<Masks>([&](auto) { ++filled; }), 32));
  thread.begin(last);
  thread.hand_over();
  go.set_value();
  EXPECT_EQ(told({last}), std::vector<int>{1});
  EXPECT_EQ(filled, 0);
}

}  // namespace
}  // namespace charonia::runtime
