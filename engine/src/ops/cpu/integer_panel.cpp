#include "ops/cpu/integer_panel.h"

#include <algorithm>

namespace charonia::ops::cpu {

void pack_integers(std::byte* panel, const IntegerPanel& shape, std::int64_t n, const std::uint8_t* codes,
                   const float* scales, const std::int8_t* zeros) {
  const std::int64_t k = shape.k, groups = shape.groups();
  auto* const out = reinterpret_cast<std::int8_t*>(panel);
  auto* const corrections_out = reinterpret_cast<std::int32_t*>(panel + shape.corrections());
  auto* const scales_out = reinterpret_cast<float*>(panel + shape.scales());
  auto* const zeros_out = reinterpret_cast<std::int32_t*>(panel + shape.zeros());
  std::fill_n(panel, shape.bytes(), std::byte{0});
  constexpr std::int64_t kStrip = 64;  // columns of a strip: a panel's strip fits the L1 cache
  for (std::int64_t begin = 0; begin < k; begin += kStrip) {
    const auto end = std::min(begin + kStrip, k);
    for (std::int64_t j = 0; j < n; ++j) {
      for (auto i = begin; i < end; ++i) {
        const auto code = static_cast<std::int8_t>(codes[j * k + i]);
        out[i / 4 * 4 * kPanel + 4 * j + i % 4] = code;
        corrections_out[i / shape.group * kPanel + j] -= 128 * code;
      }
    }
  }
  for (std::int64_t g = 0; g < groups; ++g) {
    for (std::int64_t j = 0; j < n; ++j) {
      scales_out[g * kPanel + j] = scales[j * groups + g];
      if (shape.has_zeros) zeros_out[g * kPanel + j] = zeros[j * groups + g];
    }
  }
}

}  // namespace charonia::ops::cpu
