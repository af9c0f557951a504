// Operations of recurrent layers: compared with references in double, in steps that cut sequences anywhere.
#include <gtest/gtest.h>

#include "errors.h"
#include "state_steps.h"

namespace charonia::ops {
namespace {

class StateTest : public testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(Device, StateTest, testing::ValuesIn(device_names()), [](const auto& i) { return i.param; });

using Part = StatePart<Matrix>;

struct Conv {
  Matrix weight, bias;  // [kernel, channels], [1, channels]
  int kernel = 3;
  bool has_bias = false, silu = false, gated = false;
  DType out = DType::f32;

  std::int64_t channels() const { return weight.cols; }

  // The outputs of all parts, one after the other.
  Matrix run(Ops& ops, KvCache& cache, const std::vector<Part>& parts, int gap) const {
    const auto all = joined(parts, gap, [](const Matrix& in) -> const Matrix& { return in; });
    const DeviceMatrix in(ops, all), result(ops, out, all.rows, channels(), gap), weights(ops, weight),
        biases(ops, bias);
    const ShortConvParams how{.weight = weights.floats(),
                              .bias = has_bias ? biases.floats() : nullptr,
                              .kernel = kernel,
                              .silu = silu,
                              .gated = gated};
    run_state_step(ops, parts, [&] { ops.short_conv(result.tensor(), in.tensor(), how, cache, 1); });
    return result.host();
  }

  double expected(const Matrix& in, std::int64_t row, std::int64_t c) const {
    const auto n = channels();
    double sum = has_bias ? bias.at(0, c) : 0;
    for (int k = 0; k < kernel; ++k) {
      const auto at = row - kernel + 1 + k;
      if (at < 0) continue;
      const double u = gated ? double{in.at(at, c)} * double{in.at(at, 2 * n + c)} : in.at(at, c);
      sum += double{weight.at(k, c)} * u;
    }
    if (gated) sum *= in.at(row, n + c);
    return silu ? sum / (1 + std::exp(-sum)) : sum;
  }
};

TEST_P(StateTest, short_conv_equals_the_reference_and_cuts_change_no_bit) {
  Random random(3);
  const auto ops = make_ops(GetParam(), 3);
  for (int trial = 0; trial < trials(GetParam(), 60); ++trial) {
    const auto precision = ops->precision(kWeightTypes[static_cast<std::size_t>(trial % 3)]);
    Conv conv;
    conv.kernel = 2 + trial / 3 % 3;
    conv.has_bias = uniform(random, 0, 1) == 1;
    conv.gated = uniform(random, 0, 1) == 1;
    conv.silu = !conv.gated && uniform(random, 0, 1) == 1;
    conv.out = uniform(random, 0, 2) == 0 ? DType::f32 : precision.activation;
    const int channels = uniform(random, 1, 5) == 1 ? uniform(random, 250, 600) : uniform(random, 1, 70);
    conv.weight = Matrix::random(random, DType::f32, conv.kernel, channels);
    conv.bias = Matrix::random(random, DType::f32, 1, channels);
    const auto cache = ops->make_kv_cache(state_layout((conv.kernel - 1) * channels + 5), {0, 0, kStateSlots});
    const int gap = uniform(random, 0, 9);

    std::vector<Matrix> sequences, whole;
    for (const int rows : {uniform(random, 1, 40), uniform(random, 1, 40), uniform(random, 1, 3)}) {
      sequences.push_back(Matrix::random(random, precision.gemm_out, rows, (conv.gated ? 3 : 1) * channels));
      const auto& in = sequences.back();
      whole.push_back(conv.run(*ops, *cache, {{&in, 0, rows, -1, uniform(random, 0, kStateSlots - 1)}}, gap));
      for (int row = 0; row < rows; ++row) {
        for (int c = 0; c < channels; ++c) {
          const double right = conv.expected(in, row, c);
          ASSERT_NEAR(whole.back().at(row, c), right, 1e-5 + 1.1 * rounding(conv.out) * std::abs(right))
              << "row " << row << ", channel " << c << " of " << channels << ", kernel " << conv.kernel;
        }
      }
    }

    ASSERT_NO_FATAL_FAILURE(expect_cuts_change_no_bit(
        random, sequences, whole,
        [&](const std::vector<Part>& parts) { return conv.run(*ops, *cache, parts, gap); }));
  }
}

TEST_P(StateTest, a_step_without_states_or_with_wrong_slots_is_an_error) {
  const auto ops = make_ops(GetParam(), 1);
  const auto cache = ops->make_kv_cache(state_layout(2 * 8), {0, 0, kStateSlots});
  Conv conv;
  conv.weight = Matrix(DType::f32, 3, 8);
  conv.bias = Matrix(DType::f32, 1, 8);
  const Matrix in(ops->precision(DType::f32).gemm_out, 4, 8);
  EXPECT_NO_THROW(conv.run(*ops, *cache, {{&in, 0, 2, -1, 6}}, 0));
  const auto run = [&](const Part& part) { conv.run(*ops, *cache, {part}, 0); };
  expect_error(ErrorCode::internal, {"sequence 0 at position 0 reads the state of slot 2"},
               [&] { run({&in, 0, 2, 2, 1}); });
  expect_error(ErrorCode::internal, {"at position 1 reads the state of slot -1"}, [&] { run({&in, 1, 2, -1, 1}); });
  expect_error(ErrorCode::internal, {"writes slot -1"}, [&] { run({&in, 0, 2, -1, -1}); });
  expect_error(ErrorCode::internal, {"slot 99"}, [&] { run({&in, 0, 2, -1, 1, 1, {99}}); });
  conv.weight = Matrix(DType::f32, 3, 9);
  const Matrix wide(ops->precision(DType::f32).gemm_out, 4, 9);
  expect_error(ErrorCode::internal, {"state"}, [&] { run({&wide, 0, 2, -1, 1}); });
  EXPECT_THROW(ops->make_kv_cache(state_layout(0), {0, 0, kStateSlots}), Error);
}

}  // namespace
}  // namespace charonia::ops
