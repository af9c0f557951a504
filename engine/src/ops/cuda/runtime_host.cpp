// The CUDA runtime of this engine, played by the process itself: device memory is host memory, a stream does at once
// what it is given, a graph is the list of what it was given. For tests; see runtime.h.
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <utility>

#include <sys/mman.h>
#include <unistd.h>

#include "base/text.h"
#include "charonia/error.h"
#include "ops/cuda/runtime.h"

namespace charonia::cuda {

struct GraphImpl {
  std::vector<std::function<void()>> work;
};
struct StreamImpl {
  std::unique_ptr<GraphImpl> recording;
};
struct EventImpl {};

namespace {

constexpr std::size_t kDeviceBytes = std::size_t{2} << 30;
std::atomic<std::size_t> allocated = 0;  // bytes of device memory
std::atomic<std::uint64_t> allocation_count = 0;

}  // namespace

int device_count(std::string& why) {
  why.clear();
  return 1;
}

// As an H200 in what kernels are chosen by, but with few multiprocessors, so that plans for them stay small.
DeviceInfo device_info(int index) {
  return {.index = index,
          .name = "host",
          .major = 9,
          .minor = 0,
          .multiprocessors = 6,
          .shared_bytes = std::size_t{227} << 10,
          .l2_bytes = std::size_t{50} << 20,
          .total_bytes = kDeviceBytes};
}

OnDevice::OnDevice(int) {}
OnDevice::~OnDevice() = default;

std::size_t free_device_bytes() { return kDeviceBytes > allocated ? kDeviceBytes - allocated : 0; }

void set_step(std::string) {}
bool waits_for_every_launch() { return false; }
std::uint64_t allocations() { return allocation_count; }

DeviceMemory::DeviceMemory(std::size_t bytes, std::string_view what) : bytes_(bytes) {
  if (bytes > free_device_bytes()) {
    throw Error(ErrorCode::resource_exhausted,
                cat(what, ": ", bytes, " bytes are needed and ", free_device_bytes(), " are free on the device"));
  }
  data_ = std::calloc(bytes == 0 ? 1 : bytes, 1);
  if (data_ == nullptr) throw std::bad_alloc();
  allocated += bytes;
  ++allocation_count;
}

DeviceMemory::~DeviceMemory() {
  std::free(data_);
  if (data_ != nullptr) allocated -= bytes_;
}

// Pages that nobody may touch until they are committed, so that a kernel that goes too far is found.
std::size_t ReservedMemory::granularity() { return static_cast<std::size_t>(sysconf(_SC_PAGESIZE)); }

ReservedMemory::ReservedMemory(std::size_t bytes, std::string_view what) : bytes_(bytes), what_(what) {
  void* const at = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (at == MAP_FAILED) throw std::bad_alloc();
  data_ = static_cast<std::byte*>(at);
}

ReservedMemory::~ReservedMemory() {
  while (!pieces_.empty()) release_last();
  if (data_ != nullptr) munmap(data_, bytes_);
}

void ReservedMemory::commit(std::size_t offset, std::size_t bytes) {
  if (bytes > free_device_bytes()) {
    throw Error(ErrorCode::resource_exhausted,
                cat(what_, ": ", bytes, " bytes are needed and ", free_device_bytes(), " are free on the device"));
  }
  if (mprotect(data_ + offset, bytes, PROT_READ | PROT_WRITE) != 0) throw std::bad_alloc();
  pieces_.push_back({offset, bytes});
  allocated += bytes;
  ++allocation_count;
}

void ReservedMemory::release_last() noexcept {
  const auto piece = pieces_.back();
  pieces_.pop_back();
  madvise(data_ + piece.offset, piece.bytes, MADV_DONTNEED);  // zeros again, when it comes back
  mprotect(data_ + piece.offset, piece.bytes, PROT_NONE);
  allocated -= piece.bytes;
}

PinnedMemory::PinnedMemory(std::size_t bytes) : data_(std::calloc(bytes == 0 ? 1 : bytes, 1)), bytes_(bytes) {
  if (data_ == nullptr) throw std::bad_alloc();
  ++allocation_count;
}

PinnedMemory::~PinnedMemory() { std::free(data_); }

void enqueue(NativeStream stream, std::function<void()> work) {
  if (stream->recording) {
    stream->recording->work.push_back(std::move(work));
  } else {
    work();
  }
}

Stream::Stream() : stream_(new StreamImpl) {}
Stream::~Stream() { delete stream_; }

void Stream::upload(void* device, const void* host, std::size_t bytes, std::string_view) {
  enqueue(stream_, [=] { std::memcpy(device, host, bytes); });
}
void Stream::download(void* host, const void* device, std::size_t bytes, std::string_view) {
  enqueue(stream_, [=] { std::memcpy(host, device, bytes); });
}
void Stream::copy(void* to_device, const void* from_device, std::size_t bytes, std::string_view) {
  enqueue(stream_, [=] { std::memmove(to_device, from_device, bytes); });
}
void Stream::fill_zero(void* device, std::size_t bytes, std::string_view) {
  enqueue(stream_, [=] { std::memset(device, 0, bytes); });
}
void Stream::wait(std::string_view what) {
  if (stream_->recording) throw Error(ErrorCode::internal, cat(what, ": a wait within a recording"));
}

void Stream::wait_for(const Event&, std::string_view) {}

Event::Event(bool) : event_(new EventImpl) {}
Event::~Event() { delete event_; }
void Event::record(Stream&) {}
void Event::wait(std::string_view) const {}
float Event::milliseconds(const Event&, const Event&) { return 1; }

void Graph::begin(Stream& stream) { stream.native()->recording = std::make_unique<GraphImpl>(); }
Graph Graph::end(Stream& stream) {
  Graph graph;
  graph.graph_ = stream.native()->recording.release();
  return graph;
}
void Graph::abandon(Stream& stream) noexcept { stream.native()->recording.reset(); }
Graph::~Graph() { delete graph_; }
Graph::Graph(Graph&& other) noexcept : graph_(std::exchange(other.graph_, nullptr)) {}
Graph& Graph::operator=(Graph&& other) noexcept {
  Graph taken(std::move(other));
  std::swap(graph_, taken.graph_);
  return *this;
}
void Graph::launch(Stream& stream, std::string_view) const {
  enqueue(stream.native(), [this] {
    for (const auto& work : graph_->work) work();
  });
}

}  // namespace charonia::cuda
