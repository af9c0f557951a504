// Ops::linear and make_linear, compared with a product in double; and the guarantee that a row's result depends only on
// the row.
#include <gtest/gtest.h>

#include "charonia/error.h"
#include "ops_support.h"

namespace charonia::ops {
namespace {

class LinearTest : public testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(Device, LinearTest, testing::ValuesIn(device_names()), [](const auto& i) { return i.param; });

struct Case {
  std::vector<Matrix> parts, biases;
  std::vector<HostMatrix> hosts, bias_hosts;
  std::int64_t n = 0, k = 0;
  DType weight = DType::f32;

  Case(Random& random, DType type, std::vector<std::int64_t> rows, std::int64_t cols, bool with_bias)
      : k(cols), weight(type) {
    for (const auto r : rows) {
      parts.push_back(Matrix::random(random, kWeightTypes[static_cast<std::size_t>(uniform(random, 0, 2))], r, k, 0.5F,
                                     uniform(random, 0, 1) * 3));
      n += r;
    }
    for (const auto& part : parts) hosts.push_back(part.host());
    if (!with_bias) return;
    for (const auto r : rows) biases.push_back(Matrix::random(random, DType::f32, r, 1));
    for (const auto& b : biases) bias_hosts.push_back(b.host());
    if (rows.size() > 1) bias_hosts[1] = {};
  }

  // The stored weight: rounded to its type.
  double at(std::int64_t row, std::int64_t col) const {
    for (const auto& part : parts) {
      if (row < part.rows) {
        return static_cast<float>(rounded(weight, part.at(row, col)));
      }
      row -= part.rows;
    }
    return 0;
  }
  double bias(std::int64_t row) const {
    for (std::size_t i = 0; i < bias_hosts.size(); ++i) {
      if (row < parts[i].rows) return bias_hosts[i].data == nullptr ? 0 : biases[i].at(row, 0);
      row -= parts[i].rows;
    }
    return 0;
  }
};

TEST_P(LinearTest, equals_a_product_in_double) {
  Random random(1);
  const auto ops = make_ops(GetParam(), 2);
  for (int trial = 0; trial < trials(GetParam(), 30); ++trial) {
    for (const auto type : kWeightTypes) {
      std::vector<std::int64_t> rows;
      for (int i = uniform(random, 1, 3); i > 0; --i) rows.push_back(uniform(random, 1, 150));
      const Case c(random, type, rows, uniform(random, 1, 300), trial % 2 == 0);
      const int m = trial % 3 == 0 ? uniform(random, 1, 130) : uniform(random, 1, 14);
      const auto linear = ops->make_linear(c.hosts, c.bias_hosts, type);
      ASSERT_EQ(linear->out_features(), c.n);
      ASSERT_EQ(linear->in_features(), c.k);
      EXPECT_GE(linear->bytes(), static_cast<std::size_t>(c.n * c.k) * size_of(type));
      const auto in = Matrix::random(random, ops->precision(type).activation, m, c.k, 1, uniform(random, 0, 5));
      const auto out_type = trial % 4 == 0 ? DType::f32 : ops->precision(type).gemm_out;
      const DeviceMatrix result(*ops, out_type, m, c.n, uniform(random, 0, 5));
      ops->linear(result.tensor(), DeviceMatrix(*ops, in).tensor(), *linear);
      const auto out = result.host();
      for (int r = 0; r < m; ++r) {
        for (std::int64_t j = 0; j < c.n; ++j) {
          double sum = c.bias(j), magnitude = std::abs(sum);
          for (std::int64_t i = 0; i < c.k; ++i) {
            const double product = static_cast<double>(in.at(r, i)) * c.at(j, i);
            sum += product;
            magnitude += std::abs(product);
          }
          // Each of k products and additions is rounded once; the errors are the errors of the partial sums.
          const double of_sums = magnitude * 0x1p-24 * (2 + std::sqrt(static_cast<double>(c.k)) * 4);
          const double of_out = out_type == DType::f32 ? 0 : 1.01 * rounding(out_type) * std::abs(sum);
          ASSERT_NEAR(out.at(r, j), sum, (out_type == DType::f16 ? 0x1p-25 : 1e-30) + of_sums + of_out)
              << "row " << r << " of " << m << ", feature " << j << ", k " << c.k << ", " << to_string(type);
        }
      }
    }
  }
}

TEST_P(LinearTest, a_gated_linear_has_the_bits_of_a_linear_and_its_activation) {
  Random random(5);
  const auto ops = make_ops(GetParam(), 2);
  for (const auto type : kWeightTypes) {
    for (const int rows : {1, 3, 16, 40}) {
      const std::int64_t inter = uniform(random, 1, 90), k = 8 * uniform(random, 1, 60);
      const Case c(random, type, {inter, inter}, k, rows == 3);
      const auto linear = ops->make_linear(c.hosts, c.bias_hosts, type);
      const auto precision = ops->precision(type);
      const DeviceMatrix in(*ops, Matrix::random(random, precision.activation, rows, k, 1, 8));
      const DeviceMatrix gate_up(*ops, precision.gemm_out, rows, 2 * inter, 2);
      const DeviceMatrix expected(*ops, precision.activation, rows, inter, 5);
      const DeviceMatrix found(*ops, precision.activation, rows, inter, 5);
      for (const Activation activation : {Activation(Activation::silu), Activation(Activation::gelu_tanh),
                                          Activation(Activation::clamped_swiglu, 1, 2)}) {
        ops->linear(gate_up.tensor(), in.tensor(), *linear);
        ops->gated_activation(expected.tensor(), gate_up.tensor(), activation);
        ops->gated_linear(found.tensor(), gate_up.tensor(), in.tensor(), *linear, activation);
        ASSERT_EQ(found.host().bytes, expected.host().bytes) << rows << " rows, " << to_string(type);
      }
    }
  }
}

TEST_P(LinearTest, a_row_alone_equals_the_row_in_any_batch_bit_by_bit) {
  if (!traits(GetParam()).bitwise) GTEST_SKIP() << "the device does not promise it";
  Random random(2);
  const auto one = make_ops(GetParam(), 1), many = make_ops(GetParam(), 3);
  for (int trial = 0; trial < trials(GetParam(), 12); ++trial) {
    for (const auto type : kWeightTypes) {
      const bool many_rows = trial == 0 && type == DType::bf16;  // more than are multiplied at a time
      const Case c(random, type, {uniform(random, 1, 300), uniform(random, 1, 70)},
                   many_rows ? 1100 : uniform(random, 1, 700), trial % 2 == 0);
      const auto weight_one = one->make_linear(c.hosts, c.bias_hosts, type);
      const auto weight_many = many->make_linear(c.hosts, c.bias_hosts, type);
      const int m = many_rows ? 600 : uniform(random, 2, 160);
      const auto out_type = one->precision(type).gemm_out;
      const auto rows = Matrix::random(random, one->precision(type).activation, m, c.k);
      const DeviceMatrix in_one(*one, rows), in_many(*many, rows);
      const DeviceMatrix batch_out(*many, out_type, m, c.n), alone_out(*one, out_type, m, c.n);
      many->linear(batch_out.tensor(), in_many.tensor(), *weight_many);
      const int step = many_rows ? 7 : 1;
      for (int r = 0; r < m; r += step) one->linear(alone_out.slice(r, r + 1), in_one.slice(r, r + 1), *weight_one);
      const auto batch = batch_out.host(), alone = alone_out.host();
      for (int r = 0; r < m; r += step) {
        ASSERT_TRUE(batch.same_bits(r, alone, r)) << "row " << r << " of " << m << ", " << to_string(type);
      }
      for (int size = 2; size <= 13 && size <= m; ++size) {
        const DeviceMatrix some_out(*many, out_type, size, c.n);
        many->linear(some_out.tensor(), in_many.slice(m - size, m), *weight_many);
        const auto some = some_out.host();
        for (int r = 0; r < size; ++r) ASSERT_TRUE(some.same_bits(r, batch, m - size + r)) << size << " rows";
      }
    }
  }
}

TEST_P(LinearTest, shapes_that_do_not_fit_are_rejected) {
  Random random(3);
  const auto ops = make_ops(GetParam(), 1);
  const auto a = Matrix::random(random, DType::f32, 4, 8), b = Matrix::random(random, DType::f32, 4, 9);
  const std::vector<HostMatrix> parts = {a.host(), b.host()};
  EXPECT_THROW(ops->make_linear(parts, {}, DType::f32), Error);
  const std::vector<HostMatrix> good = {a.host()};
  const auto bias = Matrix::random(random, DType::f32, 5, 1);
  const std::vector<HostMatrix> biases = {bias.host()};
  EXPECT_THROW(ops->make_linear(good, biases, DType::f32), Error);
  const auto linear = ops->make_linear(good, {}, DType::f32);
  const DeviceMatrix in(*ops, DType::f32, 2, 7), out(*ops, DType::f32, 2, 4);
  EXPECT_THROW(ops->linear(out.tensor(), in.tensor(), *linear), Error);
}

}  // namespace
}  // namespace charonia::ops
