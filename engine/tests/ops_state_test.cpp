// Operations of recurrent layers: compared with references in double, in steps that cut sequences anywhere.
#include <gtest/gtest.h>

#include <map>

#include "errors.h"
#include "ops_support.h"

namespace charonia::ops {
namespace {

class StateTest : public testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(Device, StateTest, testing::ValuesIn(device_names()), [](const auto& i) { return i.param; });

constexpr int kSlots = 7, kBlockLen = 4;

KvLayout layout_of(std::int64_t floats) {
  return {.layers = {{.kind = CacheKind::state, .state_floats = 3}, {.kind = CacheKind::state, .state_floats = floats}},
          .block_len = kBlockLen};
}

// A part of a sequence in a step: rows [begin, end) of its inputs.
struct Part {
  const Matrix* in = nullptr;
  int begin = 0, end = 0;
  std::int32_t state_in = -1, state_out = 0;
};

struct Conv {
  Matrix weight, bias;  // [kernel, channels], [1, channels]
  int kernel = 3;
  bool has_bias = false, silu = false, gated = false;
  DType out = DType::f32;

  std::int64_t channels() const { return weight.cols; }

  // The outputs of all parts, one after the other.
  Matrix run(Ops& ops, KvCache& cache, const std::vector<Part>& parts, int gap) const {
    std::vector<std::int32_t> starts = {0}, positions, state_in, state_out;
    for (const auto& part : parts) {
      for (int p = part.begin; p < part.end; ++p) positions.push_back(p);
      starts.push_back(static_cast<std::int32_t>(positions.size()));
      state_in.push_back(part.state_in);
      state_out.push_back(part.state_out);
    }
    const auto rows = std::ssize(positions);
    Matrix all(parts.front().in->dtype, rows, parts.front().in->cols, gap);
    std::int64_t to = 0;
    for (const auto& part : parts) {
      for (int p = part.begin; p < part.end; ++p, ++to) {
        for (std::int64_t c = 0; c < all.cols; ++c) all.set(to, c, part.in->at(p, c));
      }
    }
    const DeviceMatrix in(ops, all), result(ops, out, rows, channels(), gap), weights(ops, weight), biases(ops, bias);
    const std::vector<std::int32_t> ids(positions.size(), 0);
    const ShortConvParams how{.weight = weights.floats(),
                              .bias = has_bias ? biases.floats() : nullptr,
                              .kernel = kernel,
                              .silu = silu,
                              .gated = gated};
    run_step(ops,
             {.ids = ids,
              .attention = {.query_start = starts,
                            .positions = positions,
                            .block_tables = {},
                            .state_in = state_in,
                            .state_out = state_out},
              .logits_rows = {},
              .sample = {}},
             [&] { ops.short_conv(result.tensor(), in.tensor(), how, cache, 1); });
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
    const auto cache = ops->make_kv_cache(layout_of((conv.kernel - 1) * channels + 5), {0, 0, kSlots});
    const int gap = uniform(random, 0, 9);

    std::vector<Matrix> sequences, whole;
    for (const int rows : {uniform(random, 1, 40), uniform(random, 1, 40), uniform(random, 1, 3)}) {
      sequences.push_back(Matrix::random(random, precision.gemm_out, rows, (conv.gated ? 3 : 1) * channels));
      const auto& in = sequences.back();
      whole.push_back(conv.run(*ops, *cache, {{&in, 0, rows, -1, uniform(random, 0, kSlots - 1)}}, gap));
      for (int row = 0; row < rows; ++row) {
        for (int c = 0; c < channels; ++c) {
          const double right = conv.expected(in, row, c);
          ASSERT_NEAR(whole.back().at(row, c), right, 1e-5 + 1.1 * rounding(conv.out) * std::abs(right))
              << "row " << row << ", channel " << c << " of " << channels << ", kernel " << conv.kernel;
        }
      }
    }

    // Each sequence has a slot and moves to another one at times. Its steps have any number of rows.
    std::vector<std::int32_t> slot = {-1, -1, -1}, free = {0, 1, 2, 3, 4, 5, 6};
    std::vector<int> computed(3);
    while (true) {
      std::vector<Part> parts;
      std::vector<std::size_t> of_part;
      for (std::size_t s = 0; s < sequences.size(); ++s) {
        const int left = static_cast<int>(sequences[s].rows) - computed[s];
        if (left == 0 || uniform(random, 0, 3) == 0) continue;
        const int rows = uniform(random, 0, 2) == 0 ? 1 : uniform(random, 1, left);
        auto out = slot[s];
        if (out < 0 || uniform(random, 0, 2) == 0) {
          out = free.back();
          free.pop_back();
          if (slot[s] >= 0) free.insert(free.begin(), slot[s]);
        }
        parts.push_back({&sequences[s], computed[s], computed[s] + rows, slot[s], out});
        of_part.push_back(s);
        slot[s] = out;
      }
      if (computed[0] == sequences[0].rows && computed[1] == sequences[1].rows && computed[2] == sequences[2].rows) break;
      if (parts.empty()) continue;
      const auto result = conv.run(*ops, *cache, parts, gap);
      std::int64_t row = 0;
      for (std::size_t i = 0; i < parts.size(); ++i) {
        for (int p = parts[i].begin; p < parts[i].end; ++p, ++row) {
          ASSERT_TRUE(result.same_bits(row, whole[of_part[i]], p)) << "row " << p << " of sequence " << of_part[i];
        }
        computed[of_part[i]] = parts[i].end;
      }
    }
  }
}

TEST_P(StateTest, a_step_without_states_or_with_wrong_slots_is_an_error) {
  const auto ops = make_ops(GetParam(), 1);
  const auto cache = ops->make_kv_cache(layout_of(2 * 8), {0, 0, kSlots});
  Conv conv;
  conv.weight = Matrix(DType::f32, 3, 8);
  conv.bias = Matrix(DType::f32, 1, 8);
  const Matrix in(ops->precision(DType::f32).gemm_out, 4, 8);
  EXPECT_NO_THROW(conv.run(*ops, *cache, {{&in, 0, 2, -1, 6}}, 0));
  const auto run = [&](const Part& part) { conv.run(*ops, *cache, {part}, 0); };
  expect_error(ErrorCode::internal, {"sequence 0 at position 0 reads the state of slot 2"}, [&] { run({&in, 0, 2, 2, 1}); });
  expect_error(ErrorCode::internal, {"at position 1 reads the state of slot -1"}, [&] { run({&in, 1, 2, -1, 1}); });
  expect_error(ErrorCode::internal, {"writes slot -1"}, [&] { run({&in, 0, 2, -1, -1}); });
  conv.weight = Matrix(DType::f32, 3, 9);
  const Matrix wide(ops->precision(DType::f32).gemm_out, 4, 9);
  expect_error(ErrorCode::internal, {"state"}, [&] { run({&wide, 0, 2, -1, 1}); });
  EXPECT_THROW(ops->make_kv_cache(layout_of(0), {0, 0, kSlots}), Error);
}

}  // namespace
}  // namespace charonia::ops
