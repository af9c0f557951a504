// Rotation and the store into the cache, compared with double precision.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <set>
#include <string>
#include <vector>

#include "charonia/error.h"
#include "device_arrays.h"
#include "errors.h"
#include "ops/cuda/kernels/rows.h"
#include "ops_support.h"

namespace charonia::cuda {
namespace {

using ops::Matrix;
using ops::Random;
using ops::uniform;

constexpr std::array kTypes = {DType::f32, DType::bf16, DType::f16};

// The parameters of a step's rows, and the expected results in double.
struct Case {
  DType type;
  int dim, rotary_dim;  // 0: no rotation
  bool normed, scaled;
  int heads, kv_heads, block_len, blocks, rows, gap;
  bool interleaved = false, norm_after = false, norm_rows = false;

  int weights(int of_heads) const { return norm_rows ? of_heads * dim : dim; }
};

constexpr int kPositions = 50;

constexpr float kEps = 1e-3F;

// A distinct cache slot for each row; with several rows, the last one is not stored.
std::vector<std::int32_t> random_slots(Random& random, const Case& c) {
  std::vector<std::int32_t> slots(static_cast<std::size_t>(c.blocks * c.block_len));
  std::iota(slots.begin(), slots.end(), 0);
  std::shuffle(slots.begin(), slots.end(), random);
  slots.resize(static_cast<std::size_t>(c.rows));
  if (c.rows > 1) slots.back() = -1;
  return slots;
}

// Null if not wanted.
const float* floats(const MatrixOnDevice& matrix, bool wanted) {
  return wanted ? static_cast<const float*>(matrix.tensor().data) : nullptr;
}

struct Inputs {
  Inputs(Random& random, const Case& c)
      : qkv(Matrix::random(random, c.type, c.rows, (c.heads + 2 * c.kv_heads) * c.dim, 1, c.gap)),
        cos_sin(Matrix::random(random, DType::f32, kPositions, std::max(1, c.rotary_dim))),
        q_norm(Matrix::random(random, DType::f32, 1, c.weights(c.heads))),
        k_norm(Matrix::random(random, DType::f32, 1, c.weights(c.kv_heads))),
        q_scale(Matrix::random(random, DType::f32, 1, kPositions)),
        slots(random_slots(random, c)) {
    for (int r = 0; r < c.rows; ++r) {
      at.push_back(uniform(random, 0, kPositions - 1));
      turns.push_back(uniform(random, 0, kPositions - 1));
    }
  }

  // The expected head, and for each element the sum of the absolute values of its terms.
  std::pair<std::vector<double>, std::vector<double>> expected(const Case& c, int row, int head) const {
    const int dim = c.dim, half = c.rotary_dim / 2;
    std::vector<double> x, magnitude;
    for (int d = 0; d < dim; ++d) x.push_back(static_cast<double>(qkv.at(row, head * dim + d)));
    const bool is_q = head < c.heads, is_v = head >= c.heads + c.kv_heads;
    const auto normalise = [&] {
      double squares = 0;
      for (const double one : x) squares += one * one;
      int count = dim;
      if (c.norm_rows) {
        const int first = is_q ? 0 : c.heads * dim;
        count = (is_q ? c.heads : c.kv_heads) * dim;
        squares = 0;
        for (int i = first; i < first + count; ++i) squares += std::pow(static_cast<double>(qkv.at(row, i)), 2);
      }
      const double factor = 1 / std::sqrt(squares / count + static_cast<double>(kEps));
      const int first = c.norm_rows ? (is_q ? head : head - c.heads) * dim : 0;
      for (int d = 0; d < dim; ++d) {
        const double weight = factor * static_cast<double>((is_q ? q_norm : k_norm).at(0, first + d));
        x[static_cast<std::size_t>(d)] *= weight;
        if (!magnitude.empty()) magnitude[static_cast<std::size_t>(d)] *= std::abs(weight);
      }
    };
    if (!is_v && c.normed && !c.norm_after) normalise();
    for (const double one : x) magnitude.push_back(std::abs(one));
    for (int d = 0; !is_v && d < half; ++d) {
      const auto turn = turns[static_cast<std::size_t>(row)];
      const double cosine = cos_sin.at(turn, d), sine = cos_sin.at(turn, half + d);
      const auto first = static_cast<std::size_t>(c.interleaved ? 2 * d : d),
                 second = static_cast<std::size_t>(c.interleaved ? 2 * d + 1 : half + d);
      auto &a = x[first], &b = x[second];
      const double before = a;
      magnitude[first] = std::abs(a * cosine) + std::abs(b * sine);
      magnitude[second] = std::abs(b * cosine) + std::abs(a * sine);
      a = a * cosine - b * sine;
      b = b * cosine + before * sine;
    }
    if (!is_v && c.normed && c.norm_after) normalise();
    for (std::size_t d = 0; is_q && c.scaled && d < x.size(); ++d) {
      const double scale = q_scale.at(0, at[static_cast<std::size_t>(row)]);
      x[d] *= scale;
      magnitude[d] *= std::abs(scale);
    }
    return {x, magnitude};
  }

  // Compares row r of `got`, from element `first` on, with that head.
  void expect_head(const Case& c, const Matrix& got, std::int64_t r, int first, int row, int head) const {
    const auto [want, magnitude] = expected(c, row, head);
    for (int d = 0; d < c.dim; ++d) {
      const auto i = static_cast<std::size_t>(d);
      ASSERT_NEAR(got.at(r, first + d), want[i],
                  1e-6 * magnitude[i] + 1.001 * ops::rounding(c.type) * std::abs(want[i]) + 0x1p-24)
          << "head size " << c.dim << ", of which " << c.rotary_dim << " turn, interleaved " << c.interleaved
          << ", norm " << c.normed << ", after " << c.norm_after << ", of rows " << c.norm_rows << ", element " << d
          << " of head " << head;
    }
  }

  Matrix qkv, cos_sin, q_norm, k_norm, q_scale;
  std::vector<std::int32_t> slots, at, turns;
};

ops::RotaryParams params(const Case& c, const float* cos_sin, const float* q_scale, const float* squares) {
  return {.cos_sin = cos_sin,
          .rotary_dim = c.rotary_dim,
          .interleaved = c.interleaved,
          .norm_eps = kEps,
          .norm_after = c.norm_after,
          .squares = squares,
          .q_count = std::int64_t{c.heads} * c.dim,
          .k_count = std::int64_t{c.kv_heads} * c.dim,
          .q_scale = q_scale};
}

void square(Stream& stream, const MatrixOnDevice& squares, const MatrixOnDevice& qkv, const Case& c) {
  qk_squares(stream, static_cast<float*>(squares.tensor().data), qkv.tensor(), c.heads * c.dim, c.kv_heads * c.dim);
}

void check(Random& random, const Case& c) {
  const Inputs in(random, c);
  constexpr float kUntouched = 77;
  Matrix cache(c.type, std::int64_t{c.blocks} * 2 * c.kv_heads * c.block_len, c.dim);
  for (std::int64_t r = 0; r < cache.rows; ++r) {
    for (int d = 0; d < c.dim; ++d) cache.set(r, d, kUntouched);
  }
  in_both_orders([&] {
    Stream stream;
    const MatrixOnDevice qkv(stream, in.qkv), cos_sin(stream, in.cos_sin), cache_there(stream, cache),
        q_norm(stream, in.q_norm), k_norm(stream, in.k_norm), q_scale(stream, in.q_scale);
    const DeviceArray<std::int32_t> slots(stream, in.slots), at(stream, in.at), turns(stream, in.turns);
    const CacheLayer layer{cache_there.tensor().data, c.type, c.kv_heads, c.dim, c.block_len};
    const MatrixOnDevice squares(stream, Matrix(DType::f32, c.rows, 2));
    auto how = params(c, floats(cos_sin, c.rotary_dim > 0), floats(q_scale, c.scaled), floats(squares, c.norm_rows));
    how.q_norm = floats(q_norm, c.normed);
    how.k_norm = floats(k_norm, c.normed);
    if (c.norm_rows) square(stream, squares, qkv, c);
    rotary_store(stream, qkv.tensor(), how, layer, c.heads, at.data(), turns.data(), slots.data());
    const auto rotated = qkv.host(), stored = cache_there.host();
    std::set<std::int64_t> written;
    for (int row = 0; row < c.rows; ++row) {
      for (int head = 0; head < c.heads; ++head) in.expect_head(c, rotated, row, head * c.dim, row, head);
      const int slot = in.slots[static_cast<std::size_t>(row)];
      if (slot < 0) continue;
      for (int head = 0; head < 2 * c.kv_heads; ++head) {
        const auto to = (std::int64_t{slot / c.block_len} * 2 * c.kv_heads + head) * c.block_len + slot % c.block_len;
        written.insert(to);
        in.expect_head(c, stored, to, 0, row, c.heads + head);
      }
    }
    for (std::int64_t r = 0; r < stored.rows; ++r) {
      for (int d = 0; d < c.dim && written.count(r) == 0; ++d) ASSERT_EQ(stored.at(r, d), kUntouched);
    }
  });
}

Case random_case(Random& random, int trial, int dim) {
  constexpr std::array kBlockLens = {1, 3, 16, 64};
  const int kv_heads = uniform(random, 1, 3), blocks = uniform(random, 20, 30);
  const int block_len = kBlockLens[static_cast<std::size_t>(uniform(random, 0, 3))];
  return {.type = kTypes[static_cast<std::size_t>(trial % 3)],
          .dim = dim,
          .rotary_dim = dim,
          .normed = false,
          .scaled = false,
          .heads = kv_heads * uniform(random, 1, 5),
          .kv_heads = kv_heads,
          .block_len = block_len,
          .blocks = blocks,
          .rows = uniform(random, 1, std::min(12, blocks * block_len)),
          .gap = trial % 2 == 0 ? 0 : trial % 9};
}

TEST(RotaryStoreTest, rotates_q_and_k_and_stores_k_and_v_in_all_types_and_shapes) {
  Random random(1);
  constexpr std::array kDims = {2, 6, 16, 32, 64, 80, 96, 128, 256};
  for (int trial = 0; trial < 45; ++trial) {
    check(random, random_case(random, trial, kDims[static_cast<std::size_t>(trial % 9)]));
  }
}

TEST(RotaryStoreTest, a_part_of_a_head_is_rotated_or_none) {
  Random random(3);
  constexpr std::array<std::pair<int, int>, 9> kParts = {
      {{64, 16}, {128, 64}, {80, 32}, {96, 48}, {256, 64}, {6, 2}, {16, 6}, {64, 0}, {20, 0}}};
  for (int trial = 0; trial < 27; ++trial) {
    const auto [dim, part] = kParts[static_cast<std::size_t>(trial % 9)];
    auto c = random_case(random, trial, dim);
    c.rotary_dim = part;
    c.scaled = trial % 4 == 0;
    check(random, c);
  }
}

TEST(RotaryStoreTest, heads_are_normalised_before_the_rotation_and_q_is_scaled_last) {
  Random random(4);
  constexpr std::array kDims = {2, 6, 16, 64, 80, 96, 128, 256, 250};
  for (int trial = 0; trial < 36; ++trial) {
    const int dim = kDims[static_cast<std::size_t>(trial % 9)];
    auto c = random_case(random, trial, dim);
    c.normed = true;
    c.scaled = trial % 2 == 0;
    if (trial % 5 == 0) c.rotary_dim = dim / 4 * 2;
    check(random, c);
  }
}

TEST(RotaryStoreTest, pairs_may_be_interleaved) {
  Random random(6);
  constexpr std::array<std::pair<int, int>, 9> kParts = {
      {{64, 16}, {128, 128}, {80, 32}, {96, 48}, {256, 64}, {6, 2}, {16, 6}, {128, 64}, {20, 20}}};
  for (int trial = 0; trial < 27; ++trial) {
    const auto [dim, part] = kParts[static_cast<std::size_t>(trial % 9)];
    auto c = random_case(random, trial, dim);
    c.rotary_dim = part;
    c.interleaved = true;
    c.normed = trial % 2 == 0;
    c.scaled = trial % 4 == 0;
    check(random, c);
  }
}

TEST(RotaryStoreTest, a_norm_may_come_after_the_rotation_or_be_of_all_heads) {
  Random random(7);
  constexpr std::array kDims = {2, 6, 16, 64, 80, 96, 128, 256, 250};
  for (int trial = 0; trial < 36; ++trial) {
    const int dim = kDims[static_cast<std::size_t>(trial % 9)];
    auto c = random_case(random, trial, dim);
    c.normed = true;
    c.scaled = trial % 2 == 0;
    c.norm_after = trial % 3 != 0;
    c.norm_rows = !c.norm_after;
    c.interleaved = trial % 4 == 3;
    if (trial % 5 == 0) c.rotary_dim = dim / 4 * 2;
    check(random, c);
  }
}

// The float cache gives the expected integers. Without a norm the arithmetic is the same, so the bits must be equal.
// Nothing else is written, and q is the same as without quantisation.
void check_quantised(Random& random, const Case& c, int bits) {
  const int dim = c.dim, columns = (c.heads + 2 * c.kv_heads) * dim;
  const auto qkv = Matrix::random(random, c.type, c.rows, columns, 1, c.gap);
  Matrix floats_of_qkv(DType::f32, c.rows, columns, c.gap);
  for (int row = 0; row < c.rows; ++row) {
    for (int i = 0; i < columns; ++i) floats_of_qkv.set(row, i, qkv.at(row, i));
  }
  const auto cos_sin = Matrix::random(random, DType::f32, kPositions, std::max(1, c.rotary_dim));
  const auto norm = Matrix::random(random, DType::f32, 1, c.weights(c.heads)),
             q_scale = Matrix::random(random, DType::f32, 1, kPositions);
  const auto slots = random_slots(random, c);
  std::vector<std::int32_t> at;
  for (int r = 0; r < c.rows; ++r) at.push_back(uniform(random, 0, kPositions - 1));

  in_both_orders([&] {
    Stream stream;
    const MatrixOnDevice in_float(stream, floats_of_qkv), plain(stream, qkv), quantised(stream, qkv),
        turns(stream, cos_sin), norm_there(stream, norm), q_scale_there(stream, q_scale);
    const DeviceArray<std::int32_t> slots_there(stream, slots), at_there(stream, at);
    CacheLayer as_floats{nullptr, DType::f32, c.kv_heads, dim, c.block_len},
        integers{nullptr, c.type, c.kv_heads, dim, c.block_len, bits};
    const DeviceArray<float> floats_there(
        stream, std::vector<float>(static_cast<std::size_t>(c.blocks * as_floats.block_size())));
    const DeviceArray<std::byte> integers_there(
        stream, std::vector<std::byte>(static_cast<std::size_t>(c.blocks * integers.block_bytes()), std::byte{0x5a}));
    const DeviceArray<std::byte> as_is_there(
        stream, std::vector<std::byte>(static_cast<std::size_t>(c.blocks * as_floats.block_size()) * size_of(c.type)));
    const CacheLayer as_is{as_is_there.data(), c.type, c.kv_heads, dim, c.block_len};
    as_floats.data = floats_there.data();
    integers.data = integers_there.data();
    const MatrixOnDevice squares(stream, Matrix(DType::f32, c.rows, 2));
    auto how =
        params(c, floats(turns, c.rotary_dim > 0), floats(q_scale_there, c.scaled), floats(squares, c.norm_rows));
    how.q_norm = how.k_norm = floats(norm_there, c.normed);
    if (c.norm_rows) square(stream, squares, plain, c);
    rotary_store(stream, in_float.tensor(), how, as_floats, c.heads, at_there.data(), at_there.data(),
                 slots_there.data());
    rotary_store(stream, plain.tensor(), how, as_is, c.heads, at_there.data(), at_there.data(), slots_there.data());
    rotary_store(stream, quantised.tensor(), how, integers, c.heads, at_there.data(), at_there.data(),
                 slots_there.data());

    const auto rotated = plain.host(), same = quantised.host();
    for (int row = 0; row < c.rows; ++row)
      ASSERT_TRUE(rotated.same_bits(row, same, row)) << "q, and the unquantised k and v, must be equal";
    const auto stored = floats_there.host();
    const auto got = integers_there.host();
    auto expected = got;
    if (!c.normed) std::fill(expected.begin(), expected.end(), std::byte{0x5a});
    for (const int slot : slots) {
      for (int head = 0; slot >= 0 && head < 2 * c.kv_heads; ++head) {
        const auto from = static_cast<std::size_t>(as_floats.k_at(slot / c.block_len, head, slot % c.block_len));
        const std::span<const float> x(stored.data() + from, static_cast<std::size_t>(dim));
        const QuantisedHead want(x, bits);
        if (!c.normed) {
          write_head(expected, integers, slot / c.block_len, head, slot % c.block_len, want);
          continue;
        }
        const int in_block = head * c.block_len + slot % c.block_len;
        std::uint16_t scale_zero[2];
        std::memcpy(scale_zero, got.data() + integers.scale_at(slot / c.block_len, in_block), sizeof scale_zero);
        const double scale = f16_to_float(scale_zero[0]), zero = f16_to_float(scale_zero[1]);
        for (int d = 0; d < dim; ++d) {
          const auto byte = [&](int i) {
            return static_cast<unsigned>(
                got[static_cast<std::size_t>(integers.integers_at(slot / c.block_len, in_block) + i)]);
          };
          const unsigned q = bits == 8 ? byte(d) : byte(d % (dim / 2)) >> (d < dim / 2 ? 0 : 4) & 15U;
          // Half a step, plus the error from rounding the scale and the zero.
          const auto value = static_cast<double>(x[static_cast<std::size_t>(d)]);
          ASSERT_NEAR(q * scale + zero, value, scale * 0.501 + (std::abs(zero) + (1 << bits) * scale) * 0x1p-11 + 1e-6)
              << "element " << d << " of head " << head << " of " << dim;
        }
      }
    }
    ASSERT_TRUE(got == expected) << "head size " << dim << ", " << bits << " bits, " << c.rotary_dim << " turn";
  });
}

TEST(RotaryStoreQuantTest, a_quantised_cache_gets_the_integers_of_the_computed_values) {
  Random random(5);
  constexpr std::array<std::pair<int, int>, 12> kParts = {{{2, 2},
                                                           {6, 6},
                                                           {16, 16},
                                                           {32, 32},
                                                           {64, 64},
                                                           {80, 80},
                                                           {96, 48},
                                                           {128, 128},
                                                           {256, 64},
                                                           {6, 2},
                                                           {64, 0},
                                                           {20, 0}}};
  for (int trial = 0; trial < 48; ++trial) {
    const auto [dim, part] = kParts[static_cast<std::size_t>(trial % 12)];
    auto c = random_case(random, trial, dim);
    c.rotary_dim = part;
    c.scaled = trial % 4 == 0;
    c.normed = trial % 5 >= 3;
    c.interleaved = trial % 4 == 1;
    c.norm_after = c.normed && trial % 3 == 1;
    c.norm_rows = c.normed && trial % 3 == 2;
    check_quantised(random, c, trial / 12 % 2 == 0 ? 8 : 4);
  }
}

TEST(RotaryStoreQuantTest, a_constant_head_is_exact_and_a_head_that_is_not_finite_is_nan) {
  constexpr int kDim = 32;
  for (const int bits : {8, 4}) {
    Matrix qkv(DType::f32, 3, 3 * kDim);
    for (int row = 0; row < 3; ++row) {
      for (int d = 0; d < 3 * kDim; ++d) qkv.set(row, d, row == 0 ? 0.0F : -2.5F);
    }
    qkv.set(2, kDim + 5, std::numeric_limits<float>::infinity());
    qkv.set(2, 2 * kDim + 31, std::numeric_limits<float>::quiet_NaN());
    Stream stream;
    const MatrixOnDevice there(stream, qkv);
    CacheLayer layer{nullptr, DType::f32, 1, kDim, 4, bits};
    const DeviceArray<std::byte> memory(stream, std::vector<std::byte>(static_cast<std::size_t>(layer.block_bytes())));
    layer.data = memory.data();
    const DeviceArray<std::int32_t> at(stream, {0, 1, 2});
    rotary_store(stream, there.tensor(), {}, layer, 1, at.data(), at.data(), at.data());
    const auto bytes = memory.host();
    for (int head = 0; head < 2; ++head) {
      for (int slot = 0; slot < 3; ++slot) {
        std::uint16_t scale_zero[2];
        std::memcpy(scale_zero, bytes.data() + layer.scale_at(0, head * 4 + slot), sizeof scale_zero);
        const float zero = f16_to_float(scale_zero[1]);
        EXPECT_EQ(scale_zero[0], 0);
        if (slot == 2) {
          EXPECT_TRUE(std::isnan(zero)) << zero;
        } else {
          EXPECT_EQ(zero, slot == 0 ? 0.0F : -2.5F);
        }
      }
    }
  }
}

TEST(RotaryStoreTest, a_cache_of_another_type_is_rejected) {
  Stream stream;
  const MatrixOnDevice qkv(stream, Matrix(DType::bf16, 1, 3 * 64));
  const DeviceArray<std::int32_t> zero(stream, {0});
  const DeviceMemory cache(2 * 16 * 64 * 4);
  expect_error({"qkv is bf16 and its cache is of fp32"}, [&] {
    rotary_store(stream, qkv.tensor(), {}, {cache.data(), DType::f32, 1, 64, 16}, 1, zero.data(), zero.data(),
                 zero.data());
  });
}

TEST(RotaryStoreTest, the_bits_of_a_row_do_not_depend_on_its_index) {
  Random random(2);
  const auto qkv = Matrix::random(random, DType::bf16, 9, 4 * 64);
  const auto cos_sin = Matrix::random(random, DType::f32, 10, 64), norm = Matrix::random(random, DType::f32, 1, 64);
  for (const bool normed : {false, true}) {
    Stream stream;
    const MatrixOnDevice all(stream, qkv), one(stream, qkv), cos_sin_there(stream, cos_sin), norm_there(stream, norm);
    const DeviceMemory cache(2 * 16 * 64 * 2);
    const CacheLayer layer{cache.data(), DType::bf16, 1, 64, 16};
    const DeviceArray<std::int32_t> positions(stream, {0, 1, 2, 3, 4, 5, 6, 7, 8}),
        slots(stream, {0, 1, 2, 3, 4, 5, 6, 7, 8});
    const auto* const weights = normed ? static_cast<const float*>(norm_there.tensor().data) : nullptr;
    const ops::RotaryParams how{.cos_sin = static_cast<const float*>(cos_sin_there.tensor().data),
                                .rotary_dim = 64,
                                .q_norm = weights,
                                .k_norm = weights,
                                .norm_eps = 1e-6F};
    rotary_store(stream, all.tensor(), how, layer, 2, positions.data(), positions.data(), slots.data());
    auto tensor = one.tensor();
    tensor.data = static_cast<std::byte*>(tensor.data) + 5 * tensor.stride * 2;
    tensor.rows = 1;
    rotary_store(stream, tensor, how, layer, 2, positions.data() + 5, positions.data() + 5, slots.data() + 5);
    EXPECT_TRUE(all.host().same_bits(5, one.host(), 5));
  }
}

}  // namespace
}  // namespace charonia::cuda
