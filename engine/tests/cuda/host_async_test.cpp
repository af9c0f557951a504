// Tests that the emulated device finds wrong use of the instructions of hopper.h. Right use: hopper_test.cpp.
#if defined(CHARONIA_CUDA_ON_HOST)
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <string>

#include "charonia/error.h"
#include "emulator/host_stream.h"
#include "ops/cuda/device/hopper.h"
#include "ops/cuda/device/runtime.h"

namespace charonia::cuda {
namespace {

using Body = std::function<void()>;
struct BodyParams {
  const Body* body;
};
CHARONIA_KERNEL(1024, 1) void body_kernel(const BodyParams p) {
  dependency_wait();
  (*p.body)();
}

constexpr int kBytes = 256;
alignas(128) unsigned char source[kBytes];

// Expects that a grid of blocks of 128 threads fails with an error that contains `text`; empty: that it does not fail.
void expect_error(std::string_view text, const Body& body, unsigned blocks = 1) {
  SCOPED_TRACE(text);
  std::string error;
  try {
    Stream stream;
    launch(stream, "test", {.grid_x = blocks, .threads = 128, .dynamic_shared_bytes = 16 << 10}, body_kernel,
           BodyParams{&body});
    stream.wait("test");
  } catch (const Error& thrown) {
    error = thrown.what();
  }
  EXPECT_EQ(error.empty(), text.empty());
  EXPECT_NE(error.find(text), std::string::npos) << error;
}

bool first() { return threadIdx.x == 0; }
std::uint64_t* barrier() {
  CHARONIA_SHARED(std::uint64_t, one, [1]);
  return one;
}
// A barrier for `arrivals` threads, ready for use.
std::uint64_t* ready_barrier(int arrivals) {
  if (first()) {
    barrier_init(barrier(), arrivals);
    barrier_init_fence();
  }
  __syncthreads();
  return barrier();
}
void copy_to(unsigned char* to, int bytes = kBytes) { copy_bulk(to, source, bytes, barrier()); }

TEST(HostAsyncTest, phases_that_never_end_are_named_instead_of_a_hang) {
  expect_error("", [] {
    barrier_arrive(ready_barrier(128));
    barrier_wait(barrier(), 0);
  });
  expect_error(
      "128 threads wait at barrier_wait() for a phase that never ends (barrier 0, phase 0: 127 of 128 arrivals", [] {
        ready_barrier(128);
        if (!first()) barrier_arrive(barrier());
        barrier_wait(barrier(), 0);
      });
  expect_error("phase 0: 1 of 1 arrivals, 256 of 272 bytes", [] {
    ready_barrier(1);
    if (first()) {
      barrier_arrive_expect(barrier(), kBytes + 16);
      copy_to(swizzled_shared());
    }
    barrier_wait(barrier(), 0);
  });
  // The phase of parity 1 has not begun to end.
  expect_error("phase 1: 0 of 128 arrivals", [] {
    barrier_arrive(ready_barrier(128));
    barrier_wait(barrier(), 0);
    barrier_wait(barrier(), 1);
  });
}

TEST(HostAsyncTest, wrong_use_of_barriers_is_found) {
  expect_error("before barrier_init()", [] { barrier_arrive(barrier()); });
  expect_error("barrier_init() with 0 arrivals", [] { barrier_init(barrier(), 0); });
  expect_error("barrier_init() of a barrier in use", [] { barrier_init(barrier(), 1); });
  expect_error("overwritten", [] {
    ready_barrier(128);
    if (first()) *barrier() = 0;
    __syncthreads();
    barrier_arrive(barrier());
  });
  expect_error("without barrier_init_fence()", [] {
    if (!first()) return;
    barrier_init(barrier(), 1);
    barrier_arrive_expect(barrier(), kBytes);
    copy_to(swizzled_shared());
  });
  expect_error("still waits for copies of 256 bytes", [] {
    ready_barrier(1);
    if (!first()) return;
    barrier_arrive_expect(barrier(), kBytes);
    copy_to(swizzled_shared());
    barrier_arrive(barrier());
  });
  expect_error("waits for a phase of parity 1 of a barrier of which it knows that 0 phases have ended", [] {
    ready_barrier(1);
    if (!first()) return;
    barrier_wait(barrier(), 1);  // a new barrier: right
    barrier_arrive_expect(barrier(), kBytes);
    copy_to(swizzled_shared());
    barrier_wait(barrier(), 1);
  });
  expect_error("copies 272 bytes, and a barrier expects 256", [] {
    ready_barrier(1);
    if (first()) {
      copy_to(swizzled_shared() + kBytes, 16);
      copy_to(swizzled_shared());
      barrier_arrive_expect(barrier(), kBytes);
    }
    barrier_wait(barrier(), 0);
  });
  expect_error("whose 256 bytes are already on their way", [] {
    ready_barrier(1);
    if (!first()) return;
    barrier_arrive_expect(barrier(), kBytes);
    copy_to(swizzled_shared());
    copy_to(swizzled_shared() + kBytes);
  });
}

// Three warps read stages that another warp fills. shared: all stages are one ring, so the stages of a warp are used by
// other warps in between. Otherwise each warp has a ring of kStages stages.
void read_stages(bool shared) {
  constexpr int kStages = 4, kReaders = 3, kUses = 5, kAll = kStages * kReaders;
  CHARONIA_SHARED(std::uint64_t, full, [kAll]);
  CHARONIA_SHARED(std::uint64_t, empty, [kAll]);
  if (first()) {
    for (int i = 0; i < kAll; ++i) barrier_init(full + i, 1), barrier_init(empty + i, 1);
    barrier_init_fence();
  }
  __syncthreads();
  const auto stage_of = [&](int use, int reader) {
    return shared ? (use * kReaders + reader) % kStages : reader * kStages + use % kStages;
  };
  const auto parity_of = [&](int use, int reader) {
    return (shared ? use * kReaders + reader : use) / kStages % 2;
  };
  const int warp = warp_id();
  for (int use = 0; use < kUses * kStages; ++use) {
    for (int reader = 0; reader < kReaders; ++reader) {
      const int stage = stage_of(use, reader), parity = parity_of(use, reader);
      if (warp == kReaders && lane_id() == 0) {
        barrier_wait(empty + stage, 1 - parity);
        barrier_arrive_expect(full + stage, kBytes);
        copy_bulk(swizzled_shared() + stage * kBytes, source, kBytes, full + stage);
      } else if (warp == reader) {
        barrier_wait(full + stage, parity);
        __syncwarp();
        if (lane_id() == 0) barrier_arrive(empty + stage);
      }
    }
  }
}

TEST(HostAsyncTest, a_warp_that_can_be_two_phases_behind_is_found) {
  expect_error("", [] { read_stages(false); }, 4);
  expect_error("of a barrier of which it knows", [] { read_stages(true); }, 4);
  // A late thread misses two phases, which the others end without it.
  expect_error("waits for phase 0 of a barrier, but phase 1 has ended too", [] {
    ready_barrier(96);
    if (warp_id() != 0) {
      for (int i = 0; i < 2; ++i) barrier_arrive(barrier()), barrier_wait(barrier(), i);
    } else {
      barrier_wait(barrier(), 0);
    }
  });
  // It knows of both from the other threads.
  expect_error("", [] {
    ready_barrier(96);
    for (int i = 0; i < 3; ++i) {
      if (warp_id() != 0) barrier_arrive(barrier()), barrier_wait(barrier(), i % 2);
      __syncthreads();
    }
    if (warp_id() != 0) barrier_arrive(barrier());
    barrier_wait(barrier(), 1);
  });
}

// `use` runs in the first thread between the copy of `source` to shared memory and its arrival.
void expect_of_copy(std::string_view text, const std::function<void(unsigned char*)>& use) {
  expect_error(text, [&] {
    ready_barrier(1);
    if (first()) {
      barrier_arrive_expect(barrier(), kBytes);
      copy_to(swizzled_shared());
      use(swizzled_shared());
    }
    barrier_wait(barrier(), 0);
  });
}

TEST(HostAsyncTest, copies_arrive_as_late_as_possible) {
  expect_of_copy("", [](unsigned char* to) { EXPECT_EQ(to[0], 0xff); });
  expect_of_copy("destination was written while it was in flight", [](unsigned char* to) { to[8] = 1; });
  expect_of_copy("global memory that changes", [](unsigned char*) { ++source[40]; });
  expect_error("ends while copies of 256 bytes are in flight", [] {
    ready_barrier(1);
    if (!first()) return;
    barrier_arrive_expect(barrier(), kBytes);
    copy_to(swizzled_shared());
  });
}

TEST(HostAsyncTest, copies_before_an_earlier_kernel_has_written_are_found) {
  struct Params {
    unsigned char* data;
  };
  std::vector<unsigned char> data(kBytes + 16);
  auto* const at = data.data() + (16 - reinterpret_cast<std::uintptr_t>(data.data()) % 16);
  const auto write = +[](const Params p) {
    dependency_wait();
    p.data[threadIdx.x] = 5;
  };
  const auto read = +[](const Params p) {
    ready_barrier(1);
    if (first()) {
      barrier_arrive_expect(barrier(), kBytes);
      copy_bulk(swizzled_shared(), p.data, kBytes, barrier());
    }
    dependency_wait();
    barrier_wait(barrier(), 0);
  };
  const auto mode = host_stream::mode();
  host_stream::set_mode(host_stream::Mode::deferred);  // starts a kernel before the previous one
  Stream stream;
  host_stream::set_mode(mode);
  try {
    launch(stream, "write", {.threads = 128}, write, Params{at});
    launch(stream, "read", {.threads = 128, .dynamic_shared_bytes = kBytes}, read, Params{at});
    stream.wait("both");
    ADD_FAILURE() << "an early copy was not found";
  } catch (const Error& error) {
    EXPECT_NE(std::string_view(error.what()).find("before dependency_wait()"), std::string_view::npos) << error.what();
  }
}

TEST(HostAsyncTest, misplaced_copies_are_found) {
  const auto expect = [](std::string_view text, const Body& copy) {
    expect_error(text, [&] {
      ready_barrier(1);
      if (first()) copy();
    });
  };
  expect("misaligned by 8 bytes; it needs 16", [] { copy_to(swizzled_shared() + 8); });
  expect("not in the block's dynamic shared memory", [] { copy_to(swizzled_shared() + (16 << 10) - 16); });
  expect("copy_bulk() of 24 bytes", [] { copy_to(swizzled_shared(), 24); });
  expect("copy_bulk() of 0 bytes", [] { copy_to(swizzled_shared(), 0); });
  expect("from an address that is misaligned by 2", [] { copy_bulk(swizzled_shared(), source + 2, 16, barrier()); });
  const auto map = [](Swizzle swizzle) {
    return make_tensor_map({.data = source, .sizes = {16, 8}, .strides = {0, 32}, .box = {16, 8}, .swizzle = swizzle});
  };
  expect("it needs 128", [&] { copy_box(swizzled_shared() + 64, map(Swizzle::none), {0, 0}, barrier()); });
  expect("it needs 256", [&] { copy_box(swizzled_shared() + 128, map(Swizzle::of_32), {0, 0}, barrier()); });
  expect("with 3 coordinates of 2", [&] { copy_box(swizzled_shared(), map(Swizzle::none), {0, 0, 0}, barrier()); });
}

TEST(HostAsyncTest, swizzles_need_memory_that_is_aligned_to_1024_bytes) {
  alignas(16) static unsigned char rows[8 * 128];
  const auto copy = [](Swizzle swizzle, unsigned char* to) {
    const int width = swizzle == Swizzle::none ? 32 : static_cast<int>(swizzle);
    const auto map = make_tensor_map({.data = rows,
                                      .sizes = {width / 2, 8},
                                      .strides = {0, width},
                                      .box = {width / 2, 8},
                                      .swizzle = swizzle});
    ready_barrier(1);
    if (first()) {
      barrier_arrive_expect(barrier(), 8 * width);
      copy_box(to, map, {0, 0}, barrier());
    }
    barrier_wait(barrier(), 0);
  };
  expect_error("", [&] { copy(Swizzle::none, dynamic_shared()); });
  for (const auto swizzle : {Swizzle::of_32, Swizzle::of_64, Swizzle::of_128}) {
    expect_error("", [&] { copy(swizzle, swizzled_shared()); });
    expect_error("swizzled_shared() was not called", [&] { copy(swizzle, dynamic_shared()); });
  }
  expect_error("swizzled_shared() was not called", [] {
    float d[16] = {};
    const auto operand = matrix_descriptor(dynamic_shared(), Swizzle::of_32, 256);
    wgmma_fence();
    wgmma<bf16, 32>(d, operand, operand, true);
  });
}

// Both operands of a product in shared memory, zero and visible.
constexpr int kN = 32, kWidth = 32;
std::uint64_t operand(int at = 0) { return matrix_descriptor(swizzled_shared() + at, Swizzle::of_32, 8 * kWidth); }
void make_operands(bool fence = true) {
  for (int i = static_cast<int>(threadIdx.x); i < 4096; i += 128) swizzled_shared()[i] = 0;
  if (fence) async_fence();
  __syncthreads();
}
void multiply(float (&d)[kN / 2], std::uint32_t* a = nullptr) {
  if (a != nullptr) {
    wgmma<bf16, kN>(d, a, operand(), true);
  } else {
    wgmma<bf16, kN>(d, operand(2048), operand(), true);
  }
}
// In each thread: `use` runs between a product and the wait for it, `after` after the wait.
using Use = std::function<void(float (&d)[kN / 2], std::uint32_t (&a)[4])>;
void expect_of_product(std::string_view text, const Use& use, const Use& after = {}) {
  expect_error(text, [&] {
    make_operands();
    float d[kN / 2];
    std::uint32_t a[4];
    for (auto& x : d) x = 7;
    for (auto& x : a) x = 0;
    wgmma_fence();
    multiply(d, a);
    wgmma_commit();
    use(d, a);
    wgmma_wait<0>();
    if (after) after(d, a);
  });
}

TEST(HostAsyncTest, products_are_computed_at_the_wait) {
  expect_of_product(
      "",
      [](float (&d)[kN / 2], std::uint32_t (&a)[4]) {
        EXPECT_TRUE(std::isnan(d[3]));
        EXPECT_NE(a[1], 0U);
      },
      [](float (&d)[kN / 2], std::uint32_t (&a)[4]) {
        EXPECT_EQ(d[3], 7);
        EXPECT_EQ(a[1], 0U);
      });
  expect_of_product("the sums of a product changed", [](float (&d)[kN / 2], auto&) { d[2] = 0; });
  expect_of_product("the registers of operand a changed", [](auto&, std::uint32_t (&a)[4]) { a[0] = 0; });
  expect_of_product("operand in shared memory was written", [](auto&, auto&) { swizzled_shared()[100] = 1; });
  expect_error("", [] {
    make_operands();
    int d[64];
    for (auto& x : d) x = 7;
    wgmma_fence();
    wgmma<i8x2, 128>(d, operand(), operand(), true);
    wgmma_commit();
    EXPECT_EQ(d[3], -1);
    wgmma_wait<0>();
    EXPECT_EQ(d[3], 7);
  });
  // A second product may use the same sums and registers, after a new fence if a wait was between them.
  expect_of_product("", [](float (&d)[kN / 2], std::uint32_t (&a)[4]) {
    multiply(d, a);
    wgmma_commit();
  });
  expect_of_product("without wgmma_fence()", [](auto&, auto&) {}, [](float (&d)[kN / 2], auto&) { multiply(d); });
}

TEST(HostAsyncTest, only_the_groups_that_are_waited_for_are_complete) {
  expect_error("", [] {
    make_operands();
    float one[kN / 2] = {}, two[kN / 2] = {};
    wgmma_fence();
    multiply(one);
    wgmma_commit();
    multiply(two);
    wgmma_commit();
    wgmma_wait<1>();
    EXPECT_EQ(one[0], 0);
    EXPECT_TRUE(std::isnan(two[0]));
    wgmma_wait<0>();
    EXPECT_EQ(two[0], 0);
  });
}

TEST(HostAsyncTest, wrong_use_of_products_is_found) {
  const auto expect = [](std::string_view text, const std::function<void(float (&d)[kN / 2])>& use) {
    expect_error(text, [&] {
      make_operands();
      float d[kN / 2] = {};
      use(d);
    });
  };
  expect("without wgmma_fence()", [](float (&d)[kN / 2]) { multiply(d); });
  expect("ends with 1 products that it has not waited for", [](float (&d)[kN / 2]) {
    wgmma_fence();
    multiply(d);
    wgmma_wait<0>();  // not committed
  });
  expect("with other operands than the rest of its warpgroup", [](float (&d)[kN / 2]) {
    wgmma_fence();
    wgmma<bf16, kN>(d, operand(2048), operand(warp_id() == 2 ? 1024 : 0), true);
    wgmma_commit();
    wgmma_wait<0>();
  });
  expect("not all warps of its warpgroup", [](float (&d)[kN / 2]) {
    if (warp_id() == 3) return;
    wgmma_fence();
    multiply(d);
    wgmma_commit();
    wgmma_wait<0>();
  });
  expect("not aligned to 8 rows of 32 bytes", [](float (&d)[kN / 2]) {
    wgmma_fence();
    wgmma<bf16, kN>(d, operand(2048), operand(64), true);
  });
  expect("not within the block's dynamic shared memory", [](float (&d)[kN / 2]) {
    wgmma_fence();
    wgmma<bf16, kN>(d, operand((16 << 10) - 1024), operand(), true);
  });
  expect_error("or without async_fence()", [] {
    make_operands(false);
    float d[kN / 2] = {};
    wgmma_fence();
    multiply(d);
    wgmma_commit();
    wgmma_wait<0>();
  });
}

}  // namespace
}  // namespace charonia::cuda
#endif
