// The comparison of GEMM kernels with a reference kernel at the start of an engine: it never rejects a right kernel,
// and always a wrong one. gemm_runner_test.cpp tests the choices of kernels that follow.
#include <gtest/gtest.h>

#include <functional>

#include "base/text.h"
#include "cuda/fake_blas.h"
#include "cuda/gemm_problem.h"
#include "cuda/quant_formats.h"
#include "device_arrays.h"
#include "ops/cuda/cuda_quant_weights.h"
#include "ops/cuda/gemm/dequantised.h"
#include "ops/cuda/gemm/gemm_operands.h"
#include "ops/cuda/kernels/quant_gemm.h"

namespace charonia::cuda {
namespace {

using ops::Activations;
using ops::Code;
using ops::Random;

class GemmCheckTest : public ::testing::Test {
 protected:
  // The GEMM as GemmRunner checks it.
  Gemm checked(Gemm gemm, std::int64_t rows, DType out_type) {
    gemm.rows = rows, gemm.out_type = out_type;
    gemm.in_stride = is_w8a8(gemm) ? gemm.k : round_up(gemm.k, gemm.quant ? 64 : 8);
    if (gemm.quant) {
      gemm.quant->prepared = true;
      const bool scaled = is_w8a8(gemm) || has_integer_inputs(gemm.quant->format);
      if (scaled) gemm.quant->row_scales = row_scales_.data();
    }
    return gemm;
  }

  // The number of outputs in which the result of `run` differs from the reference kernel's. run(gemm) writes gemm.out.
  unsigned different(const Gemm& gemm, const std::function<void(const Gemm&)>& run) {
    GemmOperands operands(GemmOperands::exact_bytes(gemm));
    const auto exact = operands.lay_out_exact(stream_, gemm);
    stream_.fill_zero(operands.second_out(), operands.out_bytes(), "test");
    auto reference = exact;
    reference.out = operands.second_out();
    run_gemm(stream_, reference, reference_tactic(device_info(0), exact));
    stream_.fill_zero(exact.out, operands.out_bytes(), "test");
    run(exact);
    stream_.fill_zero(operands.counter(), sizeof(unsigned), "test");
    count_different(stream_, exact, exact.out_stride, operands.second_out(), exact.out_stride, operands.counter());
    unsigned out = 0;
    stream_.download(&out, operands.counter(), sizeof out, "test");
    stream_.wait("test");
    return out;
  }

  // With all built-in tactics, and as a library computes it.
  void expect_equal(const Gemm& weight, std::initializer_list<std::int64_t> numbers_of_rows) {
    for (const auto rows : numbers_of_rows) {
      for (const auto out_type : {weight.type, DType::f32}) {
        const auto gemm = checked(weight, rows, out_type);
        for (const auto& tactic : gemm_tactics(device_info(0), gemm, SumOrder::any)) {
          SCOPED_TRACE(cat(to_string(tactic), ", ", rows, " rows of ", to_string(gemm.type)));
          ASSERT_EQ(different(gemm, [&](const Gemm& exact) { run_gemm(stream_, exact, tactic); }), 0U);
        }
        ASSERT_EQ(different(gemm, [&](const Gemm& exact) { run_as_library(exact); }), 0U) << rows << " rows";
      }
    }
  }

  // Rounds the sum, then adds the bias. With many rows, weights are dequantised if that is possible. (With few rows,
  // the fake library's kernels read weights before the kernel in front has written them.)
  void run_as_library(Gemm gemm) {
    FakeBlas::Log log;
    FakeBlas blas(log);
    const auto tactic = blas.tactics(gemm, 0).front();
    if (can_dequantise(gemm) && gemm.rows > 32) {
      const DeviceMemory numbers(static_cast<std::size_t>(round_up(gemm.n, 16) * gemm.weight_stride) * 2);
      run_dequantised(stream_, blas, gemm, round_up(gemm.n, 16), tactic, numbers.data(), nullptr, 0);
    } else {
      blas.run(stream_, gemm, tactic, nullptr, 0);
    }
    add_bias(stream_, gemm);
    stream_.wait("test");
  }

  Random random_{171};
  Stream stream_;
  const DeviceArray<float> row_scales_{stream_, measured_scales(256)};
};

TEST_F(GemmCheckTest, right_kernels_of_plain_weights_never_differ) {
  for (const auto type : ops::kWeightTypes) {
    for (const bool packed : {false, true}) {
      if (packed && type == DType::f32) continue;
      for (const std::int64_t k : {72, 1032}) {
        const GemmProblem problem({.type = type, .n = 45, .k = k, .bias = k == 72, .packed = packed});
        expect_equal(problem.gemm(), {1, 16, 40});
      }
    }
  }
  const GemmProblem deep({.n = 24, .k = 14336, .bias = true});
  expect_equal(deep.gemm(), {1});
}

TEST_F(GemmCheckTest, right_kernels_of_quantised_weights_never_differ) {
  for (const auto& [k, type] : {std::pair{std::int64_t{128}, DType::f16}, {640, DType::bf16}}) {
    for (const auto& format : formats(k)) {
      SCOPED_TRACE(to_string(format.format));
      const QuantProblem problem(random_, format, 45, k, 1, type, type);
      expect_equal(problem.gemm(), {1, 40});
      if (HasFatalFailure()) return;
    }
  }
}

TEST_F(GemmCheckTest, right_kernels_of_8_bit_products_never_differ) {
  MatrixUpload upload(stream_);
  constexpr std::int64_t kColumns = 1040;
  for (const auto& [code, how] : {std::pair{Code::i8, Activations::i8_token}, {Code::f8_e4m3, Activations::f8_token}}) {
    const auto source =
        ops::MemoryQuantSource::random(random_, 45, kColumns, {code, kColumns, false, DType::f32, how});
    for (const bool packed : {false, true}) {
      const auto linear = w8a8_linear(source, DType::bf16, packed, upload);
      expect_equal(linear.gemm(), {1, 40});
    }
  }
}

// Each fault in a GEMM as large as a model's, in one row, where a fault has the fewest outputs.
TEST_F(GemmCheckTest, wrong_kernels_always_differ) {
  MatrixUpload upload(stream_);
  constexpr std::int64_t kN = 256, kK = 14336;
  const GemmProblem plain({.n = kN, .k = kK, .bias = true});
  const auto source = ops::MemoryQuantSource::random(random_, kN, kK, {Code::u4, 128, true, DType::f16});
  const ops::QuantSource* const part = &source;
  const CudaQuantLinear quantised({&part, 1}, {}, DType::bf16, upload);
  for (const auto& weight : {plain.gemm(), quantised.gemm()}) {
    SCOPED_TRACE(weight.quant ? "int4" : "bf16");
    const auto gemm = checked(weight, 1, DType::bf16);
    const auto tactic = gemm_tactics(device_info(0), gemm, SumOrder::any).front();
    const auto of = [&](const std::function<void(Gemm&)>& change) {
      return different(gemm, [&](const Gemm& exact) {
        auto wrong = exact;
        change(wrong);
        run_gemm(stream_, wrong, tactic);
      });
    };
    const auto out_of = [](const Gemm& of_gemm, std::int64_t column) {
      return static_cast<std::uint16_t*>(of_gemm.out) + column;
    };
    const auto after = [&](const std::function<void(const Gemm&)>& damage) {
      return different(gemm, [&](const Gemm& exact) {
        run_gemm(stream_, exact, tactic);
        damage(exact);
      });
    };
    EXPECT_EQ(of([](Gemm&) {}), 0U);
    if (!gemm.quant) {
      EXPECT_GT(of([](Gemm& wrong) { wrong.k -= 16; }), kN / 4) << "the last 16 columns of K are missing";
      EXPECT_GT(of([](Gemm& wrong) {
                  wrong.in = static_cast<const std::uint16_t*>(wrong.in) + 64;
                  wrong.k -= 64;
                }),
                kN / 4)
          << "the inputs of other columns";
      EXPECT_GT(of([](Gemm& wrong) { wrong.bias = nullptr; }), 0U);
    } else {
      const auto later = [](const void* from, int bytes) { return static_cast<const std::byte*>(from) + bytes; };
      EXPECT_GT(of([&](Gemm& wrong) { wrong.quant->scales = later(wrong.quant->scales, 32); }), kN / 4)
          << "the scales of the next group";
      EXPECT_GT(of([&](Gemm& wrong) { wrong.quant->zeros = later(wrong.quant->zeros, 16); }), kN / 4)
          << "the zeros of the next group";
    }
    EXPECT_EQ(after([&](const Gemm& exact) { stream_.fill_zero(out_of(exact, 77), 2, "test"); }), 1U);
    EXPECT_GT(after([&](const Gemm& exact) { stream_.copy(out_of(exact, 16), out_of(exact, 32), 32, "test"); }), 12U)
        << "two tiles of columns are equal";
    EXPECT_EQ(after([&](const Gemm& exact) { stream_.upload(out_of(exact, 5), "\xff\xff", 2, "test"); }), 1U) << "NaN";
    for (const std::int64_t behind : {0, 7}) {
      EXPECT_EQ(after([&](const Gemm& exact) { stream_.upload(out_of(exact, kN + behind), "\x80\x3f", 2, "test"); }), 1U)
          << "behind the columns of a row";
    }
  }
}

// Neighbouring rows, and the same rows of tiles and of their parts, have different scales.
TEST_F(GemmCheckTest, the_scale_of_another_row_always_differs) {
  MatrixUpload upload(stream_);
  constexpr std::int64_t kN = 45, kK = 1040, kRows = 130;
  for (const auto& [code, how] : {std::pair{Code::i8, Activations::i8_token}, {Code::f8_e4m3, Activations::f8_token}}) {
    const auto source = ops::MemoryQuantSource::random(random_, kN, kK, {code, kK, false, DType::f32, how});
    const auto linear = w8a8_linear(source, DType::bf16, false, upload);
    const auto gemm = checked(linear.gemm(), kRows, DType::bf16);
    for (const int later : {0, 1, 8, 16, 32, 64}) {
      const auto found = different(gemm, [&](const Gemm& exact) {
        auto wrong = exact;
        wrong.quant->row_scales += later;
        run_gemm(stream_, wrong, reference_tactic(device_info(0), wrong));
      });
      EXPECT_EQ(found > kRows * kN / 2, later != 0) << later;
    }
  }
}

TEST_F(GemmCheckTest, only_differences_above_the_rounding_of_the_type_count) {
  const auto count = [&](float reference, float out) {
    const DeviceArray<float> right(stream_, {reference}), found(stream_, {out});
    const DeviceArray<unsigned> counter(stream_, {0U});
    const Gemm gemm{.out = found.data(), .out_type = DType::f32, .out_stride = 1, .rows = 1, .n = 1, .k = 1};
    count_different(stream_, gemm, 1, right.data(), 1, counter.data());
    return counter.host().front();
  };
  EXPECT_EQ(count(4096, 4096), 0U);
  EXPECT_EQ(count(4096, 4096 + 0x1p-10F), 0U);
  EXPECT_EQ(count(4096, 4096 + 0x1p-9F), 1U);
  EXPECT_EQ(count(-4096, 4096), 1U);
  EXPECT_EQ(count(0, 0x1p-22F), 0U);
  EXPECT_EQ(count(0, 0x1p-20F), 1U);
  EXPECT_EQ(count(INFINITY, INFINITY), 0U);
  EXPECT_EQ(count(1, NAN), 1U);
}

}  // namespace
}  // namespace charonia::cuda
