// Norms, gated activations, soft cap, embedding, gathering, memory: compared with references in double.
#include <gtest/gtest.h>

#include "charonia/error.h"
#include "errors.h"
#include "ops_support.h"

namespace charonia::ops {
namespace {

class RowsTest : public testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(Device, RowsTest, testing::ValuesIn(device_names()), [](const auto& i) { return i.param; });

// In every second trial, the width and the gaps let a device read whole vectors.
struct Columns {
  bool wide;
  int count;

  Columns(Random& random, int trial, int most) : wide(trial % 2 == 0), count(uniform(random, 1, most)) {
    if (wide) count = (count + 7) / 8 * 8;
  }
  int gap(Random& random) const { return wide ? 8 * uniform(random, 0, 2) : uniform(random, 0, 5); }
};

DType any_type(int trial) { return kWeightTypes[static_cast<std::size_t>(trial % 3)]; }

// Relative error of a value that is computed from a rounded residual.
double of_norm(const Precision& type) { return 1e-5 + rounding(type.activation) + rounding(type.residual); }

struct NormCase {
  Matrix before, delta, weight, delta_weight;
  Precision type;
  bool with_delta = true, normed_delta = false, weighted = true, written = true, subtract_mean = false;
  float scale = 1, kept = 1, eps = 1e-5F;  // kept: factor of the residual

  // Rows [begin, end) in matrices of their own: out and residual.
  std::pair<Matrix, Matrix> run(Ops& on, std::int64_t begin, std::int64_t end, int gap) const {
    const DeviceMatrix residual(on, before.slice(begin, end, gap)), added(on, delta.slice(begin, end, gap)),
        factors(on, weight), delta_factors(on, delta_weight), out(on, type.activation, end - begin, before.cols, gap);
    auto to = out.tensor();
    if (!written) to.data = nullptr;
    on.rms_norm(to, residual.tensor(), with_delta ? added.tensor() : Tensor{},
                {.weight = weighted ? factors.floats() : nullptr,
                 .eps = eps,
                 .delta_weight = normed_delta ? delta_factors.floats() : nullptr,
                 .delta_scale = scale,
                 .residual_scale = kept,
                 .subtract_mean = subtract_mean});
    return {out.host(), residual.host()};
  }

  void check(const Matrix& out, const Matrix& residual) const {
    const auto cols = before.cols;
    const auto factor_of = [&](const Matrix& x, std::int64_t r, double mean) {
      double squares = 0;
      for (std::int64_t c = 0; c < cols; ++c) squares += std::pow(x.at(r, c) - mean, 2.0);
      return 1 / std::sqrt(squares / static_cast<double>(cols) + static_cast<double>(eps));
    };
    for (std::int64_t r = 0; r < before.rows; ++r) {
      const double delta_factor = normed_delta ? factor_of(delta, r, 0) : 1;
      double mean = 0;
      for (std::int64_t c = 0; c < cols; ++c) {
        const float first = before.at(r, c);
        if (!with_delta || (scale == 1 && kept == 1 && !normed_delta)) {
          const float sum = with_delta ? first + delta.at(r, c) : first;
          ASSERT_EQ(residual.at(r, c), static_cast<float>(rounded(type.residual, sum)));
        } else {
          const double old = kept == 0 ? 0 : static_cast<double>(kept) * static_cast<double>(first);
          const double added = static_cast<double>(scale) * static_cast<double>(delta.at(r, c)) * delta_factor *
                               (normed_delta ? delta_weight.at(0, c) : 1);
          ASSERT_NEAR(residual.at(r, c), old + added,
                      2e-7 * std::abs(old) + (normed_delta ? 1e-5 : 2e-7) * std::abs(added) +
                          1.01 * rounding(type.residual) * std::abs(old + added) + 1e-30)
              << "row " << r << ", column " << c << " of " << cols;
        }
        if (subtract_mean) mean += residual.at(r, c) / static_cast<double>(cols);
      }
      // Compared with the device's residual, so that an earlier rounding does not count.
      const double factor = factor_of(residual, r, mean);
      for (std::int64_t c = 0; c < cols; ++c) {
        const double x = residual.at(r, c), w = weight.at(0, c);
        const double expected = !written ? 0 : weighted ? (x - mean) * factor * w : x;
        // The second term: the rounding of the mean.
        ASSERT_NEAR(out.at(r, c), expected,
                    std::abs(expected) * of_norm(type) +
                        (subtract_mean ? 2e-6 * std::abs(mean) * factor * std::abs(w) : 0) +
                        (type.activation == DType::f16 ? 0x1p-24 : 1e-30))
            << "row " << r << ", column " << c << " of " << cols;
      }
    }
  }
};

// Plain norms, norms of the delta, scaled deltas with and without a norm, and subtracted means, for random widths and
// for widths near the edges of a device's vectors and thread blocks.
TEST_P(RowsTest, rms_norm_adds_the_delta_and_normalises) {
  Random random(7);
  const auto ops = make_ops(GetParam(), 3), one = make_ops(GetParam(), 1);
  constexpr std::array kWidths = {1,    7,     8,     255,   256,   257,   3584,  4096, 8191,
                                  8192, 8193, 14336, 16384, 16385, 16392, 20000, 20001};
  const int edges = 4 * static_cast<int>(kWidths.size());
  for (int trial = 0; trial < edges + trials(GetParam(), 120); ++trial) {
    const bool edge = trial < edges;
    const int rows = uniform(random, 1, edge ? 4 : 40), kind = trial % 4;
    const Columns columns(random, trial / 4, 700);
    const int cols = edge ? kWidths[static_cast<std::size_t>(trial / 4)] : columns.count;
    const int gap = edge && cols % 8 == 0 ? 8 * uniform(random, 0, 1) : columns.gap(random);
    NormCase c;
    c.type = ops->precision(any_type(trial));
    c.before = Matrix::random(random, c.type.residual, rows, cols, 3);
    c.delta = Matrix::random(random, c.type.gemm_out, rows, cols, kind == 1 ? 20 : 3);
    c.weight = Matrix::random(random, DType::f32, 1, cols);
    c.delta_weight = Matrix::random(random, DType::f32, 1, cols);
    c.with_delta = kind != 0 || uniform(random, 0, 1) == 1;
    c.normed_delta = kind == 1;
    c.scale = kind != 0 && uniform(random, 0, 1) == 1 ? 0.22F : 1.0F;
    if (c.with_delta && trial % 3 == 0) c.kept = trial % 2 == 0 ? 0.75F : 0.0F;
    if (c.kept == 0) c.before.set(0, 0, std::nanf(""));
    c.weighted = kind != 2 || uniform(random, 0, 1) == 1;
    c.written = kind != 2 || uniform(random, 0, 2) != 0;
    c.subtract_mean = kind == 3;
    if (trial % 5 == 0) c.eps = 4;
    for (int r = 0; c.subtract_mean && r < rows; ++r) {  // so that the mean matters
      for (int i = 0; i < cols; ++i) c.before.set(r, i, c.before.at(r, i) + 4);
    }
    const auto [out, residual] = c.run(*ops, 0, rows, gap);
    c.check(out, residual);
    if (HasFatalFailure()) return;
    for (const int other_gap : {0, 3}) {
      const int r = uniform(random, 0, rows - 1);
      const auto [alone, alone_residual] = c.run(*one, r, r + 1, other_gap);
      ASSERT_TRUE(alone.same_bits(0, out, r) && alone_residual.same_bits(0, residual, r))
          << "row " << r << " alone, gap " << other_gap << ", kind " << kind << ", " << cols << " columns";
    }
  }
}

TEST_P(RowsTest, qk_squares_are_of_q_and_k_only) {
  Random random(23);
  const auto ops = make_ops(GetParam(), 3), one = make_ops(GetParam(), 1);
  for (int trial = 0; trial < trials(GetParam(), 60); ++trial) {
    const Columns of_q(random, trial, trial % 5 == 0 ? 20000 : 600), of_k(random, trial, 300);
    const int rows = uniform(random, 1, trial % 5 == 0 ? 4 : 40), q = of_q.count, k = of_k.count;
    const auto type = ops->precision(any_type(trial / 2)).gemm_out;
    const auto qkv = Matrix::random(random, type, rows, q + 2 * k, 1, of_q.gap(random));
    const DeviceMatrix sums(*ops, DType::f32, rows, 2), alone(*one, DType::f32, rows, 2), again(*one, qkv);
    ops->qk_squares(sums.tensor(), DeviceMatrix(*ops, qkv).tensor(), q, k);
    const auto found = sums.host();
    for (int r = 0; r < rows; ++r) {
      double squares_q = 0, squares_k = 0;
      for (int i = 0; i < q + k; ++i) (i < q ? squares_q : squares_k) += std::pow(qkv.at(r, i), 2.0);
      ASSERT_NEAR(found.at(r, 0), squares_q, 1e-5 * squares_q);
      ASSERT_NEAR(found.at(r, 1), squares_k, 1e-5 * squares_k);
    }
    const int r = rows / 2;
    one->qk_squares(alone.slice(r, r + 1), again.slice(r, r + 1), q, k);
    ASSERT_TRUE(alone.host().same_bits(r, found, r)) << "row " << r << " alone";
  }
}

TEST_P(RowsTest, gated_activations_are_correct_far_from_zero) {
  Random random(8);
  const auto ops = make_ops(GetParam(), 2), one = make_ops(GetParam(), 1);
  for (int trial = 0; trial < trials(GetParam(), 80); ++trial) {
    const std::array kinds = {Activation(Activation::silu), Activation(Activation::gelu_tanh),
                              Activation(Activation::clamped_swiglu, 1.5F, 1.702F)};
    const auto activation = kinds[static_cast<std::size_t>(trial / 2 % 3)];
    const Columns columns(random, trial, trial % 5 == 0 ? 3000 : 300);
    const int rows = uniform(random, 1, 30), inter = columns.count;
    const auto type = ops->precision(any_type(trial));
    const auto in = Matrix::random(random, type.gemm_out, rows, 2 * inter, trial % 7 < 2 ? 60.0F : 2.0F,
                                   columns.gap(random));
    const auto activate = [&](Ops& on, int begin, int end, int gap) {
      const DeviceMatrix result(on, type.activation, rows, inter, gap), gate_up(on, in);
      on.gated_activation(result.slice(begin, end), gate_up.slice(begin, end), activation);
      return result.host();
    };
    const auto out = activate(*ops, 0, rows, columns.gap(random));
    for (int r = 0; r < rows; ++r) {
      for (int c = 0; c < inter; ++c) {
        const double gate = in.at(r, c), up = in.at(r, inter + c);
        const double expected = gated_value(activation, gate, up);
        // Devices compute 2^y, y = -alpha gate log2(e) in float; half a unit of y has this effect on the result. gelu:
        // below zero 1 + tanh cancels, so the error is about one rounding of the gate. The sum up + 1 may cancel too.
        const double power = std::abs(expected) * (1e-6 + 2 * std::abs(gate) * 0x1p-23);
        const double bound = activation.kind == Activation::gelu_tanh ? std::abs(gate * up) * 1e-6
                             : activation.kind == Activation::silu    ? power
                                                                      : power + std::abs(gate) * 0x1p-24;
        ASSERT_NEAR(out.at(r, c), expected,
                    bound + std::abs(expected) * 1.01 * rounding(type.activation) +
                        (type.activation == DType::f16 ? 0x1p-24 : 1e-30))
            << gate << ", " << up << ", activation " << activation.kind;
      }
    }
    const int r = rows / 2;
    ASSERT_TRUE(activate(*one, r, r + 1, 3).same_bits(r, out, r)) << "row " << r << " alone";
  }
}

TEST_P(RowsTest, sigmoid_gates_multiply_in_place) {
  Random random(31);
  const auto ops = make_ops(GetParam(), 2), one = make_ops(GetParam(), 1);
  for (int trial = 0; trial < trials(GetParam(), 40); ++trial) {
    const Columns columns(random, trial, 300);
    const int rows = uniform(random, 1, 30), cols = columns.count;
    const auto type = ops->precision(any_type(trial));
    const auto x = Matrix::random(random, type.activation, rows, cols, 2, columns.gap(random));
    const auto gate = Matrix::random(random, type.gemm_out, rows, cols, trial % 4 == 0 ? 60.0F : 2.0F,
                                     columns.gap(random));
    const auto run = [&](Ops& on, int begin, int end) {
      const DeviceMatrix values(on, x), gates(on, gate);
      on.sigmoid_gate(values.slice(begin, end), gates.slice(begin, end));
      return values.host();
    };
    const auto out = run(*ops, 0, rows);
    for (int r = 0; r < rows; ++r) {
      for (int c = 0; c < cols; ++c) {
        const double expected = x.at(r, c) / (1 + std::exp(-double{gate.at(r, c)}));
        ASSERT_NEAR(out.at(r, c), expected,
                    std::abs(expected) * (1e-6 + std::abs(gate.at(r, c)) * 0x1p-22 + 1.01 * rounding(type.activation)) +
                        (type.activation == DType::f16 ? 0x1p-24 : 1e-30));
      }
    }
    const int r = rows / 2;
    const auto alone = run(*one, r, r + 1);
    ASSERT_TRUE(alone.same_bits(r, out, r)) << "row " << r << " alone";
    ASSERT_TRUE(rows == 1 || alone.same_bits(0, x, 0)) << "only the tensor's own rows may change";
  }
}

TEST_P(RowsTest, gated_norms_are_of_each_head) {
  Random random(37);
  const auto ops = make_ops(GetParam(), 3), one = make_ops(GetParam(), 1);
  for (int trial = 0; trial < trials(GetParam(), 40); ++trial) {
    const int rows = uniform(random, 1, 20), heads = uniform(random, 1, 9);
    const int dim = trial % 3 == 0 ? 128 : trial % 3 == 1 ? 8 * uniform(random, 1, 40) : uniform(random, 1, 90);
    const int gap = trial % 2 == 0 ? 8 : 3;
    const float eps = trial % 5 == 0 ? 4.0F : 1e-6F;
    const auto type = ops->precision(any_type(trial));
    const auto x = Matrix::random(random, type.gemm_out, rows, heads * dim, 2, gap);
    const auto gate = Matrix::random(random, type.gemm_out, rows, heads * dim, trial % 4 == 0 ? 30.0F : 2.0F, gap);
    const auto weight = Matrix::random(random, DType::f32, 1, dim);
    const auto run = [&](Ops& on, int begin, int end) {
      const DeviceMatrix values(on, x), gates(on, gate), weights(on, weight);
      const DeviceMatrix result(on, type.activation, rows, heads * dim, gap);
      on.gated_norm(result.slice(begin, end), values.slice(begin, end), gates.slice(begin, end), weights.floats(), eps,
                    dim);
      return result.host();
    };
    const auto out = run(*ops, 0, rows);
    for (int r = 0; r < rows; ++r) {
      for (int h = 0; h < heads; ++h) {
        double squares = 0;
        for (int i = 0; i < dim; ++i) squares += std::pow(x.at(r, h * dim + i), 2.0);
        const double factor = 1 / std::sqrt(squares / dim + eps);
        for (int i = 0; i < dim; ++i) {
          const int c = h * dim + i;
          const double g = gate.at(r, c), expected = x.at(r, c) * factor * weight.at(0, i) * g / (1 + std::exp(-g));
          ASSERT_NEAR(out.at(r, c), expected,
                      std::abs(expected) * (3e-6 + std::abs(g) * 0x1p-22 + 1.01 * rounding(type.activation)) +
                          (type.activation == DType::f16 ? 0x1p-24 : 1e-30));
        }
      }
    }
    const int r = rows / 2;
    ASSERT_TRUE(run(*one, r, r + 1).same_bits(r, out, r)) << "row " << r << " alone";
  }
}

TEST_P(RowsTest, logits_are_scaled_and_then_capped) {
  Random random(20);
  const auto ops = make_ops(GetParam(), 2), one = make_ops(GetParam(), 1);
  for (int trial = 0; trial < trials(GetParam(), 60); ++trial) {
    const Columns columns(random, trial, trial % 5 == 0 ? 20000 : 400);
    const int rows = uniform(random, 1, 20), cols = columns.count;
    const float cap = std::array{30.0F, 0.0F, 1.5F}[static_cast<std::size_t>(trial % 3)];
    const float scale = trial % 5 < 3 ? 1.0F : 0.0625F;
    auto in = Matrix::random(random, DType::f32, rows, cols,
                             std::array{20.0F, 300.0F, 0.01F, 1e-20F}[static_cast<std::size_t>(trial % 4)],
                             columns.gap(random));
    in.set(0, 0, std::array{0.0F, 1e30F, -1e30F}[static_cast<std::size_t>(trial % 3)]);
    const DeviceMatrix logits(*ops, in), alone(*one, in);
    ops->scale_logits(logits.tensor(), scale, cap);
    const auto out = logits.host();
    for (int r = 0; r < rows; ++r) {
      for (int c = 0; c < cols; ++c) {
        const double x = static_cast<double>(scale) * in.at(r, c), most = cap;
        const double expected = cap > 0 ? most * std::tanh(x / most) : x;
        ASSERT_NEAR(out.at(r, c), expected, 1e-6 * std::abs(expected)) << in.at(r, c) << " under " << cap;
      }
    }
    const int r = rows / 2;
    one->scale_logits(alone.slice(r, r + 1), scale, cap);
    const auto single = alone.host();
    ASSERT_TRUE(single.same_bits(r, out, r)) << "row " << r << " alone";
    ASSERT_TRUE(rows == 1 || single.same_bits(0, in, 0)) << "only the tensor's own rows may change";
  }
}

TEST_P(RowsTest, logits_of_some_tokens_are_scattered) {
  Random random(21);
  const auto ops = make_ops(GetParam(), 2);
  for (const int vocab : {7, 700}) {
    std::vector<std::int32_t> columns(static_cast<std::size_t>(vocab), -1);
    columns[5] = 0, columns[0] = 1, columns[3] = columns.back() = 2;
    const auto in = Matrix::random(random, DType::f32, 4, 3, 20.0F, 2);
    const DeviceMatrix from(*ops, in), to(*ops, DType::f32, 4, vocab, 3);
    const auto on_device = ops->copy_of(std::span(columns));
    ops->scatter_logits(to.tensor(), from.tensor(), on_device->as<std::int32_t>());
    const auto out = to.host();
    for (int r = 0; r < 4; ++r) {
      for (int c = 0; c < vocab; ++c) {
        const auto column = columns[static_cast<std::size_t>(c)];
        ASSERT_EQ(out.at(r, c), column < 0 ? -1e30F : in.at(r, column)) << r << " " << c;
      }
    }
  }
}

TEST_P(RowsTest, rows_are_stored_in_a_table_and_loaded_from_it) {
  Random random(23);
  const auto ops = make_ops(GetParam(), 1);
  const std::vector<std::int32_t> ids(4, 0), rows = {6, -1, 0, 3};
  for (const int cols : {5, 64}) {
    const auto in = Matrix::random(random, DType::f32, 4, cols, 1, 3);
    const auto table = Matrix::random(random, DType::f32, 7, cols);
    const DeviceMatrix from(*ops, in), kept(*ops, table), loaded(*ops, table.slice(0, 4, 2));
    run_step(*ops, {.ids = ids, .attention = {}, .logits_rows = {}, .sample = {}, .hidden_rows = rows}, [&] {
      ops->store_rows(kept.tensor(), from.tensor());
      ops->load_rows(loaded.tensor(), kept.tensor());
    });
    const auto stored = kept.host(), again = loaded.host();
    for (int r = 0; r < 4; ++r) {
      const auto row = rows[static_cast<std::size_t>(r)];
      EXPECT_TRUE(row < 0 || stored.same_bits(row, in, r)) << r;
      EXPECT_TRUE(again.same_bits(r, row < 0 ? table : in, r)) << r;
    }
    for (const int row : {1, 2, 4, 5}) EXPECT_TRUE(stored.same_bits(row, table, row)) << row;
    const std::vector<std::int32_t> beyond = {6, -1, 0, 7};
    expect_error(ErrorCode::internal, {"hidden row 7"}, [&] {
      run_step(*ops, {.ids = ids, .attention = {}, .logits_rows = {}, .sample = {}, .hidden_rows = beyond},
               [&] { ops->store_rows(kept.tensor(), from.tensor()); });
    });
  }
}

TEST_P(RowsTest, embed_scales_rows_of_a_table_or_of_a_weight) {
  Random random(11);
  const auto ops = make_ops(GetParam(), 2);
  int trial = 0;
  for (const auto from : kWeightTypes) {
    for (const auto weight : kWeightTypes) {
      for (const float scale : {1.0F, 33.941125F}) {
        const Columns columns(random, trial++ / 2, 2500);
        const int vocab = uniform(random, 1, 150), hidden = columns.count;
        const auto table = Matrix::random(random, from, vocab, hidden);
        const std::array parts = {table.host()};
        const auto linear = ops->make_linear(parts, {}, weight);
        const auto embedding =
            trial % 3 == 0 ? ops->make_embedding(table.host(), weight) : ops->make_embedding(*linear);
        const auto residual = ops->precision(weight).residual;
        std::vector<std::int32_t> ids;
        for (int i = uniform(random, 1, 40); i > 0; --i) ids.push_back(uniform(random, 0, vocab - 1));
        const DeviceMatrix result(*ops, residual, std::ssize(ids), hidden, columns.gap(random));
        run_step(*ops, {.ids = ids, .attention = {}, .logits_rows = {}, .sample = {}},
                 [&] { ops->embed(result.tensor(), *embedding, scale); });
        const auto out = result.host();
        for (std::size_t i = 0; i < ids.size(); ++i) {
          for (int c = 0; c < hidden; ++c) {
            const float value = static_cast<float>(rounded(weight, table.at(ids[i], c))) * scale;
            ASSERT_EQ(out.at(static_cast<std::int64_t>(i), c), static_cast<float>(rounded(residual, value)));
          }
        }
      }
    }
  }
}

TEST_P(RowsTest, add_embedding_adds_rows_of_the_table_to_normalised_groups) {
  Random random(12);
  const auto ops = make_ops(GetParam(), 2);
  for (int trial = 0; trial < 24; ++trial) {
    const auto weight = any_type(trial);
    const auto type = ops->precision(weight).gemm_out;
    const int size = trial % 2 == 0 ? 8 * uniform(random, 1, 40) : uniform(random, 1, 300);
    const int count = uniform(random, 1, 9);
    const int vocab = uniform(random, 1, 50), cols = size * count;
    const auto table = Matrix::random(random, weight, vocab, cols);
    const auto embedding = ops->make_embedding(table.host(), weight, trial % 3 != 0);
    std::vector<std::int32_t> ids;
    for (int i = uniform(random, 1, 20); i > 0; --i) ids.push_back(uniform(random, 0, vocab - 1));
    const auto before = Matrix::random(random, type, std::ssize(ids), cols, 1, trial % 2 == 0 ? 8 : 3);
    const auto factors = Matrix::random(random, DType::f32, 1, size);
    const DeviceMatrix x(*ops, before), weights(*ops, factors), residual(*ops, DType::f32, std::ssize(ids), cols);
    const EmbeddingSum how{.weight = weights.floats(), .size = size, .eps = 0.1F, .scale = 0.7F, .table_scale = 4};
    run_step(*ops, {.ids = ids, .attention = {}, .logits_rows = {}, .sample = {}}, [&] {
      ops->embed(residual.tensor(), *embedding, 1);
      ops->add_embedding(x.tensor(), *embedding, how);
    });
    const auto out = x.host();
    for (std::int64_t r = 0; r < std::ssize(ids); ++r) {
      for (int group = 0; group < count; ++group) {
        double squares = 0;
        for (int i = 0; i < size; ++i) squares += std::pow(before.at(r, group * size + i), 2.0);
        const double factor = 1 / std::sqrt(squares / size + static_cast<double>(how.eps));
        for (int i = 0; i < size; ++i) {
          const auto c = group * size + i;
          const double normed = before.at(r, c) * factor * factors.at(0, i) * static_cast<double>(how.scale);
          const double added = static_cast<double>(how.table_scale) *
                               static_cast<double>(table.at(ids[static_cast<std::size_t>(r)], c));
          ASSERT_NEAR(out.at(r, c), normed + added,
                      1e-5 * std::abs(normed) + 1e-6 * std::abs(added) +
                          1.01 * rounding(type) * std::abs(normed + added) + 1e-7)
              << "row " << r << ", element " << i << " of group " << group << " of " << size;
        }
      }
    }
  }
}

TEST_P(RowsTest, gather_copies_the_given_rows) {
  Random random(13);
  const auto ops = make_ops(GetParam(), 1);
  const std::vector<std::int32_t> ids(20, 0), rows = {0, 7, 8, 19};
  const std::vector<SampleRow> sample(rows.size());
  for (int trial = 0; trial < 6; ++trial) {
    const Columns columns(random, trial, 3000);
    const auto type = any_type(trial);
    const auto in = Matrix::random(random, type, 20, columns.count, 1, columns.gap(random));
    const auto logits = Matrix::random(random, DType::f32, 4, 5);
    const DeviceMatrix device_in(*ops, in), out(*ops, type, 4, columns.count, columns.gap(random)),
        device_logits(*ops, logits);
    run_step(*ops, {.ids = ids, .attention = {}, .logits_rows = rows, .sample = sample}, [&] {
      ops->gather_rows(out.tensor(), device_in.tensor());
      ops->sample(device_logits.tensor());
    });
    const auto gathered = out.host();
    for (int i = 0; i < 4; ++i) EXPECT_TRUE(gathered.same_bits(i, in, rows[static_cast<std::size_t>(i)]));
  }
}

TEST_P(RowsTest, a_pending_token_of_the_previous_step_is_embedded) {
  Random random(17);
  const auto ops = make_ops(GetParam(), 2);
  constexpr int kVocab = 50, kHidden = 24;
  const auto table = Matrix::random(random, DType::f32, kVocab, kHidden);
  const auto embedding = ops->make_embedding(table.host(), DType::f32);
  const DeviceMatrix residual(*ops, ops->precision(DType::f32).residual, 3, kHidden);
  // The most likely tokens of the rows are 31 and 7; the third row has none.
  Matrix logits(DType::f32, 3, kVocab);
  logits.set(0, 31, 9);
  logits.set(1, 7, 9);
  for (int c = 0; c < kVocab; ++c) logits.set(2, c, std::nanf(""));
  const DeviceMatrix device_logits(*ops, logits);
  const std::vector<std::int32_t> first = {1, 2, 3}, rows = {0, 1, 2}, second = {-1 - 1, 4, -1 - 0};
  std::vector<SampleRow> sample(3);
  for (auto& row : sample) row.temperature = 0;
  const auto issue = [&] {
    ops->embed(residual.tensor(), *embedding, 1);
    ops->sample(device_logits.tensor());
  };
  const auto sampled = run_step(*ops, {.ids = first, .attention = {}, .logits_rows = rows, .sample = sample}, issue);
  ASSERT_EQ(sampled.size(), 3U);
  EXPECT_EQ(sampled[0].token, 31);
  EXPECT_EQ(sampled[1].token, 7);
  EXPECT_FALSE(sampled[2].error.empty());
  run_prepared_step(*ops, {.ids = second, .attention = {}, .logits_rows = {}, .sample = {}},
                    [&] { ops->embed(residual.tensor(), *embedding, 1); });
  const auto out = residual.host();
  const std::array expected = {7, 4, 31};
  for (int r = 0; r < 3; ++r) {
    for (int c = 0; c < kHidden; ++c) ASSERT_EQ(out.at(r, c), table.at(expected[static_cast<std::size_t>(r)], c));
  }
}

TEST_P(RowsTest, references_of_a_step_must_be_valid) {
  const auto ops = make_ops(GetParam(), 1);
  const std::vector<std::int32_t> ids = {1, 2}, unknown = {1, -1}, beyond = {2}, descending = {1, 0};
  const std::vector<SampleRow> one(1), two(2);
  ops->prepare({.max_rows = 2, .max_sequences = 2, .max_positions = 6}, [](const StepShape&) {});
  EXPECT_THROW(ops->begin_step({.ids = unknown, .attention = {}, .logits_rows = {}, .sample = {}}), Error);
  EXPECT_THROW(ops->begin_step({.ids = ids, .attention = {}, .logits_rows = beyond, .sample = one}), Error);
  EXPECT_THROW(ops->begin_step({.ids = ids, .attention = {}, .logits_rows = descending, .sample = two}), Error);
  EXPECT_THROW(ops->begin_step({.ids = ids, .attention = {}, .logits_rows = descending, .sample = one}), Error);
  const std::vector<std::int32_t> starts = {0, 2}, positions = {3, 5}, table = {0, 1};
  EXPECT_THROW(
      ops->begin_step({.ids = ids, .attention = {starts, positions, {table}, 2}, .logits_rows = {}, .sample = {}}),
      Error);
  EXPECT_THROW(ops->run_step([](const StepShape&) {}), Error) << "begin_step() was not called";
}

TEST_P(RowsTest, steps_are_prepared_and_stay_within_their_limits) {
  const auto ops = make_ops(GetParam(), 1);
  const std::vector<std::int32_t> one = {1}, two = {1, 2}, rows = {0, 1}, starts = {0, 1}, table = {0}, third = {2},
                                  fourth = {3};
  const std::vector<SampleRow> samples(2);
  const auto refused = [&](const StepInput& input, std::string_view why) {
    expect_error(ErrorCode::internal, {why}, [&] { ops->begin_step(input); });
  };
  const auto nothing = [](const StepShape&) {};
  refused({.ids = one, .attention = {}, .logits_rows = {}, .sample = {}}, "prepare() was not called");
  for (const StepLimits& limits : {StepLimits{0, 1, 1}, StepLimits{1, 0, 1}, StepLimits{1, 1, 0}}) {
    EXPECT_THROW(ops->prepare(limits, nothing), Error);
  }
  ops->prepare({.max_rows = 1, .max_sequences = 1, .max_positions = 3}, nothing);
  refused({.ids = two, .attention = {}, .logits_rows = {}, .sample = {}}, "2 rows");
  refused({.ids = one, .attention = {starts, fourth, {table}, 1}, .logits_rows = {}, .sample = {}},
          "position 3 is not below the maximum of 3");
  run_prepared_step(*ops, {.ids = one, .attention = {starts, third, {table}, 1}, .logits_rows = {}, .sample = {}},
                    [] {});
  ops->prepare({.max_rows = 2, .max_sequences = 1, .max_positions = 3}, nothing);
  refused({.ids = two, .attention = {}, .logits_rows = rows, .sample = samples}, "2 rows of logits");
}

TEST_P(RowsTest, buffers_start_as_zeros_and_hold_uploads) {
  const auto ops = make_ops(GetParam(), 1);
  for (const std::size_t bytes : {std::size_t{1}, std::size_t{5000}, std::size_t{9} << 20}) {
    const auto buffer = ops->allocate(bytes);
    ASSERT_EQ(buffer->bytes(), bytes);
    std::vector<std::byte> host(bytes, std::byte{1});
    ops->download(host.data(), buffer->data(), bytes);
    ASSERT_EQ(host, std::vector<std::byte>(bytes, std::byte{0}));
    std::fill(host.begin(), host.end(), std::byte{7});
    ops->upload(buffer->data(), host.data(), bytes);
    std::vector<std::byte> back(bytes);
    ops->download(back.data(), buffer->data(), bytes);
    ASSERT_EQ(back, host);
  }
}

}  // namespace
}  // namespace charonia::ops
