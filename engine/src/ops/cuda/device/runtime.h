// RAII classes for streams, events, memory, graphs and kernel launches of a CUDA device. Two implementations:
// gpu/runtime.cu with the CUDA runtime, and the emulated device (engine/tests/emulator), for tests without a GPU.
//
// Errors are charonia::Error(internal) that name the operation, CUDA's own text, and the step (set_step). An error of
// a kernel shows only at a later call. With CHARONIA_CUDA_SYNC=1 every launch is waited for, so that the message names
// the kernel that failed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "native_runtime.h"
#include "ops/cuda/device/cuda_settings.h"

namespace charonia::cuda {

struct DeviceInfo {
  int index = 0;
  std::string name;
  int major = 0, minor = 0;  // compute capability
  bool clusters = false;     // the device and the compiled kernels support clusters, and hopper.h's barriers and copies
                             // (9.0 or newer)
  bool wgmma = false;        // the same for hopper.h's products (9.0, compiled for 90a)
  bool fp8 = false;          // the same for tensor cores that multiply FP8 (8.9 or newer)
  int sms = 1;
  std::size_t shared_bytes = 0;  // maximum dynamic shared memory of a block
  std::size_t l2_bytes = 0;
  std::size_t total_bytes = 0;
};

// Number of devices that CUDA sees. 0, with the reason in `why`, if there is no driver or no device.
int device_count(std::string& why);
DeviceInfo device_info(int index);
int major_capability(int index);  // DeviceInfo::major, without a context on the device

// Makes a device the calling thread's current device during its lifetime, then restores the previous one.
class OnDevice {
 public:
  explicit OnDevice(int index);
  ~OnDevice();
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  int before_ = 0;
};

std::size_t free_device_bytes();

// Sets the name of the current step for error messages of this thread, such as "step 12 (decode of 32 rows)".
void set_step(std::string text);

// CHARONIA_CUDA_SYNC=1. Then nothing is captured, because a graph is one launch and its error does not name the kernel.
bool waits_for_every_launch();

// Number of allocations of device or page-locked memory by the classes below. For tests: a step allocates nothing.
std::uint64_t allocations();

// Device memory, zero-filled. Throws Error(resource_exhausted) with the numbers if there is not enough.
class DeviceMemory {
 public:
  DeviceMemory() = default;
  explicit DeviceMemory(std::size_t bytes, std::string_view what = "device memory");
  ~DeviceMemory();
  DeviceMemory(DeviceMemory&& other) noexcept;
  DeviceMemory& operator=(DeviceMemory&& other) noexcept;
  void* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }
  template <class T>
  T* as() const {
    return static_cast<T*>(data_);
  }

 private:
  void* data_ = nullptr;
  std::size_t bytes_ = 0;
};

// Reserved addresses of device memory; chunks get memory on request. Sizes and offsets are multiples of granularity().
class ReservedMemory {
 public:
  // In bytes, for the calling thread's device; 0: not supported.
  static std::size_t granularity();

  ReservedMemory() = default;
  explicit ReservedMemory(std::size_t bytes, std::string_view what = "device memory");
  ~ReservedMemory();
  ReservedMemory(ReservedMemory&& other) noexcept;
  ReservedMemory& operator=(ReservedMemory&& other) noexcept;
  std::byte* data() const { return data_; }

  // Provides zero-filled memory for a chunk. Throws Error(resource_exhausted) with the numbers if there is not enough.
  void commit(std::size_t offset, std::size_t bytes);
  // Frees the memory of the last commit().
  void release_last() noexcept;

 private:
  struct Chunk {
    std::size_t offset = 0, bytes = 0;
    unsigned long long memory = 0;  // CUDA's handle
  };
  int device_ = 0;
  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
  std::string what_;
  std::vector<Chunk> chunks_;
};

// Page-locked host memory, for asynchronous copies. Kernels can also read it, at the same address.
class PinnedMemory {
 public:
  PinnedMemory() = default;
  explicit PinnedMemory(std::size_t bytes);
  ~PinnedMemory();
  PinnedMemory(PinnedMemory&& other) noexcept;
  PinnedMemory& operator=(PinnedMemory&& other) noexcept;
  std::byte* data() const { return static_cast<std::byte*>(data_); }
  std::size_t bytes() const { return bytes_; }

 private:
  void* data_ = nullptr;
  std::size_t bytes_ = 0;
};

class Event;

class Stream {
 public:
  Stream();
  ~Stream();
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  NativeStream native() const { return stream_; }

  // Asynchronous with page-locked memory; otherwise complete on return.
  void upload(void* device, const void* host, std::size_t bytes, std::string_view what);
  void download(void* host, const void* device, std::size_t bytes, std::string_view what);
  void copy(void* to_device, const void* from_device, std::size_t bytes, std::string_view what);
  void fill_zero(void* device, std::size_t bytes, std::string_view what);
  void wait(std::string_view what);  // until all issued work is done
  // delays work that is issued from now on; does not block the caller
  void wait_for(const Event& event, std::string_view what);

 private:
  NativeStream stream_{};
};

class Event {
 public:
  explicit Event(bool timing = false);
  ~Event();
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  NativeEvent native() const { return event_; }
  void record(Stream& stream);
  void wait(std::string_view what) const;                           // blocks the calling thread
  static float milliseconds(const Event& begin, const Event& end);  // both need timing and must be done

 private:
  NativeEvent event_{};
};

// The work issued to a stream between begin() and end(), which can be launched again as a unit.
class Graph {
 public:
  // Between the two calls, operations of `stream` are captured instead of run.
  static void begin(Stream& stream);
  static Graph end(Stream& stream);
  // Ends a failed capture, if there is one.
  static void abandon(Stream& stream) noexcept;

  Graph() = default;
  ~Graph();
  Graph(Graph&& other) noexcept;
  Graph& operator=(Graph&& other) noexcept;
  void launch(Stream& stream, std::string_view what) const;
  explicit operator bool() const { return graph_ != NativeGraph{}; }

 private:
  NativeGraph graph_{};
};

// A branch of a graph, whose work only the end of the graph waits for. On the emulated device, work of a branch is in
// the order of the calls.
class Branch {
 public:
  // Returns the stream of the branch: work that is issued to it depends on the work of `main` before this call. `main`
  // is being captured.
  Stream& fork(Stream& main);
  // Call before the end of the capture. Does nothing without a fork().
  void join(Stream& main);

 private:
  Stream side_;
  Event forked_, joined_;
  bool open_ = false;
};

struct Launch {
  unsigned grid_x = 1, grid_y = 1, grid_z = 1;
  unsigned threads = 32;  // per block, a multiple of the warp size
  std::size_t dynamic_shared_bytes = 0;
  unsigned cluster_y = 1;  // blocks of a cluster, neighbours along y; more than 1 needs compute capability 9
  bool overlap = true;     // programmatic dependent launch, if the device supports it (compute capability 9)
};

// Launches a kernel. Requests dynamic shared memory beyond 48 KB, and the share of shared memory (carveout_setting()).
void launch_kernel(NativeStream stream, std::string_view what, const Launch& shape, NativeKernel kernel);

// Launches a kernel; a grid without blocks does nothing. Sets the member late_trigger of the parameters, if there is
// one (Overlap::late).
template <class Params>
void launch(Stream& stream, std::string_view what, const Launch& shape, void (*kernel)(Params), const Params& params) {
  if (shape.grid_x == 0 || shape.grid_y == 0 || shape.grid_z == 0) return;
  Params copy = params;
  if constexpr (requires { copy.late_trigger; }) copy.late_trigger = overlap_setting() == Overlap::late;
  launch_kernel(stream.native(), what, shape, bind_kernel(kernel, copy));
}

}  // namespace charonia::cuda
