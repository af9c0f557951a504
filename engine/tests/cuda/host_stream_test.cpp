// Tests when the emulated device runs a stream's work. Deliberate errors show that deferred streams detect them.
#if defined(CHARONIA_CUDA_ON_HOST)
#include "emulator/host_stream.h"

#include <gtest/gtest.h>

#include <array>

#include "charonia/error.h"
#include "ops/cuda/device/portable.h"
#include "ops/cuda/device/runtime.h"

namespace charonia::cuda {
namespace {

using host_stream::Mode;
using Two = std::array<int, 2>;

// Two ints in page-locked memory.
class Pinned {
 public:
  explicit Pinned(Two values = {}) { *this = values; }
  Pinned& operator=(Two values) {
    *data() = values;
    return *this;
  }
  Two* data() const { return reinterpret_cast<Two*>(memory_.data()); }
  Two values() const { return *data(); }

 private:
  PinnedMemory memory_{sizeof(Two)};
};

// Two ints on the device.
struct Device {
  void upload(Stream& stream, const void* from) const { stream.upload(memory.data(), from, sizeof(Two), "test"); }
  void download(Stream& stream, void* to) const { stream.download(to, memory.data(), sizeof(Two), "test"); }
  void copy(Stream& stream, const Device& from) const {
    stream.copy(memory.data(), from.memory.data(), sizeof(Two), "test");
  }
  // Sets the first of them to 0.
  void clear(Stream& stream) const { stream.fill_zero(memory.data(), sizeof(int), "test"); }
  Two values(Stream& stream) const {
    Two out;
    download(stream, &out);
    return out;
  }
  DeviceMemory memory{sizeof(Two)};
};

class HostStreamTest : public testing::TestWithParam<Mode> {
 protected:
  bool deferred() const { return GetParam() == Mode::deferred; }
  static Stream stream_in_mode() {
    host_stream::set_mode(GetParam());
    return Stream();
  }
  Stream stream_ = stream_in_mode();
  Device device_;
};

INSTANTIATE_TEST_SUITE_P(Mode, HostStreamTest, testing::Values(Mode::immediate, Mode::deferred),
                         [](const auto& info) { return info.param == Mode::immediate ? "immediate" : "deferred"; });

TEST_P(HostStreamTest, an_upload_reads_page_locked_memory_when_it_runs) {
  const Device second, third;
  Pinned host({1, 2});
  device_.upload(stream_, host.data());
  host = {3, 4};  // too early
  second.upload(stream_, host.data());
  stream_.wait("test");
  host = {5, 6};
  third.upload(stream_, host.data());
  EXPECT_EQ(device_.values(stream_), (deferred() ? Two{3, 4} : Two{1, 2}));
  EXPECT_EQ(second.values(stream_), (Two{3, 4}));
  EXPECT_EQ(third.values(stream_), (Two{5, 6}));
}

TEST_P(HostStreamTest, a_download_to_page_locked_memory_is_complete_after_the_wait) {
  const Two values{7, 8};
  device_.upload(stream_, &values);
  const Pinned by_wait, by_event;
  Event event;
  device_.download(stream_, by_event.data());
  event.record(stream_);
  device_.clear(stream_);
  device_.download(stream_, by_wait.data());
  if (deferred()) {
    EXPECT_EQ(by_event.values(), (Two{})) << "the work ran too early";
    EXPECT_THROW(Event::milliseconds(event, event), Error);
  }
  event.wait("test");
  EXPECT_EQ(by_event.values(), values);
  EXPECT_EQ(Event::milliseconds(event, event), 1);
  if (deferred()) {
    EXPECT_EQ(by_wait.values(), (Two{})) << "the work must wait for the event";
  }
  stream_.wait("test");
  EXPECT_EQ(by_wait.values(), (Two{0, 8}));
}

TEST_P(HostStreamTest, a_stream_that_waits_for_an_event_sees_the_earlier_work) {
  for (const bool waits : {true, false}) {
    Stream first, second;
    const Device from, to;
    const Two values{5, 6};
    Event event;
    from.upload(first, &values);
    event.record(first);
    from.clear(first);
    event.record(first);
    if (waits) second.wait_for(event, "test");
    to.copy(second, from);
    EXPECT_EQ(to.values(second), (waits || !deferred() ? Two{0, 6} : Two{})) << "a missing wait must show";
  }
}

// Memory that is freed, and graphs that are destroyed, before the work that uses them has run.
TEST_P(HostStreamTest, memory_and_graphs_live_until_their_work_has_run) {
  {
    const Device from;
    const Pinned host({1, 2});
    from.upload(stream_, host.data());
    device_.copy(stream_, from);
  }
  EXPECT_EQ(device_.values(stream_), (Two{1, 2}));
  Pinned host({3, 4});
  {
    Graph::begin(stream_);
    device_.upload(stream_, host.data());
    const auto graph = Graph::end(stream_);
    host = {5, 6};
    graph.launch(stream_, "test");
  }
  EXPECT_EQ(device_.values(stream_), (Two{5, 6}));
}

TEST_P(HostStreamTest, operations_that_cannot_be_captured_are_rejected) {
  Stream other;
  Event event;
  Graph::begin(other);
  const auto graph = Graph::end(other);
  Graph::begin(stream_);
  EXPECT_THROW(stream_.wait("test"), Error);
  EXPECT_THROW(event.record(stream_), Error);
  EXPECT_THROW(stream_.wait_for(event, "test"), Error);
  EXPECT_THROW(graph.launch(stream_, "test"), Error);
  Graph::abandon(stream_);
  stream_.wait("test");
}

struct NoParams {};
CHARONIA_KERNEL(32, 1) void broken_kernel(const NoParams) {
  dependency_wait();
  if (threadIdx.x == 0) __syncwarp();
}

TEST_P(HostStreamTest, a_kernel_error_is_thrown_by_the_wait_and_later_work_dropped) {
  const Two values{1, 2};
  const auto launch_broken = [&] { launch(stream_, "broken", {}, broken_kernel, NoParams{}); };
  if (deferred()) {
    launch_broken();
    device_.upload(stream_, &values);
    EXPECT_THROW(stream_.wait("test"), Error);
    EXPECT_EQ(device_.values(stream_), (Two{}));
    launch_broken();
    { const Device freed; }
    EXPECT_THROW(stream_.wait("test"), Error) << "another wait for the stream must not hide the error";
  } else {
    EXPECT_THROW(launch_broken(), Error);
  }
  device_.upload(stream_, &values);
  EXPECT_EQ(device_.values(stream_), values);
}

}  // namespace
}  // namespace charonia::cuda
#endif
