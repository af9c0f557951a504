// GEMMs of 8-bit numbers on the CUDA device: int8 compared with integer sums and with the CPU, bit for bit; FP8
// compared with double precision; all kernels compared with each other.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "charonia/error.h"
#include "device_arrays.h"
#include "ops/cpu/cpu_ops.h"
#include "ops/cpu/dispatch.h"
#include "ops/cuda/cuda_quant_weights.h"
#include "ops/cuda/gemm/gemm_runner.h"
#include "ops/cuda/kernels/w8a8_gemm.h"
#include "ops/cuda/make_cuda_ops.h"
#include "quant_support.h"
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

ops::QuantFormat int8(std::int64_t k, Activations how = Activations::i8_token) {
  return {Code::i8, k, false, DType::f32, how};
}
ops::QuantFormat fp8(std::int64_t k, Activations how = Activations::f8_token) {
  return {Code::f8_e4m3, k, false, DType::bf16, how};
}

#if defined(CHARONIA_CUDA_ON_HOST)
TEST(W8a8Test, floats_become_the_nearest_fp8_number) {
  Random random(150);
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
  for (int i = 0; i < 1000; ++i) all.push_back(some(random));
  for (const float x : all) EXPECT_EQ(e4m3_to_float(e4m3_from_float(x)), ops::nearest_e4m3(x)) << x;
  EXPECT_EQ(e4m3_from_float(NAN) & 0x7f, 0x7f);
}
#endif

// out = (scale of the column * sum of integers) * scale of the row + bias, in this order.
Matrix integer_reference(const MemoryQuantSource& source, const Matrix& in, std::span<const float> bias, DType type) {
  const auto n = source.rows(), k = source.cols();
  const auto order = source.order();
  Matrix out(type, in.rows, n);
  std::vector<std::int64_t> codes(static_cast<std::size_t>(k));
  for (std::int64_t r = 0; r < in.rows; ++r) {
    float scale = source.input;
    for (std::int64_t c = 0; c < k && source.input == 0; ++c) scale = std::max(scale, std::abs(in.at(r, c)) / 127.0F);
    for (std::int64_t c = 0; c < k; ++c) {
      const float x = in.at(r, order.empty() ? c : order[static_cast<std::size_t>(c)]);
      codes[static_cast<std::size_t>(c)] =
          scale == 0 ? 0 : static_cast<std::int64_t>(std::clamp(std::nearbyint(x / scale), -127.0F, 127.0F));
    }
    for (std::int64_t o = 0; o < n; ++o) {
      std::int64_t sum = 0;
      for (std::int64_t c = 0; c < k; ++c) {
        sum += codes[static_cast<std::size_t>(c)] *
               static_cast<std::int8_t>(source.codes[static_cast<std::size_t>(o * k + c)]);
      }
      float value = source.scales[static_cast<std::size_t>(o)] * static_cast<float>(sum);
      value = value * scale;
      out.set(r, o, value + (bias.empty() ? 0 : bias[static_cast<std::size_t>(o)]));
    }
  }
  return out;
}

void expect_same_bits(const Matrix& found, const Matrix& expected, const std::string& what) {
  ASSERT_EQ(found.rows, expected.rows);
  for (std::int64_t r = 0; r < found.rows; ++r) ASSERT_TRUE(found.same_bits(r, expected, r)) << what << ", row " << r;
}

// Runs all tactics for several numbers of rows; check(out, what) checks the output.
template <class Check>
void for_all_tactics(const CudaW8a8Linear& linear, const Matrix& in, DType out_type, SumOrder order, Check check) {
  const auto info = device_info(0);
  Stream stream;
  const MatrixOnDevice rows(stream, in);
  auto gemm = linear.gemm();
  for (const std::int64_t n : {in.rows, std::int64_t{40}, std::int64_t{11}, std::int64_t{1}}) {
    if (n > in.rows) continue;
    gemm.rows = n;
    gemm.in = rows.tensor().data;
    gemm.in_stride = rows.tensor().stride;
    const DeviceMemory codes(static_cast<std::size_t>(n * gemm.k)), scales(static_cast<std::size_t>(n) * 4);
    quantise_inputs(stream, gemm, codes.data(), scales.as<float>());
    auto prepared = gemm;
    prepared.in = codes.data();
    prepared.in_stride = gemm.k;
    prepared.quant->prepared = true;
    prepared.quant->row_scales = scales.as<float>();
    for (const auto& tactic : gemm_tactics(info, prepared, order)) {
      const int gap = tactic.stages % 3;  // aligned or not
      const MatrixOnDevice out(stream, Matrix(out_type, n, gemm.n, gap == 0 ? 0 : 3));
      prepared.out = out.tensor().data;
      prepared.out_type = out_type;
      prepared.out_stride = out.tensor().stride;
      DeviceMemory workspace(gemm_workspace_bytes(tactic, prepared));
      cuda::gemm(stream, info, prepared, tactic, workspace.data());
      check(out.host(), to_string(tactic) + ", " + std::to_string(n) + " rows");
      if (::testing::Test::HasFatalFailure()) return;
    }
  }
}

Matrix first_rows(const Matrix& all, std::int64_t rows) {
  auto out = all;
  out.rows = rows;
  return out;
}

TEST(W8a8Test, integers_are_multiplied_exactly_by_all_tactics) {
  Random random(151);
  Stream stream;
  MatrixUpload upload(stream);
  struct Case {
    std::int64_t n, k, rows;
    DType type, out;
    Activations how;
    bool packed, ordered;
  };
  using enum Activations;
  // Parts of K with different lengths, and partial tiles of outputs.
  const Case cases[] = {{72, 1552, 130, DType::bf16, DType::bf16, i8_token, false, false},
                        {44, 1520, 70, DType::f16, DType::f16, i8_tensor, true, true},
                        {40, 16, 40, DType::f32, DType::f32, i8_token, false, true},
                        {24, 560, 11, DType::bf16, DType::f32, i8_token, true, false}};
  for (const auto& c : cases) {
    auto source = MemoryQuantSource::random(random, c.n, c.k, int8(c.k, c.how));
    if (c.ordered) {
      std::vector<std::int32_t> order(static_cast<std::size_t>(c.k));
      std::iota(order.rbegin(), order.rend(), 0);
      source.set_order(order);
    }
    const ops::QuantSource* const part = &source;
    const auto bias = Matrix::random(random, DType::f32, c.n, 1);
    const auto host = bias.host();
    const CudaW8a8Linear linear({&part, 1}, {&host, 1}, c.type, c.packed, upload);
    std::vector<float> added;
    for (std::int64_t i = 0; i < c.n; ++i) added.push_back(bias.at(i, 0));
    const auto in = Matrix::random(random, c.type, c.rows, c.k, 1, c.ordered ? 3 : 0);
    const auto expected = integer_reference(source, in, added, c.out);
    for (const auto order : {SumOrder::fixed, SumOrder::any}) {
      for_all_tactics(linear, in, c.out, order, [&](const Matrix& out, const std::string& what) {
        expect_same_bits(out, first_rows(expected, out.rows), what);
      });
      if (HasFatalFailure()) return;
    }
  }
}

TEST(W8a8Test, the_greatest_sum_of_integers_is_exact) {
  constexpr std::int64_t kK = std::int64_t{1} << 17;
  MemoryQuantSource source(16, kK, int8(kK));
  std::fill(source.scales.begin(), source.scales.end(), 1.0F);
  std::fill(source.codes.begin(), source.codes.end(), std::uint8_t{0x80});
  const ops::QuantSource* const part = &source;
  const auto device = ops::make_cuda_ops({});
  const auto linear = device->make_quantised_linear({&part, 1}, {}, DType::bf16);
  Matrix in(DType::bf16, 2, kK);
  for (std::int64_t c = 0; c < kK; ++c) in.set(0, c, 127), in.set(1, c, -127);
  const ops::DeviceMatrix on_device(*device, in), out(*device, DType::f32, 2, 16);
  device->linear(out.tensor(), on_device.tensor(), *linear);
  const auto found = out.host();
  for (std::int64_t o = 0; o < 16; ++o) {
    EXPECT_EQ(found.at(0, o), -128.0F * 127 * kK);
    EXPECT_EQ(found.at(1, o), 128.0F * 127 * kK);
  }
  EXPECT_FALSE(is_w8a8(int8(kK + 16), DType::bf16, kK + 16, device_info(0)));
}

TEST(W8a8Test, integers_give_the_bits_of_the_cpu) {
  Random random(152);
  ops::cpu::CpuOps cpu(1, ops::cpu::instruction_set(""));
  for (const bool reproducible : {false, true}) {
    const auto cuda = ops::make_cuda_ops({.reproducible = reproducible});
    for (const auto how : {Activations::i8_token, Activations::i8_tensor}) {
      constexpr std::int64_t kN = 70, kK = 208, kRows = 21;
      const auto first = MemoryQuantSource::random(random, kN, kK, int8(kK, how));
      auto second = MemoryQuantSource::random(random, 5, kK, int8(kK, how));
      second.input *= 2;
      const ops::QuantSource* const parts[] = {&first, &second};
      const auto bias = Matrix::random(random, DType::f32, kN, 1);
      const ops::HostMatrix biases[] = {bias.host(), {}};
      const auto in = Matrix::random(random, DType::bf16, kRows, kK);
      const auto run = [&](ops::Ops& ops) {
        const auto linear = ops.make_quantised_linear(parts, biases, DType::bf16);
        Matrix own(ops.precision(DType::bf16).activation, kRows, kK);
        for (std::int64_t r = 0; r < kRows; ++r) {
          for (std::int64_t c = 0; c < kK; ++c) own.set(r, c, in.at(r, c));
        }
        const ops::DeviceMatrix rows(ops, own), out(ops, DType::f32, kRows, kN + 5);
        ops.linear(out.tensor(), rows.tensor(), *linear);
        return out.host();
      };
      expect_same_bits(run(*cuda), run(cpu), "CUDA and CPU");
      if (HasFatalFailure()) return;
    }
  }
}

TEST(W8a8Test, fp8_equals_its_product_in_double_precision_with_all_tactics) {
  Random random(153);
  Stream stream;
  MatrixUpload upload(stream);
  for (const bool packed : {false, true}) {
    constexpr std::int64_t kN = 72, kK = 1040, kRows = 130;  // two parts of K with different lengths
    const auto how = packed ? Activations::f8_tensor : Activations::f8_token;
    const auto type = packed ? DType::f16 : DType::bf16;
    const auto source = MemoryQuantSource::random(random, kN, kK, fp8(kK, how));
    const ops::QuantSource* const part = &source;
    const CudaW8a8Linear linear({&part, 1}, {}, type, packed, upload);
    const auto in = Matrix::random(random, type, kRows, kK);
    std::vector<std::vector<double>> rows;
    for (std::int64_t r = 0; r < kRows; ++r) {
      std::vector<float> row;
      for (std::int64_t c = 0; c < kK; ++c) row.push_back(in.at(r, c));
      rows.push_back(ops::quantised_activations(row, how, source.input, true));
    }
    std::optional<Matrix> first;
    for_all_tactics(linear, in, DType::f32, SumOrder::fixed, [&](const Matrix& out, const std::string& what) {
      if (first) return expect_same_bits(out, first_rows(*first, out.rows), what);
      for (std::int64_t r = 0; r < out.rows; r += 9) {
        for (std::int64_t o = 0; o < kN; ++o) {
          double sum = 0, size = 0;
          for (std::int64_t c = 0; c < kK; ++c) {
            const double one = rows[static_cast<std::size_t>(r)][static_cast<std::size_t>(c)] * source.at(o, c);
            sum += one, size += std::abs(one);
          }
          // Sums of 64 products keep 13 bits below the largest on a device, and full float precision here.
          ASSERT_NEAR(out.at(r, o), sum, size * 0x1p-12) << what << ", row " << r << ", output " << o;
        }
      }
      first = out;
    });
    if (HasFatalFailure()) return;
    const auto few = first_rows(in, 40);
    for_all_tactics(linear, few, DType::f32, SumOrder::any, [&](const Matrix& out, const std::string& what) {
      for (std::int64_t r = 0; r < out.rows; ++r) {
        for (std::int64_t o = 0; o < kN; ++o) ASSERT_NEAR(out.at(r, o), first->at(r, o), 1e-2) << what;
      }
    });
  }
}

// Rows of zeros of both signs give zeros; rows that are not finite give NaN; neither affects its neighbours.
TEST(W8a8Test, rows_of_zeros_or_nan_do_not_affect_others) {
  Random random(155);
  Stream stream;
  MatrixUpload upload(stream);
  constexpr std::int64_t kN = 40, kK = 80, kRows = 45;
  for (const auto how :
       {Activations::i8_token, Activations::i8_tensor, Activations::f8_token, Activations::f8_tensor}) {
    const bool integers = how == Activations::i8_token || how == Activations::i8_tensor;
    const auto source = MemoryQuantSource::random(random, kN, kK, integers ? int8(kK, how) : fp8(kK, how));
    const ops::QuantSource* const part = &source;
    const CudaW8a8Linear linear({&part, 1}, {}, DType::bf16, false, upload);
    const auto plain = Matrix::random(random, DType::bf16, kRows, kK);
    auto in = plain;
    const auto kind_of = [](std::int64_t row) { return row % 6; };
    for (std::int64_t r = 0; r < kRows; ++r) {
      const auto kind = kind_of(r);
      if (kind == 1 || kind == 2) {
        for (std::int64_t c = 0; c < kK; ++c) in.set(r, c, kind == 1 ? 0.0F : -0.0F);
      }
      if (kind == 3) in.set(r, 79, NAN);
      if (kind == 4) in.set(r, 0, -INFINITY);
    }
    std::vector<Matrix> expected;
    for_all_tactics(linear, plain, DType::f32, SumOrder::fixed, [&](const Matrix& out, const std::string&) {
      if (expected.empty()) expected.push_back(out);
    });
    for_all_tactics(linear, in, DType::f32, SumOrder::fixed, [&](const Matrix& out, const std::string& what) {
      for (std::int64_t r = 0; r < out.rows; ++r) {
        const auto kind = kind_of(r);
        if (kind == 0 || kind == 5) {
          ASSERT_TRUE(out.same_bits(r, expected[0], r)) << what << ", row " << r;
          continue;
        }
        for (std::int64_t o = 0; o < kN; ++o) {
          const float found = out.at(r, o);
          ASSERT_TRUE(kind <= 2 ? found == 0 : std::isnan(found)) << what << ", row " << r << ": " << found;
        }
      }
    });
    if (HasFatalFailure()) return;
  }
}

// A library that accepts everything and computes nothing.
class NotingLibrary final : public Blas {
 public:
  explicit NotingLibrary(int& asked) : asked_(asked) {}
  std::string version() const override { return "library 1"; }
  std::vector<BlasTactic> tactics(const Gemm&, std::size_t) override { return {BlasTactic{}}; }
  bool serves(const Gemm&, const BlasTactic&, std::size_t) override { return true; }
  bool run(Stream&, const Gemm& gemm, const BlasTactic&, void*, std::size_t) override {
    EXPECT_TRUE(is_w8a8(gemm) && gemm.quant->prepared && gemm.quant->row_scales != nullptr);
    ++asked_;
    return false;
  }

 private:
  int& asked_;
};

// If the library rejects a GEMM, a built-in kernel computes it with the same inputs.
TEST(W8a8Test, the_library_gets_only_fp8_in_rows) {
  Random random(154);
  Stream stream;
  MatrixUpload upload(stream);
  constexpr std::int64_t kN = 40, kK = 64, kRows = 50;
  for (const bool of_fp8 : {true, false}) {
    const auto source = MemoryQuantSource::random(random, kN, kK, of_fp8 ? fp8(kK) : int8(kK));
    const ops::QuantSource* const part = &source;
    const MatrixOnDevice in(stream, Matrix::random(random, DType::bf16, kRows, kK));
    std::optional<Matrix> first;
    for (const bool packed : {false, true}) {
      int asked = 0;
      GemmRunner::Options options;
      options.blas = std::make_unique<NotingLibrary>(asked);
      GemmRunner runner(device_info(0), std::move(options));
      const CudaW8a8Linear linear({&part, 1}, {}, DType::bf16, packed, upload);
      auto gemm = linear.gemm();
      runner.reserve(gemm);
      const MatrixOnDevice out(stream, Matrix(DType::f32, kRows, kN));
      gemm.in = in.tensor().data, gemm.in_stride = kK, gemm.rows = kRows;
      gemm.out = out.tensor().data, gemm.out_stride = kN;
      runner.run(stream, gemm);
      EXPECT_EQ(asked, of_fp8 && !packed ? 1 : 0);
      EXPECT_EQ(runner.rejected(), asked);
      const auto found = out.host();
      if (first) expect_same_bits(found, *first, "packed");
      first = found;
    }
  }
}

// If a library is available: on a machine with a GPU.
TEST(W8a8Test, fp8_of_the_library_equals_built_in_kernels_except_for_rounding) {
  std::string why;
  const auto blas = load_cublas(why);
  if (!blas) GTEST_SKIP() << why;
  constexpr std::size_t kWorkspaceBytes = std::size_t{32} << 20;
  constexpr std::int64_t kN = 272, kK = 1024, kRows = 65;
  const auto info = device_info(0);
  if (!info.fp8) GTEST_SKIP() << "the device does not multiply FP8";
  Random random(157);
  Stream stream;
  MatrixUpload upload(stream);
  const auto source = MemoryQuantSource::random(random, kN, kK, fp8(kK));
  const ops::QuantSource* const part = &source;
  const CudaW8a8Linear linear({&part, 1}, {}, DType::bf16, false, upload);
  const MatrixOnDevice in(stream, Matrix::random(random, DType::bf16, kRows, kK));
  const MatrixOnDevice out(stream, Matrix(DType::bf16, kRows, kN)), expected(stream, Matrix(DType::bf16, kRows, kN));
  const DeviceMemory codes(kRows * kK), scales(kRows * 4);
  DeviceMemory workspace(kWorkspaceBytes);
  auto gemm = linear.gemm();
  gemm.rows = kRows, gemm.in = in.tensor().data, gemm.in_stride = kK;
  quantise_inputs(stream, gemm, codes.data(), scales.as<float>());
  gemm.in = codes.data();
  gemm.quant->prepared = true;
  gemm.quant->row_scales = scales.as<float>();
  gemm.out = expected.tensor().data, gemm.out_type = DType::bf16, gemm.out_stride = kN;
  const auto own = gemm_tactics(info, gemm).front();
  DeviceMemory own_workspace(gemm_workspace_bytes(own, gemm));
  cuda::gemm(stream, info, gemm, own, own_workspace.data());
  const auto right = expected.host();
  gemm.out = out.tensor().data;
  const auto tactics = blas->tactics(gemm, kWorkspaceBytes);
  if (tactics.empty()) GTEST_SKIP() << blas->version() << " has no FP8 GEMMs with scales of rows on this device";
  for (const auto& tactic : tactics) {
    ASSERT_TRUE(blas->serves(gemm, tactic, kWorkspaceBytes));
    ASSERT_TRUE(blas->run(stream, gemm, tactic, workspace.data(), kWorkspaceBytes));
    const auto found = out.host();
    for (std::int64_t r = 0; r < kRows; ++r) {
      for (std::int64_t o = 0; o < kN; ++o) {
        ASSERT_NEAR(found.at(r, o), right.at(r, o), 0.01 * std::abs(right.at(r, o)) + 0.5) << r << ", " << o;
      }
    }
  }
}

// Codes that a norm or a gate writes give the same bits as its output, quantised separately.
TEST(W8a8Test, norms_and_gates_write_codes_with_the_bits_of_their_outputs) {
  Random random(155);
  const auto device = ops::make_cuda_ops({.reproducible = true});
  struct Case {
    std::int64_t k;
    DType type;
    ops::QuantFormat format;
    bool delta;
    float scale = 1;
    bool weighted = true, subtract_mean = false;
  };
  using enum Activations;
  const Case cases[] = {
      {64, DType::bf16, int8(64), false},
      {272, DType::f16, int8(272, i8_tensor), true},
      {8208, DType::bf16, int8(8208), true},     // two vectors per thread
      {16400, DType::bf16, int8(16400), false},  // more than a gate keeps, and than a norm can write codes for
      {528, DType::bf16, fp8(528), true},
      {64, DType::f16, fp8(64, f8_tensor), false},
      {272, DType::bf16, int8(272), true, 0.22F},
      {8208, DType::bf16, int8(8208), true, 1, false},
      {528, DType::f16, int8(528), true, 1, true, true}};
  for (const auto& c : cases) {
    constexpr std::int64_t kN = 24, kRows = 5;
    const auto source = MemoryQuantSource::random(random, kN, c.k, c.format);
    const ops::QuantSource* const part = &source;
    const auto linear = device->make_quantised_linear({&part, 1}, {}, c.type);
    const auto weight = Matrix::random(random, DType::f32, 1, c.k);
    const auto before = Matrix::random(random, DType::f32, kRows, c.k),
               delta = Matrix::random(random, c.type, kRows, c.k);
    auto gate_up = Matrix::random(random, c.type, kRows, 2 * c.k);
    gate_up.set(3, 7, INFINITY);  // a row that is not finite, in both cases
    const Matrix untouched(c.type, kRows, c.k);
    const ops::DeviceMatrix norm_weight(*device, weight), added(*device, delta), both(*device, gate_up);
    const auto run = [&](bool fused, bool gate, Matrix& residual, Matrix& normed) {
      const ops::DeviceMatrix in(*device, before), middle(*device, untouched), out(*device, DType::f32, kRows, kN);
      if (fused) device->announce_linear(*linear);
      if (gate) {
        device->gated_activation(middle.tensor(), both.tensor(), ops::Activation::silu);
      } else {
        device->rms_norm(middle.tensor(), in.tensor(), c.delta ? added.tensor() : ops::Tensor{},
                         {.weight = c.weighted ? norm_weight.floats() : nullptr,
                          .eps = 1e-5F,
                          .delta_scale = c.scale,
                          .subtract_mean = c.subtract_mean});
      }
      device->linear(out.tensor(), middle.tensor(), *linear);
      residual = in.host();
      normed = middle.host();
      return out.host();
    };
    for (const bool gate : {false, true}) {
      if (!gate && c.k > 16384) continue;
      Matrix residual, normed, fused_residual, fused_normed;
      const auto expected = run(false, gate, residual, normed), found = run(true, gate, fused_residual, fused_normed);
      const auto what = to_string(c.format) + (gate ? ", gate" : ", norm");
      expect_same_bits(found, expected, what);
      expect_same_bits(fused_residual, residual, what + ", residual");
      expect_same_bits(fused_normed, untouched, what + ", what codes stand for");
      if (HasFatalFailure()) return;
      EXPECT_EQ(std::isnan(found.at(3, 0)), gate);
    }
  }
}

// Codes belong to the weight that they were written for. Another weight, or one without codes, takes its input
// unchanged.
TEST(W8a8Test, codes_are_for_the_announced_weight) {
  Random random(156);
  const auto device = ops::make_cuda_ops({.reproducible = true});
  constexpr std::int64_t kN = 24, kK = 64, kRows = 3;
  const auto source = MemoryQuantSource::random(random, kN, kK, int8(kK)),
             other = MemoryQuantSource::random(random, kN, kK, {Code::i8, kK, false, DType::f32, Activations::as_is});
  const ops::QuantSource *const part = &source, *const other_part = &other;
  const auto linear = device->make_quantised_linear({&part, 1}, {}, DType::bf16),
             plain = device->make_quantised_linear({&other_part, 1}, {}, DType::bf16);
  const ops::DeviceMatrix gate_up(*device, Matrix::random(random, DType::bf16, kRows, 2 * kK)),
      middle(*device, DType::bf16, kRows, kK), in(*device, Matrix::random(random, DType::bf16, kRows, kK));
  const auto run = [&](const ops::Linear& weight, const ops::DeviceMatrix& rows) {
    const ops::DeviceMatrix out(*device, DType::f32, kRows, kN);
    device->linear(out.tensor(), rows.tensor(), weight);
    return out.host();
  };
  const auto gate = [&] { device->gated_activation(middle.tensor(), gate_up.tensor(), ops::Activation::silu); };
  const auto expected = run(*linear, in);
  device->announce_linear(*linear);
  gate();
  expect_same_bits(run(*linear, in), expected, "another input");
  gate();
  const auto of_plain = run(*plain, middle);
  device->announce_linear(*plain);
  gate();
  expect_same_bits(run(*plain, middle), of_plain, "a weight without codes");
}

TEST(W8a8Test, unsupported_weights_are_not_multiplied_in_8_bits) {
  auto device = device_info(0);
  const auto is = [&](const ops::QuantFormat& format, DType type = DType::bf16, std::int64_t k = 128) {
    return is_w8a8(format, type, k, device);
  };
  EXPECT_TRUE(is(int8(128)));
  EXPECT_TRUE(is(int8(128), DType::f32));
  EXPECT_TRUE(is(fp8(128)));
  EXPECT_FALSE(is(fp8(128), DType::f32));
  EXPECT_FALSE(is(int8(64)));  // groups
  EXPECT_FALSE(is(int8(100), DType::bf16, 100));
  EXPECT_FALSE(is({Code::i8, 128, true, DType::f32, Activations::i8_token}));
  EXPECT_FALSE(is({Code::u4, 128, false, DType::f32, Activations::i8_token}));
  EXPECT_FALSE(is({Code::i8, 128, false, DType::f32, Activations::as_is}));
  EXPECT_FALSE(is({Code::f8_e4m3, 128, false, DType::f32, Activations::as_is}));
  device.fp8 = false;
  EXPECT_FALSE(is(fp8(128)));
  EXPECT_TRUE(is(int8(128)));
}

}  // namespace
}  // namespace charonia::cuda
