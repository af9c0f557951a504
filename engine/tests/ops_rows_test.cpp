// Norms, gated activations, soft cap, embedding, gathering, memory: compared with references in double.
#include <gtest/gtest.h>

#include "charonia/error.h"
#include "errors.h"
#include "ops_support.h"

namespace charonia::ops {
namespace {

class RowsTest : public testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(Device, RowsTest, testing::ValuesIn(device_names()), [](const auto& i) { return i.param; });

TEST_P(RowsTest, rms_norm_adds_the_delta_and_normalises) {
  Random random(7);
  const auto ops = make_ops(GetParam(), 3), one = make_ops(GetParam(), 1);
  for (int trial = 0; trial < trials(GetParam(), 40); ++trial) {
    const int rows = uniform(random, 1, 70), cols = uniform(random, 1, trial % 4 == 0 ? 5000 : 200);
    const auto type = ops->precision(kWeightTypes[static_cast<std::size_t>(trial % 3)]);
    const auto before = Matrix::random(random, type.residual, rows, cols, 3, uniform(random, 0, 4));
    const auto delta = Matrix::random(random, type.gemm_out, rows, cols, 1, uniform(random, 0, 4));
    const auto weight = Matrix::random(random, DType::f32, 1, cols);
    const float eps = 1e-5F;
    const bool with_delta = trial % 4 != 0;
    const auto norm = [&](Ops& on, int begin, int end) {
      const DeviceMatrix residual(on, before), added(on, delta), factors(on, weight);
      const DeviceMatrix out(on, type.activation, rows, cols, before.stride % 5);
      on.rms_norm(out.slice(begin, end), residual.slice(begin, end), with_delta ? added.slice(begin, end) : Tensor{},
                  {.weight = factors.floats(), .eps = eps});
      return std::pair(out.host(), residual.host());
    };
    const auto [out, residual] = norm(*ops, 0, rows);
    for (int r = 0; r < rows; ++r) {
      double squares = 0;
      for (int c = 0; c < cols; ++c) {
        const float x = with_delta ? before.at(r, c) + delta.at(r, c) : before.at(r, c);
        ASSERT_EQ(residual.at(r, c), static_cast<float>(rounded(type.residual, x)));
        squares += static_cast<double>(x) * x;
      }
      const double factor = 1 / std::sqrt(squares / cols + static_cast<double>(eps));
      const double relative = 1e-5 + (type.activation == DType::f32 ? 0 : rounding(type.activation)) +
                              (type.residual == DType::f32 ? 0 : rounding(type.residual));
      for (int c = 0; c < cols; ++c) {
        const double expected = residual.at(r, c) * factor * weight.at(0, c);
        ASSERT_NEAR(out.at(r, c), expected,
                    std::abs(expected) * relative + (type.activation == DType::f16 ? 0x1p-25 : 1e-30));
      }
    }
    for (const int r : {0, rows / 2, rows - 1}) {
      ASSERT_TRUE(norm(*one, r, r + 1).first.same_bits(r, out, r)) << "row " << r << " alone";
    }
  }
}

TEST_P(RowsTest, rms_norm_normalises_the_delta_before_it_is_added) {
  Random random(18);
  const auto ops = make_ops(GetParam(), 3), one = make_ops(GetParam(), 1);
  for (int trial = 0; trial < trials(GetParam(), 40); ++trial) {
    const int rows = uniform(random, 1, 40), cols = uniform(random, 1, trial % 4 == 0 ? 5000 : 300);
    const auto type = ops->precision(kWeightTypes[static_cast<std::size_t>(trial % 3)]);
    const auto before = Matrix::random(random, type.residual, rows, cols, 3, uniform(random, 0, 4));
    const auto delta = Matrix::random(random, type.gemm_out, rows, cols, 20, uniform(random, 0, 4));
    const auto weight = Matrix::random(random, DType::f32, 1, cols);
    const auto delta_weight = Matrix::random(random, DType::f32, 1, cols);
    const float eps = trial % 5 == 0 ? 4.0F : 1e-6F;
    const auto norm = [&](Ops& on, int begin, int end) {
      const DeviceMatrix residual(on, before), added(on, delta), factors(on, weight), delta_factors(on, delta_weight);
      const DeviceMatrix out(on, type.activation, rows, cols, before.stride % 5);
      on.rms_norm(out.slice(begin, end), residual.slice(begin, end), added.slice(begin, end),
                  {.weight = factors.floats(), .eps = eps, .delta_weight = delta_factors.floats()});
      return std::pair(out.host(), residual.host());
    };
    const auto [out, residual] = norm(*ops, 0, rows);
    const auto factor_of = [&](const std::vector<double>& x) {
      double squares = 0;
      for (const double v : x) squares += v * v;
      return 1 / std::sqrt(squares / cols + static_cast<double>(eps));
    };
    const double residual_rounding = type.residual == DType::f32 ? 0 : 1.01 * rounding(type.residual);
    for (int r = 0; r < rows; ++r) {
      std::vector<double> d, sums;
      for (int c = 0; c < cols; ++c) d.push_back(delta.at(r, c));
      const double delta_factor = factor_of(d);
      for (int c = 0; c < cols; ++c) {
        const double added = d[static_cast<std::size_t>(c)] * delta_factor * delta_weight.at(0, c);
        const double sum = before.at(r, c) + added;
        ASSERT_NEAR(
            residual.at(r, c), sum,
            1e-6 * std::abs(before.at(r, c)) + 1e-5 * std::abs(added) + residual_rounding * std::abs(sum) + 1e-30)
            << "row " << r << ", column " << c << " of " << cols;
        sums.push_back(residual.at(r, c));
      }
      // The second norm is compared with the device's residual, so that the first norm's rounding does not count.
      const double factor = factor_of(sums);
      const double relative = 1e-5 + (type.activation == DType::f32 ? 0 : rounding(type.activation)) +
                              (type.residual == DType::f32 ? 0 : rounding(type.residual));
      for (int c = 0; c < cols; ++c) {
        const double expected = sums[static_cast<std::size_t>(c)] * factor * weight.at(0, c);
        ASSERT_NEAR(out.at(r, c), expected,
                    std::abs(expected) * relative + (type.activation == DType::f16 ? 0x1p-25 : 1e-30));
      }
    }
    for (const int r : {0, rows / 2, rows - 1}) {
      const auto [alone, alone_residual] = norm(*one, r, r + 1);
      ASSERT_TRUE(alone.same_bits(r, out, r)) << "row " << r << " alone";
      ASSERT_TRUE(alone_residual.same_bits(r, residual, r)) << "row " << r << " alone";
    }
  }
}

TEST_P(RowsTest, rms_norm_scales_the_delta_and_has_variants_of_the_norm) {
  Random random(22);
  const auto ops = make_ops(GetParam(), 3), one = make_ops(GetParam(), 1);
  for (int trial = 0; trial < trials(GetParam(), 60); ++trial) {
    const int rows = uniform(random, 1, 40), cols = uniform(random, 1, trial % 4 == 0 ? 5000 : 300);
    const auto type = ops->precision(kWeightTypes[static_cast<std::size_t>(trial % 3)]);
    auto before = Matrix::random(random, type.residual, rows, cols, 3, uniform(random, 0, 4));
    const auto delta = Matrix::random(random, type.gemm_out, rows, cols, 5, uniform(random, 0, 4));
    const auto weight = Matrix::random(random, DType::f32, 1, cols);
    const float scale = trial % 3 == 0 ? 1.0F : 0.22F, eps = 1e-5F;
    const bool weighted = trial % 4 != 1, subtract_mean = trial % 2 == 0, written = trial % 5 != 0;
    if (subtract_mean) {  // so that the mean matters
      for (int r = 0; r < rows; ++r) {
        for (int c = 0; c < cols; ++c) before.set(r, c, before.at(r, c) + 4);
      }
    }
    const auto norm = [&](Ops& on, int begin, int end) {
      const DeviceMatrix residual(on, before), added(on, delta), factors(on, weight);
      const DeviceMatrix out(on, type.activation, rows, cols, before.stride % 5);
      auto to = out.slice(begin, end);
      if (!written) to.data = nullptr;
      on.rms_norm(to, residual.slice(begin, end), added.slice(begin, end),
                  {.weight = weighted ? factors.floats() : nullptr,
                   .eps = eps,
                   .delta_scale = scale,
                   .subtract_mean = subtract_mean});
      return std::pair(out.host(), residual.host());
    };
    const auto [out, residual] = norm(*ops, 0, rows);
    for (int r = 0; r < rows; ++r) {
      double mean = 0, squares = 0;
      for (int c = 0; c < cols; ++c) {
        const double added = static_cast<double>(scale) * static_cast<double>(delta.at(r, c));
        const double sum = before.at(r, c) + added;
        ASSERT_NEAR(residual.at(r, c), sum,
                    2e-7 * (std::abs(before.at(r, c)) + std::abs(added)) + rounding(type.residual) * std::abs(sum));
        if (subtract_mean) mean += residual.at(r, c) / static_cast<double>(cols);
      }
      for (int c = 0; c < cols; ++c) squares += std::pow(residual.at(r, c) - mean, 2.0);
      const double factor = 1 / std::sqrt(squares / cols + static_cast<double>(eps));
      const double relative = 1e-5 + rounding(type.activation) + rounding(type.residual);
      for (int c = 0; c < cols; ++c) {
        const double x = residual.at(r, c), w = weight.at(0, c);
        const double expected = !written ? 0 : weighted ? (x - mean) * factor * w : x;
        // The second term: the rounding of the mean.
        ASSERT_NEAR(out.at(r, c), expected,
                    std::abs(expected) * relative + (subtract_mean ? 2e-6 * std::abs(mean) * factor * std::abs(w) : 0) +
                        (type.activation == DType::f16 ? 0x1p-25 : 1e-30))
            << "column " << c << " of " << cols << ", mean " << mean;
      }
    }
    for (const int r : {0, rows / 2, rows - 1}) {
      const auto [alone, alone_residual] = norm(*one, r, r + 1);
      ASSERT_TRUE(alone.same_bits(r, out, r)) << "row " << r << " alone";
      ASSERT_TRUE(alone_residual.same_bits(r, residual, r)) << "row " << r << " alone";
    }
  }
}

TEST_P(RowsTest, qk_squares_are_of_q_and_k_only) {
  Random random(23);
  const auto ops = make_ops(GetParam(), 3), one = make_ops(GetParam(), 1);
  for (int trial = 0; trial < trials(GetParam(), 30); ++trial) {
    const int rows = uniform(random, 1, 40), q = uniform(random, 1, trial % 4 == 0 ? 5000 : 300),
              k = uniform(random, 1, 200);
    const auto type = ops->precision(kWeightTypes[static_cast<std::size_t>(trial % 3)]).gemm_out;
    const auto qkv = Matrix::random(random, type, rows, q + 2 * k, 1, uniform(random, 0, 4));
    const DeviceMatrix sums(*ops, DType::f32, rows, 2), alone(*one, DType::f32, rows, 2), again(*one, qkv);
    ops->qk_squares(sums.tensor(), DeviceMatrix(*ops, qkv).tensor(), q, k);
    const auto found = sums.host();
    for (int r = 0; r < rows; ++r) {
      double of_q = 0, of_k = 0;
      for (int i = 0; i < q + k; ++i) (i < q ? of_q : of_k) += std::pow(qkv.at(r, i), 2.0);
      ASSERT_NEAR(found.at(r, 0), of_q, 1e-5 * of_q);
      ASSERT_NEAR(found.at(r, 1), of_k, 1e-5 * of_k);
    }
    const int r = rows / 2;
    one->qk_squares(alone.slice(r, r + 1), again.slice(r, r + 1), q, k);
    ASSERT_TRUE(alone.host().same_bits(r, found, r)) << "row " << r << " alone";
  }
}

TEST_P(RowsTest, silu_mul_is_correct_far_from_zero) {
  Random random(8);
  const auto ops = make_ops(GetParam(), 2);
  for (int trial = 0; trial < trials(GetParam(), 30); ++trial) {
    const int rows = uniform(random, 1, 30), inter = uniform(random, 1, 300);
    const auto type = ops->precision(kWeightTypes[static_cast<std::size_t>(trial % 3)]);
    const auto in =
        Matrix::random(random, type.gemm_out, rows, 2 * inter, trial % 4 == 0 ? 60.0F : 2.0F, uniform(random, 0, 4));
    const DeviceMatrix result(*ops, type.activation, rows, inter, uniform(random, 0, 4));
    ops->gated_activation(result.tensor(), DeviceMatrix(*ops, in).tensor(), Activation::silu);
    const auto out = result.host();
    for (int r = 0; r < rows; ++r) {
      for (int c = 0; c < inter; ++c) {
        const double gate = in.at(r, c), up = in.at(r, inter + c);
        const double expected = gate / (1 + std::exp(-gate)) * up;
        // Devices compute 2^y, y = -gate log2(e) in float: half a unit of y has this effect on the result.
        const double power = std::abs(gate) * 0x1p-23;
        ASSERT_NEAR(out.at(r, c), expected,
                    std::abs(expected) * (1e-6 + power + (type.activation == DType::f32 ? 0 : rounding(type.activation))) +
                        (type.activation == DType::f16 ? 0x1p-25 : 1e-30))
            << gate;
      }
    }
  }
}

TEST_P(RowsTest, gelu_tanh_is_correct_far_from_zero) {
  Random random(19);
  const auto ops = make_ops(GetParam(), 2), one = make_ops(GetParam(), 1);
  for (int trial = 0; trial < trials(GetParam(), 30); ++trial) {
    const int rows = uniform(random, 1, 30), inter = uniform(random, 1, 300);
    const auto type = ops->precision(kWeightTypes[static_cast<std::size_t>(trial % 3)]);
    const auto in =
        Matrix::random(random, type.gemm_out, rows, 2 * inter, trial % 4 == 0 ? 60.0F : 2.0F, uniform(random, 0, 4));
    const DeviceMatrix result(*ops, type.activation, rows, inter, uniform(random, 0, 4));
    ops->gated_activation(result.tensor(), DeviceMatrix(*ops, in).tensor(), Activation::gelu_tanh);
    const auto out = result.host();
    for (int r = 0; r < rows; ++r) {
      for (int c = 0; c < inter; ++c) {
        const double gate = in.at(r, c), up = in.at(r, inter + c);
        const double inner = std::sqrt(2 / std::acos(-1.0)) * (gate + 0.044715 * gate * gate * gate);
        const double expected = gate / 2 * (1 + std::tanh(inner)) * up;
        // Below zero 1 + tanh cancels, so the error is about one rounding of the gate.
        ASSERT_NEAR(out.at(r, c), expected,
                    std::abs(gate * up) * 1e-6 + std::abs(expected) * 1.01 * rounding(type.activation) +
                        (type.activation == DType::f16 ? 0x1p-25 : 1e-30))
            << gate;
      }
    }
    const DeviceMatrix single(*one, type.activation, rows, inter), again(*one, in);
    const int r = rows / 2;
    one->gated_activation(single.slice(r, r + 1), again.slice(r, r + 1), Activation::gelu_tanh);
    ASSERT_TRUE(single.host().same_bits(r, out, r)) << "row " << r << " alone";
  }
}

TEST_P(RowsTest, logits_are_scaled_and_then_capped) {
  Random random(20);
  const auto ops = make_ops(GetParam(), 2), one = make_ops(GetParam(), 1);
  for (int trial = 0; trial < trials(GetParam(), 30); ++trial) {
    const int rows = uniform(random, 1, 20), cols = uniform(random, 1, trial % 5 == 0 ? 20000 : 400);
    const float cap = std::array{30.0F, 0.0F, 1.5F}[static_cast<std::size_t>(trial % 3)];
    const float scale = trial % 5 < 3 ? 1.0F : 0.0625F;
    auto in = Matrix::random(random, DType::f32, rows, cols,
                             std::array{20.0F, 300.0F, 0.01F, 1e-20F}[static_cast<std::size_t>(trial % 4)],
                             uniform(random, 0, 4));
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

TEST_P(RowsTest, embed_scales_its_output) {
  Random random(21);
  const auto ops = make_ops(GetParam(), 2);
  for (const auto weight : kWeightTypes) {
    for (const float scale : {0.5F, 33.941125F, 1.0F}) {
      const int vocab = uniform(random, 1, 300), hidden = uniform(random, 1, 200);
      const auto table = Matrix::random(random, DType::f32, vocab, hidden);
      const auto embedding = ops->make_embedding(table.host(), weight);
      const auto residual = ops->precision(weight).residual;
      std::vector<std::int32_t> ids;
      for (int i = uniform(random, 1, 40); i > 0; --i) ids.push_back(uniform(random, 0, vocab - 1));
      const DeviceMatrix result(*ops, residual, static_cast<std::int64_t>(ids.size()), hidden);
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

TEST_P(RowsTest, embed_gives_the_table_s_rows_in_the_weight_type) {
  Random random(11);
  const auto ops = make_ops(GetParam(), 2);
  for (const auto from : kWeightTypes) {
    for (const auto weight : kWeightTypes) {
      const int vocab = uniform(random, 1, 300), hidden = uniform(random, 1, 200);
      const auto table = Matrix::random(random, from, vocab, hidden);
      const auto embedding = ops->make_embedding(table.host(), weight);
      const auto residual = ops->precision(weight).residual;
      std::vector<std::int32_t> ids;
      for (int i = uniform(random, 1, 200); i > 0; --i) ids.push_back(uniform(random, 0, vocab - 1));
      const DeviceMatrix result(*ops, residual, static_cast<std::int64_t>(ids.size()), hidden);
      run_step(*ops, {.ids = ids, .attention = {}, .logits_rows = {}, .sample = {}},
               [&] { ops->embed(result.tensor(), *embedding, 1); });
      const auto out = result.host();
      for (std::size_t i = 0; i < ids.size(); ++i) {
        for (int c = 0; c < hidden; ++c) {
          ASSERT_EQ(out.at(static_cast<std::int64_t>(i), c),
                    static_cast<float>(rounded(residual, rounded(weight, table.at(ids[i], c)))));
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
  for (const auto type : kWeightTypes) {
    const auto in = Matrix::random(random, type, 20, 33, 1, 2);
    const auto logits = Matrix::random(random, DType::f32, 4, 5);
    const DeviceMatrix device_in(*ops, in), out(*ops, type, 4, 33, 1), device_logits(*ops, logits);
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
      ops->begin_step({.ids = ids, .attention = {starts, positions, table, 2}, .logits_rows = {}, .sample = {}}),
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
  refused({.ids = one, .attention = {starts, fourth, table, 1}, .logits_rows = {}, .sample = {}},
          "position 3 is not below the maximum of 3");
  run_prepared_step(*ops, {.ids = one, .attention = {starts, third, table, 1}, .logits_rows = {}, .sample = {}}, [] {});
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
