// Memory, streams, graphs and launches, on a real or emulated device.
#include "ops/cuda/device/runtime.h"

#include <gtest/gtest.h>

#include <bit>
#include <cstring>
#include <string_view>
#include <utility>
#include <vector>

#include "base/text.h"
#include "charonia/error.h"
#include "errors.h"
#include "ops/cuda/device/carveout.h"
#include "ops/cuda/device/growing_memory.h"
#include "ops/cuda/kernels/collective.h"

namespace charonia::cuda {
namespace {

std::vector<int> downloaded(Stream& stream, const DeviceMemory& memory, std::size_t count) {
  std::vector<int> out(count);
  stream.download(out.data(), memory.data(), count * sizeof(int), "test");
  stream.wait("test");
  return out;
}

TEST(RuntimeTest, the_carveout_is_a_percentage_or_left_to_the_driver) {
  EXPECT_EQ(shared_carveout(""), kSharedCarveout);
  EXPECT_EQ(shared_carveout("0"), 0);
  EXPECT_EQ(shared_carveout("75"), 75);
  EXPECT_EQ(shared_carveout("100"), 100);
  EXPECT_EQ(shared_carveout("-1"), kDriversCarveout);
  for (const char* wrong : {"-2", "101", "50%", "all", " 50", "1e2"}) {
    expect_error(ErrorCode::invalid_argument, {cat("CHARONIA_CUDA_CARVEOUT = ", wrong)},
                 [&] { shared_carveout(wrong); });
  }
}

TEST(RuntimeTest, memory_is_zero_at_first_and_freed_with_its_owner) {
  Stream stream;
  const auto before = allocations();
  DeviceMemory a(100 * sizeof(int));
  EXPECT_EQ(allocations(), before + 1);
  EXPECT_EQ(downloaded(stream, a, 100), std::vector<int>(100, 0));
  const auto* const data = a.data();
  DeviceMemory b(std::move(a));
  EXPECT_EQ(a.data(), nullptr);
  EXPECT_EQ(b.data(), data);
  a = std::move(b);
  EXPECT_EQ(a.data(), data);
  EXPECT_EQ(a.bytes(), 100 * sizeof(int));
  a = DeviceMemory(8);
  EXPECT_EQ(a.bytes(), 8U);
  PinnedMemory pinned(64);
  PinnedMemory other(std::move(pinned));
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
  const auto word = [&](std::size_t region, std::size_t at) {
    int out = -1;
    stream.download(&out, data + region * memory.distance() + at, sizeof(out), "test");
    stream.wait("test");
    return out;
  };
  const auto fill = [&](std::size_t region, std::size_t at, int value) {
    stream.upload(data + region * memory.distance() + at, &value, sizeof(value), "test");
    stream.wait("test");
  };
  for (std::size_t region = 0; region < 3; ++region) fill(region, 4, static_cast<int>(region) + 1);
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
    EXPECT_EQ(word(region, 4), static_cast<int>(region) + 1);
    for (const std::size_t at : {std::size_t{0}, unit, 3 * unit - 4, bytes - 4}) EXPECT_EQ(word(region, at), 0) << at;
    fill(region, bytes - 4, 7);
    EXPECT_EQ(word(region, bytes - 4), 7);
  }
  GrowingMemory other(std::move(memory));
  EXPECT_EQ(other.data(), data);
  EXPECT_EQ(word(2, 4), 3);
}

TEST(GrowingMemoryTest, too_much_memory_is_rejected_with_the_numbers) {
  const auto unit = ReservedMemory::granularity();
  if (unit == 0) GTEST_SKIP() << "the device cannot reserve addresses without memory";
  Stream stream;
  const auto free = free_device_bytes();
  const auto most = free / unit * unit;
  GrowingMemory memory(2, most, unit, "the test's memory");  // addresses for twice the available memory
  const auto left = free_device_bytes();
  expect_error(ErrorCode::resource_exhausted, {"the test's memory"}, [&] { memory.commit(most / 4 * 3); });
  EXPECT_GE(free_device_bytes() + unit, left) << "the memory of the first region was not returned";
  memory.commit(2 * unit);
  const int value = 5;
  int back = 0;
  auto* const last = memory.data() + memory.distance() + 2 * unit - sizeof(value);
  stream.upload(last, &value, sizeof(value), "test");
  stream.download(&back, last, sizeof(back), "test");
  stream.wait("test");
  EXPECT_EQ(back, value);
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
  Stream stream;
  DeviceMemory a(4 * sizeof(int)), b(4 * sizeof(int));
  PinnedMemory pinned(4 * sizeof(int));
  auto* const values = reinterpret_cast<int*>(pinned.data());
  for (int i = 0; i < 4; ++i) values[i] = i * i;
  stream.upload(a.data(), values, a.bytes(), "test");
  stream.copy(b.data(), a.data(), a.bytes(), "test");
  stream.fill_zero(a.data(), 2 * sizeof(int), "test");
  EXPECT_EQ(downloaded(stream, a, 4), (std::vector<int>{0, 0, 4, 9}));
  EXPECT_EQ(downloaded(stream, b, 4), (std::vector<int>{0, 1, 4, 9}));
}

TEST(RuntimeTest, a_graph_runs_once_for_each_launch) {
  Stream stream;
  constexpr int kRows = 3, kCols = 40;
  std::vector<float> values(2 * kRows * kCols);
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i);
  DeviceMemory shards(values.size() * sizeof(float)), sum(kRows * kCols * sizeof(float));
  const ops::Tensor out{sum.data(), DType::f32, kRows, kCols, kCols};
  const auto result = [&] {
    std::vector<float> got(kRows * kCols);
    stream.download(got.data(), sum.data(), sum.bytes(), "test");
    stream.wait("test");
    return got;
  };
  Graph::begin(stream);
  sum_shards(stream, out, shards.data(), 2);
  Graph graph = Graph::end(stream);
  EXPECT_TRUE(static_cast<bool>(graph));
  EXPECT_EQ(result(), std::vector<float>(kRows * kCols, 0));  // it was not run, and the shards are zeros
  for (const float factor : {1.0F, 2.0F}) {
    auto scaled = values;
    for (auto& x : scaled) x *= factor;
    stream.upload(shards.data(), scaled.data(), shards.bytes(), "test");
    graph.launch(stream, "test");
    const auto got = result();
    for (std::size_t i = 0; i < got.size(); ++i) EXPECT_EQ(got[i], scaled[i] + scaled[i + got.size()]);
  }
  Graph moved(std::move(graph));
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
  EXPECT_EQ(downloaded(second, b, 1), std::vector<int>{7});
  timed_end.record(first);
  timed_end.wait("test");
  EXPECT_GE(Event::milliseconds(timed_begin, timed_end), 0);
}

TEST(RuntimeTest, the_ranks_shards_are_added_in_their_order) {
  Stream stream;
  for (const auto type : {DType::f32, DType::bf16, DType::f16}) {
    for (const int cols : {1, 7, 8, 24, 1000}) {
      constexpr int kRows = 2, kRanks = 3;
      const auto bits = [&](float x) -> std::uint32_t {
        return type == DType::f32    ? std::bit_cast<std::uint32_t>(x)
               : type == DType::bf16 ? float_to_bf16(x)
                                     : float_to_f16(x);
      };
      const auto value = [&](std::uint32_t x) {
        const auto half = static_cast<std::uint16_t>(x);
        return type == DType::f32    ? std::bit_cast<float>(x)
               : type == DType::bf16 ? bf16_to_float(half)
                                     : f16_to_float(half);
      };
      const auto size = size_of(type);
      const std::size_t count = static_cast<std::size_t>(kRows) * static_cast<std::size_t>(cols);
      std::vector<std::byte> host(kRanks * count * size), got(count * size);
      const auto read = [&](const std::vector<std::byte>& from, std::size_t i) {
        std::uint32_t x = 0;
        std::memcpy(&x, &from[i * size], size);
        return value(x);
      };
      for (std::size_t i = 0; i < kRanks * count; ++i) {
        const auto x = bits(static_cast<float>(i * 2654435761U % 2000) / 7.0F - 140);
        std::memcpy(&host[i * size], &x, size);
      }
      DeviceMemory shards(host.size()), sum(got.size());
      stream.upload(shards.data(), host.data(), host.size(), "test");
      sum_shards(stream, {sum.data(), type, kRows, cols, cols}, shards.data(), kRanks);
      stream.download(got.data(), sum.data(), got.size(), "test");
      stream.wait("test");
      for (std::size_t i = 0; i < count; ++i) {
        const float expected = read(host, i) + read(host, i + count) + read(host, i + 2 * count);
        ASSERT_EQ(read(got, i), value(bits(expected))) << to_string(type) << ", " << cols << " columns, element " << i;
      }
    }
  }
}

}  // namespace
}  // namespace charonia::cuda
