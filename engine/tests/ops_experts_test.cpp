// Mixture of experts, compared with a reference in double; and the guarantee that a row's result depends only on the
// row.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <limits>
#include <numeric>

#include "charonia/error.h"
#include "errors.h"
#include "ops_support.h"
#include "router_reference.h"

namespace charonia::ops {
namespace {

class ExpertsTest : public testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(Device, ExpertsTest, testing::ValuesIn(device_names()), [](const auto& i) { return i.param; });

// A layer of experts, and the reference computation of a row.
struct Layer {
  std::vector<Matrix> gate, up, down;  // [experts], in any element type
  DType weight;
  std::int64_t hidden, inter;
  RouterParams how;  // without the bias
  Activation activation = Activation::silu;
  std::vector<Matrix> gate_bias, up_bias, down_bias;  // [experts] of columns, or empty
  std::vector<float> bias;                            // of the router: [experts], or empty
  Matrix shared, shared_gate;  // [rows, hidden] and [rows, 1], or empty

  Layer(Random& random, DType type, int count, std::int64_t hidden_size, std::int64_t inter_size, const RouterParams& r,
        Activation a)
      : weight(type), hidden(hidden_size), inter(inter_size), how(r), activation(a) {
    const float scale = 1 / std::sqrt(static_cast<float>(hidden)),
                down_scale = 1 / std::sqrt(static_cast<float>(inter));
    for (int e = 0; e < count; ++e) {
      const auto from = kWeightTypes[static_cast<std::size_t>(uniform(random, 0, 2))];
      gate.push_back(Matrix::random(random, from, inter, hidden, 2 * scale, uniform(random, 0, 1) * 3));
      up.push_back(Matrix::random(random, from, inter, hidden, scale));
      down.push_back(Matrix::random(random, from, hidden, inter, down_scale, uniform(random, 0, 1) * 5));
    }
  }

  // Adds biases of the three matrices, or of gate and up only, as on ranks that do not add the down bias. In the files,
  // biases of gate and up alternate.
  void add_biases(Random& random, bool with_down) {
    for (int e = 0; e < count(); ++e) {
      gate_bias.push_back(Matrix::random(random, DType::bf16, inter, 1, 1, 1));
      up_bias.push_back(Matrix::random(random, DType::f32, inter, 1, 1, 1));
      if (with_down) down_bias.push_back(Matrix::random(random, DType::f16, hidden, 1));
    }
  }

  int count() const { return static_cast<int>(gate.size()); }
  std::unique_ptr<Experts> make(Ops& ops) const {
    std::vector<ExpertSource> sources;
    for (std::size_t e = 0; e < gate.size(); ++e) {
      sources.push_back({gate[e].host(), up[e].host(), down[e].host()});
      auto& biases = sources.back().bias;
      if (!gate_bias.empty()) biases.gate = gate_bias[e].host(), biases.up = up_bias[e].host();
      if (!down_bias.empty()) biases.down = down_bias[e].host();
    }
    return ops.make_experts(sources, weight);
  }
  ExpertsShape shape() const { return {count(), how.top_k, hidden, inter, weight}; }

  // The selected experts of a row with their weights, in ascending order.
  std::vector<std::pair<int, double>> route(const Matrix& router, std::int64_t row) const {
    std::vector<double> logits;
    for (int e = 0; e < count(); ++e) {
      logits.push_back(router.cols > count() ? router.at(row, e) + router.at(row, count() + e) : router.at(row, e));
    }
    return chosen_experts(logits, how, bias);
  }

  // The expected row, and the allowed error of a device.
  struct Result {
    std::vector<double> value, bound;  // [hidden]
  };
  Result reference(const Matrix& in, const Matrix& router, std::int64_t row, const Precision& type) const {
    const auto weight_at = [&](const Matrix& m, std::int64_t r, std::int64_t c) {
      return static_cast<double>(rounded(weight, m.at(r, c)));
    };
    const auto of_sum = [](std::int64_t n) { return 0x1p-24 * (2 + 4 * std::sqrt(static_cast<double>(n))); };
    const double of_gemm = type.gemm_out == DType::f32 ? 0 : 1.01 * rounding(type.gemm_out);
    const double of_activation = 1.01 * rounding(type.activation);
    Result out{std::vector<double>(static_cast<std::size_t>(hidden), 0.0),
               std::vector<double>(static_cast<std::size_t>(hidden), 1e-30)};
    if (shared.rows > 0) {
      const double factor = shared_gate.rows > 0 ? 1 / (1 + std::exp(-shared_gate.at(row, 0))) : 1;
      for (std::int64_t c = 0; c < hidden; ++c) {
        const auto at = static_cast<std::size_t>(c);
        out.value[at] = factor * shared.at(row, c);
        out.bound[at] += std::abs(out.value[at]) * 4e-6;
      }
    }
    std::vector<double> h(static_cast<std::size_t>(inter)), h_bound(h.size());
    for (const auto& [e, factor] : route(router, row)) {
      const auto i = static_cast<std::size_t>(e);
      for (std::int64_t j = 0; j < inter; ++j) {
        double g = gate_bias.empty() ? 0 : gate_bias[i].at(j, 0), u = up_bias.empty() ? 0 : up_bias[i].at(j, 0);
        double g_size = std::abs(g), u_size = std::abs(u);
        for (std::int64_t c = 0; c < hidden; ++c) {
          const double x = in.at(row, c), a = weight_at(gate[i], j, c) * x, b = weight_at(up[i], j, c) * x;
          g += a, u += b, g_size += std::abs(a), u_size += std::abs(b);
        }
        const double g_bound = g_size * of_sum(hidden) + std::abs(g) * of_gemm;
        const double u_bound = u_size * of_sum(hidden) + std::abs(u) * of_gemm;
        // The activation is a function of g, whose slope is at most 1.13, times u or, clamped, 1 + u.
        const double factor_of_u = activation.kind == Activation::clamped_swiglu ? 1 + std::abs(u) : std::abs(u);
        const double active = gated_value(activation, g, activation.kind == Activation::clamped_swiglu ? 0 : 1);
        const auto at = static_cast<std::size_t>(j);
        h[at] = gated_value(activation, g, u);
        h_bound[at] = 1.13 * g_bound * (factor_of_u + u_bound) + std::abs(active) * (u_bound + 1e-7) +
                      std::abs(h[at]) * (of_activation + 1e-6) + (type.activation == DType::f16 ? 0x1p-24 : 0);
      }
      for (std::int64_t c = 0; c < hidden; ++c) {
        double y = down_bias.empty() ? 0 : down_bias[i].at(c, 0), bound = 0, size = std::abs(y);
        for (std::int64_t j = 0; j < inter; ++j) {
          const auto at = static_cast<std::size_t>(j);
          const double d = weight_at(down[i], c, j);
          y += d * h[at], size += std::abs(d * h[at]), bound += std::abs(d) * h_bound[at];
        }
        const auto at = static_cast<std::size_t>(c);
        out.value[at] += factor * y;
        // The last term is for the softmax over the router's logits.
        out.bound[at] += factor * (bound + size * of_sum(inter) + std::abs(y) * (of_gemm + 4e-6));
      }
    }
    for (std::size_t c = 0; c < out.value.size(); ++c) out.bound[c] += std::abs(out.value[c]) * of_gemm;
    if (type.gemm_out == DType::f16) {
      for (auto& bound : out.bound) bound += 0x1p-24;
    }
    return out;
  }

  // Computes rows [begin, end), with scratch memory of exactly the size that the device requests.
  Matrix run(Ops& ops, const Experts& experts, const Matrix& in, const Matrix& router, std::int64_t begin,
             std::int64_t end) const {
    constexpr std::size_t kBehind = 4096;
    const auto bytes = ops.experts_scratch_bytes(shape(), end - begin);
    const auto scratch = ops.allocate(bytes + kBehind);
    std::vector<std::byte> mark(kBehind, std::byte{0x5a}), behind(kBehind);
    ops.upload(scratch->as<std::byte>() + bytes, mark.data(), kBehind);
    const DeviceMatrix rows(ops, in), logits(ops, router), biases(ops, bias_matrix());
    const DeviceMatrix shared_out(ops, shared.rows > 0 ? shared : Matrix(DType::f32, in.rows, 1)),
        gates(ops, shared_gate.rows > 0 ? shared_gate : Matrix(DType::f32, in.rows, 1));
    auto choice = how;
    if (!bias.empty()) choice.bias = static_cast<const float*>(biases.tensor().data);
    SharedExpert extra;
    if (shared.rows > 0) extra.out = shared_out.slice(begin, end);
    if (shared_gate.rows > 0) {
      extra.gate = static_cast<const float*>(gates.slice(begin, end).data);
      extra.gate_stride = gates.tensor().stride;
    }
    const DeviceMatrix out(ops, ops.precision(weight).gemm_out, in.rows, hidden, 3);
    ops.experts(out.slice(begin, end), rows.slice(begin, end), logits.slice(begin, end), experts, choice, activation,
                scratch->data(), extra);
    ops.download(behind.data(), scratch->as<std::byte>() + bytes, kBehind);
    EXPECT_EQ(behind, mark) << "the kernel wrote beyond the scratch memory";
    return out.host();
  }
  Matrix bias_matrix() const {
    Matrix out(DType::f32, 1, std::max(1, count()));
    for (std::size_t e = 0; e < bias.size(); ++e) out.set(0, static_cast<std::int64_t>(e), bias[e]);
    return out;
  }
};

// A layer and rows for it. scored: the router does not select by logits, and rows have a shared expert's output.
struct Problem {
  Layer layer;
  Matrix in, router;

  Problem(Random& random, Ops& ops, DType weight, int trial, bool scored, int rows)
      : layer(scored ? scored_layer(random, weight, trial) : plain_layer(random, weight, trial)),
        in(Matrix::random(random, ops.precision(weight).activation, rows, layer.hidden, 1, uniform(random, 0, 4))),
        router(Matrix::random(random, DType::f32, rows, layer.count() * (scored && trial % 3 == 2 ? 2 : 1), 2,
                              uniform(random, 0, 3))) {
    if (!scored) {
      for (int e = 0; trial % 3 == 1 && e < layer.count(); ++e) router.set(0, e, static_cast<float>(e % 2));  // ties
      return;
    }
    if (trial % 2 == 0) {
      for (int e = 0; e < 12; ++e) layer.bias.push_back(static_cast<float>(uniform(random, -40, 40)) / 64);
    }
    if (trial % 4 == 1 && rows > 1) {  // sigmoids that are 1 in fp32, and ties
      for (int e = 0; e < router.cols; ++e) router.set(0, e, static_cast<float>(20 + e % 5)), router.set(1, e, 0.5F);
    }
    if (trial % 5 != 0) {
      layer.shared =
          Matrix::random(random, ops.precision(weight).gemm_out, rows, layer.hidden, 2, uniform(random, 0, 1) * 3);
    }
    if (trial % 5 > 2) layer.shared_gate = Matrix::random(random, DType::f32, rows, 1, 3, uniform(random, 0, 3));
  }

 private:
  static Layer plain_layer(Random& random, DType weight, int trial) {
    const int count = uniform(random, 1, trial % 3 == 0 ? 20 : 8);
    const RouterParams how{.top_k = uniform(random, 1, std::min(count, 8)), .renormalize = trial % 2 == 0};
    const std::array activations = {Activation(Activation::silu), Activation(Activation::gelu_tanh),
                                    Activation(Activation::clamped_swiglu, 1.5F, 1.702F)};
    Layer layer(random, weight, count, uniform(random, 1, 200), uniform(random, 1, 150), how,
                activations[static_cast<std::size_t>(trial % 3)]);
    if (trial % 3 != 1) layer.add_biases(random, trial % 4 < 2);
    return layer;
  }
  static Layer scored_layer(Random& random, DType weight, int trial) {
    RouterParams how{.top_k = uniform(random, 1, 4),
                     .renormalize = trial % 3 != 0,
                     .score = trial % 4 < 2 ? RouterScore::sigmoid : RouterScore::softmax,
                     .scale = trial % 2 == 0 ? 2.5F : 1.0F};
    how.groups = std::array{0, 2, 3, 4, 6}[static_cast<std::size_t>(uniform(random, 0, 4))];
    if (how.groups > 0) {
      const int size = 12 / how.groups;
      how.top_groups = uniform(random, (how.top_k + size - 1) / size, how.groups);
    }
    if (trial % 4 == 2) how.norm_min = 0.08F;  // more than the selected scores sum to with some biases
    return {random, weight, 12, uniform(random, 1, 60), uniform(random, 1, 40), how, Activation::silu};
  }
};

TEST_P(ExpertsTest, equals_the_weighted_sum_in_double) {
  Random random(60);
  const auto ops = make_ops(GetParam(), 2);
  for (int trial = 0; trial < trials(GetParam(), 40); ++trial) {
    for (const auto weight : kWeightTypes) {
      const int rows = uniform(random, 1, 35);
      const Problem of(random, *ops, weight, trial / 2, trial % 2 == 1, rows);
      const auto& layer = of.layer;
      const auto experts = layer.make(*ops);
      ASSERT_EQ(experts->count(), layer.count());
      ASSERT_EQ(experts->hidden(), layer.hidden);
      ASSERT_EQ(experts->inter(), layer.inter);
      EXPECT_GE(experts->bytes(),
                static_cast<std::size_t>(3 * layer.count() * layer.hidden * layer.inter) * size_of(weight));
      const auto out = layer.run(*ops, *experts, of.in, of.router, 0, rows);
      for (int r = 0; r < rows; r += trial % 2 == 1 ? 1 : std::max(1, rows / 3)) {
        const auto expected = layer.reference(of.in, of.router, r, ops->precision(weight));
        for (std::int64_t c = 0; c < layer.hidden; ++c) {
          const auto at = static_cast<std::size_t>(c);
          ASSERT_NEAR(out.at(r, c), expected.value[at], expected.bound[at])
              << "trial " << trial << ", row " << r << " of " << rows << ", " << layer.how.top_k << " of "
              << layer.count() << " experts, " << layer.how.top_groups << " of " << layer.how.groups
              << " groups, hidden " << layer.hidden << ", inter " << layer.inter << ", " << to_string(weight);
        }
      }
    }
  }
}

TEST_P(ExpertsTest, a_row_alone_equals_the_row_in_any_batch_bit_by_bit) {
  if (!traits(GetParam()).bitwise) GTEST_SKIP() << "the device does not promise it";
  Random random(61);
  const auto one = make_ops(GetParam(), 1), many = make_ops(GetParam(), 3);
  for (int trial = 0; trial < trials(GetParam(), 16); ++trial) {
    for (const auto weight : kWeightTypes) {
      // The first trials have more assignments than are processed together.
      const int rows = trial < 2 ? 200 : uniform(random, 2, 40);
      const Problem of(random, *one, weight, trial / 2, trial % 2 == 1, rows);
      const auto experts_one = of.layer.make(*one), experts_many = of.layer.make(*many);
      const auto batch = of.layer.run(*many, *experts_many, of.in, of.router, 0, rows);
      for (int probe = 0; probe < 5; ++probe) {
        const int r = uniform(random, 0, rows - 1);
        ASSERT_TRUE(of.layer.run(*one, *experts_one, of.in, of.router, r, r + 1).same_bits(r, batch, r))
            << "trial " << trial << ", row " << r << " of " << rows << " alone, " << to_string(weight);
      }
      const int begin = uniform(random, 0, rows - 1);
      const auto some = of.layer.run(*many, *experts_many, of.in, of.router, begin, rows);
      for (int r = begin; r < rows; ++r) ASSERT_TRUE(some.same_bits(r, batch, r)) << rows - begin << " rows";
    }
  }
}

// Few rows per expert, many rows, and more rows than are processed together use different kernels.
TEST_P(ExpertsTest, the_bits_of_a_row_do_not_depend_on_the_rows_of_its_experts) {
  if (!traits(GetParam()).bitwise) GTEST_SKIP() << "the device does not promise it";
  Random random(64);
  const auto one = make_ops(GetParam(), 1), many = make_ops(GetParam(), 3);
  const Layer layer(random, DType::bf16, 6, 65, 71, {.top_k = 2}, Activation::silu);
  const auto experts_one = layer.make(*one), experts_many = layer.make(*many);
  const int rows = trials(GetParam(), 1400);
  const auto in = Matrix::random(random, one->precision(DType::bf16).activation, rows, layer.hidden);
  // Nearly all rows select expert 1, few select expert 4, the others share the rest.
  auto router = Matrix::random(random, DType::f32, rows, layer.count(), 2);
  for (int r = 0; r < rows; ++r) {
    router.set(r, 1, router.at(r, 1) + 8);
    router.set(r, 4, router.at(r, 4) - 5);
  }
  const auto batch = layer.run(*many, *experts_many, in, router, 0, rows);
  for (int probe = 0; probe < 24; ++probe) {
    const int r = uniform(random, 0, rows - 1);
    ASSERT_TRUE(layer.run(*one, *experts_one, in, router, r, r + 1).same_bits(r, batch, r)) << "row " << r;
  }
}

TEST_P(ExpertsTest, the_weights_of_unselected_experts_are_not_read) {
  Random random(62);
  const auto ops = make_ops(GetParam(), 2);
  Layer layer(random, DType::f32, 5, 48, 40, {.top_k = 2}, Activation::silu);
  for (const std::size_t e : {0U, 3U}) {
    for (int c = 0; c < 48; ++c) layer.gate[e].set(c % 40, c, std::numeric_limits<float>::quiet_NaN());
  }
  const auto experts = layer.make(*ops);
  const auto in = Matrix::random(random, ops->precision(DType::f32).activation, 7, 48);
  auto router = Matrix::random(random, DType::f32, 7, 5);
  for (int r = 0; r < 7; ++r) router.set(r, 0, -50), router.set(r, 3, -60);
  const auto out = layer.run(*ops, *experts, in, router, 0, 7);
  for (int r = 0; r < 7; ++r) {
    for (int c = 0; c < 48; ++c) ASSERT_TRUE(std::isfinite(out.at(r, c)));
  }
}

TEST_P(ExpertsTest, mismatched_shapes_are_rejected) {
  Random random(63);
  const auto ops = make_ops(GetParam(), 1);
  Layer layer(random, DType::f32, 3, 16, 24, {.top_k = 2}, Activation::silu);
  const auto experts = layer.make(*ops);
  // Columns: hidden, experts of the router, and hidden of the shared expert's output.
  const auto compute = [&](const RouterParams& how, int hidden = 16, int routed = 3, int shared = 16) {
    const auto scratch = ops->allocate(ops->experts_scratch_bytes(layer.shape(), 2));
    const auto type = ops->precision(DType::f32);
    const DeviceMatrix rows(*ops, type.activation, 2, hidden), router(*ops, DType::f32, 2, routed),
        out(*ops, type.gemm_out, 2, 16), more(*ops, type.gemm_out, 2, shared);
    ops->experts(out.tensor(), rows.tensor(), router.tensor(), *experts, how, Activation::silu, scratch->data(),
                 {.out = more.tensor()});
  };
  compute({.top_k = 2});
  compute({.top_k = 2, .groups = 1, .top_groups = 1});
  for (const RouterParams& how : std::vector<RouterParams>{{.top_k = 0},
                                                           {.top_k = 4},
                                                           {.top_k = 2, .groups = 2, .top_groups = 1},
                                                           {.top_k = 2, .groups = 3, .top_groups = 2},
                                                           {.top_k = 2, .groups = 1, .top_groups = 0}}) {
    expect_error(ErrorCode::internal, {}, [&] { compute(how); });
  }
  for (const auto& [hidden, routed, shared] : {std::array{15, 3, 16}, {16, 4, 16}, {16, 3, 15}}) {
    expect_error(ErrorCode::internal, {}, [&] { compute({.top_k = 2}, hidden, routed, shared); });
  }

  layer.add_biases(random, true);
  layer.make(*ops);
  layer.down_bias[2] = Matrix(DType::f32, 17, 1);
  EXPECT_THROW(layer.make(*ops), Error);
  layer.down_bias.clear();
  layer.down[1] = Matrix(DType::f32, 24, 16);
  EXPECT_THROW(layer.make(*ops), Error);
  EXPECT_THROW(ops->make_experts({}, DType::f32), Error);
}

}  // namespace
}  // namespace charonia::ops
