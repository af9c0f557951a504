// What the tests of quantised weights share: weights in memory, their values in double precision, and the product that
// every device is held against.
#pragma once

#include <cmath>
#include <cstdint>
#include <numeric>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/dtype.h"
#include "ops/quant_weight.h"

namespace charonia::ops {

// A quantised weight whose codes, scales and zeros a test has at hand.
class MemoryQuantSource : public QuantSource {
 public:
  MemoryQuantSource(std::int64_t rows, std::int64_t cols, const QuantFormat& format) {
    rows_ = rows;
    cols_ = cols;
    format_ = format;
    codes.resize(static_cast<std::size_t>(rows * cols));
    scales.resize(static_cast<std::size_t>(rows * groups()));
    zeros.resize(format.zeros ? scales.size() : 0);
  }

  // Codes of all values that the format has (but NaN), scales around `scale` that the scale type holds exactly.
  static MemoryQuantSource random(std::mt19937& random, std::int64_t rows, std::int64_t cols, const QuantFormat& format,
                                  float scale = 0.01F) {
    MemoryQuantSource out(rows, cols, format);
    const int bits = bits_of(format.code);
    std::uniform_int_distribution<int> code(0, (1 << bits) - 1);
    for (auto& c : out.codes) {
      do {
        c = static_cast<std::uint8_t>(code(random));
      } while (std::isnan(number_of(format.code, c)));
    }
    std::uniform_real_distribution<float> factor(0.5F, 1.5F);
    for (auto& s : out.scales) s = rounded(scale * factor(random), format.scale_type);
    std::uniform_int_distribution<int> zero(bits == 4 ? 0 : -128, bits == 4 ? 16 : 127);
    for (auto& z : out.zeros) z = static_cast<std::int8_t>(zero(random));
    if (format.activations == Activations::i8_tensor || format.activations == Activations::f8_tensor) out.input = 0.02F;
    return out;
  }

  // Sorts nothing: says that column c multiplies input feature order[c].
  void set_order(std::vector<std::int32_t> to) { order_ = std::move(to); }

  void read(std::int64_t first, std::int64_t n, std::uint8_t* codes_out, float* scales_out,
            std::int8_t* zeros_out) const override {
    const auto copy = [&](const auto& from, std::int64_t width, auto* to) {
      std::copy_n(from.begin() + static_cast<std::ptrdiff_t>(first * width), n * width, to);
    };
    copy(codes, cols_, codes_out);
    copy(scales, groups(), scales_out);
    if (format_.zeros) copy(zeros, groups(), zeros_out);
  }
  std::span<const std::int32_t> order() const override { return order_; }
  float input_scale() const override { return input; }
  std::string name() const override { return "test.weight"; }

  // The value of an element, where the weight's columns are, not those of read().
  double at(std::int64_t row, std::int64_t col) const {
    if (!order_.empty()) {
      for (std::size_t c = 0; c < order_.size(); ++c) {
        if (order_[c] == col) return value(row, static_cast<std::int64_t>(c));
      }
    }
    return value(row, col);
  }

  std::vector<std::uint8_t> codes;  // [rows, cols]
  std::vector<float> scales;        // [rows, groups]
  std::vector<std::int8_t> zeros;   // [rows, groups] or empty
  float input = 0;

 private:
  static float rounded(float value, DType type) {
    if (type == DType::bf16) return bf16_to_float(float_to_bf16(value));
    if (type == DType::f16) return f16_to_float(float_to_f16(value));
    if (type == DType::f8_e8m0) return std::exp2(std::round(std::log2(value)));
    return value;
  }

  double value(std::int64_t row, std::int64_t col) const {
    const auto group = static_cast<std::size_t>(row * groups() + col / format_.group);
    const double zero = format_.zeros ? zeros[group] : format_.code == Code::u4 ? 8 : 0;
    const double number = number_of(format_.code, codes[static_cast<std::size_t>(row * cols_ + col)]);
    return double{scales[group]} * (number - zero);
  }

  std::vector<std::int32_t> order_;
};

// What a row becomes before the product, by Activations: its values after they went through int8; as they are for the
// 16-bit kinds. FP8 kinds are the caller's to round, where the device does.
inline std::vector<double> quantised_activations(std::span<const float> row, Activations how, float input_scale) {
  std::vector<double> out(row.begin(), row.end());
  if (how != Activations::i8_token && how != Activations::i8_tensor) return out;
  float scale = input_scale;
  if (how == Activations::i8_token) {
    float greatest = 0;
    for (const float x : row) greatest = std::max(greatest, std::abs(x));
    scale = greatest / 127.0F;
  }
  for (auto& x : out) {
    const float code = scale == 0 ? 0 : std::nearbyint(static_cast<float>(x) / scale);
    x = double{std::min(127.0F, std::max(-127.0F, code))} * scale;
  }
  return out;
}

}  // namespace charonia::ops
