// Formats of quantised weights on the CUDA device, weights in these formats, and checks of their products.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <optional>
#include <span>
#include <vector>

#include "device_arrays.h"
#include "ops/cuda/cuda_quant_weights.h"
#include "ops/cuda/device/runtime.h"
#include "ops/cuda/kernels/w8a8_gemm.h"
#include "ops_support.h"
#include "quant_support.h"

namespace charonia::cuda {

struct Format {
  ops::QuantFormat format;
  bool ordered = false;
};

// The formats of released models, and some others.
inline std::vector<Format> formats(std::int64_t k) {
  using enum ops::Activations;
  using ops::Code;
  std::vector<Format> all;
  for (const bool zeros : {false, true}) {
    all.push_back({{Code::u4, 128, zeros, DType::f16}});
    all.push_back({{Code::u4, 32, zeros, DType::bf16}, zeros});
    all.push_back({{Code::u4, 20, zeros, DType::f32}, !zeros});
    all.push_back({{Code::u4, k, zeros, DType::f32}});
    all.push_back({{Code::i8, k, zeros, DType::bf16}});
    all.push_back({{Code::i8, 64, zeros, DType::f32}});
    all.push_back({{Code::i8, 32, zeros, DType::f16}});
  }
  all.push_back({{Code::i8, k, false, DType::f32, i8_token}});
  all.push_back({{Code::i8, k, false, DType::f32, i8_tensor}});
  all.push_back({{Code::i8, 128, false, DType::f32, i8_token}, true});
  all.push_back({{Code::u4, 128, false, DType::f32, i8_token}});
  all.push_back({{Code::f8_e4m3, k, false, DType::bf16, f8_token}});
  all.push_back({{Code::f8_e4m3, 128, false, DType::f32, f8_tensor}});
  all.push_back({{Code::f8_e4m3, 32, false, DType::f32}});
  all.push_back({{Code::f4_e2m1, 32, false, DType::f8_e8m0}});
  all.push_back({{Code::f4_e2m1, 64, false, DType::f16}});
  std::erase_if(all, [&](const Format& one) { return k % one.format.group != 0; });
  return all;
}

// Formats that the device dequantises when it loads a weight: with minimums, or with groups of 16.
inline std::vector<Format> dequantised_formats(std::int64_t k) {
  using ops::Code;
  constexpr auto kAsIs = ops::Activations::as_is;
  std::vector<Format> all;
  for (const auto code : {Code::u4, Code::i8}) {
    all.push_back({{code, 32, false, DType::f32, kAsIs, true}});
    all.push_back({{code, 20, true, DType::f16, kAsIs, true}, true});
    all.push_back({{code, 16, false, DType::f32, kAsIs, true}});
    all.push_back({{code, 16, false, DType::f32}});
  }
  std::erase_if(all, [&](const Format& one) { return k % one.format.group != 0; });
  return all;
}

inline ops::MemoryQuantSource random_source(ops::Random& random, std::int64_t n, std::int64_t k, const Format& format) {
  auto source = ops::MemoryQuantSource::random(random, n, k, format.format);
  if (format.ordered) {
    std::vector<std::int32_t> order(static_cast<std::size_t>(k));
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), random);
    source.set_order(std::move(order));
  }
  return source;
}

// The weight [n, k] in double precision, with its columns in the order of the inputs.
inline std::vector<double> values(const ops::MemoryQuantSource& source) {
  const auto n = source.rows(), k = source.cols();
  std::vector<double> out(static_cast<std::size_t>(n * k));
  const auto& format = source.format();
  const auto order = source.order();
  for (std::int64_t r = 0; r < n; ++r) {
    for (std::int64_t c = 0; c < k; ++c) {
      const auto group = static_cast<std::size_t>(r * source.groups() + c / format.group);
      const double zero = format.zeros ? source.zeros[group] : format.code == ops::Code::u4 ? 8 : 0;
      const auto to = order.empty() ? c : order[static_cast<std::size_t>(c)];
      const double number = ops::number_of(format.code, source.codes[static_cast<std::size_t>(r * k + c)]);
      const double minimum = format.minimums ? source.minimums[group] : 0;
      out[static_cast<std::size_t>(r * k + to)] = double{source.scales[group]} * (number - zero) + minimum;
    }
  }
  return out;
}

// Compares a product with double precision. weight: values(). Products are exact in float, except with float inputs;
// sums, and products with the scales of groups, are rounded. dequantised: every weight is rounded to the type of the
// inputs, and an output is rounded again if a bias is added.
inline void check_product(const ops::Matrix& out, const ops::Matrix& in, std::span<const double> weight,
                          const ops::QuantFormat& format, float input_scale, std::span<const float> bias = {},
                          bool dequantised = false) {
  const auto k = static_cast<std::size_t>(in.cols);
  const bool fp8 = is_w8a8(format, in.dtype, in.cols, device_info(0));
  std::vector<float> row(k);
  for (std::int64_t r = 0; r < out.rows; ++r) {
    for (std::size_t c = 0; c < k; ++c) row[c] = in.at(r, static_cast<std::int64_t>(c));
    const auto x = ops::quantised_activations(row, format.activations, input_scale, fp8);
    for (std::int64_t o = 0; o < out.cols; ++o) {
      double sum = 0, size = 0, inputs = 0;
      for (std::size_t c = 0; c < k; ++c) {
        const double one = x[c] * weight[static_cast<std::size_t>(o) * k + c];
        sum += one, size += std::abs(one), inputs += std::abs(x[c]);
      }
      const double added = bias.empty() ? 0 : bias[static_cast<std::size_t>(o)];
      // A device that multiplies FP8 keeps 13 bits below the largest of 64 products.
      const double of_sums = fp8 ? 0x1p-12 : (8 + std::sqrt(static_cast<double>(k))) * 0x1p-23;
      double error = of_sums * (size + std::abs(added));
      double rounded = std::abs(sum + added);
      if (dequantised) {
        error += ops::rounding(in.dtype) * size;
        if (in.dtype == DType::f16) error += 0x1p-25 * inputs;  // for subnormal f16 numbers
        rounded = 2 * (std::abs(sum) + error) + std::abs(added);
      }
      ASSERT_NEAR(out.at(r, o), sum + added, error + ops::rounding(out.dtype) * rounded)
          << to_string(format) << ", " << to_string(in.dtype) << ", k " << k << ", row " << r << " of " << out.rows
          << ", output " << o;
    }
  }
}

// A GEMM with a quantised weight and a bias, with its operands on the device.
struct QuantProblem {
  QuantProblem(ops::Random& random, const Format& format, std::int64_t n, std::int64_t k, std::int64_t rows, DType type,
               DType out_type)
      : upload(stream),
        source(random_source(random, n, k, format)),
        weight(values(source)),
        bias(ops::Matrix::random(random, DType::f32, 1, n, 3)),
        in_host(ops::Matrix::random(random, type, rows, k)),
        in(stream, in_host),
        out(stream, ops::Matrix(out_type, rows, n)) {
    const ops::QuantSource* const part = &source;
    const ops::HostMatrix bias_of_part{bias.bytes.data(), DType::f32, n, 1, 1};
    linear.emplace(std::span(&part, 1), std::span(&bias_of_part, 1), type, upload);
  }
  Gemm gemm() const {
    auto gemm = linear->gemm();
    const auto from = in.tensor(), to = out.tensor();
    gemm.in = from.data, gemm.in_stride = from.stride, gemm.rows = from.rows;
    gemm.out = to.data, gemm.out_type = to.dtype, gemm.out_stride = to.stride;
    return gemm;
  }

  // found: the first rows of the output. dequantised: see check_product(); false for the built-in kernels.
  void check(const ops::Matrix& found, bool dequantised = false) const {
    check_product(found, in_host, weight, source.format(), source.input, bias.floats(0), dequantised);
  }

  Stream stream;
  MatrixUpload upload;
  ops::MemoryQuantSource source;
  std::vector<double> weight;  // values()
  ops::Matrix bias, in_host;
  MatrixOnDevice in, out;
  std::optional<CudaQuantLinear> linear;
};

inline CudaW8a8Linear w8a8_linear(const ops::QuantSource& source, DType type, bool packed, MatrixUpload& upload,
                                  std::span<const ops::HostMatrix> bias = {}) {
  const auto* const part = &source;
  return CudaW8a8Linear({&part, 1}, bias, type, packed, upload);
}

// A GEMM whose inputs are codes. `in` and the codes must outlive it.
struct PreparedGemm {
  PreparedGemm(Stream& stream, const CudaW8a8Linear& linear, const ops::Tensor& in)
      : gemm(linear.gemm()),
        codes(static_cast<std::size_t>(in.rows * gemm.k)),
        scales(static_cast<std::size_t>(in.rows) * 4) {
    gemm.rows = in.rows, gemm.in = in.data, gemm.in_stride = in.stride;
    quantise_inputs(stream, gemm, codes.data(), scales.as<float>());
    gemm.in = codes.data(), gemm.in_stride = gemm.k;
    gemm.quant->prepared = true;
    gemm.quant->row_scales = scales.as<float>();
  }
  void set_out(const ops::Tensor& out) { gemm.out = out.data, gemm.out_type = out.dtype, gemm.out_stride = out.stride; }
  Gemm gemm;
  DeviceMemory codes, scales;
};

}  // namespace charonia::cuda
