#include "runtime/mask_threads.h"

#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <future>
#include <memory>
#include <span>
#include <stdexcept>
#include <vector>

#include "base/thread_time.h"
#include "charonia/error.h"

namespace charonia::runtime {
namespace {

// A provider whose first word is the number of the mask, and that calls a function first.
class Masks : public TokenMaskProvider {
 public:
  explicit Masks(std::function<void()> first = {}) : first_(std::move(first)) {}
  void fill(std::span<const std::int32_t> output, std::span<std::uint32_t> mask) override {
    if (first_) first_();
    mask[0] = static_cast<std::uint32_t>(output.size()) + 1;
  }
  std::unique_ptr<TokenMaskProvider> clone() const override { return std::make_unique<Masks>(first_); }

 private:
  std::function<void()> first_;
};

std::shared_ptr<SequenceMask> mask_of(std::function<void()> first = {}) {
  return std::make_shared<SequenceMask>(std::make_shared<Masks>(std::move(first)), 32);
}

TEST(MaskThreadsTest, EveryRankGetsTheMaskOfEachToken) {
  MaskThreads threads;
  std::vector<std::shared_ptr<SequenceMask>> masks;
  for (int i = 0; i < 8; ++i) masks.push_back(mask_of());
  for (const auto& mask : masks) threads.begin(mask);
  for (std::uint32_t token = 1; token <= 20; ++token) {
    threads.hand_over();
    const auto wait = [&] {
      for (const auto& mask : masks) EXPECT_EQ(mask->wait()[0], token);
    };
    auto other = std::async(std::launch::async, wait);
    wait();
    other.get();
    for (const auto& mask : masks) threads.next(mask, std::vector<TokenId>{1});
  }
}

TEST(MaskThreadsTest, AnErrorOfTheProviderReachesTheDevice) {
  MaskThreads threads;
  const auto mask = mask_of([] { throw std::runtime_error("no grammar"); });
  threads.begin(mask);
  threads.hand_over();
  EXPECT_THROW(mask->wait(), Error);
}

TEST(MaskThreadsTest, MasksOfSequencesThatEndedAreNotComputed) {
  std::promise<void> go;
  std::atomic<int> computed = 0;
  MaskThreads threads;
  auto held = go.get_future().share();
  // One for each thread, so that all threads wait.
  std::vector<std::shared_ptr<SequenceMask>> waiting;
  for (int i = 0; i < 4; ++i) waiting.push_back(mask_of([held] { held.wait(); }));
  for (const auto& mask : waiting) threads.begin(mask);
  threads.begin(mask_of([&] { ++computed; }));
  const auto last = mask_of();
  threads.begin(last);
  threads.hand_over();
  go.set_value();
  EXPECT_EQ(last->wait()[0], 1U);
  EXPECT_EQ(computed, 0);
}

TEST(MaskThreadsTest, AMaskThatNoThreadHasBegunIsComputedByTheDevice) {
  std::promise<void> go;
  auto held = go.get_future().share();
  MaskThreads threads;
  std::vector<std::shared_ptr<SequenceMask>> waiting;
  for (int i = 0; i < 4; ++i) waiting.push_back(mask_of([held] { held.wait(); }));
  for (const auto& mask : waiting) threads.begin(mask);
  std::vector<double> seconds;
  const auto provider = std::make_shared<Masks>();
  const auto mask = std::make_shared<SequenceMask>(provider, 32, false, [&](double took) { seconds.push_back(took); });
  threads.begin(mask);
  threads.hand_over();  // all threads are busy
  EXPECT_EQ(mask->wait()[0], 1U);
  threads.next(mask, std::vector<TokenId>{1});
  EXPECT_EQ(mask->wait()[0], 2U);
  EXPECT_EQ(seconds.size(), 2U);
  go.set_value();
}

TEST(MaskThreadsTest, ProposalsOfAProviderAreCutToValidTokens) {
  struct Proposes final : Masks {
    std::vector<std::int32_t> propose(std::span<const std::int32_t>, std::span<const std::int32_t>, int) override {
      return tokens;
    }
    std::vector<TokenId> tokens;
  };
  const auto provider = std::make_shared<Proposes>();
  const SequenceMask mask(provider, 32);
  for (const TokenId wrong : {-1, 32}) {
    provider->tokens = {0, 31, wrong, 1};
    EXPECT_EQ(mask.propose({}, 4), (std::vector<TokenId>{0, 31}));
  }
  EXPECT_EQ(mask.propose({}, 1), std::vector<TokenId>{0});
}

TEST(MaskThreadsTest, MasksAfterProposalsThatTakeTooLongEndTheProposals) {
  struct Slow final : Masks {
    void fill(std::span<const std::int32_t> output, std::span<std::uint32_t> mask) override {
      if (output.size() == 1) {
        for (const auto begun = thread_seconds(); thread_seconds() - begun < 0.06;) {
        }
      }
      mask[0] = ~0U;
    }
    std::vector<std::int32_t> propose(std::span<const std::int32_t>, std::span<const std::int32_t>, int) override {
      return {1};
    }
  };
  MaskThreads threads;
  const auto mask = std::make_shared<SequenceMask>(std::make_shared<Slow>(), 32);
  EXPECT_EQ(mask->propose({}, 4).size(), 1U);
  threads.begin(mask, std::vector<TokenId>{1, 2, 3});
  EXPECT_EQ(mask->row(3)->wait()[0], ~0U);
  EXPECT_TRUE(mask->propose({}, 4).empty());
}

}  // namespace
}  // namespace charonia::runtime
