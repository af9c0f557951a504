// Quantised weights in the layouts of files, for tests: packed code by code as each layout's publisher describes it.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "base/dtype.h"

namespace charonia::testing {

// A tensor of a safetensors file.
struct FileTensor {
  std::string dtype;
  std::vector<std::int64_t> shape;
  std::string bytes;
};

template <class T>
FileTensor file_tensor(const std::string& dtype, std::vector<std::int64_t> shape, const std::vector<T>& values) {
  return {dtype, std::move(shape), {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T)}};
}

// Scales: F32, F16 or BF16.
inline FileTensor file_floats(const std::string& dtype, std::vector<std::int64_t> shape,
                              const std::vector<float>& values) {
  if (dtype == "F32") return file_tensor(dtype, std::move(shape), values);
  std::vector<std::uint16_t> halves;
  for (const float value : values) halves.push_back(dtype == "F16" ? float_to_f16(value) : float_to_bf16(value));
  return file_tensor(dtype, std::move(shape), halves);
}

// By the tables of the OCP specifications.
inline double f8_e4m3_value(int bits) {
  const int exponent = bits >> 3 & 15, mantissa = bits & 7;
  const double magnitude =
      exponent == 0 ? mantissa / 8.0 * std::pow(2.0, -6) : (1 + mantissa / 8.0) * std::pow(2.0, exponent - 7);
  return bits >= 128 ? -magnitude : magnitude;
}
inline double f4_e2m1_value(int bits) {
  constexpr double kMagnitudes[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
  return kMagnitudes[bits & 7] * (bits >= 8 ? -1 : 1);
}

// A weight before it is packed.
struct PlainQuant {
  std::string dtype = "U4";  // U4, I8, F8_E4M3 or F4_E2M1
  std::int64_t rows = 0, cols = 0, group = 0;
  std::vector<int> codes;         // [rows, cols], 0 .. 2^bits - 1; I8 plus 128
  std::vector<float> scales;      // [rows, groups]
  std::vector<int> zeros;         // [rows, groups], for integer codes; empty: all are 2^(bits - 1)
  std::vector<int> column_group;  // [cols]

  std::int64_t groups() const { return (cols + group - 1) / group; }  // the last group may be short
  int bits() const { return dtype == "U4" || dtype == "F4_E2M1" ? 4 : 8; }
  int code(std::int64_t r, std::int64_t c) const { return codes[static_cast<std::size_t>(r * cols + c)]; }
  float scale(std::int64_t r, std::int64_t g) const { return scales[static_cast<std::size_t>(r * groups() + g)]; }
  int zero(std::int64_t r, std::int64_t g) const {
    return zeros.empty() ? 1 << (bits() - 1) : zeros[static_cast<std::size_t>(r * groups() + g)];
  }
  double value(std::int64_t r, std::int64_t c) const {
    const auto g = column_group[static_cast<std::size_t>(c)];
    const double number = dtype == "F8_E4M3"   ? f8_e4m3_value(code(r, c))
                          : dtype == "F4_E2M1" ? f4_e2m1_value(code(r, c))
                                               : code(r, c) - zero(r, g);
    return double{scale(r, g)} * number;
  }
};

// The files' tensors of a weight.
struct FileQuant {
  FileTensor codes, scales;
  std::optional<FileTensor> zeros, order;
};

namespace detail {

// I32 [rows, cols]: put(row, col, i, code) writes code i of a word, counted from the lowest bits.
using Put = std::function<void(std::int64_t row, std::int64_t col, std::int64_t i, int code)>;
inline FileTensor numbers(int bits, std::int64_t rows, std::int64_t cols, const std::function<void(const Put&)>& fill) {
  std::vector<std::uint32_t> out(static_cast<std::size_t>(rows * cols));
  fill([&](std::int64_t row, std::int64_t col, std::int64_t i, int code) {
    out[static_cast<std::size_t>(row * cols + col)] |= static_cast<std::uint32_t>(code)
                                                       << static_cast<unsigned>(bits * i);
  });
  return file_tensor("I32", {rows, cols}, out);
}

template <class Fn>
void for_all(std::int64_t n, std::int64_t m, Fn fn) {
  for (std::int64_t i = 0; i < n; ++i) {
    for (std::int64_t j = 0; j < m; ++j) fn(i, j);
  }
}

inline std::vector<float> transposed(const std::vector<float>& values, std::int64_t n, std::int64_t m) {
  std::vector<float> out(values.size());
  for_all(n, m, [&](auto i, auto j) {
    out[static_cast<std::size_t>(j * n + i)] = values[static_cast<std::size_t>(i * m + j)];
  });
  return out;
}

}  // namespace detail

// compressed-tensors' int-quantized and float-quantized: codes and scales unchanged.
inline FileQuant pack_rows(const PlainQuant& w) {
  std::vector<std::uint8_t> bytes;
  for (const int code : w.codes) bytes.push_back(static_cast<std::uint8_t>(w.dtype == "I8" ? code - 128 : code));
  return {file_tensor(w.dtype, {w.rows, w.cols}, bytes), file_floats("F32", {w.rows, w.groups()}, w.scales), {}, {}};
}

// compressed-tensors' pack-quantized: 32 / bits codes of a row per word, and as many rows' zeros of a group.
inline FileQuant pack_packed_rows(const PlainQuant& w) {
  const int per = 32 / w.bits();
  FileQuant out;
  out.codes = detail::numbers(w.bits(), w.rows, w.cols / per, [&](const auto& put) {
    detail::for_all(w.rows, w.cols, [&](auto r, auto c) { put(r, c / per, c % per, w.code(r, c)); });
  });
  out.scales = file_floats("BF16", {w.rows, w.groups()}, w.scales);
  if (!w.zeros.empty()) {
    out.zeros = detail::numbers(w.bits(), (w.rows + per - 1) / per, w.groups(), [&](const auto& put) {
      detail::for_all(w.rows, w.groups(), [&](auto r, auto g) { put(r / per, g, r % per, w.zero(r, g)); });
    });
  }
  return out;
}

// AutoAWQ's GEMM packing: eight rows of a column per word, even rows first.
inline FileQuant pack_awq(const PlainQuant& w) {
  const int order[] = {0, 2, 4, 6, 1, 3, 5, 7};
  FileQuant out;
  out.codes = detail::numbers(4, w.cols, w.rows / 8, [&](const auto& put) {
    detail::for_all(w.cols, w.rows, [&](auto c, auto r) { put(c, r / 8, r % 8, w.code(r / 8 * 8 + order[r % 8], c)); });
  });
  if (!w.zeros.empty()) {
    out.zeros = detail::numbers(4, w.groups(), w.rows / 8, [&](const auto& put) {
      detail::for_all(w.groups(), w.rows,
                      [&](auto g, auto r) { put(g, r / 8, r % 8, w.zero(r / 8 * 8 + order[r % 8], g)); });
    });
  }
  out.scales = file_floats("F16", {w.groups(), w.rows}, detail::transposed(w.scales, w.rows, w.groups()));
  return out;
}

// AutoGPTQ's: 32 / bits columns of a row per word, and as many rows' zeros, minus `offset`.
inline FileQuant pack_gptq(const PlainQuant& w, int offset = 1) {
  const int per = 32 / w.bits();
  FileQuant out;
  out.codes = detail::numbers(w.bits(), w.cols / per, w.rows, [&](const auto& put) {
    detail::for_all(w.cols, w.rows, [&](auto c, auto r) { put(c / per, r, c % per, w.code(r, c)); });
  });
  if (!w.zeros.empty()) {
    out.zeros = detail::numbers(w.bits(), w.groups(), w.rows / per, [&](const auto& put) {
      detail::for_all(w.groups(), w.rows, [&](auto g, auto r) { put(g, r / per, r % per, w.zero(r, g) - offset); });
    });
  }
  out.scales = file_floats("F16", {w.groups(), w.rows}, detail::transposed(w.scales, w.rows, w.groups()));
  out.order = file_tensor("I32", {w.cols}, w.column_group);
  return out;
}

// Two codes per byte, the first in the low bits; scales are powers of two.
inline FileQuant pack_mxfp4(const PlainQuant& w) {
  std::vector<std::uint8_t> bytes, exponents;
  for (std::size_t i = 0; i < w.codes.size(); i += 2) {
    bytes.push_back(static_cast<std::uint8_t>(w.codes[i] | w.codes[i + 1] << 4));
  }
  for (const float scale : w.scales) exponents.push_back(static_cast<std::uint8_t>(std::ilogb(scale) + 127));
  return {file_tensor("U8", {w.rows, w.cols / 2}, bytes), file_tensor("U8", {w.rows, w.groups()}, exponents), {}, {}};
}

// By the layout's name in the manifest.
inline FileQuant pack(const std::string& layout, const PlainQuant& w) {
  return layout == "rows"          ? pack_rows(w)
         : layout == "packed-rows" ? pack_packed_rows(w)
         : layout == "awq"         ? pack_awq(w)
         : layout == "gptq"        ? pack_gptq(w)
                                   : pack_mxfp4(w);
}

// Random codes (without NaN), with scales that every type can represent and values of about this deviation. The zeros,
// if any, differ. shuffled: groups have columns from the whole matrix, the same for all matrices of this width.
inline PlainQuant random_quant(std::mt19937& random, const std::string& dtype, std::int64_t rows, std::int64_t cols,
                               std::int64_t group, bool zeros, float deviation, bool shuffled = false) {
  PlainQuant out;
  out.dtype = dtype, out.rows = rows, out.cols = cols, out.group = group;
  const auto some = [&](int least, int greatest) {
    return std::uniform_int_distribution<int>(least, greatest)(random);
  };
  const bool is_f8 = dtype == "F8_E4M3", is_f4 = dtype == "F4_E2M1";
  const int count = 1 << out.bits(), middle = count / 2;
  double squares = 0;  // of the codes' numbers
  for (std::int64_t i = 0; i < rows * cols; ++i) {
    out.codes.push_back(is_f8 ? some(0, 1) * 128 + some(0, 0x7e) : some(0, count - 1));
    const int code = out.codes.back();
    squares += std::pow(is_f8 ? f8_e4m3_value(code) : is_f4 ? f4_e2m1_value(code) : code - middle, 2.0);
  }
  const double unit = deviation / std::sqrt(squares / static_cast<double>(rows * cols));
  for (std::int64_t i = 0; i < rows * out.groups(); ++i) {
    int exponent = 0;
    const double part = std::frexp(unit * some(8, 24) / 16, &exponent);
    // Powers of two for mxfp4; otherwise five bits.
    out.scales.push_back(static_cast<float>(std::ldexp(is_f4 ? 1 : std::ceil(part * 32) / 32, exponent)));
    if (zeros) out.zeros.push_back(middle + some(-2, 2));
  }
  for (std::int64_t c = 0; c < cols; ++c) out.column_group.push_back(static_cast<int>(c / group));
  if (shuffled) std::ranges::shuffle(out.column_group, std::mt19937(static_cast<unsigned>(cols)));
  return out;
}

}  // namespace charonia::testing
