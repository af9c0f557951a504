// Rows that are not sampled freely: a mask of allowed tokens from another thread, or a target whose log probability is
// requested.
#include <gtest/gtest.h>

#include <array>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "charonia/error.h"
#include "sample_reference.h"

namespace charonia::ops {
namespace {

// A mask that is ready from the start.
class ReadyMask : public TokenMask {
 public:
  ReadyMask(std::size_t vocab, std::span<const std::int32_t> allowed) : words_((vocab + 31) / 32) {
    for (const auto id : allowed) words_[static_cast<std::size_t>(id) / 32] |= std::uint32_t{1} << (id % 32);
  }
  std::span<const std::uint32_t> wait() const override { return words_; }
  std::vector<std::uint32_t>& words() { return words_; }

 private:
  std::vector<std::uint32_t> words_;
};

// A mask that another thread finishes.
class LateMask : public TokenMask {
 public:
  void finish(std::vector<std::uint32_t> words) {
    const std::lock_guard lock(mutex_);
    words_ = std::move(words);
    ready_ = true;
    changed_.notify_all();
  }
  std::span<const std::uint32_t> wait() const override {
    std::unique_lock lock(mutex_);
    asked_ = true;
    changed_.notify_all();
    changed_.wait(lock, [&] { return ready_; });
    return words_;
  }
  // Waits until the mask is requested; false: it is not requested.
  bool asked() const {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return asked_ || abandoned_; });
    return asked_;
  }
  void abandon() {
    const std::lock_guard lock(mutex_);
    abandoned_ = true;
    changed_.notify_all();
  }

 private:
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  mutable bool asked_ = false;
  bool ready_ = false, abandoned_ = false;
  std::vector<std::uint32_t> words_;
};

class FailedMask : public TokenMask {
 public:
  std::span<const std::uint32_t> wait() const override {
    throw Error(ErrorCode::invalid_argument, "the grammar has no rule 'root'");
  }
};

class SampleMaskTest : public testing::TestWithParam<std::string> {
 protected:
  std::vector<Sampled> sample(const Matrix& logits, std::span<SampleRow> rows) {
    for (auto& row : rows) row.sequence = ++sequences_;
    return steps_.run(logits, rows);
  }
  std::uint64_t sequences_ = 0;
  std::unique_ptr<Ops> ops_ = make_ops(GetParam(), 2);
  SamplingSteps steps_{*ops_};
};
INSTANTIATE_TEST_SUITE_P(Device, SampleMaskTest, testing::ValuesIn(device_names()),
                         [](const auto& i) { return i.param; });

// A mask equals a ban of all other tokens: the same draws, with any other parameters.
TEST_P(SampleMaskTest, a_mask_equals_banning_all_other_tokens) {
  Random random(70);
  for (int trial = 0; trial < trials(GetParam(), 60); ++trial) {
    const int vocab = std::array{5, 32, 33, 100, 1000, 5000}[static_cast<std::size_t>(trial % 6)];
    const auto logits = Matrix::random(random, DType::f32, 1, vocab, 4);
    Matrix rows_of(DType::f32, 3, vocab);
    for (int c = 0; c < 3 * vocab; ++c) rows_of.set(c / vocab, c % vocab, logits.at(0, c % vocab));
    std::vector<std::int32_t> allowed, banned;
    const int share = uniform(random, 1, 10);
    for (int t = 0; t < vocab; ++t) (uniform(random, 1, 10) <= share ? allowed : banned).push_back(t);
    if (allowed.empty()) allowed.push_back(banned.back()), banned.pop_back();
    std::vector<std::int32_t> output;
    for (int i = uniform(random, 0, 20); i > 0; --i) output.push_back(uniform(random, 0, vocab - 1));
    const std::vector<std::pair<std::int32_t, float>> bias = {{uniform(random, 0, vocab - 1), 3.0F}};
    SampleRow row;
    row.temperature = trial % 4 == 0 ? 0 : 0.8F;
    row.seed = random();
    row.position = trial;
    row.output = output;
    row.bias = bias;
    if (trial % 3 == 0) row.repetition_penalty = 1.3F;
    if (trial % 3 == 1) row.top_k = uniform(random, 1, vocab);
    if (trial % 5 == 0) row.top_p = 0.7F;
    if (trial % 5 == 1) row.presence_penalty = 0.5F;
    row.logprobs = trial % 2 == 0 ? 3 : -1;
    const auto free = sample(logits, std::span(&row, 1))[0];
    const ReadyMask mask(static_cast<std::size_t>(vocab), allowed);
    std::array rows = {row, row, row};  // rows do not depend on each other
    rows[0].mask = &mask;
    rows[1].banned = banned;
    const auto sampled = sample(rows_of, rows);
    const auto &masked = sampled[0], &expected = sampled[1];
    ASSERT_EQ(sampled[2].token, free.token);
    ASSERT_EQ(sample(logits, std::span(rows).first(1))[0].token, masked.token);
    ASSERT_EQ(masked.error, "");
    ASSERT_EQ(expected.error, "");
    ASSERT_TRUE(std::find(allowed.begin(), allowed.end(), masked.token) != allowed.end());
    ASSERT_EQ(masked.token, expected.token) << "trial " << trial << ", vocabulary " << vocab;
    ASSERT_EQ(masked.logprob, expected.logprob);
    ASSERT_EQ(masked.top, expected.top);
    expect_logprobs(logits.floats(0), row, masked);
  }
}

TEST_P(SampleMaskTest, a_step_waits_for_a_mask_that_comes_from_another_thread) {
  Random random(73);
  const auto logits = Matrix::random(random, DType::f32, 3, 64, 4);
  LateMask late;
  std::vector<SampleRow> rows(3);
  for (auto& row : rows) row.temperature = 0;
  rows[1].mask = &late;
  const std::jthread provider([&] {
    if (late.asked()) late.finish({0, 1U << 5});
  });
  const struct Abandon {
    LateMask& mask;
    ~Abandon() { mask.abandon(); }
  } abandon{late};
  const auto sampled = sample(logits, rows);
  EXPECT_EQ(sampled[1].token, 37);
  EXPECT_EQ(sampled[0].error, "");
  EXPECT_EQ(sampled[2].error, "");
}

TEST_P(SampleMaskTest, a_row_whose_mask_fails_or_allows_nothing_fails_alone) {
  Random random(74);
  const auto logits = Matrix::random(random, DType::f32, 7, 40, 4);
  const std::vector<std::int32_t> one = {7}, last = {39};
  const FailedMask failed;
  ReadyMask only(40, one), nothing(40, {}), too_short(32, one), beyond(40, last);
  beyond.words()[1] |= 0xffffff00U;  // bits beyond the vocabulary are ignored
  std::vector<SampleRow> rows(7);
  for (auto& row : rows) row.temperature = 0;
  const auto free = sample(logits, rows);
  const std::array<const TokenMask*, 6> masks = {nullptr, &failed, &only, &nothing, &too_short, &beyond};
  for (std::size_t r = 0; r < 6; ++r) rows[r].mask = masks[r];
  rows[2].banned = one;
  rows[6].target = 40;  // not a token
  const auto sampled = sample(logits, rows);
  EXPECT_EQ(sampled[0].token, free[0].token);
  EXPECT_EQ(sampled[5].token, 39);
  EXPECT_EQ(sampled[5].error, "");
  const auto expect_error_of = [&](std::size_t row, std::string_view part) {
    EXPECT_NE(sampled[row].error.find(part), std::string::npos) << sampled[row].error;
  };
  expect_error_of(1, "the grammar has no rule 'root'");
  EXPECT_NE(sampled[6].error, "");
  for (const std::size_t row : {2U, 3U}) expect_error_of(row, "no token is left");
  for (const std::size_t row : {2U, 3U, 4U}) expect_error_of(row, "mask");
}

TEST_P(SampleMaskTest, a_target_has_the_log_probability_of_unmodified_logits) {
  Random random(77);
  for (int trial = 0; trial < trials(GetParam(), 20); ++trial) {
    const int vocab = trial % 4 == 0 ? 3000 : uniform(random, 2, 200);
    const auto logits = Matrix::random(random, DType::f32, 3, vocab, 4);
    const std::int32_t target = uniform(random, 1, vocab - 1);
    const std::vector<std::int32_t> banned = {target};
    const std::vector<std::pair<std::int32_t, float>> bias = {{0, 9.0F}, {target, -kInfinity}};
    const FailedMask never_asked;
    std::vector<SampleRow> rows(3);
    // Parameters that change the logits have no effect on a target.
    rows[0].target = target;
    rows[0].logprobs = trial % 3 == 0 ? 0 : 4;
    rows[0].banned = banned;
    rows[0].bias = bias;
    rows[0].mask = &never_asked;
    rows[1].temperature = 0;
    if (trial % 2 == 1) rows[1].bias = bias;
    rows[2].target = target;
    rows[2].logits = true;
    rows[0].logits = trial % 2 == 0;
    const auto sampled = sample(logits, rows);
    ASSERT_EQ(sampled[0].error, "");
    for (const std::size_t r : {0U, 1U, 2U}) {
      ASSERT_EQ(sampled[r].logits.size(), rows[r].logits ? static_cast<std::size_t>(vocab) : 0U);
      for (std::size_t c = 0; c < sampled[r].logits.size(); ++c) {
        ASSERT_EQ(sampled[r].logits[c], logits.at(static_cast<std::int64_t>(r), static_cast<std::int64_t>(c)));
      }
    }
    ASSERT_EQ(sampled[0].token, target);
    expect_logprobs(logits.floats(0), rows[0], sampled[0]);
    const auto biased = [&](int c) {
      if (rows[1].bias.empty()) return logits.at(1, c);
      return c == target ? -kInfinity : logits.at(1, c) + (c == 0 ? 9.0F : 0.0F);
    };
    for (int c = 0; c < vocab; ++c) ASSERT_LE(biased(c), biased(sampled[1].token));
  }
}

}  // namespace
}  // namespace charonia::ops
