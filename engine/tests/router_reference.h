// The experts of a row by the router's definition, in double.
#pragma once

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>
#include <span>
#include <utility>
#include <vector>

#include "ops_support.h"

namespace charonia::ops {

// Indices by descending values; ties: the lowest first.
inline std::vector<int> descending(const std::vector<float>& values) {
  std::vector<int> order(values.size());
  std::iota(order.begin(), order.end(), 0);
  std::ranges::stable_sort(order, std::greater(), [&](int i) { return values[static_cast<std::size_t>(i)]; });
  return order;
}

// The selected experts with their weights, in ascending order. bias: of the experts, or empty; how.bias is ignored.
inline std::vector<std::pair<int, double>> chosen_experts(std::span<const double> logits, const RouterParams& how,
                                                          std::span<const float> bias) {
  double all = 0;
  for (const double logit : logits) all += std::exp(logit);
  std::vector<double> scores;
  for (const double logit : logits) {
    scores.push_back(how.score == RouterScore::sigmoid ? 1 / (1 + std::exp(-logit)) : std::exp(logit) / all);
  }
  // As floats, because large sigmoids are equal in float.
  std::vector<float> ranks(scores.begin(), scores.end());
  for (std::size_t e = 0; e < bias.size(); ++e) ranks[e] += bias[e];
  auto order = descending(how.by_logits() && bias.empty() ? std::vector<float>(logits.begin(), logits.end()) : ranks);
  if (how.groups > 0) {
    const int size = static_cast<int>(std::ssize(logits)) / how.groups;
    std::vector<float> values;
    for (int g = 0; g < how.groups; ++g) {
      std::vector<float> own(ranks.begin() + g * size, ranks.begin() + (g + 1) * size);
      std::ranges::sort(own, std::greater());
      values.push_back(own[0] + own[1]);
    }
    auto best = descending(values);
    best.resize(static_cast<std::size_t>(how.top_groups));
    std::erase_if(order, [&](int e) { return std::ranges::find(best, e / size) == best.end(); });
  }
  order.resize(static_cast<std::size_t>(how.top_k));
  std::ranges::sort(order);
  double sum = 0;
  for (const int e : order) sum += scores[static_cast<std::size_t>(e)];
  const double divisor = how.renormalize ? std::max(sum, static_cast<double>(how.norm_min)) : 1;
  std::vector<std::pair<int, double>> out;
  for (const int e : order) {
    const double own = how.expert_scale == nullptr ? 1 : static_cast<double>(how.expert_scale[e]);
    out.emplace_back(e, scores[static_cast<std::size_t>(e)] / divisor * static_cast<double>(how.scale) * own);
  }
  return out;
}

}  // namespace charonia::ops
