// The quantised GEMM with wgmma (quant_wgmma_kernel.h), compared with double precision: formats, types, odd shapes, and
// numbers of thread blocks, which begin and end within tiles.
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>

#include "base/text.h"
#include "cuda/quant_formats.h"
#include "device_arrays.h"
#include "ops/cuda/cuda_quant_weights.h"
#include "ops/cuda/gemm/gemm_runner.h"
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

struct Problem {
  Format format;
  DType type;
  std::int64_t n, k;
  int rows;
};

std::vector<GemmTactic> wgmma_tactics(const Gemm& gemm) {
  auto tactics = gemm_tactics(device_info(0), gemm, SumOrder::any);
  std::erase_if(tactics, [](const GemmTactic& one) { return one.kernel != GemmTactic::Kernel::wgmma; });
  return tactics;
}

std::vector<GemmTactic> wgmma_tiles(const Gemm& gemm) {
  auto tactics = wgmma_tactics(gemm);
  for (auto& one : tactics) one.k_blocks = 1;
  tactics.erase(std::ranges::unique(tactics).begin(), tactics.end());
  return tactics;
}

// Compares all wgmma tiles for these numbers of rows, with these numbers of blocks.
void check(Random& random, const Problem& problem, std::vector<int> of_rows, std::vector<int> of_blocks) {
  const auto& [format, type, n, k, rows] = problem;
  Stream stream;
  MatrixUpload upload(stream);
  const auto source = random_source(random, n, k, format);
  const ops::QuantSource* const part = &source;
  const auto bias = Matrix::random(random, DType::f32, n, 1, 3);
  const ops::HostMatrix biases[] = {bias.host()};
  const CudaQuantLinear linear({&part, 1}, biases, type, upload);
  const auto weight = values(source);
  std::vector<float> added;
  for (std::int64_t i = 0; i < n; ++i) added.push_back(bias.at(i, 0));
  const auto in = Matrix::random(random, type, rows, k);
  const MatrixOnDevice on_device(stream, in);
  auto gemm = linear.gemm();
  gemm.in = on_device.tensor().data, gemm.in_stride = k, gemm.rows = rows;
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
        gemm.out_stride = n;
        const DeviceMemory workspace(gemm_workspace_bytes(tactic, gemm));
        std::optional<Matrix> first;
        for (int turn = 0; turn < 2; ++turn) {
          const MatrixOnDevice out(stream, Matrix(gemm.out_type, count, n));
          gemm.out = out.tensor().data;
          cuda::gemm(stream, device_info(0), gemm, tactic, workspace.data());
          const auto found = out.host();
          std::vector<int> counters(kGemmCounterBytes / sizeof(int));
          stream.download(counters.data(), workspace.data(), kGemmCounterBytes, "the counters");
          stream.wait("the counters");
          ASSERT_TRUE(std::ranges::all_of(counters, [](int count) { return count == 0; }));
          if (!first) {
            check_product(found, in, weight, format.format, source.input, added);
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
  const Problem problems[] = {{{{Code::u4, 328, true, DType::f16}}, DType::bf16, 333, 328, 130},
                              {{{Code::u4, 128, true, DType::f32}}, DType::bf16, 520, 896, 65},
                              {{{Code::i8, 200, true, DType::bf16}}, DType::f16, 40, 200, 33},
                              {{{Code::f4_e2m1, 32, false, DType::f8_e8m0}}, DType::bf16, 289, 352, 70}};
  for (const auto& problem : problems) {
    check(random, problem, {problem.rows, 18}, {1, 2, 5, 60});
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
    EXPECT_EQ(!wgmma_tactics(gemm).empty(), rows >= 17 && rows <= 512) << rows;
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

// A GEMM with an int4 weight, and its operands.
struct Int4Gemm {
  static constexpr int kRows = 40;

  Int4Gemm(Random& random, Stream& stream, MatrixUpload& upload, std::int64_t n, std::int64_t k, int blocks)
      : source(random_source(random, n, k, format)),
        linear({&part, 1}, {}, DType::bf16, upload),
        in(Matrix::random(random, DType::bf16, kRows, k)),
        on_device(stream, in),
        gemm(linear.gemm()) {
    gemm.in = on_device.tensor().data, gemm.in_stride = k, gemm.rows = kRows;
    gemm.out_type = DType::bf16, gemm.out_stride = n;
    tactic = wgmma_tiles(gemm).front();
    tactic.k_blocks = blocks;
  }
  Matrix out() const { return {DType::bf16, kRows, gemm.n}; }

  const Format format{{Code::u4, 128, true, DType::bf16}};
  ops::MemoryQuantSource source;
  const ops::QuantSource* const part = &source;
  CudaQuantLinear linear;
  Matrix in;
  MatrixOnDevice on_device;
  Gemm gemm;
  GemmTactic tactic;
};

// On a GPU, the blocks of a launch run at the same time, and so do the ends and begins of launches.
TEST_F(QuantWgmmaTest, launches_in_a_graph_share_a_workspace) {
  Random random(155);
  Stream stream;
  MatrixUpload upload(stream);
  const Int4Gemm gemms[] = {{random, stream, upload, 520, 640, 30}, {random, stream, upload, 300, 1024, 13}};
  const DeviceMemory workspace(std::max(gemm_workspace_bytes(gemms[0].tactic, gemms[0].gemm),
                                        gemm_workspace_bytes(gemms[1].tactic, gemms[1].gemm)));
  constexpr std::size_t kLaunches = 24;
  std::vector<std::unique_ptr<MatrixOnDevice>> outs;
  for (std::size_t i = 0; i < kLaunches; ++i) {
    outs.push_back(std::make_unique<MatrixOnDevice>(stream, gemms[i % 2].out()));
  }
  const auto issue = [&](std::size_t i) {
    const auto& of = gemms[i % 2];
    auto gemm = of.gemm;
    gemm.out = outs[i]->tensor().data;
    cuda::gemm(stream, device_info(0), gemm, of.tactic, workspace.data());
  };
  for (std::size_t i = 0; i < 2; ++i) issue(i);  // the first launch of a kernel loads it, so it is not captured
  stream.wait("GEMMs");
  Graph::begin(stream);
  for (std::size_t i = 0; i < kLaunches; ++i) issue(i);
  const auto graph = Graph::end(stream);
  for (int turn = 0; turn < 2; ++turn) {
    for (const auto& out : outs) {
      const auto tensor = out->tensor();
      stream.fill_zero(tensor.data, static_cast<std::size_t>(tensor.rows * tensor.cols) * sizeof(std::uint16_t), "outs");
    }
    graph.launch(stream, "GEMMs");
    stream.wait("GEMMs");
    for (std::size_t i = 0; i < kLaunches; ++i) {
      const auto& of = gemms[i % 2];
      const auto found = outs[i]->host(), first = outs[i % 2]->host();
      if (i < 2) check_product(found, of.in, values(of.source), of.format.format, 0);
      if (HasFatalFailure()) return;
      for (int r = 0; r < Int4Gemm::kRows; ++r) ASSERT_TRUE(found.same_bits(r, first, r)) << "launch " << i;
    }
  }
  std::vector<int> counters(kGemmCounterBytes / sizeof(int));
  stream.download(counters.data(), workspace.data(), kGemmCounterBytes, "the counters");
  EXPECT_TRUE(std::ranges::all_of(counters, [](int count) { return count == 0; }));
}

// The start's measurement finds each candidate faster than the one before it.
TEST_F(QuantWgmmaTest, the_fastest_candidate_at_the_start_computes_the_gemm) {
  Random random(154);
  Stream stream;
  MatrixUpload upload(stream);
  constexpr int kRows = 40;
  const Format format{{Code::u4, 128, true, DType::bf16}};
  const auto source = random_source(random, 300, 256, format);
  const ops::QuantSource* const part = &source;
  const CudaQuantLinear linear({&part, 1}, {}, DType::bf16, upload);
  auto gemm = linear.gemm();
  gemm.out_type = DType::bf16;
  for (const bool reproducible : {false, true}) {
    GemmRunner::Options options;
    options.reproducible = reproducible;
    options.unproven = true;
    double time = 1000;
    options.timer = [&](Stream&, double, const std::function<void(int)>& issue) {
      issue(0);
      return --time;
    };
    GemmRunner runner(device_info(0), std::move(options));
    runner.reserve(gemm);
    gemm.rows = 0;
    runner.prepare(stream, {&gemm, 1}, kRows);
    const auto report = runner.report();
    EXPECT_EQ(runner.warning().find("differ"), std::string::npos) << runner.warning();
    EXPECT_EQ(report.back().find("own wgmma 64 x 256, 8 stages") != std::string::npos, !reproducible) << report.back();
    const auto in = Matrix::random(random, DType::bf16, kRows, 256);
    const MatrixOnDevice on_device(stream, in), out(stream, Matrix(DType::bf16, kRows, 300));
    auto one = gemm;
    one.in = on_device.tensor().data, one.in_stride = 256, one.rows = kRows;
    one.out = out.tensor().data, one.out_stride = 300;
    runner.run(stream, one);
    check_product(out.host(), in, values(source), format.format, 0);
    if (HasFatalFailure()) return;
  }
}

}  // namespace
}  // namespace charonia::cuda
