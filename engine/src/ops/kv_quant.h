// Quantised k and v; the same on all devices. A token's k (or v) of one head, x [head_dim], becomes head_dim integers
// of 8 or 4 bits, a scale and a zero (its minimum), both f16:
//
//   lo = min(x), hi = max(x)
//   zero = f16(lo), scale = f16((hi - lo) / (2^bits - 1)), rounded to nearest even, clamped to the range of f16
//   q = round to nearest even((x - zero) / scale), clamped to [0, 2^bits - 1]; 0 if the scale is 0
//   x' = q * scale + zero
//
// All computations are in f32, with the rounded zero and scale. Every operation follows IEEE 754, so all devices store
// the same bits for the same x. q * scale is exact in f32 (8 bits times 11), so x' is the same with and without a fused
// multiply-add. |x - x'| <= scale / 2 + |lo - zero| + (2^bits - 1) * |(hi - lo) / (2^bits - 1) - scale|. A head with an
// infinity or a NaN gets zero = NaN and scale = 0. Attention to it gives NaN, which sampling reports.
//
// Attention does not need x'. The scale and the zero of a token can be moved out of the sums over the head and over the
// tokens:
//   sum_d a[d] x'[d] = scale * sum_d a[d] q[d] + zero * sum_d a[d]
//   sum_t w[t] x'[t][d] = sum_t (w[t] scale[t]) q[t][d] + sum_t w[t] zero[t]
//
// With four bits, byte i of a token's head holds element i in its low half and element i + head_dim / 2 in its high
// half. So a vector of bytes gives two vectors of neighbouring elements, and the two elements of a rotary pair share a
// byte. Each device decides where a block holds the integers and the scales; no two tokens share a byte.
//
// With FP8 (kKvFp8) x becomes head_dim numbers of OCP FP8 E4M3: e4m3(x / scale), rounded to nearest even; larger
// magnitudes become 448, and NaN stays NaN. The scales of k and of v are constants of a layer and head: those of the
// checkpoint, or 1 (RotaryParams). A block has no scales. Every E4M3 number is exact in bf16 and f16. q is multiplied
// by the scale of k, and the weighted sum by the scale of v, so attention multiplies the numbers themselves.
//
// This header has only arithmetic, so host and device code can include it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>

namespace charonia::ops {

inline constexpr float kKvF16Max = 65504;
inline constexpr int kKvFp8 = 16;

// `bits`, here and below: 8 or 4 for integers, kKvFp8 for FP8; the values of the setting quant_policy.
constexpr bool kv_holds_integers(int bits) { return bits == 4 || bits == 8; }  // and scales and zeros
constexpr bool is_kv_quant_bits(int bits) { return kv_holds_integers(bits) || bits == kKvFp8; }

// Largest integer: 15 or 255.
constexpr int kv_quant_max(int bits) { return (1 << bits) - 1; }

// Bytes of one token's k (or v) of one head: the codes (head_dim is even), the scale and the zero, and all together.
constexpr std::size_t kv_quant_row_bytes(int head_dim, int bits) {
  return static_cast<std::size_t>(head_dim) * static_cast<std::size_t>(bits == kKvFp8 ? 8 : bits) / 8;
}
constexpr std::size_t kv_quant_scale_bytes(int bits) { return kv_holds_integers(bits) ? 4 : 0; }
constexpr std::size_t kv_quant_token_bytes(int head_dim, int bits) {
  return kv_quant_row_bytes(head_dim, bits) + kv_quant_scale_bytes(bits);
}

// The smaller and the larger of two values; NaN if one is NaN.
constexpr float kv_lesser(float a, float b) { return a < b || a != a ? a : b; }
constexpr float kv_greater(float a, float b) { return a > b || a != a ? a : b; }

// The scale and the zero before they are rounded to f16, from lo and hi.
struct KvRange {
  float scale, zero;
};
constexpr KvRange kv_range(float lo, float hi, int bits) {
  const float width = hi - lo;
  if (!(width <= std::numeric_limits<float>::max())) return {0, std::numeric_limits<float>::quiet_NaN()};
  const float scale = width / static_cast<float>(kv_quant_max(bits));
  const float zero = lo < -kKvF16Max ? -kKvF16Max : lo > kKvF16Max ? kKvF16Max : lo;
  return {scale > kKvF16Max ? kKvF16Max : scale, zero + 0.0F};  // -0 becomes 0
}

// scale and zero: the stored values.
constexpr std::uint8_t kv_quantise(float x, float scale, float zero, int bits) {
  constexpr float kNoFraction = 0x1.8p23F;  // adding it rounds to an integer, to nearest even
  const float most = static_cast<float>(kv_quant_max(bits));
  const float steps = (x - zero) / (scale > 0 ? scale : std::numeric_limits<float>::infinity());
  const float within = !(steps > 0) ? 0 : steps > most ? most : steps;  // 0 for NaN
  return static_cast<std::uint8_t>((within + kNoFraction) - kNoFraction);
}

// Four bits: elements i and i + head_dim / 2.
constexpr std::uint8_t kv_pack(std::uint8_t first, std::uint8_t second) {
  return static_cast<std::uint8_t>(first | (second << 4));
}

}  // namespace charonia::ops
