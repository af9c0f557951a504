// Quantised experts on the CUDA device, compared with double precision; and a row's bits.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <optional>

#include "charonia/error.h"
#include "errors.h"
#if defined(CHARONIA_CUDA_ON_HOST)
#include "emulator/emulated_device.h"
#endif
#include "ops/cuda/kernels/quant_gemm.h"
#include "ops/cuda/make_cuda_ops.h"
#include "ops_support.h"
#include "quant_support.h"

namespace charonia::ops {
namespace {

struct Layer {
  std::vector<MemoryQuantSource> gate, up, down;
  std::vector<Matrix> gate_bias, up_bias, down_bias;  // [experts] of columns, or empty
  std::int64_t hidden, inter;
  Activation activation = Activation::silu;

  Layer(Random& random, int count, std::int64_t hidden_size, std::int64_t inter_size, const QuantFormat& gates,
        const QuantFormat& downs)
      : hidden(hidden_size), inter(inter_size) {
    // Values of about 1 / sqrt(columns), so that the values between the GEMMs are about 1.
    const auto scale = [](Code code, std::int64_t k) {
      const float size = code == Code::u4 ? 5.0F : code == Code::i8 ? 74.0F : code == Code::f4_e2m1 ? 2.6F : 120.0F;
      return 1 / (size * std::sqrt(static_cast<float>(k)));
    };
    for (int e = 0; e < count; ++e) {
      gate.push_back(MemoryQuantSource::random(random, inter, hidden, gates, scale(gates.code, hidden)));
      up.push_back(MemoryQuantSource::random(random, inter, hidden, gates, scale(gates.code, hidden)));
      down.push_back(MemoryQuantSource::random(random, hidden, inter, downs, scale(downs.code, inter)));
    }
  }
  std::vector<QuantExpertSource> sources() const {
    std::vector<QuantExpertSource> out;
    for (std::size_t e = 0; e < gate.size(); ++e) {
      out.push_back({&gate[e], &up[e], &down[e]});
      if (!gate_bias.empty()) out.back().bias = {gate_bias[e].host(), up_bias[e].host(), down_bias[e].host()};
    }
    return out;
  }
  // In the files, biases of gate and up alternate.
  void add_biases(Random& random) {
    for (std::size_t e = 0; e < gate.size(); ++e) {
      gate_bias.push_back(Matrix::random(random, DType::bf16, inter, 1, 1, 1));
      up_bias.push_back(Matrix::random(random, DType::bf16, inter, 1, 1, 1));
      down_bias.push_back(Matrix::random(random, DType::f32, hidden, 1));
    }
    activation = Activation(Activation::clamped_swiglu, 1.2F, 1.702F);
  }
};

struct Sum {
  double value = 0, bound = 0;
};

bool is_dequantised(const QuantFormat& gates, const QuantFormat& downs) {
  return cuda_dequantises(gates) || cuda_dequantises(downs);
}

// An output of a GEMM whose inputs are within x_bound of x. to: the type that weights are rounded to.
Sum product(const MemoryQuantSource& weight, std::int64_t row, std::span<const double> x,
            std::span<const double> x_bound, std::optional<DType> to) {
  Sum out;
  double size = 0;
  for (std::size_t c = 0; c < x.size(); ++c) {
    const double exact = weight.at(row, static_cast<std::int64_t>(c));
    const double w = to ? rounded(*to, exact) : exact;
    out.value += w * x[c], size += std::abs(w * x[c]);
    if (!x_bound.empty()) out.bound += std::abs(w) * x_bound[c];
  }
  out.bound += size * (8 + std::sqrt(static_cast<double>(x.size()))) * 0x1p-23;
  return out;
}

// The expected row of the layer, with expert weights 1 for `expert` and 0 for the others.
std::vector<Sum> reference(const Layer& layer, int expert, std::span<const float> row, DType type, float input_scale,
                           float down_scale) {
  const auto e = static_cast<std::size_t>(expert);
  const auto& format = layer.gate[e].format();
  const auto x = quantised_activations(row, format.activations, input_scale);
  std::vector<float> h;
  std::vector<double> h_bound;
  const double unit = rounding(type);
  const auto to = is_dequantised(format, layer.down[e].format()) ? std::optional(type) : std::nullopt;
  for (std::int64_t j = 0; j < layer.inter; ++j) {
    auto g = product(layer.gate[e], j, x, {}, to), u = product(layer.up[e], j, x, {}, to);
    if (!layer.gate_bias.empty()) g.value += layer.gate_bias[e].at(j, 0), u.value += layer.up_bias[e].at(j, 0);
    const bool clamped = layer.activation.kind == Activation::clamped_swiglu;
    const double active = gated_value(layer.activation, g.value, clamped ? 0 : 1),
                 value = gated_value(layer.activation, g.value, u.value);
    h.push_back(static_cast<float>(rounded(type, value)));
    // The slope of silu is at most 1.13; h is rounded on both sides.
    h_bound.push_back(1.13 * g.bound * (std::abs(u.value) + clamped + u.bound) + std::abs(active) * (u.bound + 1e-7) +
                      std::abs(value) * (2.02 * unit + 1e-6) + 0x1p-24);
  }
  const auto how = layer.down[e].format().activations;
  auto between = quantised_activations(h, how, down_scale);
  if (how == Activations::i8_token || how == Activations::i8_tensor) {
    double scale = down_scale;
    if (how == Activations::i8_token) {
      scale = 0;
      for (const float one : h) scale = std::max(scale, std::abs(static_cast<double>(one)) / 127);
    }
    const double greatest = *std::ranges::max_element(h_bound);
    for (std::size_t j = 0; j < h.size(); ++j) {
      // A code may be the next one if the distance of the value to the midpoint is within its bound. If the scale is
      // the row's, it has the relative error of the row's largest value.
      const double code = std::abs(h[j] / scale), to_middle = std::abs(code - std::floor(code) - 0.5);
      const double off = how == Activations::i8_token ? greatest / 127 * code : 0;
      h_bound[j] = (to_middle * scale <= h_bound[j] + off ? scale : 0) + off + std::abs(between[j]) * 1e-6;
    }
  }
  std::vector<Sum> out;
  for (std::int64_t c = 0; c < layer.hidden; ++c) {
    auto y = product(layer.down[e], c, between, h_bound, to);
    if (!layer.down_bias.empty()) y.value += layer.down_bias[e].at(c, 0);
    y.bound += std::abs(y.value) * (2.02 * unit + 4e-6) + 0x1p-24;  // of down, and of the sum of the row's experts
    out.push_back(y);
  }
  return out;
}

// Every seventh row takes expert 1, the others take expert 2.
int expert_of(int row) { return row % 7 == 0 ? 1 : 2; }

struct Case {
  QuantFormat gate, down;
  std::int64_t hidden, inter;
};

// Formats for the fast kernels and for the plain kernel only, and shapes that are not multiples of vectors.
std::vector<Case> cases() {
  using enum Activations;
  return {
      {{Code::u4, 128, true, DType::f16}, {Code::u4, 64, true, DType::f16}, 256, 192},
      {{Code::u4, 13, false, DType::f32}, {Code::u4, 50, true, DType::f32}, 39, 50},
      {{Code::i8, 83, false, DType::bf16}, {Code::i8, 21, false, DType::bf16}, 83, 21},
      {{Code::i8, 96, false, DType::f32, i8_token}, {Code::i8, 37, false, DType::f32, i8_token}, 96, 37},
      {{Code::i8, 40, false, DType::f32, i8_tensor}, {Code::i8, 64, false, DType::f32, i8_tensor}, 40, 64},
      {{Code::f8_e4m3, 128, false, DType::f32}, {Code::f8_e4m3, 64, false, DType::f32, f8_token}, 128, 64},
      {{Code::f4_e2m1, 32, false, DType::f8_e8m0}, {Code::f4_e2m1, 32, false, DType::bf16}, 64, 96},
      {{Code::u4, 32, false, DType::f32, as_is, true}, {Code::i8, 8, false, DType::f32}, 64, 48},
      {{Code::i8, 16, false, DType::f16}, {Code::u4, 20, false, DType::f32, as_is, true}, 96, 20},
  };
}

// A case's layer of three experts, its inputs, and the expected outputs. Each row takes one expert.
struct Problem {
  static constexpr int kExperts = 3, kRows = 100;

  Problem(Random& random, const Case& of, DType of_type)
      : c(of),
        type(of_type),
        layer(random, kExperts, c.hidden, c.inter, c.gate, c.down),
        in(Matrix::random(random, type, kRows, c.hidden, 1, 1)),
        router(DType::f32, kRows, kExperts) {
    layer.up[2].input = 2 * layer.gate[0].input;  // the largest is used for all
    layer.down[1].input = 3 * layer.down[0].input;
    if (c.hidden == 256 || c.hidden == 96) {  // one expert's columns have their own orders
      const auto shuffled = [&](std::int64_t n) {
        std::vector<std::int32_t> order(static_cast<std::size_t>(n));
        std::iota(order.begin(), order.end(), 0);
        std::shuffle(order.begin(), order.end(), random);
        return order;
      };
      const auto order = shuffled(c.hidden);
      layer.gate[2].set_order(order);
      layer.up[2].set_order(order);
      layer.down[2].set_order(shuffled(c.inter));
    }
    if (c.gate.code == Code::f4_e2m1 || c.gate.zeros || c.down.minimums) layer.add_biases(random);
    for (int r = 0; r < kRows; ++r) {
      router.set(r, expert_of(r), 3);  // expert 0 gets none
      std::vector<float> row;
      for (std::int64_t k = 0; k < c.hidden; ++k) row.push_back(in.at(r, k));
      expected.push_back(reference(layer, expert_of(r), row, type, layer.up[2].input, layer.down[1].input));
    }
  }

  // Compares all rows of steps of several numbers of rows.
  void check(Ops& device) const {
    const auto sources = layer.sources();
    const auto experts = device.make_quantised_experts(sources, type);
    ASSERT_EQ(experts->hidden(), c.hidden);
    ASSERT_EQ(experts->inter(), c.inter);
    EXPECT_LT(experts->bytes(), static_cast<std::size_t>(3 * kExperts * (c.hidden + 64) * (c.inter + 64) * 2));
    const DeviceMatrix rows(device, in), logits(device, router);
    for (const int n : {3, 20, kRows}) {
      const DeviceMatrix out(device, type, n, c.hidden);
      const auto scratch = device.allocate(device.experts_scratch_bytes({kExperts, 1, c.hidden, c.inter, type}, n));
      device.experts(out.tensor(), rows.slice(0, n), logits.slice(0, n), *experts, {.top_k = 1}, layer.activation,
                     scratch->data());
      const auto found = out.host();
      for (int r = 0; r < n; ++r) {
        for (std::int64_t k = 0; k < c.hidden; ++k) {
          const auto& one = expected[static_cast<std::size_t>(r)][static_cast<std::size_t>(k)];
          ASSERT_NEAR(found.at(r, k), one.value, one.bound)
              << to_string(c.gate) << ", " << to_string(type) << ", row " << r << " of " << n << ", column " << k;
        }
      }
    }
  }

  Case c;
  DType type;
  Layer layer;
  Matrix in, router;
  std::vector<std::vector<Sum>> expected;
};

TEST(CudaQuantExpertsTest, every_format_equals_its_experts_in_double_precision) {
  Random random(140);
  const auto device = make_ops("cuda", 1);
  for (const auto& c : cases()) {
    for (const auto type : kWeightTypes) {
      Problem(random, c, type).check(*device);
      if (HasFatalFailure()) return;
    }
  }
}

// With more than 4 rows per expert on average, so for two of the three numbers of rows. Not in reproducible mode.
TEST(CudaQuantExpertsTest, wgmma_equals_the_experts_in_double_precision) {
  if (!cuda::device_info(0).wgmma) GTEST_SKIP() << "wgmma needs compute capability 9.0 and kernels for 90a";
  Random random(143);
  for (const bool reproducible : {false, true}) {
    const auto device = make_cuda_ops({.reproducible = reproducible, .wgmma_experts = true});
    for (const auto& c : cases()) {
      for (const auto type : {DType::bf16, DType::f16}) {
#if defined(CHARONIA_CUDA_ON_HOST)
        const auto before = cuda::launches("experts: quantised GEMM (wgmma)");
#endif
        Problem(random, c, type).check(*device);
        if (HasFatalFailure()) return;
#if defined(CHARONIA_CUDA_ON_HOST)
        const bool fast = cuda::is_fast(c.gate, type, c.hidden) && cuda::is_fast(c.down, type, c.inter) &&
                          !is_dequantised(c.gate, c.down);
        EXPECT_EQ(cuda::launches("experts: quantised GEMM (wgmma)") - before, fast && !reproducible ? 4U : 0U)
            << to_string(c.gate);
#endif
      }
      if (reproducible) break;  // one format is enough
    }
  }
}

TEST(CudaQuantExpertsTest, the_bits_of_a_row_do_not_depend_on_other_rows) {
  Random random(141);
  const auto device = make_ops("cuda_reproducible", 1);
  const Layer layer(random, 2, 640, 512, {Code::u4, 128, true, DType::f16}, {Code::u4, 32, false, DType::f16});
  const auto sources = layer.sources();
  const auto experts = device->make_quantised_experts(sources, DType::bf16);
  constexpr int kRows = 70;
  const auto in = Matrix::random(random, DType::bf16, kRows, 640),
             router = Matrix::random(random, DType::f32, kRows, 2);
  const DeviceMatrix rows(*device, in), logits(*device, router);
  const auto run = [&](int begin, int end) {
    const DeviceMatrix out(*device, DType::bf16, end - begin, 640);
    const auto scratch = device->allocate(device->experts_scratch_bytes({2, 2, 640, 512, DType::bf16}, end - begin));
    device->experts(out.tensor(), rows.slice(begin, end), logits.slice(begin, end), *experts, {.top_k = 2},
                    Activation::gelu_tanh, scratch->data());
    return out.host();
  };
  const auto two = run(0, 2), last = run(kRows - 1, kRows);
  for (const int n : {16, kRows}) {
    const auto all = run(0, n);
    for (int r = 0; r < 2; ++r) EXPECT_TRUE(all.same_bits(r, two, r)) << n << " rows";
    if (n == kRows) {
      EXPECT_TRUE(all.same_bits(n - 1, last, 0));
    }
  }
}

// Counts the rows that are read.
class CountingSource : public MemoryQuantSource {
 public:
  using MemoryQuantSource::MemoryQuantSource;
  void read(std::int64_t first, std::int64_t n, std::uint8_t* codes_out, float* scales_out,
            std::int8_t* zeros_out) const override {
    rows_read += n;
    MemoryQuantSource::read(first, n, codes_out, scales_out, zeros_out);
  }
  mutable std::int64_t rows_read = 0;
};

TEST(CudaQuantExpertsTest, weights_are_read_once_for_any_order_of_columns) {
  const QuantFormat format{Code::u4, 32};
  const auto device = make_cuda_ops({});
  for (const bool ordered : {false, true}) {
    const CountingSource gate(512, 64, format), up(512, 64, format);
    CountingSource down(64, 512, format);
    std::vector<std::int32_t> order(512);
    std::iota(order.begin(), order.end(), 0);
    std::ranges::reverse(order);
    if (ordered) down.set_order(order);
    const QuantExpertSource expert{&gate, &up, &down};
    device->make_quantised_experts({&expert, 1}, DType::bf16);
    EXPECT_EQ(gate.rows_read, 512);
    EXPECT_EQ(up.rows_read, 512);
    EXPECT_EQ(down.rows_read, 64);
  }
}

TEST(CudaQuantExpertsTest, mismatched_shapes_are_rejected_by_name) {
  Random random(142);
  const auto device = make_ops("cuda", 1);
  const auto fails = [&](const Layer& layer, ErrorCode code, const std::string& text) {
    const auto sources = layer.sources();
    expect_error(code, {"test.weight", text}, [&] { device->make_quantised_experts(sources, DType::bf16); });
  };
  const QuantFormat format{Code::u4, 32};
  const auto make = [&] { return Layer(random, 2, 64, 32, format, format); };
  auto layer = make();
  layer.up[1] = MemoryQuantSource::random(random, 32, 64, {Code::i8, 32});
  fails(layer, ErrorCode::invalid_argument, "both must be the same");
  layer = make();
  layer.down[0] = MemoryQuantSource::random(random, 64, 64, format);
  fails(layer, ErrorCode::invalid_argument, "[64, 64]");
  layer = make();
  std::vector<std::int32_t> order(64);
  std::iota(order.rbegin(), order.rend(), 0);
  layer.gate[1].set_order(order);
  fails(layer, ErrorCode::invalid_argument, "differs from");
  order[5] = 64;
  layer.up[1].set_order(order);
  layer.gate[1].set_order(order);
  fails(layer, ErrorCode::invalid_argument, "64 entries below 64");
}

}  // namespace
}  // namespace charonia::ops
