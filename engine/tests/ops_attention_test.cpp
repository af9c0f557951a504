// Rotation, the k/v store and attention over blocks against references in double, and bitwise independence of how a
// sequence was cut into steps and of what else is in the batch.
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "charonia/error.h"
#include "ops_support.h"

namespace charonia::ops {
namespace {

class AttentionTest : public testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(Device, AttentionTest, testing::ValuesIn(device_names()),
                         [](const auto& i) { return i.param; });

struct Shape {
  int heads, kv_heads, head_dim, block_len;
  DType weight;  // of the model; it decides on the others
};

Shape random_shape(Random& random) {
  constexpr std::array kDims = {2, 6, 16, 32, 48, 64, 80, 96, 128, 256};
  constexpr std::array kBlocks = {1, 3, 16, 20, 64, 128, 300};
  constexpr std::array kGroups = {1, 2, 3, 4, 7, 32};
  const int kv_heads = uniform(random, 1, 3);
  return {kGroups[static_cast<std::size_t>(uniform(random, 0, 5))] * kv_heads, kv_heads,
          kDims[static_cast<std::size_t>(uniform(random, 0, 9))],
          kBlocks[static_cast<std::size_t>(uniform(random, 0, 6))],
          kWeightTypes[static_cast<std::size_t>(uniform(random, 0, 2))]};
}

// A cache with several sequences whose blocks lie anywhere, and their qkv rows before rotation.
struct World {
  Shape shape;
  DType kv, product;
  std::vector<int> lengths;
  std::vector<Matrix> qkv;           // [sequence][length, (heads + 2 kv_heads) * head_dim]
  std::vector<float> cos_sin;        // [positions, head_dim]
  std::vector<std::int32_t> tables;  // [sequences, table_stride]
  std::int64_t table_stride = 0;
  std::int64_t columns = 0;
  int blocks = 0;

  World(Random& random, const Ops& ops, const Shape& s, std::vector<int> sequence_lengths)
      : shape(s),
        kv(ops.precision(s.weight).kv),
        product(ops.precision(s.weight).product),
        lengths(std::move(sequence_lengths)),
        columns((s.heads + 2 * s.kv_heads) * s.head_dim) {
    const int longest = *std::max_element(lengths.begin(), lengths.end());
    table_stride = (longest + s.block_len - 1) / s.block_len + 1;
    std::vector<std::int32_t> free(static_cast<std::size_t>(table_stride) * lengths.size() + 3);
    std::iota(free.begin(), free.end(), 0);
    std::shuffle(free.begin(), free.end(), random);
    blocks = static_cast<int>(free.size());
    tables.assign(free.begin(), free.begin() + table_stride * static_cast<std::ptrdiff_t>(lengths.size()));
    for (const int n : lengths) qkv.push_back(Matrix::random(random, product, n, columns));
    for (int p = 0; p < longest; ++p) {
      for (int half = 0; half < 2; ++half) {
        for (int d = 0; d < s.head_dim / 2; ++d) {
          const double angle = p * std::pow(10000.0, -2.0 * d / s.head_dim);
          cos_sin.push_back(static_cast<float>(half == 0 ? std::cos(angle) : std::sin(angle)));
        }
      }
    }
  }

  KvLayout layout() const { return {2, shape.kv_heads, shape.head_dim, shape.block_len, kv}; }
  float scale() const { return 1 / std::sqrt(static_cast<float>(shape.head_dim)); }

  // One step over rows [begin, end) of each sequence, in the order given. Returns attention's output and the rotated
  // qkv.
  struct Piece {
    int sequence, begin, end;
  };
  std::pair<Matrix, Matrix> step(Ops& ops, KvCache& cache, const std::vector<Piece>& pieces, DType out_type) const {
    std::vector<std::int32_t> starts = {0}, positions, table;
    for (const auto& p : pieces) {
      for (int i = p.begin; i < p.end; ++i) positions.push_back(i);
      starts.push_back(static_cast<std::int32_t>(positions.size()));
      const auto from = tables.begin() + p.sequence * table_stride;
      table.insert(table.end(), from, from + table_stride);
    }
    Matrix rows(product, static_cast<std::int64_t>(positions.size()), columns, 8);
    std::int64_t r = 0;
    for (const auto& p : pieces) {
      for (int i = p.begin; i < p.end; ++i, ++r) {
        for (std::int64_t c = 0; c < columns; ++c) rows.set(r, c, qkv[static_cast<std::size_t>(p.sequence)].at(i, c));
      }
    }
    const std::vector<std::int32_t> ids(positions.size(), 0);
    const DeviceMatrix device_rows(ops, rows), out(ops, out_type, rows.rows, shape.heads * shape.head_dim, 8);
    const auto angles = ops.allocate(cos_sin.size() * sizeof(float));
    ops.upload(angles->data(), cos_sin.data(), cos_sin.size() * sizeof(float));
    run_step(ops, {.ids = ids, .attention = {starts, positions, table, table_stride}, .logits_rows = {}, .sample = {}},
             [&] {
               ops.rotary_store(device_rows.tensor(), angles->as<float>(), cache, 1, shape.heads);
               ops.attention(out.tensor(), device_rows.tensor(), cache, 1, shape.heads, scale());
             });
    return {out.host(), device_rows.host()};
  }

  double rotated(int sequence, int position, int head, int d) const {
    const auto& m = qkv[static_cast<std::size_t>(sequence)];
    const int half = shape.head_dim / 2, i = d % half;
    const double a = m.at(position, head * shape.head_dim + i), b = m.at(position, head * shape.head_dim + half + i);
    const double c = cos_sin[static_cast<std::size_t>(position * shape.head_dim + i)];
    const double s = cos_sin[static_cast<std::size_t>(position * shape.head_dim + half + i)];
    return d < half ? a * c - b * s : b * c + a * s;
  }
  double stored(double x) const { return rounded(kv, x); }
  // Attention of one head of one row in double, with k and v as they are stored.
  std::vector<double> reference(int sequence, int position, int head) const {
    const int kv_head = head / (shape.heads / shape.kv_heads), dim = shape.head_dim;
    std::vector<double> scores, out(static_cast<std::size_t>(dim), 0.0);
    for (int p = 0; p <= position; ++p) {
      double score = 0;
      for (int d = 0; d < dim; ++d) {
        score += rounded(product, rotated(sequence, position, head, d)) *
                 stored(rotated(sequence, p, shape.heads + kv_head, d));
      }
      scores.push_back(score * static_cast<double>(scale()));
    }
    const double greatest = *std::max_element(scores.begin(), scores.end());
    double sum = 0;
    for (auto& s : scores) sum += s = std::exp(s - greatest);
    for (int p = 0; p <= position; ++p) {
      for (int d = 0; d < dim; ++d) {
        const auto column = (shape.heads + shape.kv_heads + kv_head) * dim + d;
        const double v = stored(qkv[static_cast<std::size_t>(sequence)].at(p, column));
        out[static_cast<std::size_t>(d)] += scores[static_cast<std::size_t>(p)] / sum * v;
      }
    }
    return out;
  }
};

TEST_P(AttentionTest, equals_attention_in_double) {
  Random random(4);
  const auto ops = make_ops(GetParam(), 2);
  for (int trial = 0; trial < trials(GetParam(), 25); ++trial) {
    const auto shape = random_shape(random);
    const World world(random, *ops, shape, {uniform(random, 1, 40), uniform(random, 1, trial % 5 == 0 ? 600 : 90)});
    const auto cache = ops->make_kv_cache(world.layout(), world.blocks);
    const auto out_type = ops->precision(shape.weight).activation;
    const auto [out, rows] = world.step(*ops, *cache, {{1, 0, world.lengths[1]}, {0, 0, world.lengths[0]}}, out_type);
    for (int probe = 0; probe < 12; ++probe) {
      const int sequence = probe % 2,
                position = uniform(random, 0, world.lengths[static_cast<std::size_t>(sequence)] - 1);
      const int head = uniform(random, 0, shape.heads - 1);
      const auto row = sequence == 1 ? position : world.lengths[1] + position;
      const auto expected = world.reference(sequence, position, head);
      for (int d = 0; d < shape.head_dim; ++d) {
        const double turned = world.rotated(sequence, position, head, d);
        ASSERT_NEAR(rows.at(row, head * shape.head_dim + d), turned,
                    1e-6 + (world.product == DType::f32 ? 0 : 1.01 * rounding(world.product) * std::abs(turned)));
        // k rounded in fp32 may fall to the other side of a half step of the cache's type: its rounding counts too.
        const double bound =
            1e-5 + (world.kv == DType::f32 ? 0 : traits(GetParam()).attention_roundings * rounding(world.kv)) +
            (out_type == DType::f32 ? 0 : 1.01 * rounding(out_type)) * std::abs(expected[static_cast<std::size_t>(d)]);
        ASSERT_NEAR(out.at(row, head * shape.head_dim + d), expected[static_cast<std::size_t>(d)], bound)
            << "heads " << shape.heads << "/" << shape.kv_heads << " dim " << shape.head_dim << " block "
            << shape.block_len << " kv " << to_string(world.kv) << " position " << position;
      }
    }
  }
}

TEST_P(AttentionTest, neither_chunks_nor_batch_nor_threads_change_a_bit) {
  if (!traits(GetParam()).bitwise) GTEST_SKIP() << "the device does not promise it";
  Random random(5);
  const auto one = make_ops(GetParam(), 1), many = make_ops(GetParam(), 3);
  for (int trial = 0; trial < trials(GetParam(), 15); ++trial) {
    const auto shape = random_shape(random);
    const World world(random, *one, shape,
                      {uniform(random, 2, trial % 4 == 0 ? 700 : 120), uniform(random, 1, 50), 17});
    const int n = world.lengths[0];
    const auto out_type = one->precision(shape.weight).activation;
    const auto whole_cache = one->make_kv_cache(world.layout(), world.blocks);
    const auto [whole, whole_rows] = world.step(*one, *whole_cache, {{0, 0, n}}, out_type);

    const auto cache = many->make_kv_cache(world.layout(), world.blocks);
    int done_1 = 0, done_2 = 0;
    for (int begin = 0; begin < n;) {
      const int end = std::min(n, begin + (trial % 2 == 0 ? 1 + trial / 2 : uniform(random, 1, 60)));
      const int next_1 = std::min(world.lengths[1], done_1 + 1), next_2 = std::min(world.lengths[2], done_2 + 5);
      const auto [out, rows] =
          world.step(*many, *cache, {{1, done_1, next_1}, {0, begin, end}, {2, done_2, next_2}}, out_type);
      for (int i = begin; i < end; ++i) {
        ASSERT_TRUE(whole.same_bits(i, out, next_1 - done_1 + i - begin)) << "position " << i << " of " << n;
        ASSERT_TRUE(whole_rows.same_bits(i, rows, next_1 - done_1 + i - begin));
      }
      begin = end, done_1 = next_1, done_2 = next_2;
    }
  }
}

TEST_P(AttentionTest, a_block_table_that_is_too_short_is_refused) {
  Random random(6);
  const auto ops = make_ops(GetParam(), 1);
  World world(random, *ops, {2, 1, 16, 4, DType::f32}, {9});
  const auto cache = ops->make_kv_cache(world.layout(), world.blocks);
  world.table_stride = 2;
  EXPECT_THROW(world.step(*ops, *cache, {{0, 0, 9}}, DType::f32), Error);
}

TEST_P(AttentionTest, a_block_takes_what_its_documentation_says) {
  // Llama-2-7B in half precision: 64 MiB for a block of 128 tokens.
  EXPECT_EQ(make_ops(GetParam(), 1)->kv_block_bytes({32, 32, 128, 128, DType::f16}), std::size_t{64} << 20);
}

}  // namespace
}  // namespace charonia::ops
