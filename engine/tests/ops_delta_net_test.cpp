// The gated delta net: compared with the recurrence in double, in steps that cut sequences anywhere.
#include <gtest/gtest.h>

#include "errors.h"
#include "state_steps.h"

namespace charonia::ops {
namespace {

class DeltaNetTest : public testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(Device, DeltaNetTest, testing::ValuesIn(device_names()),
                         [](const auto& i) { return i.param; });

struct Sequence {
  Matrix qkv, gates;
};

using Chunk = StatePart<Sequence>;

struct World {
  DeltaNetParams how;
  Matrix decay, dt_bias;  // [1, v_heads]

  Matrix run(Ops& ops, KvCache& cache, const std::vector<Chunk>& parts, int gap) const {
    const auto qkv = joined(parts, gap, [](const Sequence& in) -> const Matrix& { return in.qkv; });
    const auto gates = joined(parts, gap, [](const Sequence& in) -> const Matrix& { return in.gates; });
    const DeviceMatrix heads(ops, qkv), of_heads(ops, gates), decays(ops, decay), biases(ops, dt_bias);
    auto params = how;
    params.decay = decays.floats();
    params.dt_bias = biases.floats();
    run_state_step(ops, parts, [&] { ops.delta_net(heads.tensor(), of_heads.tensor(), params, cache, 1); });
    const auto all = heads.host();
    const std::int64_t v_size = std::int64_t{how.v_heads} * how.v_dim;
    Matrix out(all.dtype, all.rows, v_size);
    for (std::int64_t r = 0; r < all.rows; ++r) {
      for (std::int64_t c = 0; c < v_size; ++c) out.set(r, c, all.at(r, all.cols - v_size + c));
    }
    return out;
  }

  // o of all rows [rows][v_heads * v_dim].
  std::vector<std::vector<double>> expected(const Sequence& in) const {
    const auto k_dim = static_cast<std::size_t>(how.k_dim), v_dim = static_cast<std::size_t>(how.v_dim);
    std::vector<std::vector<double>> out(static_cast<std::size_t>(in.qkv.rows));
    for (int head = 0; head < how.v_heads; ++head) {
      std::vector<double> s(k_dim * v_dim);
      const std::int64_t k_head = how.tiled ? head % how.k_heads : head / (how.v_heads / how.k_heads);
      for (std::int64_t row = 0; row < in.qkv.rows; ++row) {
        std::vector<double> q(k_dim), k(k_dim);
        const auto load = [&](std::vector<double>& x, std::int64_t first, double scale) {
          double squares = 1e-6;
          for (std::size_t i = 0; i < k_dim; ++i) {
            x[i] = in.qkv.at(row, first + static_cast<std::int64_t>(i));
            squares += x[i] * x[i];
          }
          for (auto& value : x) value *= scale / std::sqrt(squares);
        };
        load(q, k_head * how.k_dim, 1 / std::sqrt(how.k_dim));
        load(k, (how.k_heads + k_head) * how.k_dim, 1);
        const double b = in.gates.at(row, head), a = in.gates.at(row, how.v_heads + head) + dt_bias.at(0, head);
        const double beta = 1 / (1 + std::exp(-b)), softplus = a > 30 ? a : std::log1p(std::exp(a));
        const double alpha = std::exp(-double{decay.at(0, head)} * softplus);
        for (std::size_t c = 0; c < v_dim; ++c) {
          double found = 0, o = 0;
          for (std::size_t i = 0; i < k_dim; ++i) found += alpha * s[i * v_dim + c] * k[i];
          const auto column = std::int64_t{2} * how.k_heads * how.k_dim + std::int64_t{head} * how.v_dim;
          const double delta = beta * (in.qkv.at(row, column + static_cast<std::int64_t>(c)) - found);
          for (std::size_t i = 0; i < k_dim; ++i) {
            auto& one = s[i * v_dim + c];
            one = alpha * one + k[i] * delta;
            o += one * q[i];
          }
          out[static_cast<std::size_t>(row)].push_back(o);
        }
      }
    }
    return out;
  }
};

World random_world(Random& random, int trial) {
  World world;
  auto& how = world.how;
  how.k_heads = uniform(random, 1, 3);
  how.v_heads = how.k_heads * uniform(random, 1, 3);
  how.tiled = trial % 2 == 1;
  // The released sizes, and others on each side of a strip, a vector and a thread's rows.
  how.k_dim = trial % 4 == 0 ? 128 : trial % 4 == 1 ? uniform(random, 1, 70) : 4 * uniform(random, 1, 40);
  how.v_dim = trial % 4 == 0 ? 128 : uniform(random, 1, 70);
  if (trial % 8 == 7) how.k_dim = 256;
  how.state = 16 * uniform(random, 0, 4);
  world.decay = Matrix(DType::f32, 1, how.v_heads);
  world.dt_bias = Matrix::random(random, DType::f32, 1, how.v_heads);
  for (int h = 0; h < how.v_heads; ++h) world.decay.set(0, h, std::exp2(static_cast<float>(uniform(random, -7, 4))));
  return world;
}

Sequence random_sequence(Random& random, const World& world, DType type, int rows, int trial) {
  Sequence out{Matrix::random(random, type, rows, world.how.columns(), trial % 3 == 0 ? 4 : 0.5F),
               Matrix::random(random, DType::f32, rows, std::int64_t{2} * world.how.v_heads, 2)};
  if (trial % 5 == 0) {
    for (int c = 0; c < world.how.k_dim; ++c) out.qkv.set(rows / 2, c, 0);  // a head of zeros
    out.gates.set(rows / 2, 0, -200), out.gates.set(rows / 2, world.how.v_heads, 200);
  }
  return out;
}

TEST_P(DeltaNetTest, equals_the_recurrence_in_double_and_cuts_change_no_bit) {
  Random random(5);
  const auto ops = make_ops(GetParam(), 3), one = make_ops(GetParam(), 1);
  for (int trial = 0; trial < trials(GetParam(), 24); ++trial) {
    const auto world = random_world(random, trial);
    const auto type = ops->precision(kWeightTypes[static_cast<std::size_t>(trial % 3)]).gemm_out;
    const auto layout = state_layout(world.how.state + world.how.state_floats());
    const auto cache = ops->make_kv_cache(layout, {0, 0, kStateSlots});
    const auto other = one->make_kv_cache(layout, {0, 0, kStateSlots});
    const int gap = uniform(random, 0, 1) * 8;
    std::vector<Sequence> sequences;
    std::vector<Matrix> whole;
    for (const int rows : {uniform(random, 1, 70), uniform(random, 1, 30), uniform(random, 1, 3)}) {
      sequences.push_back(random_sequence(random, world, type, rows, trial));
    }
    for (const auto& in : sequences) {
      const int rows = static_cast<int>(in.qkv.rows);
      whole.push_back(world.run(*one, *other, {{&in, 0, rows, -1, uniform(random, 0, kStateSlots - 1)}}, gap));
      const auto right = world.expected(in);
      double most = 0;
      for (const auto& row : right) {
        for (const double x : row) most = std::max(most, std::abs(x));
      }
      for (int row = 0; row < rows; ++row) {
        for (std::int64_t c = 0; c < whole.back().cols; ++c) {
          const double expected = right[static_cast<std::size_t>(row)][static_cast<std::size_t>(c)];
          ASSERT_NEAR(whole.back().at(row, c), expected, 2e-5 * most + 1.1 * rounding(type) * std::abs(expected) + 1e-7)
              << "row " << row << ", column " << c << ", heads " << world.how.k_heads << " of " << world.how.k_dim
              << " and " << world.how.v_heads << " of " << world.how.v_dim;
        }
      }
    }
    ASSERT_NO_FATAL_FAILURE(expect_cuts_change_no_bit(
        random, sequences, whole,
        [&](const std::vector<Chunk>& parts) { return world.run(*ops, *cache, parts, 8 - gap); }));
  }
}

TEST_P(DeltaNetTest, refuses_heads_that_do_not_fit) {
  Random random(6);
  const auto ops = make_ops(GetParam(), 1);
  auto world = random_world(random, 0);
  world.how.state = 0;
  const auto sequence = random_sequence(random, world, ops->precision(DType::f32).gemm_out, 2, 1);
  const auto cache = ops->make_kv_cache(state_layout(world.how.state_floats()), {0, 0, kStateSlots});
  world.run(*ops, *cache, {{&sequence, 0, 2, -1, 0}}, 0);
  world.how.state = 16;  // beyond the slot
  EXPECT_THROW(world.run(*ops, *cache, {{&sequence, 0, 2, -1, 0}}, 0), Error);
}

}  // namespace
}  // namespace charonia::ops
