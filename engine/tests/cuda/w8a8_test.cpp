// GEMMs of 8-bit numbers on the CUDA device: int8 compared with the CPU, bit for bit; FP8 compared with double
// precision; all kernels compared with each other.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "cuda/fake_blas.h"
#include "cuda/gemm_problem.h"
#include "cuda/quant_formats.h"
#include "ops/cpu/make_cpu_ops.h"
#include "ops/cuda/cuda_quant_weights.h"
#include "ops/cuda/gemm/gemm_runner.h"
#include "ops/cuda/gemm/integer_parts.h"
#include "ops/cuda/kernels/w8a8_gemm.h"
#include "ops/cuda/make_cuda_ops.h"
#if defined(CHARONIA_CUDA_ON_HOST)  // calls device functions
#include "ops/cuda/device/portable.h"
#endif

namespace charonia::cuda {
namespace {

using ops::Activations;
using ops::Code;
using ops::Matrix;
using ops::MemoryQuantSource;
using ops::Random;
using enum ops::Activations;

// Weights of whole rows: int8 with float scales, FP8 with bf16 scales.
ops::QuantFormat whole_rows(std::int64_t k, Activations how) {
  if (how == f8_token || how == f8_tensor) return {Code::f8_e4m3, k, false, DType::bf16, how};
  return {Code::i8, k, false, DType::f32, how};
}

std::unique_ptr<ops::Linear> make_linear(ops::Ops& ops, const MemoryQuantSource& source, DType type,
                                         std::span<const ops::HostMatrix> bias = {}) {
  const ops::QuantSource* const part = &source;
  return ops.make_quantised_linear({&part, 1}, bias, type);
}

Matrix multiply(ops::Ops& ops, const ops::Linear& linear, const Matrix& in) {
  const ops::DeviceMatrix rows(ops, in), out(ops, DType::f32, in.rows, linear.out_features());
  ops.linear(out.tensor(), rows.tensor(), linear);
  return out.host();
}

void expect_same_bits(const Matrix& found, const Matrix& expected, const std::string& what) {
  for (std::int64_t r = 0; r < found.rows; ++r) ASSERT_TRUE(found.same_bits(r, expected, r)) << what << ", row " << r;
}

// A weight on the device, and GEMMs with it.
class W8a8Test : public ::testing::Test {
 protected:
  // Runs all tactics for several numbers of rows; check(out, what) checks the output.
  template <class Check>
  void for_all_tactics(const CudaW8a8Linear& linear, const Matrix& in, DType out_type, SumOrder order, Check check) {
    const auto info = device_info(0);
    const MatrixOnDevice on_device(stream_, in);
    for (const std::int64_t n : {in.rows, std::int64_t{40}, std::int64_t{11}, std::int64_t{1}}) {
      if (n > in.rows) continue;
      auto rows = on_device.tensor();
      rows.rows = n;
      PreparedGemm prepared(stream_, linear, rows);
      for (const auto& tactic : gemm_tactics(info, prepared.gemm, order)) {
        if (unproven(tactic)) continue;  // W8a8WgmmaTest
        const int gap = tactic.stages % 3 == 0 ? 0 : 3;  // aligned or not
        const MatrixOnDevice out(stream_, Matrix(out_type, n, prepared.gemm.n, gap));
        prepared.set_out(out.tensor());
        const DeviceMemory workspace(gemm_workspace_bytes(tactic, prepared.gemm));
        cuda::gemm(stream_, info, prepared.gemm, tactic, workspace.data());
        check(out.host(), to_string(tactic) + ", " + std::to_string(n) + " rows");
        if (HasFatalFailure()) return;
      }
    }
  }

  Random random_{151};
  Stream stream_;
  MatrixUpload upload_{stream_};
};

#if defined(CHARONIA_CUDA_ON_HOST)
TEST_F(W8a8Test, floats_become_the_nearest_fp8_number) {
  std::vector<float> all{0, -0.0F, 448, 449, 1e9F, -1e9F, 0x1p-10F, 0x1.8p-10F, 0x1.8p-9F, 1e-30F};
  for (int code = 0; code < 256; ++code) {
    const auto bits = static_cast<std::uint8_t>(code);
    if ((bits & 0x7fU) == 0x7fU) continue;
    const float number = number_of(Code::f8_e4m3, bits),
                next = number_of(Code::f8_e4m3, (bits & 0x7fU) == 0x7eU ? bits : bits + 1);
    EXPECT_EQ(e4m3_to_float(bits), number);
    EXPECT_EQ(e4m3_from_float(number), bits);
    all.push_back((number + next) / 2);  // ties go to the even number
  }
  std::normal_distribution<float> some(0, 30);
  for (int i = 0; i < 1000; ++i) all.push_back(some(random_));
  for (const float x : all) EXPECT_EQ(e4m3_to_float(e4m3_from_float(x)), ops::nearest_e4m3(x)) << x;
  EXPECT_EQ(e4m3_from_float(NAN) & 0x7f, 0x7f);
}
#endif

TEST_F(W8a8Test, integers_give_the_bits_of_the_cpu_with_all_tactics) {
  struct Case {
    std::int64_t n, k, rows;
    DType type, out;
    Activations how;
    bool packed, ordered;
  };
  // Parts of K with different lengths, and partial tiles of outputs.
  const Case cases[] = {{72, 1552, 130, DType::bf16, DType::bf16, i8_token, false, false},
                        {44, 1520, 70, DType::f16, DType::f16, i8_tensor, true, true},
                        {40, 16, 40, DType::f32, DType::f32, i8_token, false, true},
                        {24, 560, 11, DType::bf16, DType::f32, i8_token, true, false}};
  const auto cpu = ops::make_cpu_ops(1);
  for (const auto& c : cases) {
    auto source = MemoryQuantSource::random(random_, c.n, c.k, whole_rows(c.k, c.how));
    if (c.ordered) {
      std::vector<std::int32_t> order(static_cast<std::size_t>(c.k));
      std::iota(order.rbegin(), order.rend(), 0);
      source.set_order(order);
    }
    const auto bias = Matrix::random(random_, DType::f32, c.n, 1);
    const auto host = bias.host();
    const auto in = Matrix::random(random_, c.type, c.rows, c.k, 1, c.ordered ? 3 : 0);
    Matrix on_cpu(cpu->precision(c.type).activation, c.rows, c.k), expected(c.out, c.rows, c.n);
    for (std::int64_t i = 0; i < c.rows * c.k; ++i) on_cpu.set(i / c.k, i % c.k, in.at(i / c.k, i % c.k));
    const auto exact = multiply(*cpu, *make_linear(*cpu, source, c.type, {&host, 1}), on_cpu);
    for (std::int64_t i = 0; i < c.rows * c.n; ++i) expected.set(i / c.n, i % c.n, exact.at(i / c.n, i % c.n));
    const auto weight = w8a8_linear(source, c.type, c.packed, upload_, {&host, 1});
    for (const auto order : {SumOrder::fixed, SumOrder::any}) {
      for_all_tactics(weight, in, c.out, order,
                      [&](const Matrix& out, const std::string& what) { expect_same_bits(out, expected, what); });
      if (HasFatalFailure()) return;
    }
  }
}

TEST_F(W8a8Test, the_greatest_sum_of_integers_is_exact) {
  constexpr std::int64_t kK = std::int64_t{1} << 17;
  MemoryQuantSource source(16, kK, whole_rows(kK, i8_token));
  std::ranges::fill(source.scales, 1.0F);
  std::ranges::fill(source.codes, std::uint8_t{0x80});
  const auto device = ops::make_cuda_ops({});
  Matrix in(DType::bf16, 2, kK);
  for (std::int64_t c = 0; c < kK; ++c) in.set(0, c, 127), in.set(1, c, -127);
  const auto found = multiply(*device, *make_linear(*device, source, DType::bf16), in);
  for (std::int64_t o = 0; o < 16; ++o) {
    EXPECT_EQ(found.at(0, o), -128.0F * 127 * kK);
    EXPECT_EQ(found.at(1, o), 128.0F * 127 * kK);
  }
  EXPECT_FALSE(is_w8a8(whole_rows(kK + 16, i8_token), DType::bf16, kK + 16, device_info(0)));
}

TEST_F(W8a8Test, fp8_equals_its_product_in_double_precision_with_all_tactics) {
  for (const bool packed : {false, true}) {
    constexpr std::int64_t kN = 72, kK = 1040, kRows = 130;  // two parts of K with different lengths
    const auto type = packed ? DType::f16 : DType::bf16;
    const auto source = MemoryQuantSource::random(random_, kN, kK, whole_rows(kK, packed ? f8_tensor : f8_token));
    const auto weight = w8a8_linear(source, type, packed, upload_);
    const auto in = Matrix::random(random_, type, kRows, kK);
    std::optional<Matrix> first;
    for_all_tactics(weight, in, DType::f32, SumOrder::fixed, [&](const Matrix& out, const std::string& what) {
      if (first) return expect_same_bits(out, *first, what);
      first = out;
      check_product(out, in, values(source), source.format(), source.input);
    });
    if (HasFatalFailure()) return;
    const auto few = in.slice(0, 40);
    for_all_tactics(weight, few, DType::f32, SumOrder::any, [&](const Matrix& out, const std::string& what) {
      for (std::int64_t r = 0; r < out.rows; ++r) {
        for (std::int64_t o = 0; o < kN; ++o) ASSERT_NEAR(out.at(r, o), first->at(r, o), 1e-2) << what;
      }
    });
  }
}

// Rows of zeros of both signs give zeros; rows that are not finite give NaN; neither affects its neighbours.
TEST_F(W8a8Test, rows_of_zeros_or_nan_do_not_affect_others) {
  constexpr std::int64_t kN = 40, kK = 80, kRows = 45;
  for (const auto how : {i8_token, i8_tensor, f8_token, f8_tensor}) {
    const auto source = MemoryQuantSource::random(random_, kN, kK, whole_rows(kK, how));
    const auto weight = w8a8_linear(source, DType::bf16, false, upload_);
    const auto plain = Matrix::random(random_, DType::bf16, kRows, kK);
    auto in = plain;
    // Row r has kind r % 5.
    enum Kind { usual, zeros, negative_zeros, with_nan, with_infinity };
    for (std::int64_t r = 0; r < kRows; ++r) {
      const auto kind = static_cast<Kind>(r % 5);
      for (std::int64_t c = 0; c < kK && (kind == zeros || kind == negative_zeros); ++c) {
        in.set(r, c, kind == zeros ? 0.0F : -0.0F);
      }
      if (kind == with_nan) in.set(r, 79, NAN);
      if (kind == with_infinity) in.set(r, 0, -INFINITY);
    }
    std::optional<Matrix> expected;
    for_all_tactics(weight, plain, DType::f32, SumOrder::fixed, [&](const Matrix& out, const std::string&) {
      if (!expected) expected = out;
    });
    for_all_tactics(weight, in, DType::f32, SumOrder::fixed, [&](const Matrix& out, const std::string& what) {
      for (std::int64_t r = 0; r < out.rows; ++r) {
        const auto kind = static_cast<Kind>(r % 5);
        for (std::int64_t o = 0; o < kN; ++o) {
          const float found = out.at(r, o);
          ASSERT_TRUE(kind == usual              ? found == expected->at(r, o)
                      : kind <= negative_zeros ? found == 0
                                               : std::isnan(found))
              << what << ", row " << r << ": " << found;
        }
      }
    });
    if (HasFatalFailure()) return;
  }
}

// If the library rejects a GEMM, a built-in kernel computes it with the same inputs.
TEST_F(W8a8Test, the_library_gets_only_fp8_in_rows) {
  constexpr std::int64_t kN = 40, kK = 64, kRows = 50;
  for (const bool fp8 : {true, false}) {
    const auto source = MemoryQuantSource::random(random_, kN, kK, whole_rows(kK, fp8 ? f8_token : i8_token));
    const MatrixOnDevice in(stream_, Matrix::random(random_, DType::bf16, kRows, kK));
    std::optional<Matrix> first;
    for (const bool packed : {false, true}) {
      FakeBlas::Log log{.runs = {}, .rejects = [](const Gemm& gemm) {
                          EXPECT_TRUE(is_w8a8(gemm) && gemm.quant->prepared && gemm.quant->row_scales != nullptr);
                          return true;
                        }};
      GemmRunner::Options options;
      options.blas = std::make_unique<FakeBlas>(log);
      GemmRunner runner(device_info(0), std::move(options));
      const auto weight = w8a8_linear(source, DType::bf16, packed, upload_);
      auto gemm = weight.gemm();
      runner.reserve(gemm);
      const MatrixOnDevice out(stream_, Matrix(DType::f32, kRows, kN));
      gemm.in = in.tensor().data, gemm.in_stride = kK, gemm.rows = kRows;
      gemm.out = out.tensor().data, gemm.out_stride = kN;
      runner.run(stream_, gemm);
      EXPECT_EQ(log.runs.size(), fp8 && !packed ? 1U : 0U);
      EXPECT_EQ(runner.rejected(), std::ssize(log.runs));
      if (first) expect_same_bits(out.host(), *first, "packed");
      first = out.host();
    }
  }
}

// If a library is available: on a machine with a GPU.
TEST_F(W8a8Test, fp8_of_the_library_equals_built_in_kernels_except_for_rounding) {
  std::string why;
  const auto blas = load_cublas(why);
  if (!blas) GTEST_SKIP() << why;
  constexpr std::size_t kWorkspaceBytes = std::size_t{32} << 20;
  constexpr std::int64_t kN = 272, kK = 1024, kRows = 65;
  const auto info = device_info(0);
  if (!info.fp8) GTEST_SKIP() << "the device does not multiply FP8";
  const auto source = MemoryQuantSource::random(random_, kN, kK, whole_rows(kK, f8_token));
  const auto weight = w8a8_linear(source, DType::bf16, false, upload_);
  const MatrixOnDevice in(stream_, Matrix::random(random_, DType::bf16, kRows, kK)),
      out(stream_, Matrix(DType::bf16, kRows, kN));
  PreparedGemm prepared(stream_, weight, in.tensor());
  prepared.set_out(out.tensor());
  const auto own = gemm_tactics(info, prepared.gemm).front();
  const DeviceMemory own_workspace(gemm_workspace_bytes(own, prepared.gemm)), workspace(kWorkspaceBytes);
  cuda::gemm(stream_, info, prepared.gemm, own, own_workspace.data());
  const auto right = out.host();
  const auto tactics = blas->tactics(prepared.gemm, kWorkspaceBytes);
  if (tactics.empty()) GTEST_SKIP() << blas->version() << " has no FP8 GEMMs with scales of rows on this device";
  for (const auto& tactic : tactics) {
    ASSERT_TRUE(blas->serves(prepared.gemm, tactic, kWorkspaceBytes));
    ASSERT_TRUE(blas->run(stream_, prepared.gemm, tactic, workspace.data(), kWorkspaceBytes));
    const auto found = out.host();
    for (std::int64_t r = 0; r < kRows; ++r) {
      for (std::int64_t o = 0; o < kN; ++o) {
        ASSERT_NEAR(found.at(r, o), right.at(r, o), 0.01 * std::abs(right.at(r, o)) + 0.5) << r << ", " << o;
      }
    }
  }
}

// int8 with wgmma (w8a8_wgmma.cu), compared with the tile kernel bit for bit.
class W8a8WgmmaTest : public W8a8Test {
 protected:
  void SetUp() override {
    if (!device_info(0).wgmma) GTEST_SKIP() << "wgmma needs compute capability 9.0 and kernels for 90a";
  }

  Matrix run(const PreparedGemm& prepared, const GemmTactic& tactic, const MatrixOnDevice& out, const Matrix& before) {
    out.upload(before);
    run_gemm(stream_, prepared.gemm, tactic);
    return out.host();
  }
};

// Tiles beyond the rows, outputs and columns, outputs that are not aligned, both layouts, and blocks that compute one
// to many tiles, or parts of them.
TEST_F(W8a8WgmmaTest, every_tile_and_number_of_blocks_gives_the_bits_of_the_tile_kernel) {
  struct Case {
    std::int64_t n, k, rows;
    DType type, out;
    Activations how;
    bool packed, bias;
    std::int64_t gap;
  };
  const Case cases[] = {{520, 1040, 18, DType::bf16, DType::bf16, i8_token, false, true, 0},
                        {264, 400, 64, DType::f16, DType::f16, i8_tensor, true, false, 3},
                        {333, 272, 130, DType::bf16, DType::f32, i8_token, true, true, 3},
                        {300, 144, 300, DType::bf16, DType::bf16, i8_token, false, true, 4},
                        {128, 16, 65, DType::f32, DType::f32, i8_token, false, false, 0}};
  for (const auto& c : cases) {
    const auto source = MemoryQuantSource::random(random_, c.n, c.k, whole_rows(c.k, c.how));
    const auto bias = Matrix::random(random_, DType::f32, c.n, 1);
    const ops::HostMatrix biases[] = {bias.host()};
    const auto weight = w8a8_linear(source, c.type, c.packed, upload_, {biases, c.bias ? std::size_t{1} : 0});
    auto in = Matrix::random(random_, c.type, c.rows, c.k);
    in.set(c.rows - 1, 3, INFINITY);  // its outputs are NaN
    const MatrixOnDevice on_device(stream_, in);
    PreparedGemm prepared(stream_, weight, on_device.tensor());
    const Matrix untouched(c.out, c.rows, c.n, c.gap);
    const MatrixOnDevice out(stream_, untouched);
    prepared.set_out(out.tensor());
    const auto expected = run(prepared, reference_tactic(device_info(0), prepared.gemm), out, untouched);
    std::vector<GemmTactic> tiles;
    for (auto tactic : wgmma_tactics(device_info(0), prepared.gemm, SumOrder::fixed)) {
      if (tactic.sums == GemmTactic::Sums::parts) tiles.push_back(tactic);
    }
    ASSERT_EQ(tiles.size(), c.rows > 128 ? 2U : 1U);
    for (auto tactic : tiles) {
      for (const int blocks : {1, 2, 5, 60}) {
        for (const auto sums : {GemmTactic::Sums::parts, GemmTactic::Sums::blocks}) {
          if (sums == GemmTactic::Sums::blocks && tactic.stages == 4) continue;  // the largest tile is never shared
          tactic.k_blocks = blocks, tactic.sums = sums;
          const auto found = run(prepared, tactic, out, untouched);
          const auto what = to_string(tactic) + ", " + std::to_string(c.rows) + " rows";
          expect_same_bits(found, expected, what);
          EXPECT_TRUE(found.bytes == expected.bytes) << what << ": between two rows of the output";
          if (HasFatalFailure() || HasNonfatalFailure()) return;
        }
      }
    }
  }
}

TEST_F(W8a8WgmmaTest, tactics_are_offered_for_integers_and_17_rows_or_more) {
  auto device = device_info(0);
  device.sms = 132;
  const auto offered = [&](Activations how, std::int64_t rows, std::int64_t n = 4096) {
    const float scale = 1;
    const Gemm gemm{.type = DType::bf16,
                    .weight_stride = 4096,
                    .rows = rows,
                    .n = n,
                    .k = 4096,
                    .quant = QuantWeight{.format = whole_rows(4096, how), .column_scales = &scale}};
    EXPECT_FALSE(unproven(gemm_tactics(device, gemm).front())) << "the choice without measurements";
    const auto tactics = wgmma_tactics(device, gemm, SumOrder::fixed);
    EXPECT_EQ(tactics, wgmma_tactics(device, gemm, SumOrder::any));
    std::vector<std::string> out;
    for (const auto& one : tactics) out.push_back(to_string(one));
    return out;
  };
  using Names = std::vector<std::string>;
  EXPECT_EQ(offered(i8_token, 16), Names{});
  EXPECT_EQ(offered(f8_token, 64), Names{});
  EXPECT_EQ(offered(i8_token, 64),
            (Names{"wgmma 64 x 256, 5 stages, 132 blocks", "wgmma 64 x 256, 5 stages, 32 blocks over k, one sum each",
                   "wgmma 64 x 256, 5 stages, 64 blocks over k, one sum each",
                   "wgmma 64 x 256, 5 stages, 128 blocks over k, one sum each"}))
      << "blocks that share tiles have four steps or more";
  EXPECT_EQ(offered(i8_tensor, 2048, 28672),
            (Names{"wgmma 128 x 128, 6 stages, 132 blocks", "wgmma 128 x 128, 6 stages, 132 blocks over k, one sum each",
                   "wgmma 128 x 256, 4 stages, 132 blocks"}));
  EXPECT_EQ(offered(i8_token, 513, 6144), offered(i8_token, 768, 6144)) << "one choice for all rows of a bucket";
  device.wgmma = false;
  EXPECT_EQ(offered(i8_token, 64), Names{});
}

// The first GEMM's blocks compute whole tiles and parts of tiles.
TEST_F(W8a8WgmmaTest, launches_in_a_graph_share_a_workspace) {
  constexpr std::int64_t kRows = 40, kK = 656;
  const MatrixOnDevice in(stream_, Matrix::random(random_, DType::bf16, kRows, kK));
  std::vector<CudaW8a8Linear> weights;
  std::vector<PreparedGemm> prepared;
  std::vector<LaunchedGemm> gemms;
  for (const auto& [n, blocks] : {std::pair{1000, 3}, {300, 7}}) {
    const auto source = MemoryQuantSource::random(random_, n, kK, whole_rows(kK, i8_token));
    weights.push_back(w8a8_linear(source, DType::bf16, false, upload_));
    auto& one = prepared.emplace_back(stream_, weights.back(), in.tensor());
    const Matrix untouched(DType::bf16, kRows, n);
    const MatrixOnDevice out(stream_, untouched);
    one.set_out(out.tensor());
    const GemmTactic tactic{GemmTactic::Kernel::wgmma, 64, 256, 5, blocks, GemmTactic::Sums::blocks};
    gemms.push_back({one.gemm, tactic, run(one, reference_tactic(device_info(0), one.gemm), out, untouched)});
    expect_same_bits(run(one, tactic, out, untouched), gemms.back().expected, to_string(tactic));
  }
  check_launches_in_a_graph(gemms);
}

TEST_F(W8a8WgmmaTest, the_fastest_candidate_at_the_start_computes_the_gemm_in_both_modes) {
  constexpr std::int64_t kRows = 40, kN = 300, kK = 272;
  const auto source = MemoryQuantSource::random(random_, kN, kK, whole_rows(kK, i8_token));
  const MatrixOnDevice in(stream_, Matrix::random(random_, DType::bf16, kRows, kK));
  std::optional<Matrix> first;
  for (const bool reproducible : {false, true}) {
    const auto weight = w8a8_linear(source, DType::bf16, reproducible, upload_);
    for (const bool unproven : {false, true}) {
      GemmRunner::Options options;
      options.reproducible = reproducible;
      options.unproven = unproven;
      options.timer = falling_times();
      GemmRunner runner(device_info(0), std::move(options));
      auto gemm = weight.gemm();
      gemm.out_type = DType::bf16;
      runner.reserve(gemm);
      runner.prepare(stream_, {&gemm, 1}, kRows);
      EXPECT_EQ(runner.warning().find("differ"), std::string::npos) << runner.warning();
      const auto report = runner.report();
      EXPECT_EQ(report.back().find("own wgmma 64 x 256, 5 stages") != std::string::npos, unproven) << report.back();
      const MatrixOnDevice out(stream_, Matrix(DType::bf16, kRows, kN));
      gemm.in = in.tensor().data, gemm.in_stride = kK, gemm.rows = kRows;
      gemm.out = out.tensor().data, gemm.out_stride = kN;
      runner.run(stream_, gemm);
      if (first) expect_same_bits(out.host(), *first, report.back());
      first = out.host();
      if (HasFatalFailure()) return;
    }
  }
}

// If a library is available: on a machine with a GPU.
TEST_F(W8a8Test, int8_of_the_library_gives_the_bits_of_built_in_kernels) {
  std::string why;
  const auto blas = load_cublas(why);
  if (!blas) GTEST_SKIP() << why;
  constexpr std::size_t kWorkspaceBytes = std::size_t{32} << 20;
  constexpr std::int64_t kN = 304, kK = 1024, kRows = 65;  // the last part of 128 rows is shorter
  const auto info = device_info(0);
  const auto source = MemoryQuantSource::random(random_, kN, kK, whole_rows(kK, i8_token));
  const auto weight = w8a8_linear(source, DType::bf16, false, upload_);
  const MatrixOnDevice in(stream_, Matrix::random(random_, DType::bf16, kRows, kK)),
      out(stream_, Matrix(DType::bf16, kRows, kN));
  PreparedGemm prepared(stream_, weight, in.tensor());
  prepared.set_out(out.tensor());
  const auto own = gemm_tactics(info, prepared.gemm).front();
  const DeviceMemory own_workspace(gemm_workspace_bytes(own, prepared.gemm)), workspace(kWorkspaceBytes);
  cuda::gemm(stream_, info, prepared.gemm, own, own_workspace.data());
  const auto right = out.host();
  for (const std::int64_t rows : {128, 384}) {
    const DeviceMemory sums(integer_part_bytes(prepared.gemm, rows));
    const auto part = integer_part(prepared.gemm, 0, std::min(rows, kN), sums.data());
    const auto tactics = blas->tactics(part, kWorkspaceBytes);
    const auto begin_of_last = (kN - 1) / rows * rows;
    const auto last = integer_part(prepared.gemm, begin_of_last, kN - begin_of_last, sums.data());
    int count = 0;
    for (const auto& tactic : tactics) {
      if (!blas->serves(last, tactic, kWorkspaceBytes)) continue;
      ++count;
      ASSERT_TRUE(blas->serves(part, tactic, kWorkspaceBytes));
      ASSERT_TRUE(run_integers(stream_, *blas, prepared.gemm, rows, tactic, sums.data(), workspace.data(),
                               kWorkspaceBytes));
      expect_same_bits(out.host(), right, std::to_string(rows) + " rows at a time");
    }
    EXPECT_GT(count, 0) << blas->version() << ", " << rows << " rows at a time";
  }
}

// Codes that a norm or a gate writes give the same bits as its output, quantised separately.
TEST_F(W8a8Test, norms_and_gates_write_codes_with_the_bits_of_their_outputs) {
  const auto device = ops::make_cuda_ops({.reproducible = true});
  struct Case {
    std::int64_t k;
    DType type;
    Activations how;
    bool delta;
    float scale = 1;
    bool weighted = true, subtract_mean = false;
  };
  const Case cases[] = {{64, DType::bf16, i8_token, false},
                        {272, DType::f16, i8_tensor, true},
                        {8208, DType::bf16, i8_token, true},    // two vectors per thread
                        {16400, DType::bf16, i8_token, false},  // more than a gate keeps; a norm writes no codes
                        {528, DType::bf16, f8_token, true},
                        {64, DType::f16, f8_tensor, false},
                        {272, DType::bf16, i8_token, true, 0.22F},
                        {8208, DType::bf16, i8_token, true, 1, false},
                        {528, DType::f16, i8_token, true, 1, true, true}};
  for (const auto& c : cases) {
    constexpr std::int64_t kN = 24, kRows = 5;
    const auto source = MemoryQuantSource::random(random_, kN, c.k, whole_rows(c.k, c.how));
    const auto weight = make_linear(*device, source, c.type);
    const auto before = Matrix::random(random_, DType::f32, kRows, c.k);
    auto gate_up = Matrix::random(random_, c.type, kRows, 2 * c.k);
    gate_up.set(3, 7, INFINITY);  // a row that is not finite, in both cases
    const Matrix untouched(c.type, kRows, c.k);
    const ops::DeviceMatrix factors(*device, Matrix::random(random_, DType::f32, 1, c.k)),
        added(*device, Matrix::random(random_, c.type, kRows, c.k)), both(*device, gate_up);
    struct Results {
      Matrix out, residual, normed;
    };
    const auto run = [&](bool fused, bool gate) -> Results {
      const ops::DeviceMatrix in(*device, before), middle(*device, untouched), out(*device, DType::f32, kRows, kN);
      if (fused) device->announce_linear(*weight);
      if (gate) {
        device->gated_activation(middle.tensor(), both.tensor(), ops::Activation::silu);
      } else {
        device->rms_norm(middle.tensor(), in.tensor(), c.delta ? added.tensor() : ops::Tensor{},
                         {.weight = c.weighted ? factors.floats() : nullptr,
                          .eps = 1e-5F,
                          .delta_scale = c.scale,
                          .subtract_mean = c.subtract_mean});
      }
      device->linear(out.tensor(), middle.tensor(), *weight);
      return {out.host(), in.host(), middle.host()};
    };
    for (const bool gate : {false, true}) {
      if (!gate && c.k > 16384) continue;
      const auto expected = run(false, gate), found = run(true, gate);
      const auto what = to_string(source.format()) + (gate ? ", gate" : ", norm");
      expect_same_bits(found.out, expected.out, what);
      expect_same_bits(found.residual, expected.residual, what + ", residual");
      expect_same_bits(found.normed, untouched, what + ", what codes stand for");
      if (HasFatalFailure()) return;
      EXPECT_EQ(std::isnan(found.out.at(3, 0)), gate);
    }
  }
}

// Codes belong to the weight that they were written for. Another weight, or one without codes, takes its input
// unchanged.
TEST_F(W8a8Test, codes_are_for_the_announced_weight) {
  const auto device = ops::make_cuda_ops({.reproducible = true});
  constexpr std::int64_t kN = 24, kK = 64, kRows = 3;
  const auto source = MemoryQuantSource::random(random_, kN, kK, whole_rows(kK, i8_token)),
             other = MemoryQuantSource::random(random_, kN, kK, whole_rows(kK, as_is));
  const auto weight = make_linear(*device, source, DType::bf16), plain = make_linear(*device, other, DType::bf16);
  const auto in = Matrix::random(random_, DType::bf16, kRows, kK);
  const ops::DeviceMatrix gate_up(*device, Matrix::random(random_, DType::bf16, kRows, 2 * kK)),
      middle(*device, DType::bf16, kRows, kK), out(*device, DType::f32, kRows, kN);
  const auto gate = [&] { device->gated_activation(middle.tensor(), gate_up.tensor(), ops::Activation::silu); };
  const auto of_middle = [&] {
    device->linear(out.tensor(), middle.tensor(), *plain);
    return out.host();
  };
  const auto expected = multiply(*device, *weight, in);
  device->announce_linear(*weight);
  gate();
  expect_same_bits(multiply(*device, *weight, in), expected, "another input");
  gate();
  const auto of_plain = of_middle();
  device->announce_linear(*plain);
  gate();
  expect_same_bits(of_middle(), of_plain, "a weight without codes");
}

TEST_F(W8a8Test, unsupported_weights_are_not_multiplied_in_8_bits) {
  auto device = device_info(0);
  const auto is = [&](const ops::QuantFormat& format, DType type = DType::bf16, std::int64_t k = 128) {
    return is_w8a8(format, type, k, device);
  };
  const auto int8 = whole_rows(128, i8_token), fp8 = whole_rows(128, f8_token);
  EXPECT_TRUE(is(int8) && is(int8, DType::f32) && is(fp8));
  EXPECT_FALSE(is(fp8, DType::f32));
  EXPECT_FALSE(is(whole_rows(64, i8_token))) << "groups";
  EXPECT_FALSE(is(whole_rows(100, i8_token), DType::bf16, 100));
  EXPECT_FALSE(is({Code::i8, 128, true, DType::f32, i8_token})) << "zeros";
  EXPECT_FALSE(is({Code::u4, 128, false, DType::f32, i8_token}));
  EXPECT_FALSE(is({Code::i8, 128, false, DType::f32, as_is}) || is({Code::f8_e4m3, 128, false, DType::f32, as_is}));
  device.fp8 = false;
  EXPECT_FALSE(is(fp8));
  EXPECT_TRUE(is(int8));
}

#if defined(CHARONIA_CUDA_ON_HOST)
// The library computes integer sums in parts, which a kernel scales.
class IntegerPartsTest : public RunnerTest {
 protected:
  static constexpr std::int64_t kN = 300, kK = 160, kRows = 40;

  IntegerPartsTest()
      : source_(MemoryQuantSource::random(random_, kN, kK, whole_rows(kK, i8_token))),
        in_(Matrix::random(random_, DType::bf16, kRows, kK)),
        bias_(Matrix::random(random_, DType::f32, kN, 1, 3)) {}

  GemmRunner::Options options() {
    auto options = runner_options([this] {
      double microseconds = 0;
      for (const auto& one : log_.runs) microseconds += library_ * static_cast<double>(one.algorithm);
      return microseconds > 0 ? microseconds : 100;
    });
    options.dequantised_bytes = part_bytes_;
    return options;
  }

  // Returns the outputs, and sets report_, warning_ and log_.runs of the last GEMM.
  Matrix run(GemmRunner::Options with, DType out_type, bool packed = false) {
    GemmRunner runner(device_info(0), std::move(with));
    const ops::HostMatrix biases[] = {bias_.host()};
    const auto weight = w8a8_linear(source_, DType::bf16, packed, upload_, biases);
    const MatrixOnDevice in(stream_, in_), out(stream_, Matrix(out_type, kRows, kN, 3));
    auto gemm = weight.gemm();
    gemm.rows = kRows, gemm.in = in.tensor().data, gemm.in_stride = in.tensor().stride;
    gemm.out = out.tensor().data, gemm.out_type = out_type, gemm.out_stride = out.tensor().stride;
    runner.reserve(gemm);
    runner.prepare(stream_, {&gemm, 1}, kRows);
    log_.runs.clear();
    runner.run(stream_, gemm);
    auto result = out.host();
    report_ = runner.report();
    warning_ = runner.warning();
    rejected_ = runner.rejected();
    return result;
  }
  // With built-in kernels only.
  Matrix expected(DType out_type) {
    auto with = options();
    with.memory.clear();
    with.blas = nullptr;
    return run(std::move(with), out_type);
  }

  Random random_{191};
  Stream stream_;
  MatrixUpload upload_{stream_};
  const MemoryQuantSource source_;
  const Matrix in_, bias_;
  double library_ = 1;
  std::size_t part_bytes_ = kRows * 48 * 128 * 4;
  std::vector<std::string> report_;
  std::string warning_;
  std::int64_t rejected_ = 0;
};

TEST_F(IntegerPartsTest, parts_give_the_bits_of_built_in_kernels_and_are_stored) {
  for (const auto out_type : {DType::bf16, DType::f32}) {
    const auto right = expected(out_type);
    for (const std::int64_t columns : {128, 256, 384}) {
      std::filesystem::remove_all(folder_);
      part_bytes_ = static_cast<std::size_t>(48 * columns) * sizeof(std::int32_t);
      for (const bool stored : {false, true}) {
        measured_ = 0;
        expect_same_bits(run(options(), out_type), right, "parts of " + std::to_string(columns));
        EXPECT_EQ(measured_ == 0, stored);
        EXPECT_EQ(log_.runs.size(), columns == 128 ? 3U : columns == 256 ? 2U : 1U);
        EXPECT_NE(report_.back().find(": cuBLASLt in int8, " + std::to_string(columns) + " rows at a time, "),
                  std::string::npos)
            << report_.back();
        EXPECT_EQ(warning_, "");
      }
    }
  }
}

TEST_F(IntegerPartsTest, parts_are_used_only_if_measured_faster_right_and_possible) {
  const auto right = expected(DType::bf16);
  const auto uses_library = [&](GemmRunner::Options with, bool packed = false) {
    std::filesystem::remove_all(folder_);
    expect_same_bits(run(std::move(with), DType::bf16, packed), right, "result");
    return !log_.runs.empty();
  };
  EXPECT_TRUE(uses_library(options()));
  EXPECT_FALSE(uses_library(options(), true)) << "packed weights";
  auto with = options();
  with.timer = nullptr;
  EXPECT_FALSE(uses_library(std::move(with))) << "not measured";
  with = options();
  with.reproducible = true;
  EXPECT_FALSE(uses_library(std::move(with)));
  with = options();
  with.dequantised_bytes = 1000;
  EXPECT_FALSE(uses_library(std::move(with))) << "no room for sums";
  library_ = 1000;
  EXPECT_FALSE(uses_library(options())) << "slower";
  library_ = 1;
  log_.wrong = 1;
  EXPECT_TRUE(uses_library(options())) << "another algorithm";
  EXPECT_NE(log_.runs.front().algorithm, 1U);
  EXPECT_NE(warning_.find("cuBLASLt in int8"), std::string::npos) << warning_;
  log_.wrong = 0;
  int asked = 0;
  log_.rejects = [&](const Gemm& gemm) { return gemm.type == DType::i8 && gemm.rows == kRows && ++asked > 0; };
  EXPECT_TRUE(uses_library(options()));
  EXPECT_EQ(asked, 1);
  EXPECT_EQ(rejected_, 1) << "built-in kernels compute it";
}
#endif

}  // namespace
}  // namespace charonia::cuda
