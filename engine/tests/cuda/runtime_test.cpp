// Memory, streams, graphs, launches and the kernels of collectives, on a real or emulated device.
#include "ops/cuda/device/runtime.h"

#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <utility>

#include "base/text.h"
#include "charonia/error.h"
#include "device_arrays.h"
#include "errors.h"
#include "ops/cuda/device/growing_memory.h"
#include "ops/cuda/kernels/collective.h"

namespace charonia::cuda {
namespace {

using ops::Matrix;

template <class T = int>
T word(Stream& stream, const void* at) {
  T out{};
  stream.download(&out, at, sizeof out, "test");
  stream.wait("test");
  return out;
}
void set_word(Stream& stream, void* at, int value) {
  stream.upload(at, &value, sizeof value, "test");
  stream.wait("test");
}

TEST(RuntimeTest, memory_is_zero_at_first_and_freed_with_its_owner) {
  Stream stream;
  const auto before = allocations();
  DeviceMemory a(100 * sizeof(int));
  EXPECT_EQ(allocations(), before + 1);
  EXPECT_EQ((word<std::array<int, 100>>(stream, a.data())), (std::array<int, 100>{}));
  const auto* const data = a.data();
  DeviceMemory b(std::move(a));
  EXPECT_EQ(a.data(), nullptr);
  a = std::move(b);
  EXPECT_EQ(a.data(), data);
  EXPECT_EQ(a.bytes(), 100 * sizeof(int));
  a = DeviceMemory(8);
  EXPECT_EQ(a.bytes(), 8U);
  PinnedMemory pinned(64);
  const PinnedMemory other(std::move(pinned));
  EXPECT_EQ(other.bytes(), 64U);
  EXPECT_EQ(pinned.data(), nullptr);
}

TEST(RuntimeTest, too_large_allocations_are_rejected_and_lose_no_memory) {
  const auto free = free_device_bytes();
  const auto wanted = std::size_t{1} << 50;
  expect_error(ErrorCode::resource_exhausted, {"the test's memory", std::to_string(wanted)},
               [&] { const DeviceMemory memory(wanted, "the test's memory"); });
  EXPECT_GE(free_device_bytes(), free / 2);
}

TEST(GrowingMemoryTest, regions_grow_in_place_and_are_zero_at_first) {
  const auto unit = ReservedMemory::granularity();
  if (unit == 0) GTEST_SKIP() << "the device cannot reserve addresses without memory";
  Stream stream;
  const std::size_t bytes = 5 * unit - 24;
  GrowingMemory memory(3, bytes, 8, "the test's memory");
  EXPECT_EQ(memory.distance(), 5 * unit);
  auto* const data = memory.data();
  const auto at = [&](std::size_t region, std::size_t offset) { return data + region * 5 * unit + offset; };
  for (std::size_t region = 0; region < 3; ++region) set_word(stream, at(region, 4), static_cast<int>(region) + 1);
  const auto before = allocations();
  memory.commit(unit);
  EXPECT_EQ(allocations(), before) << "the region already has that much memory";
  memory.commit(2 * unit + 1);
  EXPECT_EQ(allocations(), before + 3);
  memory.commit(unit);
  memory.commit(bytes);
  EXPECT_EQ(allocations(), before + 6);
  EXPECT_EQ(memory.data(), data);
  for (std::size_t region = 0; region < 3; ++region) {
    EXPECT_EQ(word(stream, at(region, 4)), static_cast<int>(region) + 1);
    for (const auto offset : {std::size_t{0}, unit, 3 * unit - 4, bytes - 4}) {
      EXPECT_EQ(word(stream, at(region, offset)), 0) << offset;
    }
    set_word(stream, at(region, bytes - 4), 7);
    EXPECT_EQ(word(stream, at(region, bytes - 4)), 7);
  }
  const GrowingMemory other(std::move(memory));
  EXPECT_EQ(other.data(), data);
  EXPECT_EQ(word(stream, at(2, 4)), 3);
}

TEST(GrowingMemoryTest, too_much_memory_is_rejected_with_the_numbers) {
  const auto unit = ReservedMemory::granularity();
  if (unit == 0) GTEST_SKIP() << "the device cannot reserve addresses without memory";
  Stream stream;
  const auto most = free_device_bytes() / unit * unit;
  GrowingMemory memory(2, most, unit, "the test's memory");  // addresses for twice the available memory
  const auto left = free_device_bytes();
  expect_error(ErrorCode::resource_exhausted, {"the test's memory"}, [&] { memory.commit(most / 4 * 3); });
  EXPECT_GE(free_device_bytes() + unit, left) << "the memory of the first region was not returned";
  memory.commit(2 * unit);
  auto* const last = memory.data() + memory.distance() + 2 * unit - sizeof(int);
  set_word(stream, last, 5);
  EXPECT_EQ(word(stream, last), 5);
}

TEST(GrowingMemoryTest, regions_committed_from_the_start_are_one_allocation) {
  const auto before = allocations();
  GrowingMemory memory(4, 100, 100, "the test's memory");
  EXPECT_EQ(allocations(), before + 1);
  EXPECT_EQ(memory.distance(), 100U);
  memory.commit(100);
  EXPECT_EQ(allocations(), before + 1);
}

TEST(RuntimeTest, copies_work_in_all_directions) {
  using Four = std::array<int, 4>;
  Stream stream;
  const DeviceMemory a(sizeof(Four)), b(sizeof(Four));
  const PinnedMemory pinned(sizeof(Four));
  const Four values = {0, 1, 4, 9};
  std::memcpy(pinned.data(), values.data(), sizeof values);
  stream.upload(a.data(), pinned.data(), a.bytes(), "test");
  stream.copy(b.data(), a.data(), a.bytes(), "test");
  stream.fill_zero(a.data(), 2 * sizeof(int), "test");
  EXPECT_EQ(word<Four>(stream, a.data()), (Four{0, 0, 4, 9}));
  EXPECT_EQ(word<Four>(stream, b.data()), values);
}

TEST(RuntimeTest, a_graph_runs_once_for_each_launch) {
  Stream stream;
  ops::Random random(1);
  const MatrixOnDevice shards(stream, Matrix(DType::f32, 2 * 3, 40)), sum(stream, Matrix(DType::f32, 3, 40));
  Graph::begin(stream);
  sum_shards(stream, sum.tensor(), shards.tensor().data, 2);
  Graph graph = Graph::end(stream);
  EXPECT_TRUE(static_cast<bool>(graph));
  for (int launch = 0; launch < 2; ++launch) {
    const auto values = Matrix::random(random, DType::f32, 2 * 3, 40), before = sum.host();
    shards.upload(values);
    EXPECT_EQ(sum.host().bytes, before.bytes) << "the graph was not launched";
    graph.launch(stream, "test");
    const auto got = sum.host();
    for (int i = 0; i < 3 * 40; ++i) {
      EXPECT_EQ(got.at(i / 40, i % 40), values.at(i / 40, i % 40) + values.at(3 + i / 40, i % 40));
    }
  }
  const Graph moved(std::move(graph));
  EXPECT_FALSE(static_cast<bool>(graph));
  moved.launch(stream, "test");
  stream.wait("test");
}

TEST(RuntimeTest, a_failed_capture_is_abandoned_and_the_stream_still_works) {
  Stream stream;
  DeviceMemory a(4);
  Graph::begin(stream);
  stream.fill_zero(a.data(), 4, "test");
  Graph::abandon(stream);
  Graph::abandon(stream);
  stream.fill_zero(a.data(), 4, "test");
  stream.wait("test");
}

TEST(RuntimeTest, events_order_streams_and_threads) {
  Stream first, second;
  DeviceMemory a(sizeof(int)), b(sizeof(int));
  const int seven = 7;
  Event done, timed_begin(true), timed_end(true);
  done.wait("an event that was never recorded is past");
  timed_begin.record(first);
  first.upload(a.data(), &seven, sizeof seven, "test");
  done.record(first);
  second.wait_for(done, "test");
  second.copy(b.data(), a.data(), sizeof seven, "test");
  EXPECT_EQ(word(second, b.data()), 7);
  timed_end.record(first);
  timed_end.wait("test");
  EXPECT_GE(Event::milliseconds(timed_begin, timed_end), 0);
}

TEST(CollectiveTest, the_ranks_shards_are_added_in_their_order) {
  Stream stream;
  ops::Random random(2);
  for (const auto type : ops::kWeightTypes) {
    for (const int cols : {1, 7, 8, 24, 1000}) {
      constexpr int kRows = 2;
      const auto host = Matrix::random(random, type, 3 * kRows, cols, 60);
      const MatrixOnDevice shards(stream, host), sum(stream, Matrix(type, kRows, cols));
      sum_shards(stream, sum.tensor(), shards.tensor().data, 3);
      const auto got = sum.host();
      for (int r = 0; r < kRows; ++r) {
        for (int c = 0; c < cols; ++c) {
          const float expected = host.at(r, c) + host.at(kRows + r, c) + host.at(2 * kRows + r, c);
          ASSERT_EQ(got.at(r, c), static_cast<float>(ops::rounded(type, expected))) << to_string(type) << ", " << cols;
        }
      }
    }
  }
}

TEST(CollectiveTest, all_gather_orders_shards_by_rank) {
  Stream stream;
  ops::Random random(6);
  for (const auto& [cols, gap] : {std::pair(8, 0), std::pair(640, 8), std::pair(7, 0), std::pair(333, 5)}) {
    for (const int ranks : {1, 2, 4}) {
      const int rows = ops::uniform(random, 1, 9);
      const auto shards = Matrix::random(random, DType::f32, ranks * rows, cols);
      const MatrixOnDevice from(stream, shards), to(stream, Matrix(DType::f32, rows, ranks * cols, gap));
      side_by_side(stream, to.tensor(), from.tensor().data, ranks);
      const auto out = to.host();
      for (int r = 0; r < rows; ++r) {
        for (int c = 0; c < ranks * cols; ++c) ASSERT_EQ(out.at(r, c), shards.at(c / cols * rows + r, c % cols));
      }
    }
  }
}

}  // namespace
}  // namespace charonia::cuda
