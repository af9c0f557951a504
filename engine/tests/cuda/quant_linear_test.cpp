// GEMMs with quantised weights on the CUDA device: every format compared with double precision, all kernels compared
// with each other, and rejected arguments.
#include <gtest/gtest.h>

#include <algorithm>

#include "cuda/quant_formats.h"
#include "device_arrays.h"
#include "errors.h"
#include "ops/cuda/cuda_quant_weights.h"
#include "ops/cuda/gemm/gemm_runner.h"
#include "ops/cuda/kernels/quant_gemm.h"
#include "ops/cuda/make_cuda_ops.h"
#include "quant_support.h"

namespace charonia::cuda {
namespace {

using ops::Activations;
using ops::Code;
using ops::Matrix;
using ops::MemoryQuantSource;
using ops::QuantFormat;
using ops::Random;
using ops::uniform;

// Through the device's operations: formats, types, numbers of rows and odd shapes, two parts with a bias, inputs and
// outputs at any alignment.
TEST(CudaQuantTest, every_format_equals_its_product_in_double_precision) {
  Random random(130);
  const auto device = ops::make_cuda_ops({});
  int turn = 0;
  for (const std::int64_t k : {128, 100, 640}) {
    for (const auto& format : formats(k)) {
      for (const auto type : ops::kWeightTypes) {
        if (format.format.group == 20 && type == DType::f16 && k > 100) continue;
        const std::int64_t n = k == 640 ? 24 : 45;
        const auto first = random_source(random, n, k, format);
        auto second = MemoryQuantSource::random(random, 3, k, format.format);
        if (format.ordered) second.set_order({first.order().begin(), first.order().end()});
        if (first.input > 0) second.input = 2 * first.input;
        const ops::QuantSource* const parts[] = {&first, &second};
        const auto bias = Matrix::random(random, DType::f32, n, 1, 3);
        const ops::HostMatrix biases[] = {bias.host(), {}};
        const auto linear = device->make_quantised_linear(parts, biases, type);
        ASSERT_EQ(linear->out_features(), n + 3);
        auto weight = values(first);
        const auto behind = values(second);
        weight.insert(weight.end(), behind.begin(), behind.end());
        std::vector<float> added;
        for (std::int64_t r = 0; r < n + 3; ++r) added.push_back(r < n ? bias.at(r, 0) : 0);
        const int gap = turn++ % 3;
        const auto in = Matrix::random(random, type, 20, k, 1, gap == 2 ? 8 : gap);
        const ops::DeviceMatrix on_device(*device, in);
        for (const int rows : {1, 3, 16, 17}) {
          if ((turn + rows) % 2 == 0 && rows != 3) continue;  // alternate
          const auto out_type = turn % 2 == 0 ? type : DType::f32;
          const ops::DeviceMatrix out(*device, out_type, rows, n + 3, gap);
          device->linear(out.tensor(), on_device.slice(0, rows), *linear);
          check_product(out.host(), in, weight, format.format, second.input, added);
          if (HasFatalFailure()) return;
        }
      }
    }
  }
}

// All tactics and numbers of rows, for a weight that the fast kernels support.
TEST(CudaQuantTest, all_tactics_of_a_weight_give_a_row_the_same_bits) {
  Random random(131);
  const auto info = device_info(0);
  Stream stream;
  MatrixUpload upload(stream);
  constexpr std::int64_t kN = 72, kK = 896;  // three parts of K, one of them shorter
  const Format chosen[] = {{{Code::u4, 128, true, DType::f16}},
                           {{Code::u4, 32, false, DType::bf16}},
                           {{Code::i8, kK, false, DType::f32}},
                           {{Code::f8_e4m3, 128, false, DType::f32}},
                           {{Code::f4_e2m1, 32, false, DType::bf16}}};
  int turn = 0;
  for (const auto& format : chosen) {
    for (const auto type : {DType::bf16, DType::f16}) {
      if (turn++ % 4 % 3 != 0) continue;  // alternate: bf16, f16, f16, bf16, ...
      const auto source = random_source(random, kN, kK, format);
      const ops::QuantSource* const part = &source;
      const CudaQuantLinear linear({&part, 1}, {}, type, upload);
      const auto weight = values(source);
      const auto in = Matrix::random(random, type, 130, kK);
      const MatrixOnDevice rows(stream, in);
      std::optional<Matrix> expected;
      for (const int n : {130, 40, 9, 1}) {
        auto gemm = linear.gemm();
        gemm.in = rows.tensor().data;
        gemm.in_stride = kK;
        gemm.rows = n;
        for (const auto order : {SumOrder::fixed, SumOrder::any}) {
          for (const auto& tactic : gemm_tactics(info, gemm, order)) {
            if (expected && n == 130 && order == SumOrder::any && tactic.k_blocks == 1) continue;
            const MatrixOnDevice out(stream, Matrix(type, n, kN, 0));
            gemm.out = out.tensor().data;
            gemm.out_type = type;
            gemm.out_stride = kN;
            DeviceMemory workspace(gemm_workspace_bytes(tactic, gemm));
            cuda::gemm(stream, info, gemm, tactic, workspace.data());
            const auto found = out.host();
            if (!expected) {
              check_product(found, in, weight, format.format, 0);
              if (HasFatalFailure()) return;
              expected = found;
            }
            if (order == SumOrder::any) continue;
            for (int r = 0; r < n; ++r) {
              ASSERT_TRUE(found.same_bits(r, *expected, r))
                  << to_string(format.format) << ", " << to_string(tactic) << ", row " << r << " of " << n;
            }
          }
        }
      }
    }
  }
}

// Few SMs: a block continues from one tile of outputs to the next, with copies in flight. Parts of K and their steps
// have different lengths, and tiles and columns extend beyond the weight.
TEST(CudaQuantTest, blocks_that_compute_several_tiles_give_the_same_bits) {
  Random random(134);
  Stream stream;
  MatrixUpload upload(stream);
  struct Shape {
    std::int64_t n, k;
  };
  int compared = 0;
  for (const auto& [n, k] : {Shape{1000, 576}, Shape{203, 2056}, Shape{600, 64}}) {
    const Format chosen[] = {{{Code::u4, k % 128 == 0 ? 128 : k, false, DType::bf16}},
                             {{Code::u4, k % 64 == 0 ? 64 : k, true, DType::bf16}},
                             {{Code::u4, k % 32 == 0 ? 32 : k, true, DType::f32}},
                             {{Code::i8, k, false, DType::bf16}},
                             {{Code::i8, k, true, DType::f16}},
                             {{Code::f8_e4m3, k, false, DType::f32}}};
    for (const auto& format : chosen) {
      const auto source = random_source(random, n, k, format);
      const ops::QuantSource* const part = &source;
      const CudaQuantLinear linear({&part, 1}, {}, DType::bf16, upload);
      const MatrixOnDevice rows(stream, Matrix::random(random, DType::bf16, 9, k));
      for (const int count : {1, 9}) {
        auto gemm = linear.gemm();
        gemm.in = rows.tensor().data;
        gemm.in_stride = k;
        gemm.rows = count;
        gemm.out_type = DType::bf16;
        gemm.out_stride = n;
        for (const auto& tactic : gemm_tactics(device_info(0), gemm, SumOrder::fixed)) {
          if (tactic.kernel != GemmTactic::Kernel::stream) continue;
          std::optional<Matrix> expected;  // from blocks that take one tile each
          for (const int sms : {1000, 1, 2}) {
            auto info = device_info(0);
            info.sms = sms;
            const MatrixOnDevice out(stream, Matrix(DType::bf16, count, n, 0));
            gemm.out = out.tensor().data;
            cuda::gemm(stream, info, gemm, tactic, nullptr);
            const auto found = out.host();
            if (!expected) expected = found;
            for (int r = 0; r < count; ++r) {
              ASSERT_TRUE(found.same_bits(r, *expected, r))
                  << to_string(format.format) << ", " << n << " x " << k << ", " << to_string(tactic) << ", row " << r
                  << " of " << count << ", " << sms << " SMs";
            }
            ++compared;
          }
        }
      }
    }
  }
  EXPECT_GE(compared, 3 * 6 * 3 * 3);
}

// If the prepared inputs exceed their memory, the GEMM runs in pieces.
TEST(CudaQuantTest, weights_with_an_order_support_any_number_of_rows) {
  Random random(132);
  const auto device = ops::make_cuda_ops({.reproducible = true});
  constexpr std::int64_t kN = 3, kK = 32, kRows = 16390;
  const auto source = random_source(random, kN, kK, {{Code::i8, kK, false, DType::f32, Activations::i8_token}, true});
  const ops::QuantSource* const part = &source;
  const auto linear = device->make_quantised_linear({&part, 1}, {}, DType::bf16);
  const auto few = Matrix::random(random, DType::bf16, 7, kK);
  Matrix in(DType::bf16, kRows, kK);
  for (std::int64_t r = 0; r < kRows; ++r) {
    for (std::int64_t c = 0; c < kK; ++c) in.set(r, c, few.at(r % 7, c));
  }
  const ops::DeviceMatrix on_device(*device, in), out(*device, DType::bf16, kRows, kN);
  device->linear(out.tensor(), on_device.tensor(), *linear);
  const auto found = out.host();
  check_product(found.slice(0, 7), few, values(source), source.format(), 0);
  for (std::int64_t r = 7; r < kRows; ++r) ASSERT_TRUE(found.same_bits(r, found, r % 7)) << r;
}

TEST(CudaQuantTest, unsupported_formats_are_rejected_by_name) {
  const auto device = ops::make_cuda_ops({});
  const auto fails = [&](const QuantFormat& format, ErrorCode code, const std::string& text) {
    const MemoryQuantSource source(8, 64, format);
    const ops::QuantSource* const part = &source;
    expect_error(code, {"test.weight", text}, [&] { device->make_quantised_linear({&part, 1}, {}, DType::bf16); });
  };
  fails({Code::f8_e4m3, 64, true}, ErrorCode::unsupported, "zeros only with int4 and int8");
  fails({Code::u4, 48}, ErrorCode::invalid_argument, "groups of 48");
}

}  // namespace
}  // namespace charonia::cuda
