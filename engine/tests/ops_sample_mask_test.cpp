// Rows that are not sampled freely: a mask of allowed tokens from another thread, or a target whose log probability is
// requested.
#include <gtest/gtest.h>

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
    SampleRow by_ban = row;
    by_ban.banned = banned;
    const ReadyMask mask(static_cast<std::size_t>(vocab), allowed);
    row.mask = &mask;
    const auto masked = sample(logits, std::span(&row, 1))[0], expected = sample(logits, std::span(&by_ban, 1))[0];
    ASSERT_EQ(masked.error, "");
    ASSERT_EQ(expected.error, "");
    ASSERT_TRUE(std::find(allowed.begin(), allowed.end(), masked.token) != allowed.end());
    ASSERT_EQ(masked.token, expected.token) << "trial " << trial << ", vocabulary " << vocab;
    ASSERT_EQ(masked.logprob, expected.logprob);
    ASSERT_EQ(masked.top, expected.top);
    expect_logprobs(logits.floats(0), row, masked);
  }
}

TEST_P(SampleMaskTest, mask_bits_beyond_the_vocabulary_are_ignored) {
  Random random(71);
  const auto logits = Matrix::random(random, DType::f32, 1, 37, 4);
  const std::vector<std::int32_t> allowed = {36};
  ReadyMask mask(37, allowed);
  mask.words()[1] |= 0xffffffe0U;
  SampleRow row;
  row.mask = &mask;
  EXPECT_EQ(sample(logits, std::span(&row, 1))[0].token, 36);
}

TEST_P(SampleMaskTest, the_mask_of_a_row_does_not_affect_other_rows) {
  Random random(72);
  constexpr int kRows = 9, kVocab = 300;
  const auto logits = Matrix::random(random, DType::f32, kRows, kVocab, 4);
  std::vector<SampleRow> rows(kRows);
  std::vector<std::unique_ptr<ReadyMask>> masks;
  for (int r = 0; r < kRows; ++r) {
    auto& row = rows[static_cast<std::size_t>(r)];
    row.seed = static_cast<std::uint64_t>(r), row.position = 5 * r;
    row.temperature = r % 2 == 0 ? 0 : 1;
    row.logprobs = r % 3 - 1;
  }
  const auto free = sample(logits, rows);
  for (int r = 0; r < kRows; r += 2) {
    std::vector<std::int32_t> allowed;
    for (int t = r; t < kVocab; t += 11) allowed.push_back(t);
    masks.push_back(std::make_unique<ReadyMask>(kVocab, allowed));
    rows[static_cast<std::size_t>(r)].mask = masks.back().get();
  }
  const auto mixed = sample(logits, rows);
  for (int r = 0; r < kRows; ++r) {
    const auto i = static_cast<std::size_t>(r);
    if (r % 2 == 1) {
      EXPECT_EQ(mixed[i].token, free[i].token);
      EXPECT_EQ(mixed[i].logprob, free[i].logprob);
    } else {
      EXPECT_EQ((mixed[i].token - r) % 11, 0) << mixed[i].token;
      // The row alone gives the same result.
      auto logits_alone = Matrix(DType::f32, 1, kVocab);
      for (int c = 0; c < kVocab; ++c) logits_alone.set(0, c, logits.at(r, c));
      EXPECT_EQ(sample(logits_alone, std::span(&rows[i], 1))[0].token, mixed[i].token);
    }
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

TEST_P(SampleMaskTest, a_failed_mask_fails_only_its_row) {
  Random random(74);
  const auto logits = Matrix::random(random, DType::f32, 3, 100, 4);
  const FailedMask failed;
  std::vector<SampleRow> rows(3);
  for (auto& row : rows) row.temperature = 0;
  const auto free = sample(logits, rows);
  rows[1].mask = &failed;
  const auto sampled = sample(logits, rows);
  EXPECT_EQ(sampled[0].token, free[0].token);
  EXPECT_EQ(sampled[2].token, free[2].token);
  EXPECT_NE(sampled[1].error.find("the grammar has no rule 'root'"), std::string::npos) << sampled[1].error;
}

TEST_P(SampleMaskTest, a_mask_that_allows_nothing_is_the_requests_error) {
  Random random(75);
  const auto logits = Matrix::random(random, DType::f32, 2, 40, 4);
  const std::vector<std::int32_t> one = {7}, none;
  const ReadyMask only(40, one), nothing(40, none);
  std::vector<SampleRow> rows(2);
  rows[0].mask = &only;
  rows[0].banned = one;
  rows[1].mask = &nothing;
  const auto sampled = sample(logits, rows);
  for (const auto& row : sampled) {
    EXPECT_NE(row.error.find("no token is left"), std::string::npos) << row.error;
    EXPECT_NE(row.error.find("mask"), std::string::npos) << row.error;
  }
}

TEST_P(SampleMaskTest, a_mask_of_the_wrong_length_is_rejected) {
  Random random(76);
  const auto logits = Matrix::random(random, DType::f32, 1, 40, 4);
  const std::vector<std::int32_t> one = {7};
  const ReadyMask mask(32, one);
  SampleRow row;
  row.mask = &mask;
  EXPECT_NE(sample(logits, std::span(&row, 1))[0].error.find("mask"), std::string::npos);
}

TEST_P(SampleMaskTest, a_target_is_reported_with_the_unmodified_logits_and_their_log_probabilities) {
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

TEST_P(SampleMaskTest, the_next_step_uses_the_target) {
  Random random(78);
  const auto table = Matrix::random(random, DType::f32, 50, 8);
  const auto embedding = ops_->make_embedding(table.host(), DType::f32);
  const DeviceMatrix logits(*ops_, Matrix::random(random, DType::f32, 1, 50, 4));
  SampleRow row;
  row.target = 33;
  const DeviceMatrix residual(*ops_, ops_->precision(DType::f32).residual, 1, 8);
  const std::vector<std::int32_t> first = {0}, second = {-1};
  const auto embed = [&] { ops_->embed(residual.tensor(), *embedding, 1); };
  const auto embed_and_sample = [&] {
    embed();
    ops_->sample(logits.tensor());
  };
  const auto sampled = run_step(
      *ops_, {.ids = first, .attention = {}, .logits_rows = first, .sample = std::span(&row, 1)}, embed_and_sample);
  ASSERT_EQ(sampled[0].token, 33);
  run_prepared_step(*ops_, {.ids = second, .attention = {}, .logits_rows = {}, .sample = {}}, embed);
  const auto out = residual.host();
  for (int c = 0; c < 8; ++c) EXPECT_EQ(out.at(0, c), table.at(33, c));
}

TEST_P(SampleMaskTest, a_target_that_is_not_a_token_is_rejected) {
  Random random(79);
  const auto logits = Matrix::random(random, DType::f32, 2, 50, 4);
  std::vector<SampleRow> rows(2);
  rows[0].target = 50;
  rows[1].target = 49;
  const auto sampled = sample(logits, rows);
  EXPECT_FALSE(sampled[0].error.empty());
  EXPECT_TRUE(sampled[1].error.empty());
}

}  // namespace
}  // namespace charonia::ops
