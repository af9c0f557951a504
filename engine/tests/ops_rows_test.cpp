// Norms, gated activations, soft cap, embedding, gathering, memory: compared with references in double.
#include <gtest/gtest.h>

#include "charonia/error.h"
#include "errors.h"
#include "ops_support.h"

namespace charonia::ops {
namespace {

class RowsTest : public testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(Device, RowsTest, testing::ValuesIn(device_names()), [](const auto& i) { return i.param; });

// The smallest difference of two values of a type.
double smallest(DType type) { return type == DType::f16 ? 0x1p-25 : 1e-30; }

// The norm of row r: (x - mean) * factor, in double.
struct Norm {
  Norm(const Matrix& rows, std::int64_t r, float eps, bool subtract_mean = false) {
    const auto cols = static_cast<double>(rows.cols);
    double squares = 0;
    for (std::int64_t c = 0; subtract_mean && c < rows.cols; ++c) mean += rows.at(r, c) / cols;
    for (std::int64_t c = 0; c < rows.cols; ++c) squares += std::pow(rows.at(r, c) - mean, 2.0);
    factor = 1 / std::sqrt(squares / cols + static_cast<double>(eps));
  }
  double mean = 0, factor = 0;
};

// Trials have all variants: without a delta; a delta that is scaled, or normalised before it is added; a norm without a
// weight, without an output, or of the differences from the mean.
TEST_P(RowsTest, rms_norm_adds_the_delta_and_normalises) {
  Random random(7);
  const auto ops = make_ops(GetParam(), 3), one = make_ops(GetParam(), 1);
  for (int trial = 0; trial < trials(GetParam(), 140); ++trial) {
    const int rows = uniform(random, 1, 50), cols = uniform(random, 1, trial % 4 == 0 ? 5000 : 300);
    const auto type = ops->precision(kWeightTypes[static_cast<std::size_t>(trial % 3)]);
    auto before = Matrix::random(random, type.residual, rows, cols, 3, uniform(random, 0, 4));
    const auto delta =
        Matrix::random(random, type.gemm_out, rows, cols, trial % 2 == 0 ? 1 : 20, uniform(random, 0, 4));
    const auto weight = Matrix::random(random, DType::f32, 1, cols);
    const auto delta_weight = Matrix::random(random, DType::f32, 1, cols);
    const int kind = trial / 3 % 4;  // 0: no delta, 1: as it is, 2: scaled, 3: normalised
    const float scale = kind == 2 ? 0.22F : 1.0F, eps = trial % 5 == 0 ? 4.0F : 1e-5F;
    const bool variant = kind == 1 || kind == 2;
    const bool weighted = !variant || trial % 4 != 1, subtract_mean = variant && trial % 2 == 0,
               written = !variant || trial % 5 != 0;
    for (int r = 0; subtract_mean && r < rows; ++r) {  // so that the mean matters
      for (int c = 0; c < cols; ++c) before.set(r, c, before.at(r, c) + 4);
    }
    const auto run = [&](Ops& on, int begin, int end) {
      const DeviceMatrix residual(on, before), added(on, delta), factors(on, weight), delta_factors(on, delta_weight);
      const DeviceMatrix out(on, type.activation, rows, cols, before.stride % 5);
      auto to = out.slice(begin, end);
      if (!written) to.data = nullptr;
      on.rms_norm(to, residual.slice(begin, end), kind == 0 ? Tensor{} : added.slice(begin, end),
                  {.weight = weighted ? factors.floats() : nullptr,
                   .eps = eps,
                   .delta_weight = kind == 3 ? delta_factors.floats() : nullptr,
                   .delta_scale = scale,
                   .subtract_mean = subtract_mean});
      return std::pair(out.host(), residual.host());
    };
    const auto [out, residual] = run(*ops, 0, rows);
    for (int r = 0; r < rows; ++r) {
      // The second norm is of the device's own residual, so that the rounding of the sum does not count.
      const Norm of_delta(delta, r, eps), norm(residual, r, eps, subtract_mean);
      const double relative = 1e-5 + rounding(type.activation) + rounding(type.residual);
      for (int c = 0; c < cols; ++c) {
        const double factor = kind == 0 ? 0 : kind == 3 ? of_delta.factor * delta_weight.at(0, c) : double{scale};
        const double added = delta.at(r, c) * factor;
        const double sum = before.at(r, c) + added;
        if (kind < 2) {
          const float plain = kind == 0 ? before.at(r, c) : before.at(r, c) + delta.at(r, c);
          ASSERT_EQ(residual.at(r, c), static_cast<float>(rounded(type.residual, plain)));
        }
        ASSERT_NEAR(residual.at(r, c), sum,
                    (kind == 3 ? 1e-6 : 2e-7) * std::abs(before.at(r, c)) +
                        (kind == 3 ? 1e-5 : 2e-7) * std::abs(added) + 1.01 * rounding(type.residual) * std::abs(sum) +
                        1e-30)
            << "row " << r << ", column " << c << " of " << cols;
        const double x = residual.at(r, c), w = weight.at(0, c);
        const double expected = !written ? 0 : weighted ? (x - norm.mean) * norm.factor * w : x;
        const double of_mean = 2e-6 * std::abs(norm.mean * norm.factor * w);  // its rounding
        ASSERT_NEAR(out.at(r, c), expected, std::abs(expected) * relative + of_mean + smallest(type.activation))
            << "trial " << trial << ", column " << c << " of " << cols;
      }
    }
    for (const int r : {0, rows / 2, rows - 1}) {
      const auto [alone, alone_residual] = run(*one, r, r + 1);
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

TEST_P(RowsTest, gated_activations_are_correct_far_from_zero) {
  Random random(8);
  const auto ops = make_ops(GetParam(), 2), one = make_ops(GetParam(), 1);
  for (int trial = 0; trial < trials(GetParam(), 60); ++trial) {
    const int rows = uniform(random, 1, 30), inter = uniform(random, 1, 300);
    const auto activation = trial / 3 % 2 == 0 ? Activation::silu : Activation::gelu_tanh;
    const auto type = ops->precision(kWeightTypes[static_cast<std::size_t>(trial % 3)]);
    const auto in =
        Matrix::random(random, type.gemm_out, rows, 2 * inter, trial % 4 == 0 ? 60.0F : 2.0F, uniform(random, 0, 4));
    const DeviceMatrix result(*ops, type.activation, rows, inter, uniform(random, 0, 4));
    ops->gated_activation(result.tensor(), DeviceMatrix(*ops, in).tensor(), activation);
    const auto out = result.host();
    for (int r = 0; r < rows; ++r) {
      for (int c = 0; c < inter; ++c) {
        const double gate = in.at(r, c), up = in.at(r, inter + c);
        const double inner = std::sqrt(2 / std::acos(-1.0)) * (gate + 0.044715 * gate * gate * gate);
        const double expected =
            (activation == Activation::silu ? gate / (1 + std::exp(-gate)) : gate / 2 * (1 + std::tanh(inner))) * up;
        // Devices compute silu's 2^y, y = -gate log2(e), in float: half a unit of y has this effect on the result.
        // Below zero 1 + tanh cancels, so the error is about one rounding of the gate.
        const double own = activation == Activation::silu ? std::abs(expected) * (1e-6 + std::abs(gate) * 0x1p-23)
                                                          : std::abs(gate * up) * 1e-6;
        ASSERT_NEAR(out.at(r, c), expected,
                    own + std::abs(expected) * 1.01 * rounding(type.activation) + smallest(type.activation))
            << gate;
      }
    }
    const DeviceMatrix single(*one, type.activation, rows, inter), again(*one, in);
    const int r = rows / 2;
    one->gated_activation(single.slice(r, r + 1), again.slice(r, r + 1), activation);
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

TEST_P(RowsTest, embed_gives_the_table_s_rows_in_the_weight_type_and_scales_them) {
  Random random(11);
  const auto ops = make_ops(GetParam(), 2);
  for (const auto from : kWeightTypes) {
    for (const auto weight : kWeightTypes) {
      const float scale = from == weight ? 1.0F : from == DType::f32 ? 33.941125F : 0.5F;
      const int vocab = uniform(random, 1, 300), hidden = uniform(random, 1, 200);
      const auto table = Matrix::random(random, from, vocab, hidden);
      const auto embedding = ops->make_embedding(table.host(), weight);
      const auto residual = ops->precision(weight).residual;
      std::vector<std::int32_t> ids;
      for (int i = uniform(random, 1, 200); i > 0; --i) ids.push_back(uniform(random, 0, vocab - 1));
      const DeviceMatrix result(*ops, residual, std::ssize(ids), hidden);
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
  const DeviceMatrix residual(*ops, ops->precision(DType::f32).residual, 4, kHidden);
  // The most likely tokens of the rows are 31 and 7; the third row has none, and the fourth has a target.
  Matrix logits(DType::f32, 4, kVocab);
  logits.set(0, 31, 9);
  logits.set(1, 7, 9);
  for (int c = 0; c < kVocab; ++c) logits.set(2, c, std::nanf(""));
  const DeviceMatrix device_logits(*ops, logits);
  const std::vector<std::int32_t> first = {1, 2, 3, 4}, rows = {0, 1, 2, 3}, second = {-1 - 1, 4, -1 - 0, -1 - 3};
  std::vector<SampleRow> sample(4);
  for (auto& row : sample) row.temperature = 0;
  sample[3].target = 33;
  const auto issue = [&] {
    ops->embed(residual.tensor(), *embedding, 1);
    ops->sample(device_logits.tensor());
  };
  const auto sampled = run_step(*ops, {.ids = first, .attention = {}, .logits_rows = rows, .sample = sample}, issue);
  ASSERT_EQ(sampled.size(), 4U);
  EXPECT_EQ(sampled[0].token, 31);
  EXPECT_EQ(sampled[1].token, 7);
  EXPECT_FALSE(sampled[2].error.empty());
  EXPECT_EQ(sampled[3].token, 33);
  run_prepared_step(*ops, {.ids = second, .attention = {}, .logits_rows = {}, .sample = {}},
                    [&] { ops->embed(residual.tensor(), *embedding, 1); });
  const auto out = residual.host();
  const std::array expected = {7, 4, 31, 33};
  for (int r = 0; r < 4; ++r) {
    for (int c = 0; c < kHidden; ++c) ASSERT_EQ(out.at(r, c), table.at(expected[static_cast<std::size_t>(r)], c));
  }
}

TEST_P(RowsTest, steps_are_prepared_and_their_references_are_valid) {
  const auto ops = make_ops(GetParam(), 1);
  using Ids = std::vector<std::int32_t>;
  const Ids one = {1}, two = {1, 2}, rows = {0, 1}, starts = {0, 1}, both = {0, 2}, table = {0}, blocks = {0, 1};
  const Ids third = {2}, fourth = {3}, unknown = {1, -1}, beyond = {2}, descending = {1, 0}, gap = {3, 5};
  const std::vector<SampleRow> sample(1), samples(2);
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
  ops->prepare({.max_rows = 2, .max_sequences = 2, .max_positions = 6}, nothing);
  refused({.ids = unknown, .attention = {}, .logits_rows = {}, .sample = {}}, "");
  refused({.ids = two, .attention = {}, .logits_rows = beyond, .sample = sample}, "");
  refused({.ids = two, .attention = {}, .logits_rows = descending, .sample = samples}, "");
  refused({.ids = two, .attention = {}, .logits_rows = rows, .sample = sample}, "");
  refused({.ids = two, .attention = {both, gap, blocks, 2}, .logits_rows = {}, .sample = {}}, "");
  EXPECT_THROW(ops->run_step(nothing), Error) << "begin_step() was not called";
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
