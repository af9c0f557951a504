// Rotation and the store into the cache, also a quantised one, compared with double precision.
#include "rotary_reference.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "device_arrays.h"
#include "ops/cuda/kernels/rows.h"

namespace charonia::cuda {
namespace {

using ops::Matrix;
using ops::Random;
using ops::uniform;

constexpr int kPositions = 50;

struct Case {
  DType type = DType::bf16;
  ops::RotaryReference how;
  int block_len = 1, blocks = 0, rows = 0, gap = 0, quant_bits = 0;
};

Case random_case(Random& random, int trial) {
  constexpr std::array kDims = {2, 6, 16, 20, 32, 64, 80, 96, 128, 250, 512};
  constexpr std::array kBlockLens = {1, 3, 16, 64};
  Case c;
  c.type = ops::kWeightTypes[static_cast<std::size_t>(trial % 3)];
  c.block_len = kBlockLens[static_cast<std::size_t>(uniform(random, 0, 3))];
  c.blocks = uniform(random, 20, 30);
  c.gap = trial % 2 == 0 ? 0 : trial % 9;
  auto& how = c.how;
  how.dim = kDims[static_cast<std::size_t>(trial % 11)];
  how.kv_heads = uniform(random, 1, 3);
  how.heads = how.kv_heads * uniform(random, 1, 5);
  // The whole head, a multiple of vectors, any part of it, or none.
  const std::array parts = {how.dim, how.dim, how.dim / 4 * 2, 2 * uniform(random, 1, how.dim / 2), 0};
  how.rotary_dim = parts[static_cast<std::size_t>(uniform(random, 0, 4))];
  how.interleaved = uniform(random, 0, 2) == 0;
  const int norm = uniform(random, 0, 4);
  how.normed = norm >= 2;
  how.norm_after = norm == 3;
  how.norm_rows = norm == 4;
  how.v_norm = how.normed && uniform(random, 0, 1) == 1;
  how.v_from_k = !how.norm_rows && uniform(random, 0, 2) == 0;
  how.scaled = uniform(random, 0, 1) == 1;
  how.eps = 1e-3F;
  c.rows = uniform(random, 1, std::min(12, c.blocks * c.block_len));
  return c;
}

// Null if not wanted.
const float* floats(const MatrixOnDevice& matrix, bool wanted) {
  return wanted ? static_cast<const float*>(matrix.tensor().data) : nullptr;
}

class Check {
 public:
  Check(Random& random, const Case& of) : c_(of) {
    const auto& how = c_.how;
    const int norms = how.norm_rows ? how.heads * how.dim : how.dim;
    qkv_ = Matrix::random(random, c_.type, c_.rows, (how.heads + 2 * how.kv_heads) * how.dim, 1, c_.gap);
    cos_sin_ = Matrix::random(random, DType::f32, 1, std::int64_t{kPositions} * std::max(1, how.rotary_dim));
    q_norm_ = Matrix::random(random, DType::f32, 1, norms);
    k_norm_ = Matrix::random(random, DType::f32, 1, norms);
    q_scale_ = Matrix::random(random, DType::f32, 1, kPositions);
    // [k, v][kv head]; 1 without FP8 and in every second case.
    scales_ = Matrix(DType::f32, 1, std::int64_t{2} * how.kv_heads);
    scaled_ = c_.quant_bits == ops::kKvFp8 && uniform(random, 0, 1) == 1;
    for (int h = 0; h < 2 * how.kv_heads; ++h) {
      scales_.set(0, h, scaled_ ? 0.017F * static_cast<float>(uniform(random, 1, 60)) : 1);
    }
    c_.how.cos_sin = cos_sin_.floats(0), c_.how.q_scale = q_scale_.floats(0);
    c_.how.q_norm = q_norm_.floats(0), c_.how.k_norm = k_norm_.floats(0);
    // The v heads of the first row are constant: exact in a quantised cache.
    for (auto i = qkv_.cols - std::int64_t{how.kv_heads} * how.dim; i < qkv_.cols; ++i) qkv_.set(0, i, -2.5F);
    for (auto i = qkv_.cols - std::int64_t{how.kv_heads} * how.dim; how.v_from_k && i < qkv_.cols; ++i) {
      for (int r = 0; r < c_.rows; ++r) qkv_.set(r, i, std::nanf(""));
    }
    slots_.resize(static_cast<std::size_t>(c_.blocks * c_.block_len));
    std::iota(slots_.begin(), slots_.end(), 0);
    std::shuffle(slots_.begin(), slots_.end(), random);
    slots_.resize(static_cast<std::size_t>(c_.rows));
    if (c_.rows > 1) slots_.back() = -1;  // is not stored
    for (int r = 0; r < c_.rows; ++r) {
      at_.push_back(uniform(random, 0, kPositions - 1));
      turns_.push_back(uniform(random, 0, kPositions - 1));
    }
  }

  void run() {
    Stream stream;
    const auto& how = c_.how;
    const MatrixOnDevice qkv(stream, qkv_), cos_sin(stream, cos_sin_), q_norm(stream, q_norm_), k_norm(stream, k_norm_),
        q_scale(stream, q_scale_), squares(stream, Matrix(DType::f32, c_.rows, 2)), scales(stream, scales_);
    const DeviceArray<std::int32_t> slots(stream, slots_), at(stream, at_), turns(stream, turns_);
    CacheLayer layer{nullptr, c_.type, how.kv_heads, how.dim, c_.block_len, c_.quant_bits};
    const auto bytes = static_cast<std::size_t>(c_.blocks * layer.block_bytes());
    const DeviceArray<std::byte> memory(stream, std::vector<std::byte>(bytes, kUntouched));
    layer.data = memory.data();
    const auto q_count = std::int64_t{how.heads} * how.dim, k_count = std::int64_t{how.kv_heads} * how.dim;
    if (how.norm_rows) {
      qk_squares(stream, static_cast<float*>(squares.tensor().data), qkv.tensor(), q_count, k_count);
    }
    rotary_store(stream, qkv.tensor(),
                 {.cos_sin = floats(cos_sin, how.rotary_dim > 0),
                  .rotary_dim = how.rotary_dim,
                  .interleaved = how.interleaved,
                  .q_norm = floats(q_norm, how.normed),
                  .k_norm = floats(k_norm, how.normed),
                  .norm_eps = how.eps,
                  .norm_after = how.norm_after,
                  .v_norm = how.v_norm,
                  .v_from_k = how.v_from_k,
                  .squares = floats(squares, how.norm_rows),
                  .q_count = q_count,
                  .k_count = k_count,
                  .q_scale = floats(q_scale, how.scaled),
                  .k_scales = floats(scales, scaled_),
                  .v_scales = scaled_ ? floats(scales, true) + how.kv_heads : nullptr},
                 layer, how.heads, at.data(), turns.data(), slots.data());
    const auto rotated = qkv.host();
    stored_ = memory.host();
    std::vector<bool> written(bytes);
    for (int row = 0; row < c_.rows; ++row) {
      for (int head = 0; head < how.heads; ++head) {
        expect_head(row, head, [&](int d) { return rotated.at(row, head * how.dim + d); });
      }
      const int slot = slots_[static_cast<std::size_t>(row)];
      for (int head = 0; slot >= 0 && head < 2 * how.kv_heads; ++head) {
        const int in_block = slot % c_.block_len, of_block = head * c_.block_len + in_block;
        const auto block = slot / c_.block_len;
        const auto mark = [&](std::int64_t first, std::int64_t n) {
          std::fill_n(written.begin() + first, n, true);
        };
        if (c_.quant_bits == 0) {
          Matrix one(c_.type, 1, how.dim);
          const auto from = layer.k_at(block, head, in_block) * static_cast<std::int64_t>(size_of(c_.type));
          std::copy_n(stored_.begin() + from, one.bytes.size(), one.bytes.begin());
          expect_head(row, how.heads + head, [&](int d) { return one.at(0, d); });
          mark(from, std::ssize(one.bytes));
        } else {
          const auto codes = layer.integers_at(block, of_block), scale = layer.scale_at(block, of_block);
          if (c_.quant_bits == ops::kKvFp8) {
            expect_fp8(row, how.heads + head, codes);
          } else {
            expect_integers(row, how.heads + head, codes, scale);
          }
          mark(codes, layer.row_bytes());
          mark(scale, layer.scale_bytes());
        }
      }
    }
    for (std::size_t i = 0; i < bytes; ++i) ASSERT_TRUE(written[i] || stored_[i] == kUntouched) << "byte " << i;
  }

 private:
  static constexpr std::byte kUntouched{0x5a};

  // q multiplied by the scale of its k, k and v divided by their scales.
  ops::RotaryReference::Head head_of(int row, int head) const {
    const auto r = static_cast<std::size_t>(row);
    auto out = c_.how(qkv_, row, head, at_[r], turns_[r]);
    const int group = c_.how.heads / c_.how.kv_heads;
    const bool is_q = head < c_.how.heads;
    const double scale = scales_.at(0, is_q ? head / group : head - c_.how.heads);
    for (auto* const values : {&out.value, &out.magnitude}) {
      for (auto& x : *values) x *= is_q ? scale : 1 / scale;
    }
    return out;
  }

  template <class Got>
  void expect_head(int row, int head, const Got& got) const {
    const auto [value, magnitude] = head_of(row, head);
    for (std::size_t d = 0; d < value.size(); ++d) {
      ASSERT_NEAR(got(static_cast<int>(d)), value[d],
                  1e-6 * magnitude[d] + 1.001 * ops::rounding(c_.type) * std::abs(value[d]) + 0x1p-24)
          << text() << "element " << d << " of head " << head;
    }
  }

  // A code is nearest to the value, or its neighbour if the value is in the middle.
  void expect_fp8(int row, int head, std::int64_t codes) const {
    const auto [value, magnitude] = head_of(row, head);
    for (std::size_t d = 0; d < value.size(); ++d) {
      const double number = e4m3_to_float(static_cast<std::uint8_t>(stored_[static_cast<std::size_t>(codes) + d]));
      const double expected = std::clamp(value[d], -448.0, 448.0);
      const double step = std::exp2(std::floor(std::log2(std::max(std::abs(expected), 0x1p-6))) - 3);
      ASSERT_NEAR(number, expected, step / 2 + 2e-6 * magnitude[d]) << text() << "element " << d << " of head " << head;
    }
  }

  // The integers are nearest to the values before rounding to c.type. The zero is the least value, and the scale
  // divides the range.
  void expect_integers(int row, int head, std::int64_t integers, std::int64_t scale_zero) const {
    const auto [value, magnitude] = head_of(row, head);
    std::uint16_t halves[2];
    std::memcpy(halves, stored_.data() + scale_zero, sizeof halves);
    const double scale = f16_to_float(halves[0]), zero = f16_to_float(halves[1]);
    const auto [least, most] = std::ranges::minmax(value);
    const double error = 2e-6 * *std::ranges::max_element(magnitude) + 0x1p-24;
    const int levels = (1 << c_.quant_bits) - 1, half = c_.how.dim / 2;
    ASSERT_NEAR(zero, least, std::abs(least) * 0x1.01p-11 + error) << text() << "head " << head;
    ASSERT_NEAR(scale, (most - least) / levels, scale * 0x1.01p-11 + 2 * error / levels) << text() << "head " << head;
    for (int d = 0; d < c_.how.dim; ++d) {
      const auto byte = [&](int i) { return static_cast<int>(stored_[static_cast<std::size_t>(integers + i)]); };
      const int q = c_.quant_bits == 8 ? byte(d) : byte(d % half) >> (d < half ? 0 : 4) & 15;
      // Half a step, except where the range is beyond the last integer because scale and zero are rounded.
      const double beyond = q == 0 || q == levels ? (std::abs(zero) + levels * scale) * 0x1.01p-11 : 0;
      ASSERT_NEAR(q * scale + zero, value[static_cast<std::size_t>(d)], scale * 0.5 + beyond + error)
          << text() << "element " << d << " of head " << head;
    }
  }

  std::string text() const {
    const auto& how = c_.how;
    return "head size " + std::to_string(how.dim) + ", of which " + std::to_string(how.rotary_dim) +
           " turn, interleaved " + std::to_string(how.interleaved) + ", norm " + std::to_string(how.normed) +
           ", of v " + std::to_string(how.v_norm) + ", v from k " + std::to_string(how.v_from_k) +
           ", after " + std::to_string(how.norm_after) + ", of rows " + std::to_string(how.norm_rows) + ", bits " +
           std::to_string(c_.quant_bits) + ", ";
  }

  Case c_;
  Matrix qkv_, cos_sin_, q_norm_, k_norm_, q_scale_, scales_;
  bool scaled_ = false;
  std::vector<std::int32_t> slots_, at_, turns_;
  std::vector<std::byte> stored_;
};

class RotaryStoreTest : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(QuantBits, RotaryStoreTest, testing::Values(0, 8, 4, ops::kKvFp8));

TEST_P(RotaryStoreTest, rotates_q_and_k_and_stores_k_and_v_in_all_types_shapes_and_variants) {
  Random random(static_cast<unsigned>(1 + GetParam()));
  for (int trial = 0; trial < (GetParam() == 0 ? 165 : 66); ++trial) {
    auto c = random_case(random, trial);
    c.quant_bits = GetParam();
    Check check(random, c);
    in_both_orders([&] { check.run(); });
    if (HasFatalFailure()) return;
  }
}

}  // namespace
}  // namespace charonia::cuda
