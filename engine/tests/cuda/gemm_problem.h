// GEMMs on the device with random operands, and the expected results in double precision.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <vector>

#include "device_arrays.h"
#include "ops/cuda/kernels/gemm.h"
#include "ops_support.h"

namespace charonia::cuda {

struct Case {
  DType type = DType::bf16, out_type = DType::bf16;
  std::int64_t rows = 1, n = 1, k = 1;
  std::int64_t in_gap = 0, out_gap = 0, in_offset = 0, out_offset = 0;
  bool bias = false;
  bool packed = false;
};

inline ops::Matrix all_nan(DType type, std::int64_t rows, std::int64_t cols, std::int64_t gap = 0) {
  ops::Matrix out(type, rows, cols, gap);
  std::ranges::fill(out.bytes, std::byte{0xff});
  return out;
}

inline void check_counters(Stream& stream, const DeviceMemory& workspace) {
  std::vector<int> counters(kGemmCounterBytes / sizeof(int), -1);
  stream.download(counters.data(), workspace.data(), kGemmCounterBytes, "counters");
  stream.wait("counters");
  EXPECT_EQ(std::ranges::count(counters, 0), std::ssize(counters));
}

inline void run_gemm(Stream& stream, const Gemm& gemm, const GemmTactic& tactic) {
  const DeviceMemory workspace(gemm_workspace_bytes(tactic, gemm));
  cuda::gemm(stream, device_info(0), gemm, tactic, workspace.data());
  check_counters(stream, workspace);
}

inline std::vector<GemmTactic> wgmma_tactics(const DeviceInfo& device, const Gemm& gemm, SumOrder order) {
  auto tactics = gemm_tactics(device, gemm, order);
  std::erase_if(tactics, [](const GemmTactic& one) { return one.kernel != GemmTactic::Kernel::wgmma; });
  return tactics;
}

struct LaunchedGemm {
  Gemm gemm;
  GemmTactic tactic;  // it has run before: the first launch of a kernel loads it, and cannot be captured
  ops::Matrix expected;
};
// Checks the outputs of GEMMs that a graph launches in turn, with one workspace. On a GPU, the blocks of a launch run
// at the same time, and so do the ends and begins of launches.
inline void check_launches_in_a_graph(const std::vector<LaunchedGemm>& gemms) {
  constexpr std::size_t kLaunches = 24;
  Stream stream;
  std::vector<MatrixOnDevice> outs;
  std::size_t workspace_bytes = 0;
  const auto one = [&](std::size_t i) -> const LaunchedGemm& { return gemms[i % gemms.size()]; };
  for (std::size_t i = 0; i < kLaunches; ++i) {
    outs.emplace_back(stream, one(i).expected);
    workspace_bytes = std::max(workspace_bytes, gemm_workspace_bytes(one(i).tactic, one(i).gemm));
  }
  const DeviceMemory workspace(workspace_bytes);
  Graph::begin(stream);
  for (std::size_t i = 0; i < kLaunches; ++i) {
    auto gemm = one(i).gemm;
    gemm.out = outs[i].tensor().data;
    cuda::gemm(stream, device_info(0), gemm, one(i).tactic, workspace.data());
  }
  const auto graph = Graph::end(stream);
  for (int turn = 0; turn < 2; ++turn) {
    for (std::size_t i = 0; i < kLaunches; ++i) {
      const auto& expected = one(i).expected;
      outs[i].upload(all_nan(expected.dtype, expected.rows, expected.cols));
    }
    graph.launch(stream, "GEMMs");
    for (std::size_t i = 0; i < kLaunches; ++i) {
      const auto found = outs[i].host();
      for (std::int64_t r = 0; r < found.rows; ++r) {
        ASSERT_TRUE(found.same_bits(r, one(i).expected, r)) << "launch " << i << ", row " << r;
      }
    }
  }
  check_counters(stream, workspace);
}

// A GEMM with its operands on the device. Elements between the rows of in and out are NaN.
class GemmProblem {
 public:
  struct Operands {
    ops::Matrix in, weight, bias;
  };

  explicit GemmProblem(const Case& c, unsigned seed = 1) : GemmProblem(c, random_operands(c, seed)) {}
  GemmProblem(const Case& of, Operands operands)
      : c(of),
        host(std::move(operands)),
        result(all_nan(c.out_type, c.rows, c.n, c.out_gap)),
        in(stream, host.in, c.in_offset),
        weight(stream, c.packed ? packed_weight() : host.weight),
        bias(stream, host.bias),
        out(stream, result, c.out_offset) {}

  // The same weight and bias, with rows of the input.
  GemmProblem slice(std::int64_t first, std::int64_t rows, std::int64_t in_offset = 0) const {
    auto part = c;
    part.rows = rows;
    part.in_offset = in_offset;
    return GemmProblem(part, {host.in.slice(first, first + rows), host.weight, host.bias});
  }
  GemmProblem packed() const {
    auto other = c;
    other.packed = true;
    return GemmProblem(other, host);
  }

  Gemm gemm() const {
    const auto from = in.tensor(), by = weight.tensor(), to = out.tensor();
    return {.out = to.data,
            .out_type = to.dtype,
            .out_stride = to.stride,
            .in = from.data,
            .in_stride = from.stride,
            .weight = by.data,
            .type = c.type,
            .weight_stride = by.stride,
            .packed = c.packed,
            .bias = c.bias ? static_cast<const float*>(bias.tensor().data) : nullptr,
            .rows = c.rows,
            .n = c.n,
            .k = c.k};
  }

  // Sets the output to NaN.
  void clear() {
    std::ranges::fill(result.bytes, std::byte{0xff});
    out.upload(result);
  }
  void download() { result = out.host(); }

  void run(const GemmTactic& tactic) {
    clear();
    run_gemm(stream, gemm(), tactic);
    download();
  }

  // Compares with double precision. The bound allows for rounding of sums in float and of the output, which is rounded
  // twice if the bias is added afterwards.
  void check(bool rounded_twice = false) {
    if (expected_.empty()) expect();
    for (std::int64_t r = 0; r < c.rows; ++r) {
      for (std::int64_t j = 0; j < c.n; ++j) {
        const auto& [sum, size] = expected_[static_cast<std::size_t>(r * c.n + j)];
        const double rounded =
            std::abs(sum) + (rounded_twice ? std::abs(sum) + 2 * std::abs(host.bias.at(0, j)) : 0);
        const double bound =
            ops::rounding(c.out_type) * rounded + (8 + std::sqrt(static_cast<double>(c.k))) * 0x1p-23 * size;
        ASSERT_NEAR(result.at(r, j), sum, bound) << "row " << r << " column " << j;
      }
      for (std::int64_t j = c.n; j < result.stride; ++j) {
        ASSERT_TRUE(std::isnan(result.at(r, j))) << "the kernel wrote between the rows";
      }
    }
  }

  Case c;
  Stream stream;
  Operands host;
  ops::Matrix result;
  MatrixOnDevice in, weight, bias, out;

 private:
  static Operands random_operands(const Case& c, unsigned seed) {
    ops::Random random(seed);
    Operands out{ops::Matrix::random(random, c.type, c.rows, c.k, 1, c.in_gap),
                 ops::Matrix::random(random, c.type, c.n, c.k, 0.5F, round_up(c.k, 8) - c.k),
                 ops::Matrix::random(random, DType::f32, 1, c.n, 3)};
    for (std::int64_t r = 0; r < c.rows; ++r) {
      for (std::int64_t i = c.k; i < out.in.stride; ++i) out.in.set(r, i, std::nanf(""));
    }
    return out;
  }

  // Memory that must not be read is NaN.
  ops::Matrix packed_weight() const {
    const auto stride = round_up(c.k, kPackedK);
    auto out = all_nan(c.type, round_up(c.n, kPackedRows), stride);
    for (std::int64_t r = 0; r < c.n; ++r) {
      for (std::int64_t k = 0; k < host.weight.stride; ++k) {
        const auto at = packed_at(r, k, stride);
        out.set(at / stride, at % stride, host.weight.at(r, k));
      }
    }
    return out;
  }

  // Computes the expected result once in double precision; the tactics then use the same operands.
  void expect() {
    for (std::int64_t r = 0; r < c.rows; ++r) {
      for (std::int64_t j = 0; j < c.n; ++j) {
        double sum = c.bias ? host.bias.at(0, j) : 0, size = std::abs(sum);
        for (std::int64_t i = 0; i < c.k; ++i) {
          const double one = static_cast<double>(host.in.at(r, i)) * host.weight.at(j, i);
          sum += one, size += std::abs(one);
        }
        expected_.push_back({sum, size});
      }
    }
  }

  struct Expected {
    double sum, size;  // size: sum of the absolute values of the terms
  };
  std::vector<Expected> expected_;
};

}  // namespace charonia::cuda
