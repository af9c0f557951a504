// The quantised GEMM with wgmma (quant_wgmma_kernel.h), compared with double precision: formats, types, odd shapes, and
// numbers of thread blocks, which begin and end within tiles.
#include <gtest/gtest.h>

#include <algorithm>
#include <optional>

#include "base/text.h"
#include "cuda/fake_blas.h"
#include "cuda/gemm_problem.h"
#include "cuda/quant_formats.h"
#include "ops/cuda/kernels/quant_gemm.h"

namespace charonia::cuda {
namespace {

using ops::Activations;
using ops::Code;
using ops::Matrix;
using ops::Random;

class QuantWgmmaTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!device_info(0).wgmma) GTEST_SKIP() << "wgmma needs compute capability 9.0 and kernels for 90a";
  }
};

struct Shape {
  Format format;
  DType type;
  std::int64_t n, k;
  int rows;
};

std::vector<GemmTactic> wgmma_tiles(const Gemm& gemm) {
  auto tactics = wgmma_tactics(device_info(0), gemm, SumOrder::any);
  for (auto& one : tactics) one.k_blocks = 1;
  tactics.erase(std::ranges::unique(tactics).begin(), tactics.end());
  return tactics;
}

// Compares all wgmma tiles for these numbers of rows, with these numbers of blocks.
void check(Random& random, const Shape& shape, std::vector<int> of_rows, std::vector<int> of_blocks) {
  const auto& [format, type, n, k, rows] = shape;
  QuantProblem problem(random, format, n, k, rows, type, type);
  auto& stream = problem.stream;
  auto gemm = problem.gemm();
  const std::int64_t stride = round_up(k, 64);
  const DeviceMemory prepared(static_cast<std::size_t>(rows * stride) * size_of(type)), scales(rows * sizeof(float));
  if (needs_prepared_inputs(gemm)) {
    prepare_quant_inputs(stream, gemm, prepared.data(), stride, scales.as<float>());
    gemm.in = prepared.data(), gemm.in_stride = stride;
    gemm.quant->prepared = true;
    if (has_integer_inputs(format.format)) gemm.quant->row_scales = scales.as<float>();
  }
  for (const int count : of_rows) {
    gemm.rows = count;
    const auto tactics = wgmma_tiles(gemm);
    ASSERT_FALSE(tactics.empty());
    for (auto tactic : tactics) {
      for (const int blocks : of_blocks) {
        SCOPED_TRACE(cat(ops::to_string(format.format), ", ", n, " x ", k, ", ", count, " rows in tiles of ",
                         tactic.tile_rows, " x ", tactic.tile_columns, ", ", blocks, " blocks"));
        tactic.k_blocks = blocks;
        gemm.out_type = blocks % 2 == 0 ? DType::f32 : type;
        const DeviceMemory workspace(gemm_workspace_bytes(tactic, gemm));
        std::optional<Matrix> first;
        for (int turn = 0; turn < 2; ++turn) {
          const MatrixOnDevice out(stream, Matrix(gemm.out_type, count, n));
          gemm.out = out.tensor().data;
          cuda::gemm(stream, device_info(0), gemm, tactic, workspace.data());
          const auto found = out.host();
          check_counters(stream, workspace);
          if (!first) {
            problem.check(found);
            if (::testing::Test::HasFatalFailure()) return;
            first = found;
          }
          for (int r = 0; r < count; ++r) ASSERT_TRUE(found.same_bits(r, *first, r)) << "row " << r;
        }
      }
    }
  }
}

TEST_F(QuantWgmmaTest, a_tile_of_every_code_equals_its_product_in_double_precision) {
  Random random(150);
  for (const auto type : {DType::bf16, DType::f16}) {
    for (const auto code : {Code::u4, Code::i8, Code::f8_e4m3}) {
      check(random, {{{code, 64, false, DType::bf16}}, type, 256, 64, 32}, {32}, {1});
    }
    check(random, {{{Code::f4_e2m1, 32, false, DType::f8_e8m0}}, type, 256, 64, 32}, {32}, {1});
    if (HasFatalFailure()) return;
  }
}

TEST_F(QuantWgmmaTest, every_format_equals_its_product_in_double_precision) {
  Random random(151);
  int turn = 0;
  for (const std::int64_t k : {128, 640}) {
    for (const auto& format : formats(k)) {
      const auto type = turn++ % 2 == 0 ? DType::bf16 : DType::f16;
      if (!is_fast(format.format, type, k) || is_w8a8(format.format, type, k, device_info(0))) continue;
      const int rows = turn % 3 == 0 ? 17 : turn % 3 == 1 ? 39 : 75;
      check(random, {format, type, 203, k, rows}, {rows}, {3});
      if (HasFatalFailure()) return;
    }
  }
}

// Tiles beyond the outputs and rows, columns that are no multiple of a step, and blocks with parts of one to three
// tiles.
TEST_F(QuantWgmmaTest, odd_shapes_and_numbers_of_blocks_equal_their_product) {
  Random random(152);
  const Shape shapes[] = {{{{Code::u4, 328, true, DType::f16}}, DType::bf16, 333, 328, 130},
                          {{{Code::u4, 128, true, DType::f32}}, DType::bf16, 520, 896, 65},
                          {{{Code::i8, 200, true, DType::bf16}}, DType::f16, 40, 200, 33},
                          {{{Code::f4_e2m1, 32, false, DType::f8_e8m0}}, DType::bf16, 289, 352, 70}};
  for (const auto& shape : shapes) {
    check(random, shape, {shape.rows, 18}, {1, 2, 5, 60});
    if (HasFatalFailure()) return;
  }
}

TEST_F(QuantWgmmaTest, tactics_are_offered_only_for_any_order_of_sums_and_17_to_512_rows) {
  Random random(153);
  Stream stream;
  MatrixUpload upload(stream);
  const auto source = random_source(random, 64, 128, {{Code::u4, 128}});
  const ops::QuantSource* const part = &source;
  const CudaQuantLinear linear({&part, 1}, {}, DType::bf16, upload);
  auto gemm = linear.gemm();
  for (const int rows : {1, 16, 17, 64, 512, 513}) {
    gemm.rows = rows;
    EXPECT_EQ(!wgmma_tactics(device_info(0), gemm, SumOrder::any).empty(), rows >= 17 && rows <= 512) << rows;
    const auto fixed = gemm_tactics(device_info(0), gemm, SumOrder::fixed);
    const auto any = gemm_tactics(device_info(0), gemm, SumOrder::any);
    for (const auto& tactic : fixed) EXPECT_NE(tactic.kernel, GemmTactic::Kernel::wgmma);
    EXPECT_NE(any.front().kernel, GemmTactic::Kernel::wgmma);  // the choice without measurements
    auto older = device_info(0);
    older.wgmma = false;
    for (const auto& tactic : gemm_tactics(older, gemm, SumOrder::any)) {
      EXPECT_NE(tactic.kernel, GemmTactic::Kernel::wgmma);
    }
  }
}

TEST_F(QuantWgmmaTest, several_numbers_of_thread_blocks_are_offered) {
  const QuantWeight quant{.format = {Code::u4, 128}};
  auto device = device_info(0);
  device.sms = 132;
  const auto blocks = [&](std::int64_t rows, std::int64_t n, std::int64_t k) {
    const Gemm gemm{.type = DType::bf16, .weight_stride = k, .rows = rows, .n = n, .k = k, .quant = quant};
    std::vector<int> out;
    for (const auto& one : gemm_tactics(device, gemm, SumOrder::any)) {
      if (one.kernel == GemmTactic::Kernel::wgmma && one.tile_rows == 64) out.push_back(one.k_blocks);
    }
    return out;
  };
  EXPECT_EQ(blocks(64, 4096, 4096), (std::vector{16, 32, 64, 132}));
  EXPECT_EQ(blocks(64, 28672, 4096), (std::vector{112, 132}));
  EXPECT_EQ(blocks(128, 28672, 4096), (std::vector{112, 132})) << "two whole tiles each";
  EXPECT_EQ(blocks(65, 25856, 4096), (std::vector{101, 132}));
  EXPECT_EQ(blocks(64, 1024, 256), (std::vector{4})) << "four steps each";
}

constexpr Format kInt4{{Code::u4, 128, true, DType::bf16}};

TEST_F(QuantWgmmaTest, launches_in_a_graph_share_a_workspace) {
  Random random(155);
  QuantProblem problems[] = {{random, kInt4, 520, 640, 40, DType::bf16, DType::bf16},
                             {random, kInt4, 300, 1024, 40, DType::bf16, DType::bf16}};
  std::vector<LaunchedGemm> gemms;
  for (auto& problem : problems) {
    const auto gemm = problem.gemm();
    auto tactic = wgmma_tiles(gemm).front();
    tactic.k_blocks = gemms.empty() ? 30 : 13;
    run_gemm(problem.stream, gemm, tactic);
    gemms.push_back({gemm, tactic, problem.out.host()});
    problem.check(gemms.back().expected);
  }
  check_launches_in_a_graph(gemms);
}

TEST_F(QuantWgmmaTest, the_fastest_candidate_at_the_start_computes_the_gemm) {
  Random random(154);
  for (const bool reproducible : {false, true}) {
    QuantProblem problem(random, kInt4, 300, 256, 40, DType::bf16, DType::bf16);
    GemmRunner::Options options;
    options.reproducible = reproducible;
    options.unproven = true;
    options.timer = falling_times();
    GemmRunner runner(device_info(0), std::move(options));
    const auto gemm = problem.gemm();
    runner.reserve(gemm);
    runner.prepare(problem.stream, {&gemm, 1}, 40);
    const auto report = runner.report();
    EXPECT_EQ(runner.warning().find("differ"), std::string::npos) << runner.warning();
    EXPECT_EQ(report.back().find("own wgmma 64 x 256, 8 stages") != std::string::npos, !reproducible) << report.back();
    runner.run(problem.stream, gemm);
    problem.check(problem.out.host());
    if (HasFatalFailure()) return;
  }
}

}  // namespace
}  // namespace charonia::cuda
