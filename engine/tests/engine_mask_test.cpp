// Token masks: the provider runs on a separate thread, and its mask is applied.
#include <algorithm>
#include <atomic>
#include <future>
#include <memory>
#include <stdexcept>

#include "engine_fixture.h"

namespace charonia {
namespace {

using testing::Collector;
using testing::kVocab;
using testing::MaskOf;
using testing::request;

class EngineMaskTest : public testing::EngineFixture {
 protected:
  static Request masked(std::vector<TokenId> ids, int max_tokens, MaskOf::Allowed allowed) {
    auto out = request(std::move(ids), max_tokens);
    out.mask = std::make_shared<MaskOf>(kVocab, std::move(allowed));
    return out;
  }
};
INSTANTIATE_TEST_SUITE_P(Device, EngineMaskTest, testing::kDevices, testing::device_name);

TEST_P(EngineMaskTest, OnlyTokensOfTheMaskAreSampled) {
  const auto one = engine();
  for (const float temperature : {0.0F, 1.5F}) {
    // Only vowels, according to the bytes of the tokens.
    auto asked = masked({1, 2, 3}, 60, [&](TokenId token, auto) {
      const auto bytes = one->token_bytes(token);
      return bytes.size() == 1 && std::string_view("aeiou").find(bytes[0]) != std::string_view::npos;
    });
    asked.sampling.temperature = temperature;
    Collector out(*one, asked);
    EXPECT_EQ(out.text().size(), 60U);
    EXPECT_EQ(out.text().find_first_not_of("aeiou"), std::string::npos) << out.text();
  }
  one->check_integrity();
}

TEST_P(EngineMaskTest, TheMaskSeesTheOutputAndIsAskedOncePerToken) {
  std::atomic<int> asked_count = 0;
  const auto step = [&](TokenId token, std::span<const TokenId> output) {
    if (token == 0) ++asked_count;
    return token == (output.empty() ? 5 : (output.back() + 3) % kVocab);
  };
  // With few blocks the sequence is preempted and recomputed; known masks are not computed again.
  const auto one = engine({{"cache_max_entry_count", "16"}, {"session_len", "60"}});
  Collector before(*one, request({9, 9, 9}, 50)), out(*one, masked({1, 2, 3}, 50, step));
  std::vector<TokenId> expected{5};
  while (expected.size() < 50) expected.push_back((expected.back() + 3) % kVocab);
  EXPECT_EQ(out.tokens(), expected);
  EXPECT_EQ(before.tokens(), alone(request({9, 9, 9}, 50)));
  EXPECT_EQ(asked_count, 50) << "the last token needs no mask after it";
}

TEST_P(EngineMaskTest, AMaskDoesNotChangeTheTokensOfOtherRequests) {
  const auto one = engine();
  Collector masked_out(*one, masked({1, 2}, 40, [](TokenId token, auto) { return token < 10; }));
  Collector free_out(*one, request({3, 4, 5}, 40));
  EXPECT_EQ(free_out.tokens(), alone(request({3, 4, 5}, 40)));
  for (const auto token : masked_out.tokens()) EXPECT_LT(token, 10);
}

TEST_P(EngineMaskTest, EverySequenceHasAMaskOfItsOwn) {
  const auto one = engine();
  auto several = masked({1, 2}, 20, [](TokenId token, std::span<const TokenId> output) {
    return output.empty() || token == (output.back() + 1) % kVocab;
  });
  several.sampling.n = 4;
  several.sampling.temperature = 1.0F;
  several.sampling.seed = 5;
  Collector all(*one, several);
  for (int i = 0; i < 4; ++i) {
    const auto tokens = all.tokens(i);
    for (std::size_t t = 1; t < tokens.size(); ++t) EXPECT_EQ(tokens[t], (tokens[t - 1] + 1) % kVocab);
  }
}

TEST_P(EngineMaskTest, AnEndIdEndsOnlyWhereTheMaskAllowsIt) {
  const auto one = engine();
  auto asked = masked({1, 2, 3}, 50, [](TokenId token, std::span<const TokenId> output) {
    return output.size() == 17 ? token == 0 : token == 7 || token == 8;
  });
  asked.sampling.ignore_eos = false;
  Collector out(*one, asked);
  EXPECT_EQ(out.last().finish_reason, FinishReason::stop);
  EXPECT_EQ(out.tokens().size(), 18U);
  EXPECT_EQ(out.tokens().back(), 0);
}

TEST_P(EngineMaskTest, NoTokenAndAnExceptionAreErrorsThatSaySo) {
  const auto one = engine();
  const auto fails = [](TokenId, auto output) {
    if (output.size() == 3) throw std::runtime_error("no grammar for this");
    return true;
  };
  Collector none(*one, masked({1}, 20, [](TokenId, auto output) { return output.size() < 5; }));
  Collector thrown(*one, masked({2}, 20, fails)), beside(*one, request({3}, 20));
  EXPECT_EQ(none.last().finish_reason, FinishReason::error);
  EXPECT_NE(none.last().error.find("allows no token after 5 tokens"), std::string::npos) << none.last().error;
  EXPECT_EQ(thrown.last().finish_reason, FinishReason::error);
  EXPECT_NE(thrown.last().error.find("no grammar for this"), std::string::npos) << thrown.last().error;
  EXPECT_EQ(thrown.tokens().size(), 3U);
  EXPECT_EQ(beside.tokens().size(), 20U);
  one->check_integrity();
}

// The provider must live until its call has returned; records when it is destroyed.
class SlowMask : public TokenMaskProvider {
 public:
  SlowMask(std::promise<void> entered, std::shared_future<void> go, std::promise<void> gone)
      : entered_(std::move(entered)), go_(std::move(go)), gone_(std::move(gone)) {}
  ~SlowMask() override { gone_.set_value(); }
  void fill(std::span<const TokenId> output, std::span<std::uint32_t> mask) override {
    std::ranges::fill(mask, ~0U);
    if (output.empty()) {
      entered_.set_value();
      go_.wait();
    }
  }
  std::unique_ptr<TokenMaskProvider> clone() const override { throw std::runtime_error("not this one"); }

 private:
  std::promise<void> entered_;
  std::shared_future<void> go_;
  std::promise<void> gone_;
};

TEST_P(EngineMaskTest, CancelWhileTheProviderWorksIsSafe) {
  // Its prompt waits for another one, so the engine does not wait for the mask.
  lengthen();
  const auto one = engine({{"max_batch_size", "1"}});
  Collector first, cancelled;
  const auto holder = one->submit(request({1, 2}, 19'000), first.callback());
  first.wait_for(1);
  std::promise<void> entered, go, gone;
  auto is_in = entered.get_future(), is_gone = gone.get_future();
  auto asked = request({4, 5}, 20);
  asked.mask = std::make_shared<SlowMask>(std::move(entered), go.get_future().share(), std::move(gone));
  const auto handle = one->submit(std::move(asked), cancelled.callback());
  asked.mask.reset();
  is_in.wait();
  one->cancel(handle);
  cancelled.wait();
  go.set_value();
  is_gone.wait();
  one->cancel(holder);
  first.wait();
  EXPECT_EQ(testing::tokens_of(*one, request({3}, 5)).size(), 5U);
}

TEST_P(EngineMaskTest, AProviderThatCannotBeClonedIsRejected) {
  const auto one = engine();
  std::promise<void> entered, go, gone;
  auto asked = request({4, 5}, 20);
  asked.sampling.n = 2;
  asked.mask = std::make_shared<SlowMask>(std::move(entered), go.get_future().share(), std::move(gone));
  expect_error(ErrorCode::invalid_argument, {"not this one"}, [&] { one->submit(asked, {}); });
}

}  // namespace
}  // namespace charonia
