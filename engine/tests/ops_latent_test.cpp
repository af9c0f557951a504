// Latent attention: latent_store(), heads_linear() and attention() over latents, compared with attention over the
// expanded keys and values in double; and bitwise independence of the division into steps and of the batch.
#include <gtest/gtest.h>

#include <cmath>
#include <numeric>

#include "charonia/error.h"
#include "ops_support.h"

namespace charonia::ops {
namespace {

class LatentTest : public testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(Device, LatentTest, testing::ValuesIn(device_names()), [](const auto& i) { return i.param; });

struct LatentShape {
  int heads, plain, rotated, latent, values, block_len;  // elements of a head; of the cache's latent
  DType weight;
  bool interleaved = false, scaled = false;

  int q_head() const { return plain + rotated; }
  int row() const { return latent + rotated; }
};

LatentShape random_shape(Random& random) {
  const auto of = [&](auto values) {
    return values[static_cast<std::size_t>(uniform(random, 0, static_cast<int>(values.size()) - 1))];
  };
  return {of(std::array{1, 2, 5, 16}),     of(std::array{1, 7, 16, 64}), of(std::array{2, 6, 16, 64}),
          of(std::array{2, 22, 64, 130}),  of(std::array{1, 9, 32, 70}), of(std::array{1, 3, 16, 20, 64, 300}),
          of(kWeightTypes),                uniform(random, 0, 1) == 1,   uniform(random, 0, 1) == 1};
}

// A sequence of tokens, and the weights of one layer.
struct LatentWorld {
  LatentShape shape;
  Precision types;
  int length;
  Matrix q, latents;           // [length, heads * q_head], [length, row]
  std::vector<Matrix> w_k, w_v;  // of each head: [latent, plain], [values, latent]
  Matrix norm, angles, q_scale;  // [1, latent], [length, rotated], [1, length]
  std::vector<std::int32_t> table;
  float eps = 0.25F;  // large enough to matter

  LatentWorld(Random& random, const Ops& ops, const LatentShape& s, int n)
      : shape(s),
        types(ops.precision(s.weight)),
        length(n),
        q(Matrix::random(random, types.gemm_out, n, s.heads * s.q_head())),
        latents(Matrix::random(random, types.gemm_out, n, s.row())),
        norm(Matrix::random(random, DType::f32, 1, s.latent)),
        angles(DType::f32, n, s.rotated),
        q_scale(DType::f32, 1, n),
        table(static_cast<std::size_t>((n + s.block_len - 1) / s.block_len)) {
    for (int h = 0; h < s.heads; ++h) {
      w_k.push_back(Matrix::random(random, s.weight, s.latent, s.plain, 1 / std::sqrt(static_cast<float>(s.plain))));
      w_v.push_back(Matrix::random(random, s.weight, s.values, s.latent, 1 / std::sqrt(static_cast<float>(s.latent))));
    }
    for (int p = 0; p < n; ++p) {
      q_scale.set(0, p, s.scaled ? 1 + 0.01F * static_cast<float>(p % 50) : 1);
      for (int d = 0; d < s.rotated / 2; ++d) {
        const double angle = p * std::pow(10000.0, -2.0 * d / s.rotated);
        angles.set(p, d, static_cast<float>(std::cos(angle)));
        angles.set(p, s.rotated / 2 + d, static_cast<float>(std::sin(angle)));
      }
    }
    std::iota(table.begin(), table.end(), 1);
    std::shuffle(table.begin(), table.end(), random);
  }

  KvLayout layout() const {
    return {.layers = {{.kv_heads = 1, .k_dim = shape.row(), .v_dim = 0}},
            .block_len = shape.block_len,
            .dtype = types.kv};
  }
  float scale() const { return 1 / std::sqrt(static_cast<float>(shape.q_head())); }
  std::unique_ptr<KvCache> make_cache(Ops& ops) const {
    return ops.make_kv_cache(layout(), {static_cast<int>(table.size()) + 1}, {});
  }

  // Runs rows [begin, end) of the sequence after another sequence of one row, whose block is 0. Returns the values.
  Matrix step(Ops& ops, KvCache& cache, int begin, int end, bool with_other = false) const {
    const int others = with_other ? 1 : 0, rows = end - begin + others, stride = static_cast<int>(table.size());
    std::vector<std::int32_t> starts = {0}, positions, tables;
    Matrix q_rows(q.dtype, rows, q.cols), latent_rows(latents.dtype, rows, latents.cols);
    if (with_other) starts.push_back(1), positions.push_back(0), tables.assign(static_cast<std::size_t>(stride), 0);
    for (int r = 0; r < rows; ++r) {
      const int from = r < others ? length - 1 : begin + r - others;
      if (r >= others) positions.push_back(from);
      for (std::int64_t c = 0; c < q.cols; ++c) q_rows.set(r, c, q.at(from, c));
      for (std::int64_t c = 0; c < latents.cols; ++c) latent_rows.set(r, c, latents.at(from, c));
    }
    starts.push_back(rows);
    tables.insert(tables.end(), table.begin(), table.end());
    const std::vector<std::int32_t> ids(static_cast<std::size_t>(rows), 0);
    const DeviceMatrix device_q(ops, q_rows), device_latents(ops, latent_rows), device_norm(ops, norm),
        device_angles(ops, angles), device_scale(ops, q_scale),
        plain(ops, types.activation, rows, shape.heads * shape.plain),
        queries(ops, types.gemm_out, rows, shape.heads * shape.row()),
        attended(ops, types.activation, rows, shape.heads * shape.latent),
        out(ops, types.activation, rows, shape.heads * shape.values);
    std::vector<std::unique_ptr<Linear>> keys, values;
    for (const auto& one : w_k) keys.push_back(ops.make_linear({{one.host()}}, {}, shape.weight));
    for (const auto& one : w_v) values.push_back(ops.make_linear({{one.host()}}, {}, shape.weight));
    const LatentParams how{.norm = device_norm.floats(),
                           .norm_eps = eps,
                           .cos_sin = device_angles.floats(),
                           .rotary_dim = shape.rotated,
                           .interleaved = shape.interleaved,
                           .q_scale = shape.scaled ? device_scale.floats() : nullptr};
    const StepInput input{
        .ids = ids, .attention = {starts, positions, {tables}, stride}, .logits_rows = {}, .sample = {}};
    run_step(ops, input, [&] {
      ops.latent_store(queries.tensor(), plain.tensor(), device_q.tensor(), device_latents.tensor(), how, cache, 0,
                       shape.heads);
      ops.heads_linear(queries.tensor(), plain.tensor(), keys);
      ops.attention(attended.tensor(), queries.tensor(), cache, 0, shape.heads, {.scale = scale()});
      ops.heads_linear(out.tensor(), attended.tensor(), values);
    });
    return out.host().slice(others, rows);
  }

  std::vector<double> rotated(const Matrix& from, std::int64_t row, std::int64_t first) const {
    std::vector<double> out(static_cast<std::size_t>(shape.rotated));
    for (int d = 0; d < shape.rotated / 2; ++d) {
      const int a = shape.interleaved ? 2 * d : d, b = shape.interleaved ? 2 * d + 1 : d + shape.rotated / 2;
      const double x = from.at(row, first + a), y = from.at(row, first + b), cosine = angles.at(row, d),
                   sine = angles.at(row, shape.rotated / 2 + d);
      out[static_cast<std::size_t>(a)] = x * cosine - y * sine;
      out[static_cast<std::size_t>(b)] = y * cosine + x * sine;
    }
    return out;
  }

  // The values of a head of a row, from k and v of all earlier tokens.
  std::vector<double> expected(int row, int head) const {
    const auto h = static_cast<std::size_t>(head);
    const auto q_rotated = rotated(q, row, head * shape.q_head() + shape.plain);
    std::vector<double> weights, out(static_cast<std::size_t>(shape.values));
    std::vector<std::vector<double>> all_values;
    for (int t = 0; t <= row; ++t) {
      double squares = 0, score = 0;
      for (int i = 0; i < shape.latent; ++i) squares += std::pow(latents.at(t, i), 2);
      const double factor = 1 / std::sqrt(squares / shape.latent + eps);
      const auto latent = [&](int i) { return latents.at(t, i) * factor * norm.at(0, i); };
      for (int j = 0; j < shape.plain; ++j) {
        double k = 0;
        for (int i = 0; i < shape.latent; ++i) k += w_k[h].at(i, j) * latent(i);
        score += k * q.at(row, head * shape.q_head() + j);
      }
      const auto k_rotated = rotated(latents, t, shape.latent);
      for (int d = 0; d < shape.rotated; ++d) {
        score += q_rotated[static_cast<std::size_t>(d)] * k_rotated[static_cast<std::size_t>(d)];
      }
      weights.push_back(std::exp(score * q_scale.at(0, row) * scale()));
      auto& values = all_values.emplace_back();
      for (int d = 0; d < shape.values; ++d) {
        double v = 0;
        for (int i = 0; i < shape.latent; ++i) v += w_v[h].at(d, i) * latent(i);
        values.push_back(v);
      }
    }
    const double sum = std::accumulate(weights.begin(), weights.end(), 0.0);
    for (std::size_t t = 0; t < weights.size(); ++t) {
      for (std::size_t d = 0; d < out.size(); ++d) out[d] += weights[t] / sum * all_values[t][d];
    }
    return out;
  }
};

TEST_P(LatentTest, equals_attention_over_expanded_keys_and_values_in_double) {
  Random random(41);
  for (int trial = 0; trial < trials(GetParam(), 20); ++trial) {
    const auto ops = make_ops(GetParam(), 2);
    const LatentWorld world(random, *ops, random_shape(random), uniform(random, 1, trial % 5 == 0 ? 600 : 90));
    const auto& shape = world.shape;
    const auto cache = world.make_cache(*ops);
    const auto out = world.step(*ops, *cache, 0, world.length);
    // Each of about six tensors is rounded, and an error of a score changes weights by as much.
    const double bound = shape.weight == DType::f32 ? 5e-5 : 16 * rounding(shape.weight);
    for (int probe = 0; probe < 6; ++probe) {
      const int row = probe == 0 ? world.length - 1 : uniform(random, 0, world.length - 1);
      const int head = uniform(random, 0, shape.heads - 1);
      const auto expected = world.expected(row, head);
      for (int d = 0; d < shape.values; ++d) {
        ASSERT_NEAR(out.at(row, head * shape.values + d), expected[static_cast<std::size_t>(d)], bound)
            << "row " << row << " of " << world.length << " heads " << shape.heads << " plain " << shape.plain
            << " rotated " << shape.rotated << " latent " << shape.latent << " values " << shape.values << " block "
            << shape.block_len << " " << to_string(shape.weight) << " interleaved " << shape.interleaved;
      }
    }
  }
}

TEST_P(LatentTest, bits_do_not_depend_on_chunks_batch_or_threads) {
  if (!traits(GetParam()).bitwise) GTEST_SKIP() << "the device does not promise it";
  Random random(42);
  const auto one = make_ops(GetParam(), 1), many = make_ops(GetParam(), 3);
  for (int trial = 0; trial < trials(GetParam(), 12); ++trial) {
    const LatentWorld world(random, *one, random_shape(random), uniform(random, 2, trial % 4 == 3 ? 1100 : 120));
    const auto whole_cache = world.make_cache(*one), cache = world.make_cache(*many);
    const auto whole = world.step(*one, *whole_cache, 0, world.length);
    for (int begin = 0; begin < world.length;) {
      const int longest = trial % 4 == 3 ? 400 : 60;
      const int end = begin > 3 * world.length / 4 ? std::min(world.length, begin + 1 + trial % 4 * 10)
                                                   : std::min(world.length, begin + uniform(random, 1, longest));
      const auto out = world.step(*many, *cache, begin, end, begin % 2 == 0);
      for (int row = begin; row < end; ++row) {
        ASSERT_TRUE(whole.same_bits(row, out, row - begin)) << "position " << row << " of " << world.length;
      }
      begin = end;
    }
  }
}

TEST(LatentLayoutTest, several_latents_and_quantised_latents_are_rejected) {
  KvLayout layout{.layers = {{.kv_heads = 1, .k_dim = 576, .v_dim = 0}}, .block_len = 64, .dtype = DType::bf16};
  layout.check();
  EXPECT_EQ(layout.block_bytes(CacheKind::full), std::size_t{64 * 576 * 2});  // DeepSeek V3: 1152 bytes for a token
  layout.quant_bits = 8;
  EXPECT_THROW(layout.check(), Error);
  layout.quant_bits = 0;
  layout.layers[0].kv_heads = 2;
  EXPECT_THROW(layout.check(), Error);
}

}  // namespace
}  // namespace charonia::ops
