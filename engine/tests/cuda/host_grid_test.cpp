// Tests that the emulated device runs kernels like a GPU, and that it detects errors that a GPU may not show. The other
// tests in this folder depend on this. Kernels with deliberate errors show that each check works.
#if defined(CHARONIA_CUDA_ON_HOST)
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <numeric>
#include <string>
#include <vector>

#include "charonia/error.h"
#include "ops/cuda/device/runtime.h"
#include "ops/cuda/device/tensor_core.h"
#include "emulator/host_stream.h"

namespace charonia::cuda {
namespace {

using host_grid::Order;
using Body = std::function<void()>;

struct BodyParams {
  const Body* body;
};
CHARONIA_KERNEL(1024, 1) void body_kernel(const BodyParams p) { (*p.body)(); }

int thread() { return static_cast<int>(threadIdx.x); }
template <class T>
T* dynamic() {
  return reinterpret_cast<T*>(dynamic_shared());
}

// Runs `body` in every thread of a grid, and waits for the grid.
void run(const Launch& shape, const Body& body) {
  Stream stream;
  launch(stream, "test", shape, body_kernel, BodyParams{&body});
  stream.wait("test");
}

// Expects that the grid fails with an error that contains `text`; empty: that it does not fail.
void expect_error(std::string_view text, const Launch& shape, const Body& body) {
  SCOPED_TRACE(text);
  std::string error;
  try {
    run(shape, body);
  } catch (const Error& thrown) {
    EXPECT_EQ(thrown.code(), ErrorCode::internal);
    error = thrown.what();
  }
  EXPECT_EQ(error.empty(), text.empty());
  EXPECT_NE(error.find(text), std::string::npos) << error;
}

// The blocks and threads of a grid in the order in which they ran, in the last of `kernels` kernels of a stream.
using Ran = std::vector<std::pair<unsigned, int>>;
Ran order_of(std::uint64_t seed, Order order, int kernels = 1) {
  host_grid::set_seed(seed);
  host_grid::set_order(order);
  Stream stream;
  Ran out;
  const Body body = [&] {
    dependency_wait();
    out.emplace_back(blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z), thread());
  };
  for (int i = 0; i < kernels; ++i) {
    out.clear();
    launch(stream, "order", {.grid_x = 2, .grid_y = 3, .grid_z = 2, .threads = 64}, body_kernel, BodyParams{&body});
    stream.wait("order");
  }
  return out;
}

TEST(HostGridTest, the_seed_decides_the_order_of_blocks_and_threads) {
  const auto counted = order_of(0, Order::ascending);
  ASSERT_EQ(counted.size(), 12U * 64U);
  EXPECT_TRUE(std::ranges::is_sorted(counted));
  const auto one = order_of(1, Order::ascending), two = order_of(2, Order::ascending);
  for (const auto& drawn : {one, two}) {
    auto sorted = drawn;
    std::ranges::sort(sorted);
    EXPECT_EQ(sorted, counted) << "every thread must run once";
    EXPECT_NE(drawn[0].second, drawn[64].second) << "blocks must run in different orders";
    for (std::size_t i = 0; i < drawn.size(); ++i) {
      EXPECT_EQ(drawn[i].first, drawn[i / 64 * 64].first) << "a block must end before the next block starts";
    }
  }
  EXPECT_NE(one, counted);
  EXPECT_NE(one, two);
  EXPECT_EQ(one, order_of(1, Order::ascending)) << "equal seeds must give equal orders";
  EXPECT_NE(one, order_of(1, Order::ascending, 2)) << "the second kernel of a stream must have another order";
  auto reversed = order_of(1, Order::descending);
  for (std::size_t i = 0; i < one.size(); ++i) EXPECT_EQ(one[i].first, reversed[one.size() - 1 - i].first);
}

TEST(HostGridTest, a_barrier_that_some_threads_miss_is_found_with_kernel_and_seed) {
  host_grid::set_seed(5);
  const Body half_come = [] {
    dependency_wait();
    if (thread() < 32) __syncthreads();
    if (thread() >= 32 && thread() < 40) __syncwarp();
  };
  expect_error("test: of 64 threads 32 wait at __syncthreads()", {.threads = 64}, half_come);
  expect_error("CHARONIA_EMULATED_ORDER=5", {.threads = 64}, half_come);
  expect_error("", {.threads = 64}, [] {
    dependency_wait();
    __syncthreads();
  });
}

// Shared memory.

TEST(HostGridTest, reads_before_a_copy_is_complete_give_nan) {
  alignas(16) float in[32];
  std::ranges::fill(in, 5.0F);
  std::vector<float> early(8), complete(32);
  run({.dynamic_shared_bytes = 128}, [&] {
    const auto at = static_cast<std::size_t>(thread());
    auto* const shared = dynamic<float>();
    dependency_wait();
    if (at < 8) copy_async_16(shared + at * 4, in + at * 4);
    copy_commit();
    if (at < 8) early[at] = shared[4 * at];
    copy_wait<0>();
    __syncthreads();
    complete[at] = shared[at];
  });
  for (const float x : early) EXPECT_TRUE(std::isnan(x));
  EXPECT_EQ(complete, std::vector<float>(32, 5));
}

TEST(HostGridTest, shared_memory_is_nan_when_a_block_begins) {
  std::vector<float> out;
  run({.grid_x = 3, .dynamic_shared_bytes = 16}, [&] {
    CHARONIA_SHARED(float, fixed, [4]);
    dependency_wait();
    if (thread() != 0) return;
    out.insert(out.end(), {fixed[3], dynamic<float>()[3]});
    fixed[3] = dynamic<float>()[3] = 1;
  });
  EXPECT_EQ(out.size(), 6U);
  for (const float x : out) EXPECT_TRUE(std::isnan(x)) << "data of the previous block must not be visible";
}

TEST(HostGridTest, an_order_and_its_reverse_show_a_missing_barrier_for_every_pair) {
  std::vector<int> seen(64, 0);
  for (const auto order : {Order::ascending, Order::descending}) {
    host_grid::set_order(order);
    run({.threads = 64}, [&] {  // a thread reads data that its neighbour writes
      CHARONIA_SHARED(float, x, [64]);
      dependency_wait();
      x[thread()] = 1;
      seen[threadIdx.x] += std::isnan(x[thread() ^ 1]) ? 1 : 0;
    });
  }
  EXPECT_EQ(seen, std::vector<int>(64, 1));
}

// Clusters.

constexpr Launch kClusters{.grid_x = 2, .grid_y = 8, .threads = 64, .dynamic_shared_bytes = 256, .cluster_y = 4};

enum class Fault { none, no_barrier_before, no_barrier_after, missing_block, other_memory, other_rank };

// The blocks of a cluster add the values that each has written to its shared memory. out: [block][thread].
Body cluster_sum(std::vector<int>& out, Fault fault) {
  out.assign(16 * 64, 0);
  return [&out, fault] {
    CHARONIA_SHARED(int, elsewhere, [64]);
    dependency_wait();
    auto* const mine = dynamic<int>();
    const unsigned block = blockIdx.y * gridDim.x + blockIdx.x;
    mine[thread()] = elsewhere[thread()] = 1 << block;
    if (fault == Fault::missing_block && cluster_rank() == 1) return;
    if (fault == Fault::no_barrier_before) {
      __syncthreads();
    } else {
      cluster_sync();
    }
    int sum = 0;
    for (int other = 0; other < 4; ++other) {
      sum += *map_shared_rank((fault == Fault::other_memory ? elsewhere : mine) + (thread() + other) % 64,
                              fault == Fault::other_rank ? other + 1 : other);
    }
    out[block * 64 + threadIdx.x] = sum;
    if (fault != Fault::no_barrier_after) cluster_sync();
  };
}

TEST(HostGridTest, blocks_of_a_cluster_read_each_others_shared_memory) {
  std::vector<int> out, good(16 * 64);
  for (unsigned i = 0; i < good.size(); ++i) {  // blocks of a cluster are neighbours along y
    const auto block = i / 64;
    good[i] = 0b01010101 << (block % 2 + (block < 8 ? 0 : 8));
  }
  for (const std::uint64_t seed : {0, 1, 2, 3}) {
    host_grid::set_seed(seed);
    run(kClusters, cluster_sum(out, Fault::none));
    EXPECT_EQ(out, good) << seed;
  }
  host_grid::set_seed(1);
  for (const auto fault : {Fault::no_barrier_before, Fault::no_barrier_after}) {
    run(kClusters, cluster_sum(out, fault));
    EXPECT_NE(out, good) << static_cast<int>(fault);
  }
  expect_error("a block has ended and another one of its cluster waits", kClusters,
               cluster_sum(out, Fault::missing_block));
  expect_error("map_shared_rank(): 4 bytes that are not in the block's dynamic shared memory", kClusters,
               cluster_sum(out, Fault::other_memory));
  expect_error("map_shared_rank(): rank 4 of a cluster of 4", kClusters, cluster_sum(out, Fault::other_rank));
}

// Limits of launches.

template <int kBytes>
void use_static() {
  CHARONIA_SHARED(unsigned char, first, [kBytes / 2]);
  CHARONIA_SHARED(unsigned char, second, [kBytes - kBytes / 2]);
  dependency_wait();
  first[0] = second[0] = 0;
}

TEST(HostGridTest, launches_that_a_device_rejects_are_rejected) {
  constexpr int kGiven = 48 << 10, kMost = 227 << 10;
  const Body body = dependency_wait;
  const std::pair<Launch, std::string_view> cases[] = {
      {{.grid_x = 2, .grid_y = 2, .grid_z = 2, .threads = 1024, .dynamic_shared_bytes = kMost}, ""},
      {{.grid_x = 0}, ""},  // launch() ignores an empty grid
      {{.threads = 1056}, "blocks of (1056, 1, 1) threads"},
      {{.threads = 0}, "blocks of (0, 1, 1) threads"},
      {{.threads = 48}, "whole warps"},
      {{.grid_x = 1U << 31U}, "a grid of (2147483648, 1, 1) blocks"},
      {{.grid_y = 65536}, "a grid of (1, 65536, 1) blocks"},
      {{.grid_z = 65536}, "a grid of (1, 1, 65536) blocks"},
      {{.dynamic_shared_bytes = kMost + 1}, "232449 bytes of dynamic shared memory"},
      {{.grid_y = 48, .cluster_y = 0}, "test: clusters of "},
      {{.grid_y = 48, .cluster_y = 3}, "test: clusters of "},
      {{.grid_y = 50, .cluster_y = 5}, "test: clusters of "},
      {{.grid_y = 48, .cluster_y = 16}, "test: clusters of "},
      {{.grid_y = 6, .cluster_y = 4}, "clusters of 4 of 6 blocks"},
  };
  for (const auto& [shape, text] : cases) expect_error(text, shape, body);
  expect_error("", {}, use_static<kGiven>);
  expect_error("", {.dynamic_shared_bytes = kGiven - 1000}, use_static<1000>);
  expect_error("", {.dynamic_shared_bytes = kMost - 1000}, use_static<1000>);
  expect_error("49154 bytes of static shared memory", {}, use_static<kGiven + 2>);
  expect_error("a block has 49152, because larger dynamic", {.dynamic_shared_bytes = kGiven - 999}, use_static<1000>);
  expect_error("a block has 232448 (CHARONIA_", {.dynamic_shared_bytes = kMost - 999}, use_static<1000>);
  Stream stream;  // in any stream mode the launch itself is rejected
  EXPECT_THROW(launch(stream, "wide", {.threads = 2048}, body_kernel, BodyParams{&body}), Error);
}

// Addresses.

TEST(HostGridTest, addresses_that_are_not_aligned_or_not_in_shared_memory_are_found) {
  alignas(16) unsigned char memory[64] = {};
  struct Case {
    std::string_view text;
    int by;  // offset from a valid address in bytes
    std::function<void(unsigned char* shared, unsigned char* global, int by)> access;
  };
  const auto words = [](unsigned char* at) { return reinterpret_cast<const uint4*>(at); };
  const auto floats = [](unsigned char* at) { return reinterpret_cast<const float4*>(at); };
  std::uint32_t r[4];
  const Case cases[] = {
      {"copy_async(): an access of 16 bytes is misaligned by 8 bytes", 8,
       [&](auto* shared, auto*, int by) { copy_async_16(shared + by, memory); }},
      {"copy_async(): an access of 16 bytes is misaligned by 4 bytes", 4,
       [&](auto* shared, auto* global, int) { copy_async_16(shared, global); }},
      {"copy_async(): 16 bytes that are not in the block's shared memory", 1,
       [&](auto* shared, auto*, int by) { copy_async_16(by == 0 ? shared + 240 : memory, memory); }},
      {"copy_async(): from shared memory", 1,
       [&](auto* shared, auto*, int by) { copy_async_16(shared, by == 0 ? memory : shared + 16); }},
      {"copy_async(): an access of 4 bytes is misaligned by 2 bytes", 2,
       [&](auto* shared, auto*, int by) { copy_async_4(shared + by, memory); }},
      {"load_matrix_x4(): an access of 16 bytes is misaligned by 8 bytes", 8,
       [&](auto* shared, auto*, int by) { load_matrix_x4(r, shared + by); }},
      {"load_matrix_x4_transposed(): 16 bytes that are not in", 1,
       [&](auto* shared, auto*, int by) { load_matrix_x4_transposed(r, shared + 240 + 16 * by); }},
      {"load_readonly(): an access of 16 bytes is misaligned by 8 bytes", 8,
       [&](auto*, auto* global, int) { (void)load_readonly(floats(global)); }},
      {"load_streaming(): an access of 16 bytes is misaligned by 8 bytes", 8,
       [&](auto*, auto* global, int) { (void)load_streaming(words(global)); }},
      {"load_cached(): an access of 16 bytes is misaligned by 8 bytes", 8,
       [&](auto*, auto* global, int) { (void)load_cached(words(global)); }},
      {"load_l2(): an access of 16 bytes is misaligned by 8 bytes", 8,
       [&](auto*, auto* global, int) { (void)load_l2(floats(global)); }},
      {"an atomic function(): an access of 8 bytes is misaligned by 4 bytes", 4,
       [&](auto*, auto* global, int) { atomicAdd(reinterpret_cast<unsigned long long*>(global), 1ULL); }},
  };
  for (const auto& c : cases) {
    SCOPED_TRACE(c.text);
    for (const int by : {0, c.by}) {
      expect_error(by == 0 ? "" : c.text, {.dynamic_shared_bytes = 256}, [&] {
        dependency_wait();
        c.access(dynamic_shared(), memory + by, by);
      });
    }
  }
}

// Programmatic dependent launch.

TEST(HostGridTest, every_thread_must_wait_for_the_previous_kernel) {
  alignas(16) int data[4] = {};
  const Launch overlap{.threads = 64}, apart{.threads = 64, .overlap = false};
  const Body one_thread_does_not_wait = [] {
    if (thread() >= 1) dependency_wait();
  };
  const Body reads_early = [&] {
    (void)load_cached(reinterpret_cast<const uint4*>(data));
    dependency_wait();
  };
  const Body counts_early = [&] {
    CHARONIA_SHARED(int, count, [1]);
    if (thread() == 0) *count = 0;
    __syncthreads();
    atomicAdd(count, 1);  // counters in shared memory belong to the block
    atomicAdd(data, 1);
    dependency_wait();
  };
  expect_error("test: thread 0 of block (0, 0, 0) ends without dependency_wait()", overlap, one_thread_does_not_wait);
  expect_error("calls load_cached() before dependency_wait()", overlap, reads_early);
  expect_error("an atomic function() before dependency_wait()", overlap, counts_early);
  for (const auto& body : {one_thread_does_not_wait, reads_early, counts_early}) expect_error("", apart, body);
}

class HostGridChainTest : public testing::TestWithParam<host_stream::Mode> {};
INSTANTIATE_TEST_SUITE_P(Mode, HostGridChainTest,
                         testing::Values(host_stream::Mode::immediate, host_stream::Mode::deferred));

// Each kernel of a chain adds 1 to its predecessor's value. The first block of a grid, whichever it is, shows the error
// if the value is read too early.
TEST_P(HostGridChainTest, a_block_that_does_not_wait_reads_stale_data) {
  host_stream::set_mode(GetParam());
  for (const bool graph : {false, true}) {
    for (const bool early : {false, true}) {
      int values[7] = {};  // the last kernel has three blocks
      std::vector<Body> bodies;
      for (int i = 0; i < 4; ++i) {
        bodies.push_back([&values, early, i] {
          CHARONIA_SHARED(int, read, [1]);
          if (early && thread() == 0) *read = values[i];
          __syncthreads();
          dependency_wait();
          if (!early && thread() == 0) *read = values[i];
          __syncthreads();
          if (thread() == 0) values[static_cast<unsigned>(i) + 1 + blockIdx.x] = *read + 1;
        });
      }
      Stream stream;
      if (graph) Graph::begin(stream);
      for (const auto& body : bodies) {
        launch(stream, "chain", {.grid_x = &body == &bodies.back() ? 3U : 1U}, body_kernel, BodyParams{&body});
      }
      if (graph) Graph::end(stream).launch(stream, "chain");
      stream.wait("chain");
      const bool stale = early && (graph || GetParam() == host_stream::Mode::deferred);
      EXPECT_EQ(std::count(values + 4, values + 7, 4), stale ? 0 : 3) << "graph " << graph << ", early " << early;
    }
  }
}

// Memory.

[[gnu::noinline]] int deep(int depth) {
  volatile char room[1024];
  room[0] = static_cast<char>(depth);
  return depth == 0 ? room[0] : deep(depth - 1) + room[0];
}

TEST(HostGridDeathTest, a_thread_that_needs_more_stack_than_it_has_ends_the_process) {
  int out = 0;
  const auto recurse = [&](int depth) {
    run({}, [&out, depth] {
      dependency_wait();
      out = deep(depth);
    });
  };
  recurse(50);
  EXPECT_DEATH(recurse(1000), "");
}

#if defined(__SANITIZE_ADDRESS__)

TEST(HostGridDeathTest, sanitizer_errors_end_the_process) {
  const DeviceMemory memory(64);
  auto* const global = memory.as<unsigned char>();
  int by = 0;
  const std::pair<Body, const char*> cases[] = {
      {[&] { dynamic_shared()[63 + by] = 1; }, "heap-buffer-overflow|out of bounds"},
      {[&] {
         CHARONIA_SHARED(unsigned char, fixed, [64]);
         fixed[63 + by] = 1;
       },
       "heap-buffer-overflow|out of bounds"},
      {[&] { global[63 + by] = 1; }, "heap-buffer-overflow|out of bounds"},
      {[&] { *reinterpret_cast<uint4*>(global + by * 8) = uint4{1, 2, 3, 4}; }, "misaligned address"}};
  for (const auto& [access, text] : cases) {
    const auto try_it = [&access = access] {
      run({.dynamic_shared_bytes = 64}, [&] {
        dependency_wait();
        access();
      });
    };
    by = 0;
    try_it();
    by = 1;
    EXPECT_DEATH(try_it(), text);
  }
}

#endif

}  // namespace
}  // namespace charonia::cuda
#endif
