// Sampling by its definition, in double precision; and rows with random parameters.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <map>
#include <numeric>
#include <optional>
#include <set>
#include <span>
#include <utility>
#include <vector>

#include "ops/cpu/sample.h"
#include "ops_support.h"

namespace charonia::ops {

using Ids = std::vector<std::int32_t>;
using Bias = std::vector<std::pair<std::int32_t, float>>;

// A row's parameters with the memory of its lists.
struct OwnedRow {
  SampleRow row;
  Bias bias;
  Ids banned, prompt, output;

  const SampleRow& view() {
    row.bias = bias;
    row.banned = banned;
    row.prompt = prompt;
    row.output = output;
    return row;
  }
};

inline Ids random_ids(Random& random, int most, int vocab) {
  Ids out;
  for (int i = uniform(random, 0, most); i > 0; --i) out.push_back(uniform(random, 0, vocab - 1));
  return out;
}

// with_lists: the row may also have penalties, biases and bans.
inline OwnedRow random_row(Random& random, int vocab, bool with_lists) {
  OwnedRow out;
  auto& row = out.row;
  const auto coin = [&] { return uniform(random, 0, 1) == 1; };
  row.seed = random();
  row.position = uniform(random, 0, 1000);
  row.temperature = std::array{0.0F, 0.3F, 1.0F, 2.5F, 40.0F}[static_cast<std::size_t>(uniform(random, 0, 4))];
  if (coin()) row.top_k = uniform(random, 1, vocab + 5);
  if (coin()) row.top_k = std::min(row.top_k, uniform(random, 1, 50));
  if (coin()) row.top_p = static_cast<float>(uniform(random, 1, 99)) / 100;
  if (coin()) row.min_p = static_cast<float>(uniform(random, 0, 50)) / 100;
  if (!with_lists) return out;
  out.prompt = random_ids(random, 20, vocab);
  out.output = random_ids(random, 20, vocab);
  if (coin()) row.repetition_penalty = coin() ? 1.3F : 0.8F;
  if (coin()) row.presence_penalty = 0.7F;
  if (coin()) row.frequency_penalty = -0.2F;
  std::set<std::int32_t> biased;
  for (int i = uniform(random, 0, 3); i > 0; --i) biased.insert(uniform(random, 0, vocab - 1));
  for (const auto id : biased) out.bias.emplace_back(id, 2.0F);
  if (vocab > 20) out.banned = random_ids(random, 4, vocab);
  std::ranges::sort(out.banned);
  return out;
}

// The logits after bias, bans and penalties.
inline std::vector<double> changed_logits(std::span<const float> logits, const SampleRow& row) {
  std::vector<double> out(logits.begin(), logits.end());
  const auto at = [&](std::int32_t id) -> double& { return out[static_cast<std::size_t>(id)]; };
  for (const auto& [id, bias] : row.bias) at(id) += static_cast<double>(bias);
  for (const auto id : row.banned) at(id) = -std::numeric_limits<double>::infinity();
  std::set<std::int32_t> all(row.prompt.begin(), row.prompt.end());
  all.insert(row.output.begin(), row.output.end());
  const auto repetition = static_cast<double>(row.repetition_penalty);
  for (const auto id : all) at(id) = at(id) > 0 ? at(id) / repetition : at(id) * repetition;
  std::map<std::int32_t, int> counts;
  for (const auto id : row.output) ++counts[id];
  for (const auto& [id, n] : counts) {
    at(id) -= static_cast<double>(row.presence_penalty) + n * static_cast<double>(row.frequency_penalty);
  }
  return out;
}

// Token ids by descending value; equal values: the lowest id first.
template <class T>
Ids most_likely(const std::vector<T>& values) {
  Ids order(values.size());
  std::iota(order.begin(), order.end(), 0);
  std::ranges::stable_sort(order, std::greater(), [&](auto id) { return values[static_cast<std::size_t>(id)]; });
  return order;
}

// The sampled token by the definition. Empty if float cannot decide: the draw or the edge of a filter is within `near`
// of another result.
inline std::optional<std::int32_t> drawn_token(std::span<const float> logits, const SampleRow& row,
                                               double near = 1e-4) {
  const auto changed = changed_logits(logits, row);
  auto order = most_likely(changed);
  const auto at = [&](std::size_t i) { return changed[static_cast<std::size_t>(order[i])]; };
  if (row.temperature == 0) {
    if (order.size() > 1 && at(0) != at(1) && at(0) - at(1) < near) return std::nullopt;
    return order[0];
  }
  if (row.top_k > 0) order.resize(std::min(order.size(), static_cast<std::size_t>(row.top_k)));
  std::vector<double> weights;
  for (std::size_t i = 0; i < order.size(); ++i) {
    weights.push_back(std::exp((at(i) - at(0)) / static_cast<double>(row.temperature)));
  }
  const double all = std::accumulate(weights.begin(), weights.end(), 0.0);
  double cumulated = 0;
  std::size_t n = weights.size();
  if (row.top_p < 1) {
    const double target = static_cast<double>(row.top_p) * all;
    for (n = 0; n < weights.size();) {
      cumulated += weights[n++];
      if (std::abs(cumulated - target) < near * all) return std::nullopt;
      if (cumulated >= target) break;
    }
  }
  const auto min_p = static_cast<double>(row.min_p);
  for (std::size_t i = 0; i < n; ++i) {
    if (min_p > 0 && std::abs(weights[i] - min_p) < near) return std::nullopt;
  }
  while (weights[n - 1] < min_p) --n;
  const double sum = std::accumulate(weights.begin(), weights.begin() + static_cast<std::ptrdiff_t>(n), 0.0);
  const double target = cpu::random_unit(row.seed, row.position) * sum;
  cumulated = 0;
  for (std::size_t i = 0; i < n; ++i) {
    if (std::abs(cumulated + weights[i] - target) < near * sum) return std::nullopt;
    cumulated += weights[i];
    if (cumulated > target) return order[i];
  }
  return std::nullopt;
}

// Expects the token of the definition, if float can decide it. Returns whether it can.
inline bool expect_drawn(std::span<const float> logits, const SampleRow& row, const Sampled& sampled) {
  EXPECT_EQ(sampled.error, "");
  const auto expected = drawn_token(logits, row);
  EXPECT_EQ(sampled.token, expected.value_or(sampled.token)) << "vocabulary " << logits.size();
  return expected.has_value();
}

// The log probability of every token.
inline std::vector<double> log_softmax(std::span<const float> logits) {
  const double maximum = *std::ranges::max_element(logits);
  double sum = 0;
  for (const float x : logits) sum += std::exp(static_cast<double>(x) - maximum);
  std::vector<double> out;
  for (const float x : logits) out.push_back(static_cast<double>(x) - maximum - std::log(sum));
  return out;
}

// Expects the log probabilities that the row requests, of the unmodified logits.
inline void expect_logprobs(std::span<const float> logits, const SampleRow& row, const Sampled& sampled) {
  if (row.logprobs < 0) {
    ASSERT_EQ(sampled.logprob, 0.0F);
    ASSERT_TRUE(sampled.top.empty());
    return;
  }
  const auto expected = log_softmax(logits);
  const auto at = [&](std::int32_t id) { return expected[static_cast<std::size_t>(id)]; };
  ASSERT_NEAR(sampled.logprob, at(sampled.token), 2e-6);
  const auto order = most_likely(expected);
  ASSERT_EQ(sampled.top.size(), std::min<std::size_t>(static_cast<std::size_t>(row.logprobs), order.size()));
  for (std::size_t i = 0; i < sampled.top.size(); ++i) {
    const auto& [id, logprob] = sampled.top[i];
    ASSERT_EQ(id, order[i]) << i;
    ASSERT_TRUE(logprob == at(id) || std::abs(logprob - at(id)) < 2e-6) << logprob << ", not " << at(id);
  }
}

}  // namespace charonia::ops
