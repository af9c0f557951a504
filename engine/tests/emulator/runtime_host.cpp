// The emulated device's implementation of runtime.h, for tests: device memory is host memory, and a stream runs its
// work when it is waited for (host_stream.h).
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <map>
#include <mutex>
#include <utility>

#include <sys/mman.h>
#include <unistd.h>

#include "base/text.h"
#include "charonia/error.h"
#include "emulator/emulated_device.h"
#include "emulator/host_stream.h"
#include "ops/cuda/device/runtime.h"
#include "ops/cuda/device/tensor_map.h"

namespace charonia::cuda {

struct GraphImpl {
  std::shared_ptr<const host_stream::Capture> capture;
};
struct StreamImpl {
  std::shared_ptr<host_stream::Queue> queue = host_stream::Queue::make();
};
struct EventImpl {
  host_stream::Mark mark;
};

namespace {

constexpr std::size_t kDeviceBytes = std::size_t{2} << 30;
std::atomic<std::size_t> allocated = 0;  // bytes of device memory
std::atomic<std::uint64_t> allocation_count = 0;
std::mutex launch_mutex;
std::map<std::string, std::uint64_t, std::less<>> launch_counts;  // by the kernel's name

std::atomic<int> failing_step = 0;
std::atomic<bool> failed = false;
thread_local std::string step_text;  // of set_step()

void check(std::string_view operation) {
  if (!failed) return;
  throw Error(ErrorCode::internal,
              cat(operation, ": the emulated device has failed", step_text.empty() ? "" : ", in ", step_text));
}

}  // namespace

int device_count(std::string& why) {
  why.clear();
  return 1;
}

// Has the properties of an H200 that kernels are selected by, but few SMs, so that plans stay small.
DeviceInfo device_info(int index) {
  return {.index = index,
          .name = "host",
          .major = 9,
          .minor = 0,
          .clusters = true,
          .wgmma = true,
          .fp8 = true,
          .sms = 6,
          .shared_bytes = host_grid::kMaxSharedBytes,
          .l2_bytes = std::size_t{50} << 20,
          .total_bytes = kDeviceBytes};
}

int major_capability(int index) { return device_info(index).major; }

OnDevice::OnDevice(int) {}
OnDevice::~OnDevice() = default;

std::size_t free_device_bytes() { return kDeviceBytes > allocated ? kDeviceBytes - allocated : 0; }

void fail_in_step(int step) {
  failing_step = step;
  failed = false;
}

std::uint64_t launches(std::string_view kernel) {
  const std::lock_guard lock(launch_mutex);
  const auto found = launch_counts.find(kernel);
  return found == launch_counts.end() ? 0 : found->second;
}

void set_step(std::string text) { step_text = std::move(text); }
bool waits_for_every_launch() { return false; }
std::uint64_t allocations() { return allocation_count; }

DeviceMemory::DeviceMemory(std::size_t bytes, std::string_view what) : bytes_(bytes) {
  if (bytes > free_device_bytes()) {
    throw Error(ErrorCode::resource_exhausted,
                cat(what, ": ", bytes, " bytes are needed, but ", free_device_bytes(), " are free on the device"));
  }
  data_ = std::calloc(bytes == 0 ? 1 : bytes, 1);
  if (data_ == nullptr) throw std::bad_alloc();
  allocated += bytes;
  ++allocation_count;
}

DeviceMemory::~DeviceMemory() {
  if (data_ == nullptr) return;
  host_stream::wait_for_all();
  std::free(data_);
  allocated -= bytes_;
}

// Pages without access rights until they are committed, to detect kernels that access them.
std::size_t ReservedMemory::granularity() { return static_cast<std::size_t>(sysconf(_SC_PAGESIZE)); }

ReservedMemory::ReservedMemory(std::size_t bytes, std::string_view what) : bytes_(bytes), what_(what) {
  void* const at = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (at == MAP_FAILED) throw std::bad_alloc();
  data_ = static_cast<std::byte*>(at);
}

ReservedMemory::~ReservedMemory() {
  if (data_ == nullptr) return;
  host_stream::wait_for_all();
  while (!chunks_.empty()) release_last();
  munmap(data_, bytes_);
}

void ReservedMemory::commit(std::size_t offset, std::size_t bytes) {
  if (bytes > free_device_bytes()) {
    throw Error(ErrorCode::resource_exhausted,
                cat(what_, ": ", bytes, " bytes are needed, but ", free_device_bytes(), " are free on the device"));
  }
  if (mprotect(data_ + offset, bytes, PROT_READ | PROT_WRITE) != 0) throw std::bad_alloc();
  chunks_.push_back({offset, bytes});
  allocated += bytes;
  ++allocation_count;
}

void ReservedMemory::release_last() noexcept {
  const auto chunk = chunks_.back();
  chunks_.pop_back();
  madvise(data_ + chunk.offset, chunk.bytes, MADV_DONTNEED);  // they are zero when committed again
  mprotect(data_ + chunk.offset, chunk.bytes, PROT_NONE);
  allocated -= chunk.bytes;
}

PinnedMemory::PinnedMemory(std::size_t bytes) : data_(std::calloc(bytes == 0 ? 1 : bytes, 1)), bytes_(bytes) {
  if (data_ == nullptr) throw std::bad_alloc();
  host_stream::add_pinned(data_, bytes);
  ++allocation_count;
}

PinnedMemory::~PinnedMemory() {
  if (data_ == nullptr) return;
  host_stream::wait_for_all();
  host_stream::remove_pinned(data_);
  std::free(data_);
}

void enqueue(NativeStream stream, std::function<void()> work) {
  check("launch");
  stream->queue->add(host_stream::Task{std::move(work)});
}

// Immediately rejects a kernel whose shape the device would reject.
void launch_kernel(NativeStream stream, std::string_view what, const Launch& launch, NativeKernel kernel) {
  check(what);
  host_grid::Shape shape{.grid = {launch.grid_x, launch.grid_y, launch.grid_z},
                         .block = {launch.threads, 1, 1},
                         .cluster_y = launch.cluster_y,
                         .dynamic_shared_bytes = launch.dynamic_shared_bytes,
                         .overlap = launch.overlap && overlap_setting() != Overlap::off,
                         .what = std::string(what)};
  host_grid::check(shape);
  {
    const std::lock_guard lock(launch_mutex);
    ++launch_counts[shape.what];
  }
  stream->queue->add(host_stream::Kernel{std::move(shape), std::move(kernel)});
}

TensorMap make_tensor_map(const TensorBox& box) {
  check(box);
  TensorMap map;
  static_assert(sizeof box <= sizeof map.bytes);
  std::memcpy(map.bytes.data(), &box, sizeof box);
  return map;
}

Stream::Stream() : stream_(new StreamImpl) {}
Stream::~Stream() {
  host_stream::wait_for_all();
  delete stream_;
}

void Stream::upload(void* device, const void* host, std::size_t bytes, std::string_view what) {
  check(what);
  stream_->queue->upload(device, host, bytes);
}
void Stream::download(void* host, const void* device, std::size_t bytes, std::string_view what) {
  check(what);
  stream_->queue->download(host, device, bytes);
}
void Stream::copy(void* to_device, const void* from_device, std::size_t bytes, std::string_view) {
  enqueue(stream_, [=] { std::memmove(to_device, from_device, bytes); });
}
void Stream::fill_zero(void* device, std::size_t bytes, std::string_view) {
  enqueue(stream_, [=] { std::memset(device, 0, bytes); });
}
void Stream::wait(std::string_view what) {
  check(what);
  stream_->queue->wait(what);
}
void Stream::wait_for(const Event& event, std::string_view) { stream_->queue->add(event.native()->mark); }

Event::Event(bool) : event_(new EventImpl) {}
Event::~Event() { delete event_; }
void Event::record(Stream& stream) { event_->mark = stream.native()->queue->mark(); }
void Event::wait(std::string_view what) const {
  event_->mark.wait();
  // CudaOps::begin_step() makes the text.
  if (failing_step > 0 && step_text.starts_with(cat("step ", failing_step.load(), " "))) failed = true;
  check(what);
}
float Event::milliseconds(const Event& begin, const Event& end) {
  if (!begin.native()->mark.done() || !end.native()->mark.done()) {
    throw Error(ErrorCode::internal, "time between events: both must have been recorded");
  }
  return 1;
}

void Graph::begin(Stream& stream) { stream.native()->queue->begin_capture(); }
Graph Graph::end(Stream& stream) {
  Graph graph;
  graph.graph_ = new GraphImpl{stream.native()->queue->end_capture()};
  return graph;
}
void Graph::abandon(Stream& stream) noexcept { stream.native()->queue->end_capture(); }
Graph::~Graph() { delete graph_; }

Stream& Branch::fork(Stream& main) { return main; }
void Branch::join(Stream&) {}
void Graph::launch(Stream& stream, std::string_view what) const {
  check(what);
  stream.native()->queue->add(graph_->capture);
}

}  // namespace charonia::cuda
