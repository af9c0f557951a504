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
#if defined(CHARONIA_CUDA_ON_HOST)  // calls device functions
#include "ops/cuda/kernels/quant_layout.h"
#include "ops/cuda/kernels/quant_numbers.h"
#endif

namespace charonia::cuda {
namespace {

using ops::Activations;
using ops::Code;
using ops::Matrix;
using ops::MemoryQuantSource;
using ops::QuantFormat;
using ops::Random;
using ops::uniform;

#if defined(CHARONIA_CUDA_ON_HOST)
// Every code, at every position of a word, with every zero.
template <class T, Code code>
void check_numbers() {
  constexpr int kBits = kCodeBits<code>, kCodes = 32 / kBits;
  const bool zeros = code == Code::u4 || code == Code::i8;
  for (int zero = zeros ? (code == Code::u4 ? 0 : -128) : 0; zero <= (zeros ? (code == Code::u4 ? 16 : 127) : 0);
       ++zero) {
    const std::uint32_t term = zero_term<T, code>(static_cast<std::uint8_t>(zero));
    for (int first = 0; first < 1 << kBits; ++first) {
      std::uint32_t word = 0;
      std::uint8_t codes[kCodes];
      for (int i = 0; i < kCodes; ++i) {
        codes[i] = static_cast<std::uint8_t>((first + 37 * i) % (1 << kBits));
        const auto place = code_place(0, i, kBits, 1);
        ASSERT_EQ(place.word, 0);
        word |= static_cast<std::uint32_t>(codes[i]) << place.bit;
      }
      std::uint32_t pairs[kCodes / 2];
      numbers<T, code>(word, term, pairs);
      for (int i = 0; i < kCodes; ++i) {
        const float expected = number_of(code, codes[i]) - static_cast<float>(zero);
        if (std::isnan(expected)) continue;
        ASSERT_EQ(to_float(T{static_cast<std::uint16_t>(pairs[i / 2] >> i % 2 * 16)}), expected)
            << to_string(code) << " " << int{codes[i]} << " less " << zero << " at " << i;
      }
    }
  }
}

TEST(CudaQuantTest, every_code_has_the_correct_value) {
  check_numbers<bf16, Code::u4>();
  check_numbers<f16, Code::u4>();
  check_numbers<bf16, Code::i8>();
  check_numbers<f16, Code::i8>();
  check_numbers<bf16, Code::f8_e4m3>();
  check_numbers<f16, Code::f8_e4m3>();
  check_numbers<bf16, Code::f4_e2m1>();
  check_numbers<f16, Code::f4_e2m1>();
}
#endif

TEST(CudaQuantTest, a_reader_with_several_threads_dequantises_all_rows) {
  Random random(131);
  ThreadPool pool(3);
  constexpr std::int64_t kRows = 300, kCols = 80;
  for (const auto& format : dequantised_formats(kCols)) {
    const auto source = random_source(random, kRows, kCols, format);
    const auto expected = values(source);
    for (const auto type : ops::kWeightTypes) {
      // Rows are dequantised all together, 64 together, and 128 together.
      for (const std::size_t bytes : {DequantisedReader::kBytes, std::size_t{1}, 130 * kCols * size_of(type)}) {
        DequantisedReader reader(source, type, pool, bytes);
        for (std::int64_t r = 0; r < kRows; r += r == 70 ? 100 : 1) {  // may skip rows
          const auto row = reader.at(r);
          ASSERT_EQ(row.dtype, type);
          for (std::int64_t c = 0; c < kCols; ++c) {
            const auto exact = static_cast<float>(expected[static_cast<std::size_t>(r * kCols + c)]);
            ASSERT_EQ(float_at(row.data, static_cast<std::size_t>(c), type), ops::rounded(type, exact))
                << to_string(format.format) << " row " << r << " column " << c;
          }
        }
      }
    }
  }
}

// Through the device's operations: formats, types, numbers of rows and odd shapes, two parts with a bias, inputs and
// outputs at any alignment.
TEST(CudaQuantTest, every_format_equals_its_product_in_double_precision) {
  Random random(130);
  const auto normal = ops::make_cuda_ops({}), reproducible = ops::make_cuda_ops({.reproducible = true});
  int turn = 0;
  for (const std::int64_t k : {128, 100, 640}) {
    auto all = formats(k);
    std::ranges::copy(dequantised_formats(k), std::back_inserter(all));
    for (const auto& format : all) {
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
        const bool dequantised = ops::cuda_dequantises(format.format);
        // In reproducible mode, dequantised weights are packed.
        auto& device = dequantised && turn % 2 == 0 ? *reproducible : *normal;
        const auto linear = device.make_quantised_linear(parts, biases, type);
        ASSERT_EQ(linear->out_features(), n + 3);
        auto weight = values(first);
        const auto behind = values(second);
        weight.insert(weight.end(), behind.begin(), behind.end());
        for (auto& one : weight) one = dequantised ? ops::rounded(type, one) : one;
        std::vector<float> added;
        for (std::int64_t r = 0; r < n + 3; ++r) added.push_back(r < n ? bias.at(r, 0) : 0);
        const int gap = turn++ % 3;
        const auto in = Matrix::random(random, type, 20, k, 1, gap == 2 ? 8 : gap);
        const ops::DeviceMatrix on_device(device, in);
        for (const int rows : {1, 3, 16, 17}) {
          if ((turn + rows) % 2 == 0 && rows != 3) continue;  // alternate
          // A library's GEMM of a dequantised weight rounds outputs of 16 bits before it adds the bias.
          const auto out_type = turn % 2 == 0 && !dequantised ? type : DType::f32;
          const ops::DeviceMatrix out(device, out_type, rows, n + 3, gap);
          device.linear(out.tensor(), on_device.slice(0, rows), *linear);
          check_product(out.host(), in, weight, format.format, second.input, added);
          if (HasFatalFailure()) return;
        }
      }
    }
  }
}

// All tactics and numbers of rows, for weights that the fast kernels support. Parts of K and their steps have different
// lengths, and tiles and columns extend beyond the weight. With few SMs, a block continues from one tile of outputs to
// the next, with copies in flight.
TEST(CudaQuantTest, all_tactics_and_numbers_of_sms_give_a_row_the_same_bits) {
  Random random(131);
  struct Shape {
    std::int64_t n, k;
    int rows;
  };
  for (const auto& [n, k, rows] : {Shape{72, 896, 130}, Shape{1000, 576, 9}, Shape{203, 2056, 9}, Shape{600, 64, 9}}) {
    const auto group = [k = k](std::int64_t length) { return k % length == 0 ? length : k; };
    const std::pair<Format, DType> chosen[] = {{{{Code::u4, group(128), false, DType::bf16}}, DType::bf16},
                                               {{{Code::u4, group(64), true, DType::f16}}, DType::f16},
                                               {{{Code::u4, group(32), true, DType::f32}}, DType::bf16},
                                               {{{Code::i8, k, false, DType::bf16}}, DType::bf16},
                                               {{{Code::i8, k, true, DType::f16}}, DType::f16},
                                               {{{Code::f8_e4m3, group(128), false, DType::f32}}, DType::bf16},
                                               {{{Code::f4_e2m1, group(32), false, DType::bf16}}, DType::f16}};
    for (const auto& [format, type] : chosen) {
      QuantProblem problem(random, format, n, k, rows, type, type);
      std::optional<Matrix> expected;
      for (const int count : {rows, 40, 9, 1}) {
        auto gemm = problem.gemm();
        gemm.rows = count;
        for (const auto order : {SumOrder::fixed, SumOrder::any}) {
          for (const auto& tactic : gemm_tactics(device_info(0), gemm, order)) {
            for (const int sms : {1000, 1, 2}) {
              if (count > rows || (sms < 1000 && tactic.kernel != GemmTactic::Kernel::stream)) continue;
              auto info = device_info(0);
              info.sms = sms;
              const MatrixOnDevice out(problem.stream, Matrix(type, count, n));
              gemm.out = out.tensor().data;
              const DeviceMemory workspace(gemm_workspace_bytes(tactic, gemm));
              cuda::gemm(problem.stream, info, gemm, tactic, workspace.data());
              const auto found = out.host();
              if (!expected || order == SumOrder::any) {
                problem.check(found.slice(0, std::min(count, 2)));
                if (HasFatalFailure()) return;
              }
              if (!expected) expected = found;
              for (int r = 0; order == SumOrder::fixed && r < count; ++r) {
                ASSERT_TRUE(found.same_bits(r, *expected, r))
                    << to_string(format.format) << ", " << n << " x " << k << ", " << to_string(tactic) << ", row " << r
                    << " of " << count << ", " << sms << " SMs";
              }
            }
          }
        }
      }
    }
  }
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

TEST(CudaQuantTest, a_row_that_is_not_finite_gives_nan) {
  Random random(134);
  const auto device = ops::make_cuda_ops({});
  for (const auto how : {Activations::i8_token, Activations::i8_tensor}) {
    const auto source = MemoryQuantSource::random(random, 40, 64, {Code::i8, 64, false, DType::f32, how});
    const ops::QuantSource* const part = &source;
    for (const auto type : {DType::bf16, DType::f32}) {
      const auto linear = device->make_quantised_linear({&part, 1}, {}, type);
      for (const float broken : {NAN, INFINITY, -INFINITY}) {
        auto in = Matrix::random(random, type, 3, 64);
        in.set(1, 11, broken);
        const ops::DeviceMatrix on_device(*device, in), out(*device, DType::f32, 3, 40);
        device->linear(out.tensor(), on_device.tensor(), *linear);
        const auto found = out.host();
        for (std::int64_t r = 0; r < 3; ++r) {
          for (std::int64_t j = 0; j < 40; ++j) ASSERT_EQ(std::isnan(found.at(r, j)), r == 1) << broken;
        }
      }
    }
  }
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
