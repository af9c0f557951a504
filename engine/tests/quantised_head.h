// A head of k or v of a quantised cache, computed from the definition (ops/kv_quant.h) without its code.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <span>
#include <vector>

#include "base/dtype.h"

namespace charonia::ops {

struct QuantisedHead {
  std::vector<std::uint8_t> integers;  // [head_dim]
  std::uint16_t scale = 0, zero = 0;   // f16

  QuantisedHead(std::span<const float> x, int bits) {
    const auto most = static_cast<float>((1 << bits) - 1);
    const auto [lo, hi] = std::minmax_element(x.begin(), x.end());
    scale = float_to_f16((*hi - *lo) / most);
    zero = float_to_f16(*lo + 0.0F);  // -0 becomes 0
    const float step = f16_to_float(scale), minimum = f16_to_float(zero);
    for (const float one : x) {
      const float steps = step == 0 ? 0 : std::nearbyint((one - minimum) / step);
      integers.push_back(static_cast<std::uint8_t>(std::clamp(steps, 0.0F, most)));
    }
  }

  double value(int d) const {
    return static_cast<double>(integers[static_cast<std::size_t>(d)]) * static_cast<double>(f16_to_float(scale)) +
           static_cast<double>(f16_to_float(zero));
  }
};

// The values that a cache with this number of bits returns for a head.
inline std::vector<double> through_integers(const std::vector<double>& row, int bits) {
  const std::vector<float> x(row.begin(), row.end());
  const QuantisedHead head(x, bits);
  std::vector<double> out;
  for (int d = 0; d < static_cast<int>(x.size()); ++d) out.push_back(head.value(d));
  return out;
}

}  // namespace charonia::ops
