#include "ops/cpu/candidates.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace charonia::ops::cpu {
namespace {

constexpr int kBins = 4096;
constexpr float kRange = 80;  // in units of logit / temperature; beyond it, float's exponential underflows

// The bin of a logit; kBins means none.
std::uint16_t bin_at(float greatest, float logit, float bins_per_logit) {
  return static_cast<std::uint16_t>(
      static_cast<std::int32_t>(std::min((greatest - logit) * bins_per_logit, static_cast<float>(kBins))));
}

}  // namespace

int Candidates::bin_of(float logit) const { return bin_at(greatest_, logit, bins_per_logit_); }

void Candidates::begin(std::span<const float> logits, float greatest, float temperature, const Kernels& kernels) {
  constexpr float kMax = std::numeric_limits<float>::max();
  const auto n = logits.size();
  logits_ = logits;
  greatest_ = greatest;
  temperature_ = temperature;
  bins_per_logit_ = std::min(kBins / kRange / temperature, kMax);
  open_bin_ = -1;
  weights_.resize(std::max(weights_.size(), n));
  bins_.resize(std::max(bins_.size(), n));
  kernels.exp_sum(weights_.data(), logits.data(), greatest, std::min(1 / temperature, kMax),
                  static_cast<std::int64_t>(n));
  for (std::size_t i = 0; i < n; ++i) bins_[i] = bin_at(greatest, logits[i], bins_per_logit_);
  mass_.assign(kBins + 1, 0.0);
  count_.assign(kBins + 1, 0);
  for (std::size_t i = 0; i < n; ++i) {
    mass_[bins_[i]] += static_cast<double>(weights_[i]);
    ++count_[bins_[i]];
  }
  kept_ = {};
  double below = 0;
  for (int bin = 0; bin < kBins; ++bin) {
    const auto at = static_cast<std::size_t>(bin);
    if (count_[at] == 0) continue;
    kept_ = {bin, static_cast<std::size_t>(count_[at]), below, below + mass_[at]};
    below = kept_.mass;
  }
}

void Candidates::open(int bin) const {
  if (open_bin_ == bin) return;
  open_bin_ = bin;
  open_.clear();
  for (std::size_t i = 0; i < logits_.size(); ++i) {
    if (bins_[i] == bin) open_.push_back({logits_[i], static_cast<std::int32_t>(i)});
  }
}

void Candidates::keep_top_k(std::int64_t k) {
  std::int64_t before = 0;
  double below = 0;
  for (int bin = 0; bin <= kept_.bin; ++bin) {
    const auto at = static_cast<std::size_t>(bin);
    if (before + count_[at] < k) {
      before += count_[at];
      below += mass_[at];
      continue;
    }
    const auto n = static_cast<std::size_t>(k - before);
    if (bin == kept_.bin && n >= kept_.n) return;
    open(bin);
    std::nth_element(open_.begin(), open_.begin() + static_cast<std::ptrdiff_t>(n) - 1, open_.end(), is_more_likely);
    kept_ = {bin, n, below, below};
    for (std::size_t i = 0; i < n; ++i) kept_.mass += weight(open_[i]);
    return;
  }
}

Candidates::Prefix Candidates::prefix_over(double target) const {
  double below = 0;
  int bin = 0;
  for (; bin < kept_.bin; ++bin) {
    const double sum = below + mass_[static_cast<std::size_t>(bin)];
    if (sum > target) break;
    below = sum;
  }
  const auto count = bin == kept_.bin ? kept_.n : static_cast<std::size_t>(count_[static_cast<std::size_t>(bin)]);
  open(bin);
  // A quickselect over sums instead of ranks: elements before `low` are more likely and sum to `sum_low`; the target is
  // reached before `high`.
  std::size_t low = 0, high = count;
  double sum_low = below;
  const auto at = [&](std::size_t i) { return open_.begin() + static_cast<std::ptrdiff_t>(i); };
  while (high - low > 1) {
    const auto a = open_[low], b = open_[low + (high - low) / 2], c = open_[high - 1];
    const auto pivot = is_more_likely(a, b) ? (is_more_likely(b, c)   ? b
                                               : is_more_likely(a, c) ? c
                                                                      : a)
                                            : (is_more_likely(a, c)   ? a
                                               : is_more_likely(b, c) ? c
                                                                      : b);
    const auto split = static_cast<std::size_t>(
        std::partition(at(low), at(high), [&](const TokenLogit& x) { return is_more_likely(x, pivot); }) -
        open_.begin());
    double sum = sum_low;
    for (auto i = low; i < split; ++i) sum += weight(open_[i]);
    if (sum > target) {
      high = split;
      continue;
    }
    // The pivot is the most likely of [split, high).
    std::iter_swap(at(split), std::find_if(at(split), at(high), [&](const TokenLogit& x) { return x.id == pivot.id; }));
    sum += weight(pivot);
    low = split + 1;
    sum_low = sum;
    if (sum > target) return {bin, low, below, sum};
  }
  if (low == high) return {bin, high, below, sum_low};
  return {bin, high, below, sum_low + weight(open_[low])};
}

void Candidates::keep_top_p(double p) {
  // Tokens whose sum equals the target count too, so the sum must exceed the number just below the target.
  kept_ = prefix_over(std::nextafter(p * kept_.mass, 0.0));
}

void Candidates::keep_min_p(float p) {
  const float minimum = greatest_ + temperature_ * std::log(p);
  const int bin = bin_of(minimum);
  if (bin > kept_.bin) return;
  double below = 0;
  int last = -1;  // the last bin before it that has tokens
  for (int i = 0; i < bin; ++i) {
    if (count_[static_cast<std::size_t>(i)] != 0) last = i;
    below += mass_[static_cast<std::size_t>(i)];
  }
  open(bin);
  const auto count = bin == kept_.bin ? kept_.n : open_.size();
  const auto end = std::partition(open_.begin(), open_.begin() + static_cast<std::ptrdiff_t>(count),
                                  [&](const TokenLogit& x) { return x.logit >= minimum; });
  const auto n = static_cast<std::size_t>(end - open_.begin());
  if (n > 0) {
    kept_ = {bin, n, below, below};
    for (std::size_t i = 0; i < n; ++i) kept_.mass += weight(open_[i]);
  } else {
    const auto at = static_cast<std::size_t>(last);  // exists, because the most likely token is in bin 0
    kept_ = {last, static_cast<std::size_t>(count_[at]), below - mass_[at], below};
  }
}

std::int32_t Candidates::draw(double unit) const {
  const auto prefix = prefix_over(unit * kept_.mass);
  return std::max_element(open_.begin(), open_.begin() + static_cast<std::ptrdiff_t>(prefix.n), is_more_likely)->id;
}

}  // namespace charonia::ops::cpu
