// Rotation and the store into the cache against double precision.
#include <gtest/gtest.h>

#include <cmath>
#include <numeric>
#include <set>
#include <vector>

#include "device_arrays.h"
#include "ops/cuda/kernels/rows.h"
#include "ops_support.h"

namespace charonia::cuda {
namespace {

using ops::Matrix;
using ops::Random;
using ops::uniform;

constexpr std::array kTypes = {DType::f32, DType::bf16, DType::f16};

TEST(RotaryStoreTest, rotates_q_and_k_and_stores_k_and_v_in_any_types_and_shapes) {
  Random random(1);
  constexpr std::array kDims = {2, 6, 16, 32, 64, 80, 96, 128, 256};
  constexpr std::array kBlockLens = {1, 3, 16, 64};
  for (int trial = 0; trial < 45; ++trial) {
    const int dim = kDims[static_cast<std::size_t>(trial % 9)], half = dim / 2;
    const int kv_heads = uniform(random, 1, 3), heads = kv_heads * uniform(random, 1, 5);
    const auto type = kTypes[static_cast<std::size_t>(trial % 3)];
    const auto kv_type = kTypes[static_cast<std::size_t>(trial / 3 % 3)];
    const int block_len = kBlockLens[static_cast<std::size_t>(uniform(random, 0, 3))], blocks = uniform(random, 20, 30);
    const int rows = uniform(random, 1, std::min(12, blocks * block_len)), positions = 50;
    const auto qkv =
        Matrix::random(random, type, rows, (heads + 2 * kv_heads) * dim, 1, trial % 2 == 0 ? 0 : trial % 9);
    const auto cos_sin = Matrix::random(random, DType::f32, positions, dim);
    std::vector<std::int32_t> slots(static_cast<std::size_t>(blocks * block_len)), at;
    std::iota(slots.begin(), slots.end(), 0);
    std::shuffle(slots.begin(), slots.end(), random);
    slots.resize(static_cast<std::size_t>(rows));
    for (int r = 0; r < rows; ++r) at.push_back(uniform(random, 0, positions - 1));
    if (rows > 1) slots.back() = -1;
    constexpr float kUntouched = 77;
    Matrix cache(kv_type, std::int64_t{blocks} * 2 * kv_heads * block_len, dim);
    for (std::int64_t r = 0; r < cache.rows; ++r) {
      for (int d = 0; d < dim; ++d) cache.set(r, d, kUntouched);
    }

    in_both_orders([&] {
      Stream stream;
      const MatrixOnDevice qkv_there(stream, qkv), cos_sin_there(stream, cos_sin), cache_there(stream, cache);
      const DeviceArray<std::int32_t> slots_there(stream, slots), at_there(stream, at);
      const CacheLayer layer{cache_there.tensor().data, kv_type, kv_heads, dim, block_len};
      rotary_store(stream, qkv_there.tensor(), static_cast<const float*>(cos_sin_there.tensor().data), layer, heads,
                   at_there.data(), slots_there.data());
      const auto rotated = qkv_there.host(), stored = cache_there.host();

      const auto expected = [&](int row, int head, int d) {
        const double a = qkv.at(row, head * dim + d % half), b = qkv.at(row, head * dim + half + d % half);
        if (head >= heads + kv_heads) return d < half ? a : b;
        const auto position = at[static_cast<std::size_t>(row)];
        const double c = cos_sin.at(position, d % half), s = cos_sin.at(position, half + d % half);
        return d < half ? a * c - b * s : b * c + a * s;
      };
      std::set<std::int64_t> written;
      for (int row = 0; row < rows; ++row) {
        for (int head = 0; head < heads; ++head) {
          for (int d = 0; d < dim; ++d) {
            const double want = expected(row, head, d);
            ASSERT_NEAR(rotated.at(row, head * dim + d), want, 1e-6 + 1.001 * ops::rounding(type) * std::abs(want));
          }
        }
        const int slot = slots[static_cast<std::size_t>(row)];
        if (slot < 0) continue;
        for (int head = 0; head < 2 * kv_heads; ++head) {
          const auto to = (std::int64_t{slot / block_len} * 2 * kv_heads + head) * block_len + slot % block_len;
          written.insert(to);
          for (int d = 0; d < dim; ++d) {
            const double want = expected(row, heads + head, d);
            ASSERT_NEAR(stored.at(to, d), want, 1e-6 + 1.001 * ops::rounding(kv_type) * std::abs(want));
          }
        }
      }
      for (std::int64_t r = 0; r < stored.rows; ++r) {
        for (int d = 0; d < dim && written.count(r) == 0; ++d) ASSERT_EQ(stored.at(r, d), kUntouched);
      }
    });
  }
}

TEST(RotaryStoreTest, a_row_has_the_same_bits_wherever_it_stands) {
  Random random(2);
  const auto qkv = Matrix::random(random, DType::bf16, 9, 4 * 64);
  const auto cos_sin = Matrix::random(random, DType::f32, 10, 64);
  Stream stream;
  const MatrixOnDevice all(stream, qkv), one(stream, qkv), cos_sin_there(stream, cos_sin);
  const DeviceMemory cache(2 * 16 * 64 * 2);
  const CacheLayer layer{cache.data(), DType::bf16, 1, 64, 16};
  const DeviceArray<std::int32_t> positions(stream, {0, 1, 2, 3, 4, 5, 6, 7, 8}),
      slots(stream, {0, 1, 2, 3, 4, 5, 6, 7, 8});
  const auto* const turns = static_cast<const float*>(cos_sin_there.tensor().data);
  rotary_store(stream, all.tensor(), turns, layer, 2, positions.data(), slots.data());
  auto tensor = one.tensor();
  tensor.data = static_cast<std::byte*>(tensor.data) + 5 * tensor.stride * 2;
  tensor.rows = 1;
  rotary_store(stream, tensor, turns, layer, 2, positions.data() + 5, slots.data() + 5);
  EXPECT_TRUE(all.host().same_bits(5, one.host(), 5));
}

}  // namespace
}  // namespace charonia::cuda
