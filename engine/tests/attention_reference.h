// Attention of one head of one row by its definition, in double.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <span>
#include <vector>

namespace charonia::ops {

struct AttentionReference {
  double scale = 1, soft_cap = 0, slope = 0;
  double sink = -std::numeric_limits<double>::infinity();  // minus infinity: none

  // out: the result. spread[d]: the sum over positions of weight * |v[d] - out[d]|. If each weight has a relative error
  // of at most e, and they are divided by their own sum and the sink's weight, out has an error of at most
  // e / (1 - e) * spread.
  struct Result {
    std::vector<double> out, spread;
  };
  // keys, values: of the positions that the row attends to; the row is at the last of them.
  Result operator()(std::span<const double> q, std::span<const std::vector<double>> keys,
                    std::span<const std::vector<double>> values) const {
    std::vector<double> weights;
    for (std::size_t p = 0; p < keys.size(); ++p) {
      double x = std::inner_product(q.begin(), q.end(), keys[p].begin(), 0.0) * scale;
      if (soft_cap != 0) x = soft_cap * std::tanh(x / soft_cap);
      weights.push_back(x - slope * static_cast<double>(keys.size() - 1 - p));
    }
    const double maximum = std::max(sink, *std::ranges::max_element(weights));
    double sum = std::exp(sink - maximum);
    for (auto& x : weights) sum += x = std::exp(x - maximum);
    Result result{std::vector<double>(q.size()), std::vector<double>(q.size())};
    auto& [out, spread] = result;
    for (std::size_t p = 0; p < keys.size(); ++p) {
      for (std::size_t d = 0; d < q.size(); ++d) out[d] += weights[p] / sum * values[p][d];
    }
    for (std::size_t p = 0; p < keys.size(); ++p) {
      for (std::size_t d = 0; d < q.size(); ++d) spread[d] += weights[p] / sum * std::abs(values[p][d] - out[d]);
    }
    return result;
  }
};

}  // namespace charonia::ops
