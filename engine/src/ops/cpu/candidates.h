// Selects tokens of a row in the order of their logits without sorting them: top-k, top-p, min-p and the random draw.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "ops/cpu/kernels.h"

namespace charonia::ops::cpu {

struct TokenLogit {
  float logit;
  std::int32_t id;
};

// The order of candidates; ties go to the lower id.
inline bool is_more_likely(const TokenLogit& a, const TokenLogit& b) {
  return a.logit != b.logit ? a.logit > b.logit : a.id < b.id;
}

// Tokens are put into bins of equal width by their logits, most likely first. A filter keeps a prefix of the order:
// whole bins and a part of one bin, so it has to examine only that bin. Every filter takes time linear in the
// vocabulary. Sums are double, over ids in a fixed order.
class Candidates {
 public:
  // Drops tokens with less than e^-80 times the probability of the most likely. greatest: the finite maximum of the
  // logits. temperature > 0. The logits must not change while the object is used.
  void begin(std::span<const float> logits, float greatest, float temperature, const Kernels& kernels);

  void keep_top_k(std::int64_t k);       // >= 1
  void keep_top_p(double p);             // keeps the smallest prefix with at least the share p of the remaining weight
  void keep_min_p(float p);              // in (0, 1]: keeps tokens with at least p times the weight of the most likely
  std::int32_t draw(double unit) const;  // inverse of the cumulative weights at `unit` in [0, 1)

 private:
  // A prefix of the order: all bins before `bin`, with weights that sum to `below`, and the first `n` >= 1 tokens of
  // `bin`. `mass` is the total weight.
  struct Prefix {
    int bin = 0;
    std::size_t n = 0;
    double below = 0, mass = 0;
  };

  double weight(const TokenLogit& token) const {
    return static_cast<double>(weights_[static_cast<std::size_t>(token.id)]);
  }
  int bin_of(float logit) const;
  void open(int bin) const;
  // The shortest prefix of the remaining tokens whose weights sum to more than `target`, or all of them. Its last token
  // is the least likely of open_[0, n).
  Prefix prefix_over(double target) const;

  std::span<const float> logits_;
  float greatest_ = 0, temperature_ = 1, bins_per_logit_ = 0;
  std::vector<float> weights_;       // [vocab] e^((logit - greatest) / temperature)
  std::vector<std::uint16_t> bins_;  // [vocab]
  std::vector<double> mass_;         // [bins]
  std::vector<std::int32_t> count_;  // [bins]
  Prefix kept_;
  // Tokens of open_bin_. If kept_ ends in this bin, the most likely tokens of kept_ come first.
  mutable std::vector<TokenLogit> open_;
  mutable int open_bin_ = -1;
};

}  // namespace charonia::ops::cpu
