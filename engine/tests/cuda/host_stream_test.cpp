// Tests when the emulated device runs a stream's work. Deliberate errors show that deferred streams detect them.
#if defined(CHARONIA_CUDA_ON_HOST)
#include "emulator/host_stream.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <thread>
#include <vector>

#include "charonia/error.h"
#include "ops/cuda/device/portable.h"
#include "ops/cuda/device/runtime.h"

namespace charonia::cuda {
namespace {

using host_stream::Mode;

// Page-locked ints.
class Pinned {
 public:
  explicit Pinned(std::vector<int> values) : memory_(values.size() * sizeof(int)) { set(values); }
  void set(const std::vector<int>& values) { std::ranges::copy(values, data()); }
  int* data() const { return reinterpret_cast<int*>(memory_.data()); }
  std::size_t bytes() const { return memory_.bytes(); }
  std::vector<int> values() const { return {data(), data() + bytes() / sizeof(int)}; }

 private:
  PinnedMemory memory_;
};

class HostStreamTest : public testing::TestWithParam<Mode> {
 protected:
  HostStreamTest() { host_stream::set_mode(GetParam()); }
  bool deferred() const { return GetParam() == Mode::deferred; }

  static std::vector<int> downloaded(Stream& stream, const DeviceMemory& memory) {
    std::vector<int> out(memory.bytes() / sizeof(int));
    stream.download(out.data(), memory.data(), memory.bytes(), "test");
    return out;
  }
};

INSTANTIATE_TEST_SUITE_P(Mode, HostStreamTest, testing::Values(Mode::immediate, Mode::deferred),
                         [](const auto& info) { return info.param == Mode::immediate ? "immediate" : "deferred"; });

TEST_P(HostStreamTest, an_upload_reads_page_locked_memory_when_it_runs) {
  Stream stream;
  DeviceMemory first(8), second(8), third(8);
  Pinned host({1, 2});
  stream.upload(first.data(), host.data(), host.bytes(), "test");
  host.set({3, 4});  // too early
  stream.upload(second.data(), host.data(), host.bytes(), "test");
  stream.wait("test");
  host.set({5, 6});
  stream.upload(third.data(), host.data(), host.bytes(), "test");
  EXPECT_EQ(downloaded(stream, first), (deferred() ? std::vector{3, 4} : std::vector{1, 2}));
  EXPECT_EQ(downloaded(stream, second), (std::vector{3, 4}));
  EXPECT_EQ(downloaded(stream, third), (std::vector{5, 6}));
}

TEST_P(HostStreamTest, a_download_to_page_locked_memory_is_complete_after_the_wait) {
  Stream stream;
  DeviceMemory memory(8);
  const std::vector<int> values{7, 8};
  stream.upload(memory.data(), values.data(), 8, "test");
  Pinned by_wait({0, 0}), by_event({0, 0});
  Event event;
  stream.download(by_event.data(), memory.data(), 8, "test");
  event.record(stream);
  stream.fill_zero(memory.data(), 4, "test");
  stream.download(by_wait.data(), memory.data(), 8, "test");
  if (deferred()) {
    EXPECT_EQ(by_event.values(), (std::vector{0, 0})) << "the work ran too early";
    EXPECT_THROW(Event::milliseconds(event, event), Error);
  }
  event.wait("test");
  EXPECT_EQ(by_event.values(), values);
  EXPECT_EQ(Event::milliseconds(event, event), 1);
  if (deferred()) {
    EXPECT_EQ(by_wait.values(), (std::vector{0, 0})) << "the work must wait for the event";
  }
  stream.wait("test");
  EXPECT_EQ(by_wait.values(), (std::vector{0, 8}));
}

TEST_P(HostStreamTest, copies_of_pageable_memory_have_finished_when_they_return) {
  Stream stream;
  DeviceMemory memory(8);
  std::vector<int> values{1, 2};
  stream.upload(memory.data(), values.data(), 8, "test");
  values = {3, 4};
  std::vector<int> out(2);
  stream.download(out.data(), memory.data(), 8, "test");
  EXPECT_EQ(out, (std::vector{1, 2}));
}

TEST_P(HostStreamTest, a_stream_that_waits_for_an_event_sees_the_earlier_work) {
  for (const bool waits : {true, false}) {
    Stream first, second;
    DeviceMemory from(8), to(8);
    const std::vector<int> values{5, 6};
    Event event;
    first.upload(from.data(), values.data(), 8, "test");
    event.record(first);
    first.fill_zero(from.data(), 4, "test");
    event.record(first);
    if (waits) second.wait_for(event, "test");
    second.copy(to.data(), from.data(), 8, "test");
    const auto expected = waits || !deferred() ? std::vector{0, 6} : std::vector{0, 0};
    EXPECT_EQ(downloaded(second, to), expected) << (waits ? "" : "the wait that is missing shows");
  }
}

TEST_P(HostStreamTest, threads_may_wait_for_each_other_s_streams) {
  constexpr int kRounds = 50;
  Stream streams[2];
  DeviceMemory memory[2] = {DeviceMemory(sizeof(int)), DeviceMemory(sizeof(int))};
  const int one = 1;
  for (int round = 0; round < kRounds; ++round) {
    Event ready[2];
    for (int i = 0; i < 2; ++i) {
      streams[i].upload(memory[i].data(), &one, sizeof one, "test");
      ready[i].record(streams[i]);
    }
    Pinned out[2] = {Pinned({0}), Pinned({0})};
    std::thread threads[2];
    for (int i = 0; i < 2; ++i) {
      threads[i] = std::thread([&, i] {
        streams[i].wait_for(ready[1 - i], "test");
        streams[i].download(out[i].data(), memory[1 - i].data(), sizeof(int), "test");
        streams[i].wait("test");
      });
    }
    for (auto& thread : threads) thread.join();
    for (const auto& value : out) EXPECT_EQ(value.values(), std::vector{1});
  }
}

TEST_P(HostStreamTest, memory_is_freed_after_the_work_that_uses_it) {
  Stream stream;
  DeviceMemory to(8);
  {
    DeviceMemory from(8);
    Pinned host({1, 2});
    stream.upload(from.data(), host.data(), 8, "test");
    stream.copy(to.data(), from.data(), 8, "test");
  }
  EXPECT_EQ(downloaded(stream, to), (std::vector{1, 2}));
}

TEST_P(HostStreamTest, a_launched_graph_runs_after_it_is_destroyed) {
  Stream stream;
  DeviceMemory memory(8);
  Pinned host({1, 2});
  {
    Graph::begin(stream);
    stream.upload(memory.data(), host.data(), 8, "test");
    const auto graph = Graph::end(stream);
    host.set({3, 4});
    graph.launch(stream, "test");
  }
  EXPECT_EQ(downloaded(stream, memory), (std::vector{3, 4}));
}

TEST_P(HostStreamTest, operations_that_cannot_be_captured_are_rejected) {
  Stream stream, other;
  Event event;
  Graph::begin(other);
  const auto graph = Graph::end(other);
  Graph::begin(stream);
  EXPECT_THROW(stream.wait("test"), Error);
  EXPECT_THROW(event.record(stream), Error);
  EXPECT_THROW(stream.wait_for(event, "test"), Error);
  EXPECT_THROW(graph.launch(stream, "test"), Error);
  Graph::abandon(stream);
  stream.wait("test");
}

struct NoParams {};
CHARONIA_KERNEL(32, 1) void broken_kernel(const NoParams) {
  dependency_wait();
  if (threadIdx.x == 0) __syncwarp();
}

TEST_P(HostStreamTest, a_kernel_error_is_thrown_by_the_wait_and_later_work_dropped) {
  Stream stream;
  DeviceMemory memory(8);
  const std::vector<int> values{1, 2};
  if (deferred()) {
    launch(stream, "broken", {}, broken_kernel, NoParams{});
    stream.upload(memory.data(), values.data(), 8, "test");
    EXPECT_THROW(stream.wait("test"), Error);
    EXPECT_EQ(downloaded(stream, memory), (std::vector{0, 0}));
    launch(stream, "broken", {}, broken_kernel, NoParams{});
    {
      const DeviceMemory freed(8);
    }
    EXPECT_THROW(stream.wait("test"), Error) << "another wait for the stream must not hide the error";
  } else {
    EXPECT_THROW(launch(stream, "broken", {}, broken_kernel, NoParams{}), Error);
  }
  stream.upload(memory.data(), values.data(), 8, "test");
  EXPECT_EQ(downloaded(stream, memory), values);
}

}  // namespace
}  // namespace charonia::cuda
#endif
