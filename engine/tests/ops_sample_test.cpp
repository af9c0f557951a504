// Sampling, compared with its definition in double; and its distribution.
#include <gtest/gtest.h>

#include "charonia/error.h"
#include "sample_reference.h"

namespace charonia::ops {
namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

class SampleTest : public testing::TestWithParam<std::string> {
 protected:
  // One step that only samples. logits: [rows, vocab]. All rows are of new sequences.
  std::vector<Sampled> sample(const Matrix& logits, std::span<SampleRow> rows) {
    for (auto& row : rows) row.sequence = ++sequences_;
    return steps_.run(logits, rows);
  }
  Sampled sample(const std::vector<float>& logits, SampleRow row) {
    return sample(matrix({logits}), std::span(&row, 1))[0];
  }
  static Matrix matrix(const std::vector<std::vector<float>>& rows) {
    Matrix out(DType::f32, std::ssize(rows), std::ssize(rows[0]));
    for (std::int64_t r = 0; r < out.rows; ++r) {
      for (std::int64_t c = 0; c < out.cols; ++c) {
        out.set(r, c, rows[static_cast<std::size_t>(r)][static_cast<std::size_t>(c)]);
      }
    }
    return out;
  }
  std::uint64_t sequences_ = 0;
  std::unique_ptr<Ops> ops_ = make_ops(GetParam(), 2);
  SamplingSteps steps_{*ops_};
};
INSTANTIATE_TEST_SUITE_P(Device, SampleTest, testing::ValuesIn(device_names()), [](const auto& i) { return i.param; });

// Rows with all parameters. In every third step no row has lists.
TEST_P(SampleTest, samples_equal_the_definition) {
  Random random(14);
  int compared = 0, all = 0;
  for (int step = 0; step < trials(GetParam(), 160); ++step) {
    constexpr std::array kVocabs = {31, 200, 1000, 5000, 31, 32000, 1000, 90, 5000, 1, 1000, 50257};
    const int vocab = kVocabs[static_cast<std::size_t>(step % 12)], count = vocab > 30000 ? 4 : 12;
    const auto logits =
        Matrix::random(random, DType::f32, count, vocab, step % 2 == 0 ? 4.0F : 0.5F, uniform(random, 0, 4));
    std::vector<OwnedRow> owned;
    for (int r = 0; r < count; ++r) owned.push_back(random_row(random, vocab, step % 3 != 0 && r % 2 == 0));
    std::vector<SampleRow> rows;
    for (auto& row : owned) rows.push_back(row.view());
    const auto sampled = sample(logits, rows);
    for (std::size_t r = 0; r < rows.size(); ++r) {
      compared += expect_drawn(logits.floats(static_cast<std::int64_t>(r)), rows[r], sampled[r]);
      ASSERT_FALSE(HasFailure()) << "step " << step << ", row " << r;
    }
    all += count;
  }
  EXPECT_GT(compared, all * 85 / 100) << "too few rows have a defined token";
}

TEST_P(SampleTest, frequencies_follow_the_probabilities) {
  const std::vector<float> logits = {0, 1, 2, -1, 0.5F};
  std::vector<double> weights;
  double sum = 0;
  for (const float x : logits) sum += weights.emplace_back(std::exp(static_cast<double>(x)));
  constexpr int kRows = 60;
  const int draws = traits(GetParam()).effort < 1 ? 600 : 20040;
  std::vector<int> counts(logits.size());
  std::vector<SampleRow> rows(kRows);
  const auto repeated = matrix(std::vector(kRows, logits));
  for (int done = 0; done < draws; done += kRows) {
    for (std::size_t r = 0; r < kRows; ++r) rows[r].seed = 42, rows[r].position = done + static_cast<int>(r);
    for (const auto& sampled : sample(repeated, rows)) ++counts[static_cast<std::size_t>(sampled.token)];
  }
  double chi_square = 0;
  for (std::size_t i = 0; i < logits.size(); ++i) {
    const double expected = draws * weights[i] / sum;
    chi_square += (counts[i] - expected) * (counts[i] - expected) / expected;
  }
  EXPECT_LT(chi_square, 18.5);  // four degrees of freedom, one in a thousand; seed and draws are fixed
}

TEST_P(SampleTest, greedy_selects_the_lowest_of_equal_ids) {
  std::vector<float> logits(9000, 1.0F);
  logits[8700] = logits[4300] = logits[4301] = 2;
  OwnedRow row;
  row.row.temperature = 0;
  EXPECT_EQ(sample(logits, row.view()).token, 4300);
  row.bias = {{5, 50.0F}, {4300, -kInfinity}};
  EXPECT_EQ(sample(logits, row.view()).token, 5);
  row.banned = {5};
  EXPECT_EQ(sample(logits, row.view()).token, 4301);
  std::ranges::fill(logits, -1.0F);
  logits[1] = -0.0F, logits[600] = 0.0F;
  row.bias.clear(), row.banned.clear();
  EXPECT_EQ(sample(logits, row.view()).token, 1) << "-0 is no less than 0";
}

TEST_P(SampleTest, top_k_of_equal_logits_keeps_the_lowest_ids) {
  std::vector<SampleRow> rows(60);
  for (std::size_t i = 0; i < rows.size(); ++i) rows[i].top_k = 3, rows[i].position = static_cast<std::int64_t>(i);
  std::set<std::int32_t> seen;
  for (const auto& sampled : sample(matrix(std::vector(60, std::vector<float>(100, 1.0F))), rows)) {
    seen.insert(sampled.token);
  }
  EXPECT_EQ(seen, (std::set<std::int32_t>{0, 1, 2}));
}

TEST_P(SampleTest, temperatures_may_be_tiny_or_huge) {
  const std::vector<float> logits = {1, 5, 4.999F, -3};
  SampleRow row;
  for (const float temperature : {1e-6F, 1e-30F, 1e-42F}) {
    row.temperature = temperature;
    EXPECT_EQ(sample(logits, row).token, 1);
  }
  for (const float temperature : {1e10F, 3e38F}) {
    row.temperature = temperature;
    for (row.position = 0; row.position < 8; ++row.position) {
      EXPECT_TRUE(expect_drawn(logits, row, sample(logits, row))) << temperature;
    }
  }
}

TEST_P(SampleTest, log_probabilities_are_of_the_unmodified_logits) {
  Random random(27);
  for (const int vocab : {1, 31, 1000, 9001}) {
    for (const bool with_lists : {false, true}) {
      auto logits = Matrix::random(random, DType::f32, 9, vocab, 3, vocab % 2);
      std::vector<OwnedRow> owned;
      for (int r = 0; r < 9; ++r) {
        owned.push_back(random_row(random, vocab, with_lists && vocab > 20));
        owned.back().row.logprobs = std::array{-1, 0, 1, 5, 20}[static_cast<std::size_t>(r % 5)];
      }
      owned[8].row.logprobs = 20;
      owned[3].banned.clear();
      for (int id = 0; id < vocab; ++id) {
        if (id > 0) logits.set(3, id, -kInfinity);
        logits.set(4, id, 2);
        // The most likely tokens are adjacent, and more than a list holds.
        if (id >= 700 && id < 3000) logits.set(8, id, logits.at(8, id) + 50);
      }
      std::vector<SampleRow> rows;
      for (auto& row : owned) rows.push_back(row.view());
      const auto sampled = sample(logits, rows);
      for (std::size_t r = 0; r < rows.size(); ++r) {
        ASSERT_EQ(sampled[r].error, "");
        expect_logprobs(logits.floats(static_cast<std::int64_t>(r)), rows[r], sampled[r]);
        if (HasFatalFailure()) FAIL() << "vocabulary " << vocab << ", row " << r;
      }
    }
  }
}

TEST_P(SampleTest, rows_do_not_depend_on_each_other) {
  Random random(16);
  constexpr int kRows = 12, kVocab = 13000;
  const auto logits = Matrix::random(random, DType::f32, kRows, kVocab, 2);
  std::vector<OwnedRow> owned;
  for (int r = 0; r < kRows; ++r) {
    owned.push_back(random_row(random, kVocab, r % 3 == 0));
    owned.back().row.logprobs = r % 2 == 0 ? 5 : -1;
  }
  std::vector<SampleRow> rows;
  for (auto& row : owned) rows.push_back(row.view());
  const auto together = sample(logits, rows);
  for (int r = 0; r < kRows; ++r) {
    const auto i = static_cast<std::size_t>(r);
    const auto alone = sample(logits.slice(r, r + 1, r % 4), std::span(&rows[i], 1))[0];
    EXPECT_EQ(alone.token, together[i].token);
    EXPECT_EQ(alone.logprob, together[i].logprob);
    EXPECT_EQ(alone.top, together[i].top);
  }
}

TEST_P(SampleTest, penalties_count_pending_tokens) {
  // Three steps of one sequence: the third is issued with the second's token as `pending`.
  const auto logits = matrix({{5, 4.5F, 4, 0, 0, 0}});
  SampleRow row;
  row.temperature = 0;
  row.frequency_penalty = 0.75F;
  row.sequence = ++sequences_;
  Ids output, sampled;
  for (int step = 0; step < 6; ++step) {
    row.output = output;
    row.pending = step == 0 ? -1 : 0;
    row.position = step;
    sampled.push_back(steps_.run(logits, std::span(&row, 1))[0].token);
    output.assign(sampled.begin(), sampled.end() - 1);
  }
  // 5, 4.5 and 4 lose 0.75 each time they are sampled; ties go to the lower id.
  EXPECT_EQ(sampled, (Ids{0, 1, 0, 2, 1, 0}));
}

TEST_P(SampleTest, rows_that_cannot_be_sampled_name_the_reason_and_do_not_affect_others) {
  constexpr int kVocab = 5000;
  Random random(26);
  auto logits = Matrix::random(random, DType::f32, 8, kVocab, 2);
  logits.set(1, 4321, kInfinity), logits.set(1, 4322, kNaN), logits.set(1, 4999, kNaN);
  logits.set(2, 77, kNaN);
  logits.set(3, 3, 1e30F), logits.set(3, 4100, -kNaN);
  for (int id = 0; id < kVocab; ++id) logits.set(5, id, -kInfinity);
  std::vector<std::string> errors = {"", "token 4321 is inf", "token 77 is ", "token 4100 is ", "", "no token is left",
                                     "", ""};
  std::vector<SampleRow> rows(8);
  for (std::size_t r = 0; r < rows.size(); ++r) {
    rows[r].temperature = r % 2 == 0 ? 0.0F : 1.0F;
    rows[r].seed = r;
    rows[r].logprobs = r % 3 == 0 ? 2 : -1;
  }
  Ids all(kVocab);
  std::iota(all.begin(), all.end(), 0);
  const Bias bias = {{12, kInfinity}};
  for (const bool with_lists : {false, true}) {
    if (with_lists) {
      rows[7].banned = all, errors[7] = "no token is left";
      rows[6].bias = bias, errors[6] = "token 12 is inf";
    }
    const auto sampled = sample(logits, rows);
    for (std::size_t r = 0; r < rows.size(); ++r) {
      if (errors[r].empty()) {
        const auto x = logits.floats(static_cast<std::int64_t>(r));
        expect_drawn(x, rows[r], sampled[r]);
        expect_logprobs(x, rows[r], sampled[r]);
      } else {
        EXPECT_NE(sampled[r].error.find(errors[r]), std::string::npos) << r << ": " << sampled[r].error;
      }
    }
  }
}

TEST(RandomUnitTest, is_uniform_over_positions_and_over_seeds) {
  constexpr int kDraws = 64000, kBins = 64;
  for (const bool over_seeds : {false, true}) {
    std::vector<int> counts(kBins);
    for (int i = 0; i < kDraws; ++i) {
      const double u = over_seeds ? cpu::random_unit(static_cast<std::uint64_t>(i), 5) : cpu::random_unit(123, i);
      ASSERT_GE(u, 0.0);
      ASSERT_LT(u, 1.0);
      ++counts[static_cast<std::size_t>(u * kBins)];
    }
    double chi_square = 0;
    for (const int n : counts) chi_square += std::pow(n - kDraws / kBins, 2) / (kDraws / kBins);
    EXPECT_LT(chi_square, 103.4);  // 63 degrees of freedom, one in a thousand; the draws are fixed
  }
}

}  // namespace
}  // namespace charonia::ops
