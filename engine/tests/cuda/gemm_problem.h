// GEMMs on the device with random operands, and the expected results in double precision.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>
#include <random>
#include <vector>

#include "ops/cuda/kernels/gemm.h"

namespace charonia::cuda {

inline std::uint32_t encode(DType type, float x) {
  switch (type) {
    case DType::bf16:
      return float_to_bf16(x);
    case DType::f16:
      return float_to_f16(x);
    default:
      return std::bit_cast<std::uint32_t>(x);
  }
}

inline float decode(DType type, std::uint32_t bits) {
  switch (type) {
    case DType::bf16:
      return bf16_to_float(static_cast<std::uint16_t>(bits));
    case DType::f16:
      return f16_to_float(static_cast<std::uint16_t>(bits));
    default:
      return std::bit_cast<float>(bits);
  }
}

// A matrix on the device with rows `stride` apart, `offset` elements after an aligned address. The elements between the
// rows are NaN unless `padding` is given.
class GemmMatrix {
 public:
  GemmMatrix(DType type, std::int64_t rows, std::int64_t cols, std::int64_t stride, std::int64_t offset = 0,
             float padding = std::numeric_limits<float>::quiet_NaN())
      : type(type),
        rows(rows),
        cols(cols),
        stride(stride),
        offset(offset),
        host(static_cast<std::size_t>(offset + rows * stride) * size_of(type)),
        device(host.size()) {
    for (std::int64_t i = 0; i < offset + rows * stride; ++i) set(i, padding);
  }

  void set(std::int64_t at, float x) {
    const auto bits = encode(type, x);
    std::memcpy(host.data() + static_cast<std::size_t>(at) * size_of(type), &bits, size_of(type));
  }
  std::uint32_t bits(std::int64_t row, std::int64_t col) const {
    std::uint32_t out = 0;
    std::memcpy(&out, host.data() + static_cast<std::size_t>(offset + row * stride + col) * size_of(type),
                std::min(size_of(type), sizeof(out)));
    return out;
  }
  float at(std::int64_t row, std::int64_t col) const { return decode(type, bits(row, col)); }
  void fill(std::mt19937& random, float scale) {
    std::normal_distribution<float> normal(0, scale);
    for (std::int64_t r = 0; r < rows; ++r) {
      for (std::int64_t c = 0; c < cols; ++c) set(offset + r * stride + c, normal(random));
    }
  }
  void upload(Stream& stream) { stream.upload(device.data(), host.data(), host.size(), "test"); }
  void download(Stream& stream) {
    stream.download(host.data(), device.data(), host.size(), "test");
    stream.wait("test");
  }
  void copy(const GemmMatrix& from, Stream& stream) {
    host = from.host;
    upload(stream);
  }
  void* data() { return device.as<std::byte>() + static_cast<std::size_t>(offset) * size_of(type); }

  DType type;
  std::int64_t rows, cols, stride, offset;
  std::vector<std::byte> host;
  DeviceMemory device;
};

struct Case {
  DType type = DType::bf16, out_type = DType::bf16;
  std::int64_t rows = 1, n = 1, k = 1;
  std::int64_t in_gap = 0, out_gap = 0, in_offset = 0, out_offset = 0;
  bool bias = false;
  bool packed = false;
};

// A GEMM with its operands on the device.
struct GemmProblem {
  explicit GemmProblem(const Case& c, unsigned seed = 1)
      : in(c.type, c.rows, c.k, c.k + c.in_gap, c.in_offset),
        weight(c.type, c.n, c.k, round_up(c.k, 8), 0, 0),
        bias(DType::f32, 1, c.n, c.n),
        out(c.out_type, c.rows, c.n, c.n + c.out_gap, c.out_offset),
        has_bias(c.bias),
        packed(c.packed) {
    std::mt19937 random(seed);
    in.fill(random, 1);
    weight.fill(random, 0.5F);
    bias.fill(random, 3);
    for (auto* one : {&in, &weight, &bias, &out}) one->upload(stream);
  }

  // Packs the weight; memory that must not be read is NaN.
  void pack() {
    const auto stride = round_up(weight.cols, kPackedK);
    packed_weight.emplace(weight.type, round_up(weight.rows, kPackedRows), stride, stride);
    for (std::int64_t r = 0; r < weight.rows; ++r) {
      for (std::int64_t k = 0; k < weight.stride; ++k) packed_weight->set(packed_at(r, k, stride), weight.at(r, k));
    }
    packed_weight->upload(stream);
  }

  Gemm gemm() {
    if (packed && !packed_weight) pack();
    return {.out = out.data(),
            .out_type = out.type,
            .out_stride = out.stride,
            .in = in.data(),
            .in_stride = in.stride,
            .weight = packed ? packed_weight->data() : weight.data(),
            .type = in.type,
            .weight_stride = packed ? packed_weight->stride : weight.stride,
            .packed = packed,
            .bias = has_bias ? static_cast<const float*>(bias.data()) : nullptr,
            .rows = in.rows,
            .n = weight.rows,
            .k = weight.cols};
  }

  void run(const GemmTactic& tactic) {
    DeviceMemory workspace(gemm_workspace_bytes(tactic, gemm()));
    clear_out();
    cuda::gemm(stream, device_info(0), gemm(), tactic, workspace.data());
    std::vector<int> counters(kGemmCounterBytes / sizeof(int), -1);
    stream.download(counters.data(), workspace.data(), kGemmCounterBytes, "counters");
    out.download(stream);
    for (const int counter : counters) ASSERT_EQ(counter, 0);
  }

  // Compares with double precision. The bound allows for rounding of sums in float and of the output, which is rounded
  // twice if the bias is added afterwards.
  void check(bool rounded_twice = false) {
    const double unit = out.type == DType::bf16 ? 0x1p-8 : out.type == DType::f16 ? 0x1p-11 : 0x1p-24;
    if (expected.empty()) expect();
    for (std::int64_t r = 0; r < in.rows; ++r) {
      for (std::int64_t c = 0; c < weight.rows; ++c) {
        const auto& [sum, size] = expected[static_cast<std::size_t>(r * weight.rows + c)];
        const double rounded = std::abs(sum) + (rounded_twice ? std::abs(sum) + 2 * std::abs(bias.at(0, c)) : 0);
        const double bound = unit * rounded + (8 + std::sqrt(static_cast<double>(in.cols))) * 0x1p-23 * size;
        ASSERT_NEAR(out.at(r, c), sum, bound) << "row " << r << " column " << c;
      }
      for (std::int64_t c = weight.rows; c < out.stride; ++c) {
        ASSERT_TRUE(std::isnan(out.at(r, c))) << "the kernel wrote between the rows";
      }
    }
  }

  // Computes the expected result once in double precision; the tactics then use the same operands.
  void expect() {
    for (std::int64_t r = 0; r < in.rows; ++r) {
      for (std::int64_t c = 0; c < weight.rows; ++c) {
        double sum = has_bias ? bias.at(0, c) : 0, size = std::abs(sum);
        for (std::int64_t i = 0; i < in.cols; ++i) {
          const double one = static_cast<double>(in.at(r, i)) * weight.at(c, i);
          sum += one, size += std::abs(one);
        }
        expected.push_back({sum, size});
      }
    }
  }

  void clear_out() {
    std::memset(out.host.data(), 0xff, out.host.size());  // NaN in every type
    out.upload(stream);
  }

  std::vector<std::uint32_t> row(std::int64_t r) const {
    std::vector<std::uint32_t> all;
    for (std::int64_t c = 0; c < out.cols; ++c) all.push_back(out.bits(r, c));
    return all;
  }

  Stream stream;
  GemmMatrix in, weight, bias, out;
  bool has_bias;
  bool packed;
  std::optional<GemmMatrix> packed_weight;
  struct Expected {
    double sum, size;  // size: sum of the absolute values of the terms
  };
  std::vector<Expected> expected;
};

}  // namespace charonia::cuda
