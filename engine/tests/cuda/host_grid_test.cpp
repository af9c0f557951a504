// Tests that the emulated device runs kernels like a GPU, and that it detects errors that a GPU may not show. The other
// tests in this folder depend on this. Kernels with deliberate errors show that each check works.
#if defined(CHARONIA_CUDA_ON_HOST)
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "charonia/error.h"
#include "ops/cuda/device/runtime.h"
#include "ops/cuda/device/tensor_core.h"
#include "emulator/host_stream.h"

namespace charonia::cuda {
namespace {

// Runs a kernel and waits for it.
template <class Params>
void run(const Launch& shape, void (*kernel)(Params), const Params& params) {
  Stream stream;
  launch(stream, "test", shape, kernel, params);
  stream.wait("test");
}

// The text of the error that `what` throws, or "no error".
std::string error_of(const std::function<void()>& what) {
  try {
    what();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::internal);
    return error.what();
  }
  return "no error";
}

testing::AssertionResult says(const std::string& text, std::string_view part) {
  if (text.find(part) != std::string::npos) return testing::AssertionSuccess();
  return testing::AssertionFailure() << '"' << part << "\" is not in: " << text;
}

struct SumParams {
  const float* in;
  float* out;
  int n;
};

CHARONIA_KERNEL(256, 1) void sum_kernel(const SumParams p) {
  CHARONIA_SHARED(float, scratch, [32]);
  dependency_wait();
  float x = 0;
  for (int i = static_cast<int>(threadIdx.x); i < p.n; i += static_cast<int>(blockDim.x)) {
    x += p.in[static_cast<int>(blockIdx.x) * p.n + i];
  }
  x = block_sum(x, scratch);
  if (threadIdx.x == 0) p.out[blockIdx.x] = x;
}

TEST(HostGridTest, sums_of_blocks_and_threads_are_correct_in_any_order) {
  constexpr int kBlocks = 3, kN = 1000;
  std::vector<float> in(kBlocks * kN), out(kBlocks);
  std::iota(in.begin(), in.end(), 0.0F);
  for (const std::uint64_t seed : {0, 1, 2, 3}) {
    host_grid::set_seed(seed);
    for (const auto order : {host_grid::Order::ascending, host_grid::Order::descending}) {
      host_grid::set_order(order);
      std::ranges::fill(out, 0.0F);
      run({.grid_x = kBlocks, .threads = 256}, sum_kernel, SumParams{in.data(), out.data(), kN});
      for (int b = 0; b < kBlocks; ++b) {
        EXPECT_EQ(out[static_cast<std::size_t>(b)],
                  std::accumulate(in.begin() + b * kN, in.begin() + (b + 1) * kN, 0.0F))
            << "the sums are whole numbers below 2^24, so they are exact";
      }
    }
  }
}

struct MatrixParams {
  const bf16 *a, *b;  // a [16, 16], b [8, 16]: its transpose
  float* out;         // [16, 8]
};

CHARONIA_KERNEL(32, 1) void matrix_kernel(const MatrixParams p) {
  auto* const shared = reinterpret_cast<bf16*>(dynamic_shared());
  const int lane = lane_id();
  dependency_wait();
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

TEST(HostGridTest, a_tensor_core_product_is_correct) {
  std::mt19937 random(1);
  std::uniform_int_distribution<int> small(-8, 8);
  alignas(16) bf16 a[256], b[128];
  std::vector<float> out(128);
  for (auto& x : a) x = from_float<bf16>(static_cast<float>(small(random)));
  for (auto& x : b) x = from_float<bf16>(static_cast<float>(small(random)));
  run({.threads = 32, .dynamic_shared_bytes = 768}, matrix_kernel, MatrixParams{a, b, out.data()});
  for (std::size_t i = 0; i < 16; ++i) {
    for (std::size_t j = 0; j < 8; ++j) {
      float expected = 0;
      for (std::size_t k = 0; k < 16; ++k) expected += to_float(a[i * 16 + k]) * to_float(b[j * 16 + k]);
      EXPECT_EQ(out[i * 8 + j], expected);
    }
  }
}

// Order.

struct OrderParams {
  int* next;
  int *block_at, *thread_at;  // for each block and thread: its position in the order
};
CHARONIA_KERNEL(64, 1) void order_kernel(const OrderParams p) {
  dependency_wait();
  const int at = atomicAdd(p.next, 1);
  p.thread_at[at] = static_cast<int>(threadIdx.x);
  p.block_at[at] = static_cast<int>(blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z));
}

// The blocks in their order, and the threads of all of them.
std::pair<std::vector<int>, std::vector<int>> order_of(std::uint64_t seed, host_grid::Order order, int kernels = 1) {
  constexpr int kBlocks = 2 * 3 * 2, kThreads = 64;
  host_grid::set_seed(seed);
  host_grid::set_order(order);
  std::vector<int> blocks(kBlocks * kThreads), threads(blocks.size());
  Stream stream;
  int next = 0;
  for (int i = 0; i < kernels; ++i) {
    next = 0;
    launch(stream, "order", {.grid_x = 2, .grid_y = 3, .grid_z = 2, .threads = kThreads}, order_kernel,
           OrderParams{&next, blocks.data(), threads.data()});
    stream.wait("order");
  }
  EXPECT_EQ(next, kBlocks * kThreads);
  std::vector<int> in_turn;
  for (int b = 0; b < kBlocks; ++b) {
    in_turn.push_back(blocks[static_cast<std::size_t>(b * kThreads)]);
    const auto begin = threads.begin() + b * kThreads;
    std::vector<int> sorted(begin, begin + kThreads), all(kThreads);
    std::ranges::sort(sorted);
    std::iota(all.begin(), all.end(), 0);
    EXPECT_EQ(sorted, all) << "every thread of a block must run once before the next block starts";
  }
  return {in_turn, threads};
}

TEST(HostGridTest, the_seed_decides_the_order_of_blocks_and_threads) {
  using host_grid::Order;
  std::vector<int> blocks(12);
  std::iota(blocks.begin(), blocks.end(), 0);
  const auto counted = order_of(0, Order::ascending);
  EXPECT_EQ(counted.first, blocks);
  EXPECT_TRUE(std::is_sorted(counted.second.begin(), counted.second.begin() + 64));
  const auto one = order_of(1, Order::ascending), two = order_of(2, Order::ascending);
  for (const auto& drawn : {one, two}) {
    EXPECT_NE(drawn.first, blocks);
    EXPECT_FALSE(std::is_sorted(drawn.second.begin(), drawn.second.begin() + 64));
    EXPECT_NE(std::vector<int>(drawn.second.begin(), drawn.second.begin() + 64),
              std::vector<int>(drawn.second.begin() + 64, drawn.second.begin() + 128))
        << "blocks must run in different orders";
    auto sorted = drawn.first;
    std::ranges::sort(sorted);
    EXPECT_EQ(sorted, blocks);
  }
  EXPECT_NE(one, two);
  EXPECT_EQ(one, order_of(1, Order::ascending)) << "equal seeds must give equal orders";
  EXPECT_NE(one, order_of(1, Order::ascending, 2)) << "the second kernel of a stream must have another order";
  auto reversed = order_of(1, Order::descending);
  std::ranges::reverse(reversed.first);
  EXPECT_EQ(reversed.first, one.first);
}

struct NoParams {};
CHARONIA_KERNEL(64, 1) void half_come_kernel(const NoParams) {
  dependency_wait();
  if (threadIdx.x < 32) __syncthreads();
  if (threadIdx.x >= 32 && threadIdx.x < 40) __syncwarp();
}

TEST(HostGridTest, a_barrier_that_not_all_reach_is_found_and_the_error_names_kernel_and_seed) {
  host_grid::set_seed(5);
  Stream stream;
  const auto error = error_of([&] {
    launch(stream, "half", {.threads = 64}, half_come_kernel, NoParams{});
    stream.wait("half");
  });
  EXPECT_TRUE(says(error, "half: of 64 threads 32 wait at __syncthreads()"));
  EXPECT_TRUE(says(error, "CHARONIA_EMULATED_ORDER=5"));
  // The next grid runs normally.
  std::vector<float> in(64, 1), out(1);
  launch(stream, "sum", {.threads = 64}, sum_kernel, SumParams{in.data(), out.data(), 64});
  stream.wait("sum");
  EXPECT_EQ(out[0], 64);
}

// Shared memory.

struct EarlyParams {
  const float* in;
  float* out;
};
CHARONIA_KERNEL(32, 1) void early_kernel(const EarlyParams p) {
  auto* const shared = reinterpret_cast<float*>(dynamic_shared());
  dependency_wait();
  if (lane_id() < 8) copy_async_16(shared + lane_id() * 4, p.in + lane_id() * 4);
  copy_commit();
  if (lane_id() < 8) p.out[lane_id()] = shared[4 * lane_id()];
  copy_wait<0>();
  __syncthreads();
  p.out[32 + lane_id()] = shared[lane_id()];
}

TEST(HostGridTest, reads_before_a_copy_is_complete_give_nan) {
  alignas(16) float in[32];
  std::ranges::fill(in, 5.0F);
  std::vector<float> out(64);
  run({.threads = 32, .dynamic_shared_bytes = 128}, early_kernel, EarlyParams{in, out.data()});
  for (std::size_t i = 0; i < 8; ++i) EXPECT_TRUE(std::isnan(out[i]));
  for (std::size_t i = 32; i < 64; ++i) EXPECT_EQ(out[i], 5);
}

struct UnwrittenParams {
  float* out;  // [blocks][2]
};
CHARONIA_KERNEL(32, 1) void unwritten_kernel(const UnwrittenParams p) {
  CHARONIA_SHARED(float, fixed, [4]);
  auto* const dynamic = reinterpret_cast<float*>(dynamic_shared());
  dependency_wait();
  if (threadIdx.x == 0) {
    p.out[2 * blockIdx.x] = fixed[3], p.out[2 * blockIdx.x + 1] = dynamic[3];
    fixed[3] = dynamic[3] = 1;
  }
}

TEST(HostGridTest, shared_memory_is_nan_when_a_block_begins) {
  std::vector<float> out(6, 0);
  run({.grid_x = 3, .dynamic_shared_bytes = 16}, unwritten_kernel, UnwrittenParams{out.data()});
  for (const float x : out) EXPECT_TRUE(std::isnan(x)) << "data of the previous block must not be visible";
}

struct RaceParams {
  float* out;
};
// Reads data that its neighbour writes, without a barrier.
CHARONIA_KERNEL(64, 1) void race_kernel(const RaceParams p) {
  CHARONIA_SHARED(float, x, [64]);
  dependency_wait();
  x[threadIdx.x] = 1;
  p.out[threadIdx.x] = x[threadIdx.x ^ 1];
}

TEST(HostGridTest, an_order_and_its_reverse_show_a_missing_barrier_for_every_pair) {
  std::vector<float> out(64);
  std::vector<int> seen(64, 0);
  for (const auto order : {host_grid::Order::ascending, host_grid::Order::descending}) {
    host_grid::set_order(order);
    run({.threads = 64}, race_kernel, RaceParams{out.data()});
    for (std::size_t i = 0; i < out.size(); ++i) seen[i] += std::isnan(out[i]) ? 1 : 0;
  }
  EXPECT_EQ(seen, std::vector<int>(64, 1));
}

// Limits of launches.

CHARONIA_KERNEL(1024, 1) void nothing_kernel(const NoParams) { dependency_wait(); }
template <int kBytes>
CHARONIA_KERNEL(32, 1)
void static_kernel(const NoParams) {
  CHARONIA_SHARED(unsigned char, first, [kBytes / 2]);
  CHARONIA_SHARED(unsigned char, second, [kBytes - kBytes / 2]);
  dependency_wait();
  first[0] = second[0] = 0;
}

// The blocks of a cluster add the values that each has written to its shared memory.
struct ClusterParams {
  int* out;
  int fault;  // 0: none; 1: no barrier before it is read, 2: none behind it, 3: a block does not come to the barrier,
              // 4: an address that is not of dynamic shared memory, 5: a rank that is none
};

CHARONIA_KERNEL(64, 1) void cluster_kernel(const ClusterParams p) {
  CHARONIA_SHARED(int, elsewhere, [64]);
  dependency_wait();
  auto* const mine = reinterpret_cast<int*>(dynamic_shared());
  const int thread = static_cast<int>(threadIdx.x);
  const int rank = cluster_rank(),
            block = static_cast<int>((blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x);
  mine[thread] = elsewhere[thread] = 1 << block;
  if (p.fault == 3 && rank == 1) return;
  if (p.fault == 1) {
    __syncthreads();
  } else {
    cluster_sync();
  }
  int sum = 0;
  for (int other = 0; other < 4; ++other) {
    sum +=
        *map_shared_rank((p.fault == 4 ? elsewhere : mine) + (thread + other) % 64, p.fault == 5 ? other + 1 : other);
  }
  p.out[block * 64 + thread] = sum;
  if (p.fault != 2) cluster_sync();
}

constexpr Launch kClusters{.grid_x = 2, .grid_y = 8, .threads = 64, .dynamic_shared_bytes = 256, .cluster_y = 4};

std::vector<int> cluster_sums(int fault) {
  std::vector<int> out(16 * 64);
  run(kClusters, cluster_kernel, ClusterParams{out.data(), fault});
  return out;
}

TEST(HostGridTest, blocks_of_a_cluster_read_each_others_shared_memory) {
  for (const std::uint64_t seed : {0, 1, 2, 3}) {
    host_grid::set_seed(seed);
    const auto out = cluster_sums(0);
    for (int block = 0; block < 16; ++block) {
      // Blocks of a cluster are neighbours along y.
      const int expected = block < 8 ? 0b01010101 << block % 2 : 0b01010101 << (8 + block % 2);
      for (int i = 0; i < 64; ++i) EXPECT_EQ(out[static_cast<std::size_t>(block * 64 + i)], expected) << block;
    }
  }
  host_grid::set_seed(1);
}

TEST(HostGridTest, clusters_that_do_not_wait_for_each_other_are_found) {
  const auto good = cluster_sums(0);
  for (const int fault : {1, 2}) EXPECT_NE(cluster_sums(fault), good) << fault;
  EXPECT_TRUE(says(error_of([] { cluster_sums(3); }), "a block has ended and another one of its cluster waits"));
  EXPECT_TRUE(says(error_of([] { cluster_sums(4); }),
                   "map_shared_rank(): 4 bytes that are not in the block's dynamic shared memory"));
  EXPECT_TRUE(says(error_of([] { cluster_sums(5); }), "map_shared_rank(): rank 4 of a cluster of 4"));
}

TEST(HostGridTest, clusters_that_a_device_rejects_are_rejected) {
  for (const unsigned size : {0U, 3U, 5U, 16U}) {
    auto shape = kClusters;
    shape.grid_y = 48;
    if (size == 5) shape.grid_y = 50;
    shape.cluster_y = size;
    EXPECT_TRUE(says(error_of([&] { run(shape, cluster_kernel, ClusterParams{}); }), "test: clusters of ")) << size;
  }
  auto shape = kClusters;
  shape.grid_y = 6;
  EXPECT_TRUE(says(error_of([&] { run(shape, cluster_kernel, ClusterParams{}); }), "clusters of 4 of 6 blocks"));
}

TEST(HostGridTest, launches_that_a_device_rejects_are_rejected) {
  const auto error = [](const Launch& shape) { return error_of([&] { run(shape, nothing_kernel, NoParams{}); }); };
  EXPECT_EQ(error({.grid_x = 2, .grid_y = 2, .grid_z = 2, .threads = 1024, .dynamic_shared_bytes = 227 << 10}),
            "no error");
  EXPECT_TRUE(says(error({.threads = 1056}), "blocks of (1056, 1, 1) threads"));
  EXPECT_TRUE(says(error({.threads = 0}), "blocks of (0, 1, 1) threads"));
  EXPECT_TRUE(says(error({.threads = 48}), "whole warps"));
  EXPECT_TRUE(says(error({.grid_x = 1U << 31U}), "a grid of (2147483648, 1, 1) blocks"));
  EXPECT_TRUE(says(error({.grid_y = 65536}), "a grid of (1, 65536, 1) blocks"));
  EXPECT_TRUE(says(error({.grid_z = 65536}), "a grid of (1, 1, 65536) blocks"));
  EXPECT_TRUE(says(error({.dynamic_shared_bytes = (227 << 10) + 1}), "232449 bytes of dynamic shared memory"));
  EXPECT_EQ(error({.grid_x = 0}), "no error") << "launch() must ignore an empty grid";
  EXPECT_TRUE(says(error_of([] {
                     host_grid::check({.grid = {1, 0, 1}, .block = {32, 1, 1}, .what = "empty"});
                   }),
                   "empty: a grid of (1, 0, 1) blocks"));
}

TEST(HostGridTest, an_invalid_launch_is_rejected_at_once_in_any_stream_mode) {
  Stream stream;
  EXPECT_THROW(launch(stream, "wide", {.threads = 2048}, nothing_kernel, NoParams{}), Error);
  stream.wait("wide");
}

TEST(HostGridTest, static_shared_memory_counts_too) {
  const auto error = [](std::size_t dynamic, void (*kernel)(NoParams)) {
    return error_of([&] { run({.dynamic_shared_bytes = dynamic}, kernel, NoParams{}); });
  };
  constexpr int kGiven = 48 << 10;
  EXPECT_EQ(error(0, static_kernel<kGiven>), "no error");
  EXPECT_EQ(error(kGiven - 1000, static_kernel<1000>), "no error");
  EXPECT_EQ(error((227 << 10) - 1000, static_kernel<1000>), "no error");
  EXPECT_TRUE(says(error(0, static_kernel<kGiven + 2>), "49154 bytes of static shared memory"));
  EXPECT_TRUE(says(error(kGiven - 999, static_kernel<1000>), "a block has 49152, because larger dynamic"));
  EXPECT_TRUE(says(error((227 << 10) - 999, static_kernel<1000>), "a block has 232448 (CHARONIA_"));
}

// Addresses.

enum class Access {
  copy_to,
  copy_from,
  copy_outside,
  copy_inside,
  copy_four,
  matrix,
  matrix_outside,
  readonly,
  streaming,
  cached,
  l2,
  atomic
};
struct AccessParams {
  Access access;
  unsigned char* memory;
  int by;  // offset from a valid address in bytes
};
CHARONIA_KERNEL(32, 1) void access_kernel(const AccessParams p) {
  unsigned char* const shared = dynamic_shared();
  unsigned char* const global = p.memory + p.by;
  dependency_wait();
  std::uint32_t r[4];
  switch (p.access) {
    case Access::copy_to:
      return copy_async_16(shared + p.by, p.memory);
    case Access::copy_from:
      return copy_async_16(shared, global);
    case Access::copy_outside:
      return copy_async_16(p.by == 0 ? shared + 240 : p.memory, p.memory);
    case Access::copy_inside:
      return copy_async_16(shared, p.by == 0 ? p.memory : shared + 16);
    case Access::copy_four:
      return copy_async_4(shared + p.by, p.memory);
    case Access::matrix:
      return load_matrix_x4(r, shared + p.by);
    case Access::matrix_outside:
      return load_matrix_x4_transposed(r, shared + 240 + 16 * p.by);
    case Access::readonly:
      return (void)load_readonly(reinterpret_cast<const float4*>(global));
    case Access::streaming:
      return (void)load_streaming(reinterpret_cast<const uint4*>(global));
    case Access::cached:
      return (void)load_cached(reinterpret_cast<const uint4*>(global));
    case Access::l2:
      return (void)load_l2(reinterpret_cast<const float4*>(global));
    case Access::atomic:
      atomicAdd(reinterpret_cast<unsigned long long*>(global), 1ULL);
  }
}

TEST(HostGridTest, addresses_that_are_not_aligned_or_not_in_shared_memory_are_found) {
  alignas(16) unsigned char memory[64] = {};
  const auto error = [&](Access access, int by) {
    return error_of([&] { run({.dynamic_shared_bytes = 256}, access_kernel, AccessParams{access, memory, by}); });
  };
  using enum Access;
  for (const auto access : {copy_to, copy_from, copy_outside, copy_inside, copy_four, matrix, matrix_outside, readonly,
                            streaming, cached, l2, atomic}) {
    EXPECT_EQ(error(access, 0), "no error") << static_cast<int>(access);
  }
  EXPECT_TRUE(says(error(copy_to, 8), "copy_async(): an access of 16 bytes is misaligned by 8 bytes"));
  EXPECT_TRUE(says(error(copy_from, 4), "copy_async(): an access of 16 bytes is misaligned by 4 bytes"));
  EXPECT_TRUE(says(error(copy_outside, 1), "copy_async(): 16 bytes that are not in the block's shared memory"));
  EXPECT_TRUE(says(error(copy_inside, 1), "copy_async(): from shared memory"));
  EXPECT_TRUE(says(error(copy_four, 2), "copy_async(): an access of 4 bytes is misaligned by 2 bytes"));
  EXPECT_TRUE(says(error(matrix, 8), "load_matrix_x4(): an access of 16 bytes is misaligned by 8 bytes"));
  EXPECT_TRUE(says(error(matrix_outside, 1), "load_matrix_x4_transposed(): 16 bytes that are not in"));
  EXPECT_TRUE(says(error(readonly, 8), "load_readonly(): an access of 16 bytes is misaligned by 8 bytes"));
  EXPECT_TRUE(says(error(streaming, 8), "load_streaming(): an access of 16 bytes is misaligned by 8 bytes"));
  EXPECT_TRUE(says(error(cached, 8), "load_cached(): an access of 16 bytes is misaligned by 8 bytes"));
  EXPECT_TRUE(says(error(l2, 8), "load_l2(): an access of 16 bytes is misaligned by 8 bytes"));
  EXPECT_TRUE(says(error(atomic, 4), "an atomic function(): an access of 8 bytes is misaligned by 4 bytes"));
}

// Programmatic dependent launch.

struct DependentParams {
  int* data;
  int* out;
  int before;  // number of threads that do not wait
  bool early;
};
CHARONIA_KERNEL(64, 1) void some_wait_kernel(const DependentParams p) {
  if (static_cast<int>(threadIdx.x) >= p.before) dependency_wait();
}
CHARONIA_KERNEL(64, 1) void cached_kernel(const DependentParams p) {
  if (!p.early) dependency_wait();
  p.out[threadIdx.x] = static_cast<int>(load_cached(reinterpret_cast<const uint4*>(p.data)).x);
  if (p.early) dependency_wait();
}
CHARONIA_KERNEL(64, 1) void counting_kernel(const DependentParams p) {
  CHARONIA_SHARED(int, count, [1]);
  if (threadIdx.x == 0) *count = 0;
  __syncthreads();
  atomicAdd(count, 1);
  if (!p.early) dependency_wait();
  atomicAdd(p.out, 1);
  if (p.early) dependency_wait();
}

TEST(HostGridTest, every_thread_must_wait_for_the_previous_kernel) {
  alignas(16) int data[4] = {};
  std::vector<int> out(64);
  const auto error = [&](void (*kernel)(DependentParams), int before, bool early, bool overlap) {
    return error_of([&] {
      run({.threads = 64, .overlap = overlap}, kernel, DependentParams{data, out.data(), before, early});
    });
  };
  EXPECT_EQ(error(some_wait_kernel, 0, false, true), "no error");
  EXPECT_TRUE(says(error(some_wait_kernel, 1, false, true),
                   "test: thread 0 of block (0, 0, 0) ends without dependency_wait()"));
  EXPECT_EQ(error(some_wait_kernel, 1, false, false), "no error") << "the kernel is not started early";
  EXPECT_EQ(error(cached_kernel, 0, false, true), "no error");
  EXPECT_TRUE(says(error(cached_kernel, 0, true, true), "calls load_cached() before dependency_wait()"));
  EXPECT_EQ(error(cached_kernel, 0, true, false), "no error");
  EXPECT_EQ(error(counting_kernel, 0, false, true), "no error") << "counters in shared memory belong to the block";
  EXPECT_TRUE(says(error(counting_kernel, 0, true, true), "an atomic function() before dependency_wait()"));
}

struct ChainParams {
  const int* in;
  int* out;
  bool early;
};
// The first block of a grid, whichever it is, shows the error if `in` is read too early.
CHARONIA_KERNEL(32, 1) void chain_kernel(const ChainParams p) {
  CHARONIA_SHARED(int, read, [1]);
  if (p.early && threadIdx.x == 0) *read = *p.in;
  __syncthreads();
  dependency_wait();
  if (!p.early && threadIdx.x == 0) *read = *p.in;
  __syncthreads();
  if (threadIdx.x == 0) p.out[blockIdx.x] = *read + 1;
}

class HostGridChainTest : public testing::TestWithParam<host_stream::Mode> {};
INSTANTIATE_TEST_SUITE_P(Mode, HostGridChainTest,
                         testing::Values(host_stream::Mode::immediate, host_stream::Mode::deferred));

TEST_P(HostGridChainTest, a_block_that_does_not_wait_reads_stale_data) {
  host_stream::set_mode(GetParam());
  for (const bool graph : {false, true}) {
    for (const bool early : {false, true}) {
      int values[4] = {};
      int last[3] = {};
      Stream stream;
      const auto issue = [&] {
        for (int i = 0; i < 3; ++i) {
          launch(stream, "chain", {}, chain_kernel, ChainParams{values + i, values + i + 1, early});
        }
        launch(stream, "chain", {.grid_x = 3}, chain_kernel, ChainParams{values + 3, last, early});
      };
      if (graph) {
        Graph::begin(stream);
        issue();
        const auto captured = Graph::end(stream);
        captured.launch(stream, "chain");
      } else {
        issue();
      }
      stream.wait("chain");
      const bool stale = early && (graph || GetParam() == host_stream::Mode::deferred);
      EXPECT_EQ(std::ranges::count(last, 4), stale ? 0 : 3) << "graph " << graph << ", early " << early;
    }
  }
}

// Memory.

struct DeepParams {
  int depth;
  int* out;
};
[[gnu::noinline]] int deep(int depth) {
  volatile char room[1024];
  room[0] = static_cast<char>(depth);
  return depth == 0 ? room[0] : deep(depth - 1) + room[0];
}
CHARONIA_KERNEL(32, 1) void deep_kernel(const DeepParams p) {
  dependency_wait();
  *p.out = deep(p.depth);
}

TEST(HostGridDeathTest, a_thread_that_needs_more_stack_than_it_has_ends_the_process) {
  int out = 0;
  run({}, deep_kernel, DeepParams{50, &out});
  EXPECT_DEATH(run({}, deep_kernel, DeepParams{1000, &out}), "");
}

#if defined(__SANITIZE_ADDRESS__)

enum class Wrong { dynamic, fixed, global, vector };
struct WrongParams {
  Wrong wrong;
  unsigned char* memory;
  int by;
};
CHARONIA_KERNEL(32, 1) void wrong_kernel(const WrongParams p) {
  CHARONIA_SHARED(unsigned char, fixed, [64]);
  unsigned char* const dynamic = dynamic_shared();
  dependency_wait();
  switch (p.wrong) {
    case Wrong::dynamic:
      dynamic[63 + p.by] = 1;
      return;
    case Wrong::fixed:
      fixed[63 + p.by] = 1;
      return;
    case Wrong::global:
      p.memory[63 + p.by] = 1;
      return;
    case Wrong::vector:
      *reinterpret_cast<uint4*>(p.memory + p.by * 8) = uint4{1, 2, 3, 4};
  }
}

TEST(HostGridDeathTest, sanitizer_errors_end_the_process) {
  const DeviceMemory memory(64);
  const auto try_it = [&](Wrong wrong, int by) {
    run({.dynamic_shared_bytes = 64}, wrong_kernel, WrongParams{wrong, memory.as<unsigned char>(), by});
  };
  for (const auto wrong : {Wrong::dynamic, Wrong::fixed, Wrong::global, Wrong::vector}) try_it(wrong, 0);
  for (const auto wrong : {Wrong::dynamic, Wrong::fixed, Wrong::global}) {
    EXPECT_DEATH(try_it(wrong, 1), "heap-buffer-overflow|out of bounds");
  }
  EXPECT_DEATH(try_it(Wrong::vector, 1), "misaligned address");
}

#endif

}  // namespace
}  // namespace charonia::cuda
#endif
