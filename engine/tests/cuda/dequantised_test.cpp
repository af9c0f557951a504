// Quantised weights that are dequantised for the library: the numbers, the GEMMs, and when the runner uses them.
#include "ops/cuda/gemm/dequantised.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>

#include "base/json.h"
#include "cuda/fake_blas.h"
#include "cuda/gemm_problem.h"
#include "cuda/quant_formats.h"
#include "ops/cuda/gemm/dequantised_parts.h"
#include "ops/cuda/gemm/gemm_runner.h"
#include "ops/cuda/kernels/quant_gemm.h"

namespace charonia::cuda {
namespace {

using ops::Activations;
using ops::Code;
using ops::Random;

TEST(DequantisedTest, parts_have_equal_sizes_and_fit) {
  constexpr std::size_t kMiB = std::size_t{1} << 20;
  EXPECT_EQ(dequantised_parts(28672, 4096, 64 * kMiB, 60 * kMiB), (std::vector<std::int64_t>{7168, 3584}));
  EXPECT_EQ(dequantised_parts(4096, 4096, 64 * kMiB, 60 * kMiB), (std::vector<std::int64_t>{4096, 2048}));
  EXPECT_EQ(dequantised_parts(40, 64, 64 * kMiB, 60 * kMiB), (std::vector<std::int64_t>{48}))
      << "both parts have all rows";
  EXPECT_EQ(dequantised_parts(200, 100, 96 * 256, 2 * 48 * 256), (std::vector<std::int64_t>{80, 48}));
  EXPECT_EQ(dequantised_parts(200, 100, 15 * 256, 60 * kMiB), std::vector<std::int64_t>{}) << "no unit of rows fits";
  for (std::int64_t n = 1; n < 3000; n += 37) {
    for (const std::int64_t k : {8, 72, 640}) {
      for (const auto bytes : {dequantised_bytes(16, k), dequantised_bytes(160, k), dequantised_bytes(1024, k)}) {
        const auto rows = dequantised_rows(n, k, bytes);
        ASSERT_EQ(rows % 16, 0);
        ASSERT_GT(rows, 0);
        ASSERT_LE(dequantised_bytes(rows, k), bytes);
      }
    }
  }
}

// For every format, from a weight's first row or a later row; the row behind the part does not change.
TEST(DequantisedTest, dequantised_numbers_are_the_double_product_rounded_once) {
  Random random(160);
  Stream stream;
  MatrixUpload upload(stream);
  constexpr std::int64_t kN = 45;
  int dequantised = 0;
  for (const std::int64_t k : {128, 100, 640, 200}) {
    auto all = formats(k);
    if (k == 200) {
      all.push_back({{Code::f8_e4m3, 8, false, DType::f32}});
      all.push_back({{Code::u4, 40, true, DType::f16}});
    }
    for (const auto& format : all) {
      for (const auto type : ops::kWeightTypes) {
        const auto source = random_source(random, kN, k, format);
        const ops::QuantSource* const part = &source;
        const CudaQuantLinear linear({&part, 1}, {}, type, upload);
        const auto gemm = linear.gemm();
        const bool integers = has_integer_inputs(format.format);
        ASSERT_EQ(can_dequantise(gemm), type != DType::f32 && !integers && format.format.group != 20);
        if (!can_dequantise(gemm)) continue;
        ++dequantised;
        const auto expected = values(source);
        const auto order = source.order();
        in_both_orders([&] {
          for (const std::int64_t first : {0, 32}) {
            const auto rows = kN - first, units = round_up(rows, 16);
            const MatrixOnDevice on_device(stream, all_nan(type, units + 1, gemm.weight_stride));
            dequantise(stream, gemm, first, rows, on_device.tensor().data);
            const auto out = on_device.host();
            for (std::int64_t r = 0; r < rows; ++r) {
              for (std::int64_t c = 0; c < k; ++c) {
                const auto feature = order.empty() ? c : order[static_cast<std::size_t>(c)];
                const double value = expected[static_cast<std::size_t>((first + r) * k + feature)];
                ASSERT_EQ(out.at(r, c), ops::rounded(type, value))
                    << to_string(format.format) << ", " << charonia::to_string(type) << ", k " << k << ", row "
                    << first + r << ", column " << c;
              }
            }
            for (std::int64_t c = 0; c < out.cols; ++c) ASSERT_TRUE(std::isnan(out.at(units, c)));
          }
        });
        if (HasFatalFailure()) return;
      }
    }
  }
  EXPECT_GT(dequantised, 50);
}

using Weights = std::vector<std::int64_t>;

// A weight of 200 rows, with memory for 96 of them: parts of 80, 80 and 40 rows, or of 48 and a last part of 8.
class DequantisedRunnerTest : public RunnerTest {
 protected:
  static constexpr std::int64_t kN = 200, kK = 128;
  static constexpr Format kFormat{{Code::u4, 32, true, DType::f16}};

  DequantisedRunnerTest() {
    log_.rejects = [](const Gemm& gemm) {
      EXPECT_FALSE(gemm.quant);
      return false;
    };
  }
  QuantProblem problem(std::int64_t rows, DType type = DType::bf16, DType out_type = DType::bf16,
                       const Format& format = kFormat) {
    return QuantProblem(random_, format, kN, kK, rows, type, out_type);
  }

  GemmRunner::Options options(std::int64_t k = kK) {
    auto options = runner_options([this] {
      double microseconds = 0;
      for (const auto& one : log_.runs) microseconds += one.n > 48 ? microseconds_large_ : 1;
      return microseconds > 0 ? microseconds : own_;
    });
    options.dequantised_bytes = dequantised_bytes(96, k);
    return options;
  }
  static DeviceInfo device(std::int64_t k = kK) {
    auto info = device_info(0);
    info.l2_bytes = 2 * dequantised_bytes(48, k);
    return info;
  }

  // The rows of the weights that the library received.
  Weights weights() const {
    Weights out;
    for (const auto& one : log_.runs) out.push_back(one.n);
    return out;
  }
  Weights run(GemmRunner& runner, QuantProblem& problem) {
    log_.runs.clear();
    runner.run(problem.stream, problem.gemm());
    problem.stream.wait("test");
    return weights();
  }

  static void prepare(GemmRunner& runner, QuantProblem& problem) {
    const auto gemm = problem.gemm();
    runner.reserve(gemm);
    runner.prepare(problem.stream, {&gemm, 1}, static_cast<int>(gemm.rows));
  }

  Random random_{161};
  double microseconds_large_ = 1;  // of a weight with more than 48 rows; 1 for others
  double own_ = 100;
};

const Weights kLargeParts{80, 80, 40}, kSmallParts{48, 48, 48, 48, 8};

TEST_F(DequantisedRunnerTest, many_rows_go_to_the_library_in_the_fastest_parts) {
  struct One {
    std::int64_t k;
    Format format;
    DType type, out_type;
  };
  const One all[] = {{128, {{Code::u4, 32, true, DType::f16}, true}, DType::bf16, DType::bf16},
                     {100, {{Code::i8, 100, false, DType::f32}}, DType::f16, DType::f32},
                     {256, {{Code::f8_e4m3, 128, false, DType::f32, Activations::f8_token}}, DType::bf16, DType::f32},
                     {128, {{Code::f4_e2m1, 32, false, DType::f8_e8m0}}, DType::f16, DType::f16}};
  for (const auto& one : all) {
    for (const bool large : {true, false}) {
      std::filesystem::remove_all(folder_);
      microseconds_large_ = large ? 1 : 30;
      QuantProblem problem(random_, one.format, kN, one.k, 40, one.type, one.out_type);
      GemmRunner runner(device(one.k), options(one.k));
      prepare(runner, problem);
      const auto* const said = large ? ": dequantised 80 rows at a time, cuBLASLt, 3.0 us"
                                     : ": dequantised 48 rows at a time, cuBLASLt, 5.0 us";
      EXPECT_NE(runner.report().back().find(said), std::string::npos) << runner.report().back();
      EXPECT_EQ(runner.report().back().find("rows 33..48 "), 0U) << runner.report().back();
      EXPECT_EQ(run(runner, problem), large ? kLargeParts : kSmallParts);
      problem.check(problem.out.host(), true);
      if (HasFatalFailure()) return;
    }
  }
}

TEST_F(DequantisedRunnerTest, dequantising_is_used_for_many_rows_if_faster_and_not_reproducible) {
  auto many = problem(48), few = problem(32), more = problem(129);
  // Whether the library computes the problem.
  const auto dequantised = [&](GemmRunner::Options with, QuantProblem& problem) {
    GemmRunner runner(device(), std::move(with));
    prepare(runner, problem);
    const bool asked = !run(runner, problem).empty();
    problem.check(problem.out.host(), asked);
    return asked;
  };
  EXPECT_TRUE(dequantised(options(), many));
  EXPECT_FALSE(dequantised(options(), few));
  auto with = options();
  with.reproducible = true;
  EXPECT_FALSE(dequantised(std::move(with), many));
  with = options();
  with.blas = nullptr;
  EXPECT_FALSE(dequantised(std::move(with), many));
  std::filesystem::remove_all(folder_);
  own_ = 2.5;
  EXPECT_FALSE(dequantised(options(), many)) << "built-in kernels were faster";

  // Without measurements, by rule.
  for (auto* const one : {&many, &more}) {
    with = options();
    with.timer = nullptr;
    with.memory.clear();
    EXPECT_EQ(dequantised(std::move(with), *one), one == &more);
  }
  // Inputs that become int8 codes use the kernels that give the same sums.
  auto integers =
      problem(129, DType::bf16, DType::bf16, {{Code::u4, 32, false, DType::f32, Activations::i8_token}});
  GemmRunner runner(device(), options());
  prepare(runner, integers);
  EXPECT_TRUE(run(runner, integers).empty());
}

TEST_F(DequantisedRunnerTest, parts_that_the_library_rejects_run_on_built_in_kernels) {
  auto problem = this->problem(40, DType::f16, DType::f32);
  GemmRunner runner(device(), options());
  prepare(runner, problem);
  log_.rejects = [](const Gemm& gemm) { return gemm.n == 40; };  // the last part
  EXPECT_EQ(run(runner, problem), kLargeParts);
  EXPECT_EQ(runner.rejected(), 1);
  problem.check(problem.out.host());

  // If the output is not aligned, nothing is dequantised.
  auto gemm = problem.gemm();
  gemm.n -= 1;
  const DeviceMemory out(static_cast<std::size_t>(gemm.rows * gemm.n) * sizeof(float));
  gemm.out = out.data(), gemm.out_stride = gemm.n;
  EXPECT_FALSE(run_dequantised(problem.stream, *options().blas, gemm, 80, {}, nullptr, nullptr, 0));
}

TEST_F(DequantisedRunnerTest, measurements_are_stored) {
  auto problem = this->problem(40);
  std::vector<std::string> report;
  nlohmann::json good;
  {
    GemmRunner runner(device(), options());
    prepare(runner, problem);
    report = runner.report();
    std::ifstream(file()) >> good;
  }
  const auto measured_with = [&](const nlohmann::json& text, GemmRunner::Options with) {
    std::ofstream(file()) << text.dump();
    measured_ = 0;
    GemmRunner runner(device(), std::move(with));
    prepare(runner, problem);
    if (measured_ == 0) {
      EXPECT_EQ(runner.report(), report);
    }
    EXPECT_EQ(run(runner, problem).empty(), runner.report().back().find("own ") != std::string::npos);
    problem.check(problem.out.host(), true);
    return measured_ > 0;
  };
  EXPECT_FALSE(measured_with(good, options()));
  auto no_room = options();
  no_room.dequantised_bytes = dequantised_bytes(64, kK);
  EXPECT_TRUE(measured_with(good, std::move(no_room))) << "with room for fewer than the 80 rows";
  const auto text = good.dump(), chosen = std::string(R"("dequantised_rows":80)");
  const auto at = text.find(chosen);
  ASSERT_NE(at, std::string::npos);
  for (const auto* rows : {"81", "-16", "4611686018427387904", R"("x")"}) {
    auto altered = text;
    altered.replace(at + chosen.size() - 2, 2, rows);
    EXPECT_TRUE(measured_with(nlohmann::json::parse(altered), options())) << rows;
  }
}

#if defined(CHARONIA_CUDA_ON_HOST)
TEST_F(DequantisedRunnerTest, dequantising_can_be_captured) {
  auto problem = this->problem(40);
  GemmRunner runner(device(), options());
  prepare(runner, problem);
  log_.runs.clear();
  Graph::begin(problem.stream);
  runner.run(problem.stream, problem.gemm());
  const auto graph = Graph::end(problem.stream);
  EXPECT_EQ(weights(), kLargeParts);
  for (int i = 0; i < 2; ++i) graph.launch(problem.stream, "test");
  problem.stream.wait("test");
  problem.check(problem.out.host(), true);
  EXPECT_EQ(weights(), kLargeParts) << "a replay does not call the library";
}
#endif

}  // namespace
}  // namespace charonia::cuda
