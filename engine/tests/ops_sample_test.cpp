// Sampling, compared with a simple reference that sorts the whole vocabulary in double; and the distribution of its
// random numbers.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <functional>
#include <limits>
#include <map>
#include <numeric>
#include <optional>
#include <set>

#include "charonia/error.h"
#include "ops/cpu/sample.h"
#include "ops_support.h"

namespace charonia::ops {
namespace {

class SampleTest : public testing::TestWithParam<std::string> {
 protected:
  // One step that only samples. logits: [rows, vocab].
  std::vector<Sampled> sample(const std::vector<float>& logits, std::span<const SampleRow> rows) {
    Matrix matrix(DType::f32, std::ssize(rows), std::ssize(logits) / std::ssize(rows));
    std::memcpy(matrix.bytes.data(), logits.data(), matrix.bytes.size());
    return steps_.run(matrix, rows);
  }
  // A row of a new sequence.
  Sampled sample(const std::vector<float>& logits, SampleRow row) {
    row.sequence = ++sequences_;
    return sample(logits, std::span(&row, 1))[0];
  }
  std::uint64_t sequences_ = 0;
  std::unique_ptr<Ops> ops_ = make_ops(GetParam(), 2);
  SamplingSteps steps_{*ops_};
};
INSTANTIATE_TEST_SUITE_P(Device, SampleTest, testing::ValuesIn(device_names()), [](const auto& i) { return i.param; });

std::vector<float> random_logits(Random& random, int n, float scale) {
  std::normal_distribution<float> normal(0, scale);
  std::vector<float> out(static_cast<std::size_t>(n));
  for (auto& x : out) x = normal(random);
  return out;
}

// The logits after bias, bans and penalties.
std::vector<double> changed_logits(const std::vector<float>& logits, const SampleRow& row) {
  std::vector<double> out(logits.begin(), logits.end());
  for (const auto& [id, bias] : row.bias) out[static_cast<std::size_t>(id)] += static_cast<double>(bias);
  for (const auto id : row.banned) out[static_cast<std::size_t>(id)] = -std::numeric_limits<double>::infinity();
  std::set<std::int32_t> all(row.prompt.begin(), row.prompt.end());
  all.insert(row.output.begin(), row.output.end());
  for (const auto id : all) {
    auto& x = out[static_cast<std::size_t>(id)];
    x = x > 0 ? x / static_cast<double>(row.repetition_penalty) : x * static_cast<double>(row.repetition_penalty);
  }
  std::map<std::int32_t, int> counts;
  for (const auto id : row.output) ++counts[id];
  for (const auto& [id, n] : counts) {
    out[static_cast<std::size_t>(id)] -=
        static_cast<double>(row.presence_penalty) + n * static_cast<double>(row.frequency_penalty);
  }
  return out;
}

// Ids by descending values; the lowest of equal ones first.
std::vector<std::int32_t> by_descending(const std::vector<double>& values) {
  std::vector<std::int32_t> order(values.size());
  std::iota(order.begin(), order.end(), 0);
  std::ranges::stable_sort(order, std::greater(), [&](auto id) { return values[static_cast<std::size_t>(id)]; });
  return order;
}

// The candidates after top_k, top_p and min_p, most likely first, with their probabilities before the last filter's
// renormalisation.
std::vector<std::pair<std::int32_t, double>> candidates(const std::vector<float>& logits, const SampleRow& row) {
  const auto changed = changed_logits(logits, row);
  const auto at = [&](std::int32_t id) { return changed[static_cast<std::size_t>(id)]; };
  auto order = by_descending(changed);
  if (row.top_k > 0 && static_cast<std::size_t>(row.top_k) < order.size())
    order.resize(static_cast<std::size_t>(row.top_k));
  std::vector<std::pair<std::int32_t, double>> out;
  double sum = 0;
  for (const auto id : order) {
    out.emplace_back(id, std::exp((at(id) - at(order[0])) / static_cast<double>(row.temperature)));
    sum += out.back().second;
  }
  double cumulated = 0;
  std::size_t n = 0;
  while (n < out.size()) {
    cumulated += out[n++].second;
    if (cumulated >= static_cast<double>(row.top_p) * sum) break;
  }
  if (row.top_p < 1) out.resize(n);
  while (out.back().second < static_cast<double>(row.min_p)) out.pop_back();
  return out;
}

// The drawn token by the definition; empty if the random number is too close to an edge to decide in float.
std::optional<std::int32_t> reference_draw(const std::vector<float>& logits, const SampleRow& row) {
  const auto list = candidates(logits, row);
  double sum = 0;
  for (const auto& c : list) sum += c.second;
  const double target = cpu::random_unit(row.seed, row.position) * sum;
  double cumulated = 0;
  for (const auto& c : list) {
    if (std::abs(cumulated + c.second - target) < 1e-5 * sum) return std::nullopt;
    cumulated += c.second;
    if (cumulated > target) return c.first;
  }
  return std::nullopt;
}

TEST_P(SampleTest, samples_equal_the_definition) {
  Random random(14);
  int compared = 0;
  for (int trial = 0; trial < trials(GetParam(), 600); ++trial) {
    const int vocab = uniform(random, 1, trial % 10 == 0 ? 5000 : 200);
    const auto logits = random_logits(random, vocab, trial % 3 == 0 ? 0.5F : 4.0F);
    SampleRow row;
    row.seed = random();
    row.position = uniform(random, 0, 1000);
    row.temperature = std::array{0.3F, 1.0F, 2.5F}[static_cast<std::size_t>(trial % 3)];
    if (uniform(random, 0, 1) == 1) row.top_k = uniform(random, 1, vocab + 5);
    if (uniform(random, 0, 1) == 1) row.top_p = static_cast<float>(uniform(random, 1, 99)) / 100;
    if (uniform(random, 0, 1) == 1) row.min_p = static_cast<float>(uniform(random, 0, 50)) / 100;
    std::vector<std::int32_t> prompt, output;
    for (int i = uniform(random, 0, 20); i > 0; --i) prompt.push_back(uniform(random, 0, vocab - 1));
    for (int i = uniform(random, 0, 20); i > 0; --i) output.push_back(uniform(random, 0, vocab - 1));
    row.prompt = prompt;
    row.output = output;
    if (uniform(random, 0, 1) == 1) row.repetition_penalty = 1.3F;
    if (uniform(random, 0, 1) == 1) row.presence_penalty = 0.7F;
    if (uniform(random, 0, 1) == 1) row.frequency_penalty = -0.2F;
    std::map<std::int32_t, float> biased;
    for (int i = uniform(random, 0, 3); i > 0; --i) biased[uniform(random, 0, vocab - 1)] += 2.0F;
    const std::vector<std::pair<std::int32_t, float>> bias(biased.begin(), biased.end());
    row.bias = bias;
    std::vector<std::int32_t> banned;
    if (vocab > 3) banned = {uniform(random, 0, vocab - 1), uniform(random, 0, vocab - 1)};
    std::ranges::sort(banned);
    row.banned = banned;

    const auto sampled = sample(logits, row);
    const auto list = candidates(logits, row);
    // At an edge that float cannot decide, one candidate more or less is allowed; the draw below is exact away from
    // edges.
    if (row.top_p == 1 && row.min_p == 0) {
      ASSERT_TRUE(std::any_of(list.begin(), list.end(), [&](const auto& c) { return c.first == sampled.token; }))
          << trial;
    }
    if (const auto expected = reference_draw(logits, row)) {
      ++compared;
      ASSERT_EQ(sampled.token, *expected) << "trial " << trial << ", vocabulary " << vocab;
    }
  }
  EXPECT_GT(compared, trials(GetParam(), 600) * 9 / 10);
}

TEST_P(SampleTest, greedy_selects_the_lowest_of_equal_ids) {
  std::vector<float> logits(1000, 1.0F);
  logits[700] = logits[300] = logits[301] = 2;
  SampleRow row;
  row.temperature = 0;
  EXPECT_EQ(sample(logits, row).token, 300);
  const std::vector<std::pair<std::int32_t, float>> bias = {{5, 50.0F}, {300, -kInfinity}};
  row.bias = bias;
  EXPECT_EQ(sample(logits, row).token, 5);
  const std::vector<std::int32_t> banned = {5};
  row.banned = banned;
  EXPECT_EQ(sample(logits, row).token, 301);
}

TEST_P(SampleTest, top_k_of_equal_logits_keeps_the_lowest_ids) {
  const std::vector<float> logits(100, 1.0F);
  SampleRow row;
  row.top_k = 3;
  std::set<std::int32_t> seen;
  for (row.position = 0; row.position < 200; ++row.position) seen.insert(sample(logits, row).token);
  EXPECT_EQ(seen, (std::set<std::int32_t>{0, 1, 2}));
  for (row.temperature = 1e-6F; row.temperature > 0; row.temperature *= 1e-12F) {  // tiny: equals greedy
    EXPECT_EQ(sample({1, 5, 4.999F, -3}, row).token, 1) << row.temperature;
  }
}

TEST_P(SampleTest, log_probabilities_are_of_the_unmodified_logits) {
  Random random(15);
  const auto logits = random_logits(random, 3000, 3);
  double sum = 0;
  for (const float x : logits) sum += std::exp(static_cast<double>(x));
  const auto logprob = [&](std::int32_t id) {
    return static_cast<double>(logits[static_cast<std::size_t>(id)]) - std::log(sum);
  };
  const auto order = by_descending({logits.begin(), logits.end()});

  SampleRow row;
  const std::vector<std::int32_t> banned = {order[0]};
  const std::vector<std::int32_t> output = {order[1], order[1]};
  row.banned = banned;
  row.output = output;
  row.repetition_penalty = 1.5F;
  row.presence_penalty = 1;
  row.logprobs = 20;
  for (const float temperature : {0.0F, 0.7F}) {
    row.temperature = temperature;
    const auto sampled = sample(logits, row);
    EXPECT_NE(sampled.token, order[0]);
    EXPECT_NEAR(sampled.logprob, logprob(sampled.token), 2e-6);
    ASSERT_EQ(sampled.top.size(), 20U);
    for (std::size_t i = 0; i < sampled.top.size(); ++i) {
      EXPECT_EQ(sampled.top[i].first, order[i]);
      EXPECT_NEAR(sampled.top[i].second, logprob(order[i]), 2e-6);
    }
  }
  row.logprobs = 0;
  EXPECT_TRUE(sample(logits, row).top.empty());
}

TEST_P(SampleTest, rows_do_not_depend_on_each_other) {
  Random random(16);
  constexpr int kRows = 24, kVocab = 4000;
  std::vector<float> all;
  std::vector<SampleRow> rows(kRows);
  std::vector<std::int32_t> prompt;
  for (int i = 0; i < 50; ++i) prompt.push_back(uniform(random, 0, kVocab - 1));
  for (int r = 0; r < kRows; ++r) {
    const auto logits = random_logits(random, kVocab, 2);
    all.insert(all.end(), logits.begin(), logits.end());
    rows[static_cast<std::size_t>(r)].seed = random();
    rows[static_cast<std::size_t>(r)].top_p = r % 2 == 0 ? 1.0F : 0.9F;
    rows[static_cast<std::size_t>(r)].repetition_penalty = r % 3 == 0 ? 1.0F : 1.2F;
    rows[static_cast<std::size_t>(r)].prompt = prompt;
  }
  for (auto& row : rows) row.sequence = ++sequences_;
  const auto together = sample(all, rows);
  for (std::size_t r = 0; r < kRows; ++r) {
    const std::vector<float> logits(all.begin() + static_cast<std::ptrdiff_t>(r * kVocab),
                                    all.begin() + static_cast<std::ptrdiff_t>((r + 1) * kVocab));
    EXPECT_EQ(sample(logits, rows[r]).token, together[r].token);
  }
}

TEST_P(SampleTest, penalties_count_pending_tokens) {
  // Three steps of one sequence: the third is issued with the second's token as `pending`.
  const std::vector<float> logits = {5, 4.5F, 4, 0, 0, 0};
  SampleRow row;
  row.temperature = 0;
  row.frequency_penalty = 0.75F;
  row.sequence = ++sequences_;
  std::vector<std::int32_t> output;
  std::vector<std::int32_t> sampled;
  for (int step = 0; step < 6; ++step) {
    row.output = output;
    row.pending = step == 0 ? -1 : 0;
    row.position = step;
    sampled.push_back(sample(logits, std::span(&row, 1))[0].token);
    output.assign(sampled.begin(), sampled.end() - 1);
  }
  // 5, 4.5 and 4 lose 0.75 each time they are sampled; ties go to the lower id.
  EXPECT_EQ(sampled, (std::vector<std::int32_t>{0, 1, 0, 2, 1, 0}));
}

TEST_P(SampleTest, a_row_that_cannot_be_sampled_names_its_error_and_does_not_affect_others) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const std::vector<float> logits = {1, 3, 2, 4, nan, 0, 5, 1, 1, 1, kInfinity, 1, 1, 2, 3};
  const std::vector<std::int32_t> all = {0, 1, 2};
  for (const float temperature : {0.0F, 1.0F}) {
    std::vector<SampleRow> rows(5);
    for (auto& row : rows) row.temperature = temperature, row.top_k = 1, row.sequence = ++sequences_;
    rows[4].banned = all;
    const auto sampled = sample(logits, rows);
    const std::array<std::string_view, 5> errors = {"", "token 1", "", "token 1", "no token is left"};
    for (std::size_t r = 0; r < 5; ++r) {
      EXPECT_EQ(sampled[r].error.empty(), errors[r].empty()) << sampled[r].error;
      EXPECT_NE(sampled[r].error.find(errors[r]), std::string::npos) << sampled[r].error;
    }
    EXPECT_EQ(sampled[0].token, 1);
    EXPECT_EQ(sampled[2].token, 0);
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
