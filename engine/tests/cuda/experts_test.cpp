// Experts on the CUDA device: routing, grouping, and equal bits from all tactics of a GEMM. ops_experts_test.cpp, which
// all devices share, tests the results.
#include "ops/cuda/kernels/experts.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>

#include "device_arrays.h"
#include "ops/cuda/make_cuda_ops.h"
#include "router_reference.h"

namespace charonia::cuda {
namespace {

using ops::DeviceMatrix;
using ops::Matrix;
using ops::Random;
using ops::uniform;

struct Routed {
  std::vector<std::int32_t> chosen, places, rows_of;
  std::vector<float> weights;
  std::vector<ExpertTile> tiles;
};

Routed route(const Matrix& logits, RouteParams params, std::int32_t real_rows, const std::vector<float>& bias = {}) {
  Stream stream;
  const DeviceArray<float> biases(stream, bias);
  if (!bias.empty()) params.how.bias = biases.data();
  const auto n = static_cast<std::size_t>(logits.rows * params.how.top_k);
  params.rows = static_cast<int>(logits.rows);
  params.experts = static_cast<int>(logits.cols);
  params.stride = logits.stride;
  params.num_tiles = static_cast<int>(max_expert_tiles(static_cast<std::int64_t>(n), params.experts, params.tile_rows));
  const MatrixOnDevice on_device(stream, logits);
  const DeviceArray<std::int32_t> chosen(stream, std::vector<std::int32_t>(n, 77)),
      places(stream, std::vector<std::int32_t>(n, 77)), rows_of(stream, std::vector<std::int32_t>(n, 77)),
      real(stream, {real_rows});
  const DeviceArray<float> weights(stream, std::vector<float>(n, 77));
  const DeviceArray<ExpertTile> tiles(
      stream, std::vector<ExpertTile>(static_cast<std::size_t>(params.num_tiles), {7, 7, 7, 7}));
  params.logits = static_cast<const float*>(on_device.tensor().data);
  params.real_rows = real.data();
  params.chosen = chosen.data();
  params.weights = weights.data();
  params.places = places.data();
  params.rows_of = rows_of.data();
  params.tiles = tiles.data();
  route_rows(stream, params);
  return {chosen.host(), places.host(), rows_of.host(), weights.host(), tiles.host()};
}

// Compares with the documented definition, in double.
void check(const Matrix& logits, const RouteParams& params, std::int32_t real_rows,
           const std::vector<float>& bias = {}) {
  const auto got = route(logits, params, real_rows, bias);
  const int top_k = params.how.top_k;
  const auto experts = static_cast<std::int32_t>(logits.cols);
  std::vector<std::vector<std::int32_t>> rows_of(static_cast<std::size_t>(experts));
  for (std::int32_t r = 0; r < logits.rows; ++r) {
    std::vector<std::pair<int, double>> expected(static_cast<std::size_t>(top_k), {experts, 0});  // of padding: none
    if (r < real_rows) {
      const auto row = logits.floats(r);
      expected = ops::chosen_experts(std::vector<double>(row.begin(), row.end()), params.how, bias);
    }
    for (std::size_t i = 0; i < expected.size(); ++i) {
      const auto at = static_cast<std::size_t>(r * top_k) + i;
      ASSERT_EQ(got.chosen[at], expected[i].first) << "row " << r;
      if (r >= real_rows) {
        EXPECT_EQ(got.places[at], -1);
        continue;
      }
      EXPECT_NEAR(got.weights[at], expected[i].second, 1e-6);
      rows_of[static_cast<std::size_t>(expected[i].first)].push_back(r);
    }
  }
  // Places are sorted by expert, then by row; tiles cover them.
  std::int32_t place = 0;
  std::size_t tile = 0;
  for (std::int32_t e = 0; e < experts; ++e) {
    const auto& rows = rows_of[static_cast<std::size_t>(e)];
    const auto count = static_cast<std::int32_t>(rows.size());
    for (std::int32_t from = 0; from < count; from += params.tile_rows) {
      ASSERT_LT(tile, got.tiles.size());
      EXPECT_EQ(got.tiles[tile].expert, e);
      EXPECT_EQ(got.tiles[tile].first, place + from);
      EXPECT_EQ(got.tiles[tile].rows, std::min(params.tile_rows, count - from));
      ++tile;
    }
    for (const auto row : rows) {
      EXPECT_EQ(got.rows_of[static_cast<std::size_t>(place)], row);
      const auto first = got.chosen.begin() + row * top_k;
      const auto at = std::find(first, first + top_k, e) - got.chosen.begin();
      EXPECT_EQ(got.places[static_cast<std::size_t>(at)], place);
      ++place;
    }
  }
  for (; tile < got.tiles.size(); ++tile) EXPECT_EQ(got.tiles[tile].rows, 0);
}

// Routers by logits, then by scores, with a bias, in the best groups.
TEST(CudaExpertsTest, rows_are_grouped_by_expert_and_padding_gets_no_expert) {
  Random random(80);
  in_both_orders([&] {
    for (int trial = 0; trial < 12; ++trial) {
      const int experts = trial == 0 ? 130 : uniform(random, 1, 40), rows = trial == 1 ? 300 : uniform(random, 1, 30);
      auto logits = Matrix::random(random, DType::f32, rows, experts, 2, uniform(random, 0, 3));
      if (trial % 3 == 0) {  // ties, with zeros of both signs
        for (int e = 0; e < experts; ++e) logits.set(0, e, e % 3 == 0 ? 0.0F : -0.0F);
      }
      check(logits,
            {.how = {.top_k = uniform(random, 1, std::min(experts, kMaxExpertsOfRow)), .renormalize = trial % 2 == 0},
             .tile_rows = std::array{8, 32, 64, 128}[static_cast<std::size_t>(trial % 4)]},
            trial % 3 == 2 ? uniform(random, 0, rows) : rows);
    }
    for (int trial = 0; trial < 12; ++trial) {
      const int groups = trial == 0 ? ops::RouterParams::kMaxGroups : trial % 3 == 0 ? 0 : uniform(random, 1, 6);
      const int size = uniform(random, trial == 1 ? 32 : 2, trial == 1 ? 40 : 9), experts = std::max(1, groups) * size;
      const int rows = uniform(random, 1, 30), top_k = uniform(random, 1, std::min(experts, 8));
      std::vector<float> bias;
      for (int e = 0; trial % 2 == 0 && e < experts; ++e) {
        bias.push_back(static_cast<float>(uniform(random, -9, 9)) / 16);
      }
      check(Matrix::random(random, DType::f32, rows, experts, 2, uniform(random, 0, 3)),
            {.how = {.top_k = top_k,
                     .renormalize = trial % 4 < 2,
                     .score = trial % 3 == 2 ? ops::RouterScore::softmax : ops::RouterScore::sigmoid,
                     .groups = groups,
                     .top_groups = groups == 0 ? 0 : uniform(random, (top_k + size - 1) / size, groups),
                     .scale = 1.5F},
             .tile_rows = 32},
            trial % 3 == 2 ? uniform(random, 0, rows) : rows, bias);
    }
  });
}

TEST(CudaExpertsTest, nan_logits_select_existing_experts) {
  constexpr float kNaN = std::numeric_limits<float>::quiet_NaN(), kInfinity = std::numeric_limits<float>::infinity();
  Matrix logits(DType::f32, 5, 6);
  for (int e = 0; e < 6; ++e) {
    logits.set(0, e, kNaN), logits.set(1, e, -kInfinity), logits.set(2, e, e == 3 ? kNaN : 1.0F);
    logits.set(3, e, e == 2 ? kInfinity : -kNaN), logits.set(4, e, e < 4 ? kNaN : -kInfinity);
  }
  // The NaN of a GPU's own operations compares greater than all others.
  const std::uint32_t greatest = 0x7fffffffU;
  std::memcpy(logits.bytes.data(), &greatest, sizeof greatest);
  const ops::RouterParams choices[] = {{.top_k = 3},
                                       {.top_k = 6},
                                       {.top_k = 3, .score = ops::RouterScore::sigmoid},
                                       {.top_k = 6, .score = ops::RouterScore::sigmoid},
                                       {.top_k = 4, .groups = 3, .top_groups = 2}};
  for (const auto& how : choices) {
    const auto got = route(logits, {.how = how, .tile_rows = 8}, 5);
    for (int i = 0; i < 5 * how.top_k; ++i) {
      const auto* const chosen = &got.chosen[static_cast<std::size_t>(i)];
      EXPECT_TRUE(*chosen >= 0 && *chosen < 6);
      EXPECT_TRUE(i % how.top_k == 0 || chosen[-1] < *chosen) << "an expert was chosen twice";
    }
  }
}

// With one expert the number of rows selects the tactic: 8, 32, 64 or 128 rows per tile. Both GEMMs have several parts
// of K.
TEST(CudaExpertsTest, all_tactics_of_a_gemm_give_a_row_the_same_bits) {
  Random random(81);
  constexpr std::int64_t kHidden = 530, kInter = 516;
  EXPECT_EQ(expert_tile_rows(DType::bf16, 4, 1), 8);
  EXPECT_EQ(expert_tile_rows(DType::bf16, 5, 1), 32);
  EXPECT_EQ(expert_tile_rows(DType::bf16, 33, 1), 64);
  EXPECT_EQ(expert_tile_rows(DType::bf16, 97, 1), 128);
  for (const auto type : {DType::bf16, DType::f16, DType::f32}) {
    const auto device = ops::make_cuda_ops({});
    const auto gate = Matrix::random(random, type, kInter, kHidden, 0.08F),
               up = Matrix::random(random, type, kInter, kHidden, 0.05F),
               down = Matrix::random(random, type, kHidden, kInter, 0.05F);
    const ops::ExpertSource source{gate.host(), up.host(), down.host()};
    const auto experts = device->make_experts(std::span(&source, 1), type);
    const ops::ExpertsShape shape{1, 1, kHidden, kInter, type};
    const auto in = Matrix::random(random, type, 100, kHidden);
    const Matrix router(DType::f32, 100, 1);
    const DeviceMatrix rows(*device, in), logits(*device, router);
    const auto run = [&](std::int64_t begin, std::int64_t end) {
      const auto scratch = device->allocate(device->experts_scratch_bytes(shape, end - begin));
      const DeviceMatrix out(*device, type, end - begin, kHidden);
      device->experts(out.tensor(), rows.slice(begin, end), logits.slice(begin, end), *experts, {.top_k = 1},
                      ops::Activation::silu, scratch->data());
      return out.host();
    };
    const auto two = run(0, 2);
    for (const int n : {8, 40, 100}) {
      if (type == DType::f32 && n > 8) continue;  // there is one tactic
      const auto all = run(0, n);
      for (int r = 0; r < 2; ++r) EXPECT_TRUE(all.same_bits(r, two, r)) << n << " rows, " << to_string(type);
      EXPECT_TRUE(all.same_bits(n - 1, run(n - 1, n), 0)) << n << " rows, " << to_string(type);
    }
  }
}

}  // namespace
}  // namespace charonia::cuda
