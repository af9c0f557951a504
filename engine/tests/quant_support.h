// Common parts of the tests of quantised weights: weights in memory, their values in double precision, and the
// reference product for every device.
#pragma once

#include <algorithm>
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

// A quantised weight with public codes, scales and zeros.
class MemoryQuantSource : public QuantSource {
 public:
  MemoryQuantSource(std::int64_t rows, std::int64_t cols, const QuantFormat& format) {
    rows_ = rows;
    cols_ = cols;
    format_ = format;
    codes.resize(static_cast<std::size_t>(rows * cols));
    scales.resize(static_cast<std::size_t>(rows * groups()));
    zeros.resize(format.zeros ? scales.size() : 0);
    minimums.resize(format.minimums ? scales.size() : 0);
  }

  // Codes of all values of the format (except NaN), and scales around `scale` that the scale type represents exactly.
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
    for (auto& m : out.minimums) m = scale * 8 * (factor(random) - 1);
    if (format.activations == Activations::i8_tensor || format.activations == Activations::f8_tensor) out.input = 0.02F;
    return out;
  }

  // Sets order(): column c multiplies input feature order[c]. Does not sort the columns.
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
  void read_minimums(std::int64_t first, std::int64_t n, float* out) const override {
    if (format_.minimums) {
      std::copy_n(minimums.begin() + static_cast<std::ptrdiff_t>(first * groups()), n * groups(), out);
    }
  }
  std::span<const std::int32_t> order() const override { return order_; }
  float input_scale() const override { return input; }
  std::string name() const override { return "test.weight"; }

  // The value of an element in the order of the weight's columns, not of read().
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
  std::vector<float> minimums;      // [rows, groups] or empty
  float input = 0;

 private:
  static float rounded(float value, DType type) {
    if (type == DType::bf16) return bf16_to_float(float_to_bf16(value));
    if (type == DType::f16) return f16_to_float(float_to_f16(value));
    return type == DType::f8_e8m0 ? std::exp2(std::round(std::log2(value))) : value;
  }

  double value(std::int64_t row, std::int64_t col) const {
    const auto group = static_cast<std::size_t>(row * groups() + col / format_.group);
    const double zero = format_.zeros ? zeros[group] : format_.code == Code::u4 ? 8 : 0;
    const double number = number_of(format_.code, codes[static_cast<std::size_t>(row * cols_ + col)]);
    return double{scales[group]} * (number - zero) + (format_.minimums ? double{minimums[group]} : 0);
  }

  std::vector<std::int32_t> order_;
};

// The FP8 number nearest to x; ties go to the even code.
inline float nearest_e4m3(float x) {
  static const std::vector<std::pair<float, int>> kNumbers = [] {
    std::vector<std::pair<float, int>> out;
    for (int code = 0; code < 0x7f; ++code) {
      out.emplace_back(number_of(Code::f8_e4m3, static_cast<std::uint8_t>(code)), code);
    }
    return out;
  }();
  const float size = std::min(std::abs(x), 448.0F);
  const auto above = std::lower_bound(kNumbers.begin(), kNumbers.end(), std::pair(size, -1));
  auto found = above;
  if (above != kNumbers.begin()) {
    const auto below = above - 1;
    const float up = above->first - size, down = size - below->first;
    if (down < up || (down == up && below->second % 2 == 0)) found = below;
  }
  return std::copysign(found->first, x);
}

// The values of a row after quantisation by Activations: through int8, or through FP8 if the device multiplies FP8;
// unchanged for the 16-bit kinds.
inline std::vector<double> quantised_activations(std::span<const float> row, Activations how, float input_scale,
                                                 bool fp8 = false) {
  std::vector<double> out(row.begin(), row.end());
  const bool integers = how == Activations::i8_token || how == Activations::i8_tensor;
  if (how == Activations::as_is || (!integers && !fp8)) return out;
  float scale = input_scale;
  if (how == Activations::i8_token || how == Activations::f8_token) {
    float greatest = 0;
    for (const float x : row) greatest = std::max(greatest, std::abs(x));
    scale = greatest / (integers ? 127.0F : 448.0F);
  }
  for (auto& x : out) {
    const float divided = scale == 0 ? 0 : static_cast<float>(x) / scale;
    x = double{integers ? std::min(127.0F, std::max(-127.0F, std::nearbyint(divided))) : nearest_e4m3(divided)} * scale;
  }
  return out;
}

// A row [k] of bf16, in the order of the columns, as the fixed-point numbers that some CPUs multiply with integer
// weights (FixedRow in ops/cpu/kernels.h): blocks of 128 columns of a group, each with its own step.
inline std::vector<double> fixed_point(std::vector<double> row, std::int64_t group) {
  constexpr std::int64_t kBlock = 128;
  const auto k = std::ssize(row);
  for (std::int64_t first = 0; first < k; first += group) {
    for (std::int64_t begin = first; begin < first + group; begin += kBlock) {
      const std::span block(row.data() + begin, static_cast<std::size_t>(std::min(kBlock, first + group - begin)));
      double greatest = 0;
      for (const double x : block) greatest = std::max(greatest, std::abs(x));
      if (greatest == 0) continue;
      double step = std::exp2(std::max(std::floor(std::log2(greatest)) - 14, -126.0));
      if (greatest / step > 127 * 256 + 127) step *= 2;  // limit of two signed bytes
      for (double& x : block) x = std::nearbyint(x / step) * step;
    }
  }
  return row;
}

}  // namespace charonia::ops
