// A head of k or v of a quantised cache, computed from the definition (ops/kv_quant.h) without its code for integers.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <span>
#include <vector>

#include "base/dtype.h"
#include "ops/kv_quant.h"

namespace charonia::ops {

struct QuantisedHead {
  std::vector<std::uint8_t> codes;    // [head_dim]
  std::uint16_t scale = 0, zero = 0;  // f16, of integers
  bool fp8 = false;

  QuantisedHead(std::span<const float> x, int bits) : fp8(bits == kKvFp8) {
    if (fp8) {
      for (const float one : x) codes.push_back(float_to_e4m3(one));
      return;
    }
    const auto most = static_cast<float>((1 << bits) - 1);
    const auto [lo, hi] = std::minmax_element(x.begin(), x.end());
    scale = float_to_f16((*hi - *lo) / most);
    zero = float_to_f16(*lo + 0.0F);  // -0 becomes 0
    const float step = f16_to_float(scale), minimum = f16_to_float(zero);
    for (const float one : x) {
      const float steps = step == 0 ? 0 : std::nearbyint((one - minimum) / step);
      codes.push_back(static_cast<std::uint8_t>(std::clamp(steps, 0.0F, most)));
    }
  }

  double value(int d) const {
    const auto code = codes[static_cast<std::size_t>(d)];
    if (fp8) return static_cast<double>(e4m3_to_float(code));
    return static_cast<double>(code) * static_cast<double>(f16_to_float(scale)) +
           static_cast<double>(f16_to_float(zero));
  }
};

// The values that a cache with these bits (KvLayout::quant_bits) returns for a head. fp8_scale: of the head.
inline std::vector<double> through_codes(const std::vector<double>& row, int bits, float fp8_scale = 1) {
  std::vector<float> x(row.begin(), row.end());
  for (auto& one : x) one /= fp8_scale;
  const QuantisedHead head(x, bits);
  std::vector<double> out;
  for (int d = 0; d < static_cast<int>(x.size()); ++d) out.push_back(head.value(d));
  return out;
}

}  // namespace charonia::ops
