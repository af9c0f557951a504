// Whether the CPU runs kernels as a device would: what the other tests in this folder rest on.
#if defined(CHARONIA_CUDA_ON_HOST)
#include <gtest/gtest.h>

#include <numeric>
#include <random>
#include <vector>

#include "charonia/error.h"
#include "ops/cuda/device/tensor_core.h"
#include "ops/cuda/runtime.h"

namespace charonia::cuda {
namespace {

struct SumParams {
  const float* in;
  float* out;
  int n;
};

CHARONIA_KERNEL(256, 1) void sum_kernel(const SumParams p) {
  CHARONIA_SHARED(float, scratch, [32]);
  float x = 0;
  for (int i = static_cast<int>(threadIdx.x); i < p.n; i += static_cast<int>(blockDim.x)) {
    x += p.in[static_cast<int>(blockIdx.x) * p.n + i];
  }
  x = block_sum(x, scratch);
  if (threadIdx.x == 0) p.out[blockIdx.x] = x;
}

TEST(HostGridTest, blocks_and_threads_sum_what_they_should) {
  constexpr int kBlocks = 3, kN = 1000;
  std::vector<float> in(kBlocks * kN), out(kBlocks);
  std::iota(in.begin(), in.end(), 0.0F);
  for (const auto order : {host_grid::Order::ascending, host_grid::Order::descending}) {
    host_grid::set_order(order);
    Stream stream;
    launch(stream, "sum", {.grid_x = kBlocks, .threads = 256}, sum_kernel, SumParams{in.data(), out.data(), kN});
    for (int b = 0; b < kBlocks; ++b) {
      EXPECT_EQ(out[static_cast<std::size_t>(b)], std::accumulate(in.begin() + b * kN, in.begin() + (b + 1) * kN, 0.0F))
          << "all sums are whole numbers below 2^24";
    }
  }
  host_grid::set_order(host_grid::Order::ascending);
}

struct MatrixParams {
  const bf16 *a, *b;  // a [16, 16], b [8, 16]: its transpose
  float* out;         // [16, 8]
};

CHARONIA_KERNEL(32, 1) void matrix_kernel(const MatrixParams p) {
  auto* const shared = reinterpret_cast<bf16*>(dynamic_shared());
  const int lane = lane_id();
  copy_async_16(shared + lane * 8, p.a + lane * 8);
  copy_async_16(shared + 256 + lane % 16 * 8, p.b + lane % 16 * 8);
  copy_commit();
  copy_wait<0>();
  __syncthreads();
  std::uint32_t a[4], b[4];
  load_matrix_x4(a, shared + lane % 16 * 16 + lane / 16 * 8);
  load_matrix_x4(b, shared + 256 + lane % 8 * 16 + lane / 8 % 2 * 8);
  float d[4] = {0, 0, 0, 0};
  const std::uint32_t low[2] = {b[0], b[1]};
  mma_m16n8k16<bf16>(d, a, low);
  const int g = lane / 4, t = lane % 4;
  for (int i = 0; i < 4; ++i) p.out[(g + (i >= 2 ? 8 : 0)) * 8 + 2 * t + i % 2] = d[i];
}

TEST(HostGridTest, a_product_over_tensor_cores_is_the_product) {
  std::mt19937 random(1);
  std::uniform_int_distribution<int> small(-8, 8);
  std::vector<bf16> a(256), b(128);
  std::vector<float> out(128);
  for (auto& x : a) x = from_float<bf16>(static_cast<float>(small(random)));
  for (auto& x : b) x = from_float<bf16>(static_cast<float>(small(random)));
  Stream stream;
  launch(stream, "matrix", {.threads = 32, .dynamic_shared_bytes = 768}, matrix_kernel,
         MatrixParams{a.data(), b.data(), out.data()});
  for (std::size_t i = 0; i < 16; ++i) {
    for (std::size_t j = 0; j < 8; ++j) {
      float expected = 0;
      for (std::size_t k = 0; k < 16; ++k) expected += to_float(a[i * 16 + k]) * to_float(b[j * 16 + k]);
      EXPECT_EQ(out[i * 8 + j], expected);
    }
  }
}

struct NoParams {};
CHARONIA_KERNEL(64, 1) void half_come_kernel(const NoParams) {
  if (threadIdx.x < 32) __syncthreads();
  if (threadIdx.x >= 32 && threadIdx.x < 40) __syncwarp();
}

TEST(HostGridTest, a_barrier_that_not_all_reach_is_found) {
  Stream stream;
  EXPECT_THROW(launch(stream, "half", {.threads = 64}, half_come_kernel, NoParams{}), Error);
  // And the next grid runs as if nothing had been.
  std::vector<float> in(64, 1), out(1);
  launch(stream, "sum", {.threads = 64}, sum_kernel, SumParams{in.data(), out.data(), 64});
  EXPECT_EQ(out[0], 64);
}

struct EarlyParams {
  const float* in;
  float* out;
};
CHARONIA_KERNEL(32, 1) void early_kernel(const EarlyParams p) {
  auto* const shared = reinterpret_cast<float*>(dynamic_shared());
  if (lane_id() < 8) copy_async_16(shared + lane_id() * 4, p.in + lane_id() * 4);
  copy_commit();
  p.out[lane_id()] = shared[lane_id()];
  copy_wait<0>();
  __syncthreads();
  p.out[32 + lane_id()] = shared[lane_id()];
}

TEST(HostGridTest, what_is_read_before_its_copy_is_waited_for_is_nan) {
  std::vector<float> in(32, 5), out(64);
  Stream stream;
  launch(stream, "early", {.threads = 32, .dynamic_shared_bytes = 128}, early_kernel,
         EarlyParams{in.data(), out.data()});
  EXPECT_TRUE(std::isnan(out[0]));
  EXPECT_EQ(out[40], 5);
}

}  // namespace
}  // namespace charonia::cuda
#endif
