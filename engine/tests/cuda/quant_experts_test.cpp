// Quantised experts on the CUDA device, compared with the same experts in float on the CPU; and a row's bits.
// ops_quant_linear_test.cpp, which all devices share, compares experts with 8-bit activations.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "charonia/error.h"
#include "cuda/quant_formats.h"
#include "errors.h"
#include "ops/cpu/make_cpu_ops.h"
#include "ops_support.h"
#include "quant_support.h"

namespace charonia::ops {
namespace {

// Counts the rows that are read.
class CountingSource : public MemoryQuantSource {
 public:
  explicit CountingSource(const MemoryQuantSource& of) : MemoryQuantSource(of) {}
  void read(std::int64_t first, std::int64_t n, std::uint8_t* codes_out, float* scales_out,
            std::int8_t* zeros_out) const override {
    rows_read += n;
    MemoryQuantSource::read(first, n, codes_out, scales_out, zeros_out);
  }
  mutable std::int64_t rows_read = 0;
};

std::vector<std::int32_t> shuffled(Random& random, std::int64_t n) {
  std::vector<std::int32_t> order(static_cast<std::size_t>(n));
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), random);
  return order;
}

struct Layer {
  std::vector<CountingSource> gate, up, down;
  std::int64_t hidden, inter;

  Layer(Random& random, int count, std::int64_t hidden_size, std::int64_t inter_size, const QuantFormat& gates,
        const QuantFormat& downs)
      : hidden(hidden_size), inter(inter_size) {
    // Values of about 1 / sqrt(columns), so that the values between the GEMMs are about 1.
    const auto source = [&](std::int64_t n, std::int64_t k, const QuantFormat& format) {
      const auto code = format.code;
      const float size = code == Code::u4 ? 5.0F : code == Code::i8 ? 74.0F : code == Code::f4_e2m1 ? 2.6F : 120.0F;
      const float scale = 1 / (size * std::sqrt(static_cast<float>(k)));
      return CountingSource(MemoryQuantSource::random(random, n, k, format, scale));
    };
    for (int e = 0; e < count; ++e) {
      gate.push_back(source(inter, hidden, gates));
      up.push_back(source(inter, hidden, gates));
      down.push_back(source(hidden, inter, downs));
    }
  }
  std::vector<QuantExpertSource> sources() const {
    std::vector<QuantExpertSource> out;
    for (std::size_t e = 0; e < gate.size(); ++e) out.push_back({&gate[e], &up[e], &down[e]});
    return out;
  }
  // The same experts in float.
  std::unique_ptr<Experts> in_float(Ops& ops) const {
    std::vector<Matrix> matrices;
    for (const auto* of : {&gate, &up, &down}) {
      for (const auto& source : *of) {
        auto& matrix = matrices.emplace_back(DType::f32, source.rows(), source.cols());
        const auto values = cuda::values(source);
        std::vector<float> floats(values.begin(), values.end());
        std::memcpy(matrix.bytes.data(), floats.data(), matrix.bytes.size());
      }
    }
    std::vector<ExpertSource> all;
    const auto n = gate.size();
    for (std::size_t e = 0; e < n; ++e) {
      all.push_back({matrices[e].host(), matrices[n + e].host(), matrices[2 * n + e].host()});
    }
    return ops.make_experts(all, DType::f32);
  }
};

Matrix run(Ops& ops, const Experts& experts, const Matrix& in, const Matrix& router, int top_k, DType weight) {
  const auto scratch = ops.allocate(
      ops.experts_scratch_bytes({static_cast<int>(router.cols), top_k, in.cols, experts.inter(), weight}, in.rows));
  const DeviceMatrix rows(ops, in), logits(ops, router), out(ops, ops.precision(weight).gemm_out, in.rows, in.cols);
  ops.experts(out.tensor(), rows.tensor(), logits.tensor(), experts, {.top_k = top_k}, Activation::silu,
              scratch->data());
  return out.host();
}

// Each row takes one expert. Formats for both kernels and for the plain kernel only, and shapes that are not multiples
// of vectors.
TEST(CudaQuantExpertsTest, every_format_equals_its_experts_in_float) {
  Random random(140);
  struct Case {
    QuantFormat gate, down;
    std::int64_t hidden, inter;
  };
  const Case cases[] = {
      {{Code::u4, 128, true, DType::f16}, {Code::u4, 64, true, DType::f16}, 256, 192},
      {{Code::u4, 13, false, DType::f32}, {Code::u4, 50, true, DType::f32}, 39, 50},
      {{Code::i8, 83, false, DType::bf16}, {Code::i8, 21, false, DType::bf16}, 83, 21},
      {{Code::i8, 96, true, DType::f32}, {Code::i8, 40, true, DType::f32}, 96, 40},
      {{Code::f8_e4m3, 128, false, DType::f32}, {Code::f8_e4m3, 64, false, DType::f32, Activations::f8_token}, 128, 64},
      {{Code::f4_e2m1, 32, false, DType::f8_e8m0}, {Code::f4_e2m1, 32, false, DType::bf16}, 64, 96},
  };
  const auto device = make_ops("cuda", 1), cpu = make_cpu_ops(1);
  for (const auto& c : cases) {
    for (const auto type : kWeightTypes) {
      constexpr int kExperts = 3, kRows = 20;
      Layer layer(random, kExperts, c.hidden, c.inter, c.gate, c.down);
      if (c.hidden == 256 || c.hidden == 96) {  // one expert's columns have their own orders
        const auto order = shuffled(random, c.hidden);
        layer.gate[2].set_order(order);
        layer.up[2].set_order(order);
        layer.down[2].set_order(shuffled(random, c.inter));
      }
      const auto experts = device->make_quantised_experts(layer.sources(), type);
      for (std::size_t e = 0; e < kExperts; ++e) {
        for (const auto* one : {&layer.gate[e], &layer.up[e], &layer.down[e]}) EXPECT_EQ(one->rows_read, one->rows());
      }
      ASSERT_EQ(experts->hidden(), c.hidden);
      ASSERT_EQ(experts->inter(), c.inter);
      EXPECT_LT(experts->bytes(), static_cast<std::size_t>(3 * kExperts * (c.hidden + 64) * (c.inter + 64) * 2));
      const auto in = Matrix::random(random, type, kRows, c.hidden, 1, 1);
      Matrix router(DType::f32, kRows, kExperts), floats(DType::f32, kRows, c.hidden);
      for (int r = 0; r < kRows; ++r) {
        router.set(r, r % 7 == 0 ? 1 : 2, 3);  // expert 0 gets none
        for (std::int64_t i = 0; i < c.hidden; ++i) floats.set(r, i, in.at(r, i));
      }
      const auto expected = run(*cpu, *layer.in_float(*cpu), floats, router, 1, DType::f32);
      for (const int n : {3, kRows}) {
        const auto found = run(*device, *experts, in.slice(0, n), router.slice(0, n), 1, type);
        for (int r = 0; r < n; ++r) {
          const auto row = expected.floats(r);
          const double size = std::max(std::abs(std::ranges::max(row)), std::abs(std::ranges::min(row)));
          for (std::int64_t k = 0; k < c.hidden; ++k) {
            ASSERT_NEAR(found.at(r, k), expected.at(r, k), size * (1e-5 + 4 * rounding(type)))
                << to_string(c.gate) << ", " << to_string(type) << ", row " << r << " of " << n << ", column " << k;
          }
        }
      }
    }
  }
}

TEST(CudaQuantExpertsTest, the_bits_of_a_row_do_not_depend_on_other_rows) {
  Random random(141);
  const auto device = make_ops("cuda_reproducible", 1);
  const Layer layer(random, 2, 640, 512, {Code::u4, 128, true, DType::f16}, {Code::u4, 32, false, DType::f16});
  const auto experts = device->make_quantised_experts(layer.sources(), DType::bf16);
  constexpr int kRows = 70;
  const auto in = Matrix::random(random, DType::bf16, kRows, 640),
             router = Matrix::random(random, DType::f32, kRows, 2);
  const auto rows = [&](int begin, int end) {
    return run(*device, *experts, in.slice(begin, end), router.slice(begin, end), 2, DType::bf16);
  };
  const auto all = rows(0, kRows), some = rows(0, 16), two = rows(0, 2);
  for (int r = 0; r < 2; ++r) EXPECT_TRUE(all.same_bits(r, two, r) && some.same_bits(r, two, r)) << r;
  EXPECT_TRUE(all.same_bits(kRows - 1, rows(kRows - 1, kRows), 0));
}

TEST(CudaQuantExpertsTest, mismatched_shapes_are_rejected_by_name) {
  Random random(142);
  const auto device = make_ops("cuda", 1);
  const auto fails = [&](const Layer& layer, const std::string& text) {
    expect_error(ErrorCode::invalid_argument, {"test.weight", text},
                 [&] { device->make_quantised_experts(layer.sources(), DType::bf16); });
  };
  const QuantFormat format{Code::u4, 32}, other{Code::i8, 32};
  const auto make = [&] { return Layer(random, 2, 64, 32, format, format); };
  auto layer = make();
  layer.up[1] = CountingSource(MemoryQuantSource::random(random, 32, 64, other));
  fails(layer, "both must be the same");
  layer = make();
  layer.down[0] = CountingSource(MemoryQuantSource::random(random, 64, 64, format));
  fails(layer, "[64, 64]");
  layer = make();
  auto order = shuffled(random, 64);
  layer.gate[1].set_order(order);
  fails(layer, "differs from");
  order[5] = 64;
  layer.up[1].set_order(order);
  layer.gate[1].set_order(order);
  fails(layer, "64 entries below 64");
}

}  // namespace
}  // namespace charonia::ops
