// runtime.h with the CUDA runtime.
#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <unordered_map>
#include <utility>

#include <cuda.h>

#include "base/text.h"
#include "charonia/error.h"
#include "ops/cuda/device/runtime.h"
#include "ops/cuda/device/tensor_map.h"

namespace charonia::cuda {
namespace {

constexpr std::size_t kGivenShared = std::size_t{48} << 10;  // available to every block without a request
constexpr int kNothingToRestore = -1;

thread_local std::string step_text;
std::atomic<std::uint64_t> allocation_count = 0;

bool flag(const char* name, bool otherwise) {
  const char* const value = std::getenv(name);
  return value == nullptr || *value == '\0' ? otherwise : std::strcmp(value, "0") != 0;
}

std::string what_failed(std::string_view operation, cudaError_t result) {
  auto text = cat(operation, ": ", cudaGetErrorString(result), " (", cudaGetErrorName(result), ")");
  if (!step_text.empty()) text += cat(", in ", step_text);
  return text;
}

int attribute(int device, cudaDeviceAttr which) {
  int value = 0;
  check(cudaDeviceGetAttribute(&value, which, device), "device attribute");
  return value;
}

int current_device() {
  int device = 0;
  check(cudaGetDevice(&device), "current device");
  return device;
}

// Facts about a device and a kernel that launches need, cached per thread.
struct KnownKernel {
  std::size_t shared_bytes = kGivenShared;  // limit of dynamic shared memory
  bool divided = false;                     // carveout_setting() is set
};
struct Known {
  int major = 0;
  std::unordered_map<const void*, KnownKernel> kernels;
};

Known& known(int device) {
  thread_local std::unordered_map<int, Known> devices;
  auto& one = devices[device];
  if (one.major == 0) one.major = attribute(device, cudaDevAttrComputeCapabilityMajor);
  return one;
}

bool capturing(cudaStream_t stream) {
  auto status = cudaStreamCaptureStatusNone;
  return cudaStreamIsCapturing(stream, &status) == cudaSuccess && status != cudaStreamCaptureStatusNone;
}

void issue_copy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind, cudaStream_t stream,
                std::string_view what) {
  if (bytes > 0) check(cudaMemcpyAsync(to, from, bytes, kind, stream), what);
}

// Finds a function of the driver that has existed since this CUDA version.
template <class Call>
bool find_call(const char* name, Call& call, unsigned since) {
  void* at = nullptr;
  auto status = cudaDriverEntryPointSymbolNotFound;
  const auto result = cudaGetDriverEntryPointByVersion(name, &at, since, cudaEnableDefault, &status);
  if (result != cudaSuccess) (void)cudaGetLastError();
  if (result != cudaSuccess || status != cudaDriverEntryPointSuccess) return false;
  call = reinterpret_cast<Call>(at);
  return at != nullptr;
}

// Driver functions that allocate addresses and memory separately; the runtime has none.
struct AddressCalls {
  decltype(&cuDeviceGetAttribute) device_attribute = nullptr;
  decltype(&cuMemGetAllocationGranularity) granularity = nullptr;
  decltype(&cuMemAddressReserve) reserve = nullptr;
  decltype(&cuMemAddressFree) free = nullptr;
  decltype(&cuMemCreate) create = nullptr;
  decltype(&cuMemRelease) release = nullptr;
  decltype(&cuMemMap) map = nullptr;
  decltype(&cuMemUnmap) unmap = nullptr;
  decltype(&cuMemSetAccess) set_access = nullptr;
  decltype(&cuGetErrorString) error_string = nullptr;
  bool all = false;

  AddressCalls() {
    all = find("cuDeviceGetAttribute", device_attribute) && find("cuMemGetAllocationGranularity", granularity) &&
          find("cuMemAddressReserve", reserve) && find("cuMemAddressFree", free) && find("cuMemCreate", create) &&
          find("cuMemRelease", release) && find("cuMemMap", map) && find("cuMemUnmap", unmap) &&
          find("cuMemSetAccess", set_access) && find("cuGetErrorString", error_string);
  }

  void check(CUresult result, std::string_view operation) const {
    if (result == CUDA_SUCCESS) return;
    const char* text = nullptr;
    if (error_string(result, &text) != CUDA_SUCCESS || text == nullptr) text = "unknown error";
    throw Error(ErrorCode::internal, cat(operation, ": ", text, " (CUresult ", static_cast<int>(result), ")"));
  }

 private:
  template <class Call>
  static bool find(const char* name, Call& call) {
    return find_call(name, call, 10020);  // the CUDA version that has all of them
  }
};

const AddressCalls& address_calls() {
  static const AddressCalls calls;
  return calls;
}

CUmemAllocationProp memory_of(int device) {
  CUmemAllocationProp out{};
  out.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  out.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  out.location.id = device;
  return out;
}

}  // namespace

void check(cudaError_t result, std::string_view operation) {
  if (result == cudaSuccess) return;
  (void)cudaGetLastError();  // clears a recoverable error, so that the next call does not report it
  throw Error(ErrorCode::internal, what_failed(operation, result));
}

int device_count(std::string& why) {
  why.clear();
  int count = 0;
  const auto result = cudaGetDeviceCount(&count);
  if (result == cudaSuccess && count > 0) return count;
  (void)cudaGetLastError();
  switch (result) {
    case cudaErrorInsufficientDriver: {
      int driver = 0;
      if (cudaDriverGetVersion(&driver) != cudaSuccess || driver == 0) {
        why = "no NVIDIA driver was found (libcuda.so.1)";
      } else {
        why = cat("the NVIDIA driver is too old: it supports CUDA ", driver / 1000, ".", driver % 1000 / 10,
                  ", but this build needs ", CUDART_VERSION / 1000, ".0");
      }
      break;
    }
    case cudaSuccess:
    case cudaErrorNoDevice:
      why = "there is no NVIDIA GPU that this process can see (CUDA_VISIBLE_DEVICES?)";
      break;
    default:
      why = cat("CUDA cannot start: ", cudaGetErrorString(result));
  }
  return 0;
}

namespace {

// Its shared memory says whether it was compiled for 90a.
__global__ void probe_kernel(int* out) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  __shared__ int shared[1];
  shared[0] = *out;
  *out = *const_cast<volatile int*>(shared);
#endif
}

// Ten times the compute capability of the virtual architecture of a device's code, and whether it is for 90a.
struct Compiled {
  int architecture;
  bool sm_90a;
};
Compiled compiled_for(int index) {
  const OnDevice on(index);
  cudaFuncAttributes attributes{};
  check(cudaFuncGetAttributes(&attributes, probe_kernel), cat("device ", index, ": its kernels"));
  return {attributes.ptxVersion, attributes.sharedSizeBytes > 0};
}

}  // namespace

DeviceInfo device_info(int index) {
  cudaDeviceProp properties{};
  check(cudaGetDeviceProperties(&properties, index), cat("device ", index));
  const auto compiled = compiled_for(index);
  return {.index = index,
          .name = properties.name,
          .major = properties.major,
          .minor = properties.minor,
          .clusters = properties.major >= 9 && compiled.architecture >= 90,
          .wgmma = compiled.sm_90a,
          .fp8 = 10 * properties.major + properties.minor >= 89 && compiled.architecture >= 89,
          .sms = properties.multiProcessorCount,
          .shared_bytes = properties.sharedMemPerBlockOptin,
          .l2_bytes = static_cast<std::size_t>(std::max(properties.l2CacheSize, 0)),
          .total_bytes = properties.totalGlobalMem};
}

int major_capability(int index) {
  int major = 0;
  check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, index), cat("device ", index));
  return major;
}

OnDevice::OnDevice(int index) : before_(current_device()) {
  if (index == before_) {
    before_ = kNothingToRestore;
  } else {
    check(cudaSetDevice(index), cat("device ", index));
  }
}

OnDevice::~OnDevice() {
  if (before_ != kNothingToRestore) (void)cudaSetDevice(before_);
}

std::size_t free_device_bytes() {
  std::size_t free = 0, total = 0;
  check(cudaMemGetInfo(&free, &total), "free memory");
  return free;
}

void set_step(std::string text) { step_text = std::move(text); }

bool waits_for_every_launch() {
  static const bool waits = flag("CHARONIA_CUDA_SYNC", false);
  return waits;
}

std::uint64_t allocations() { return allocation_count.load(); }

DeviceMemory::DeviceMemory(std::size_t bytes, std::string_view what) : bytes_(bytes) {
  if (bytes == 0) return;
  ++allocation_count;
  const auto result = cudaMalloc(&data_, bytes);
  if (result == cudaErrorMemoryAllocation) {
    (void)cudaGetLastError();
    throw Error(ErrorCode::resource_exhausted, cat(what, ": ", bytes, " bytes are needed, but ", free_device_bytes(),
                                                   " are free on device ", current_device()));
  }
  check(result, what);
  try {
    // These streams do not wait for the default stream, so the memory must be zero before it is used.
    check(cudaMemset(data_, 0, bytes), what);
    check(cudaStreamSynchronize(cudaStreamLegacy), what);
  } catch (...) {
    (void)cudaFree(std::exchange(data_, nullptr));
    throw;
  }
}

DeviceMemory::~DeviceMemory() {
  if (data_ != nullptr) (void)cudaFree(data_);
}

std::size_t ReservedMemory::granularity() {
  const auto& calls = address_calls();
  if (!calls.all) return 0;
  const int device = current_device();
  check(cudaFree(nullptr), "start of the device");
  int can = 0;
  calls.check(calls.device_attribute(&can, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, device),
              "device attribute");
  if (can == 0) return 0;
  const auto properties = memory_of(device);
  std::size_t out = 0;
  calls.check(calls.granularity(&out, &properties, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED), "granularity of memory");
  return out;
}

ReservedMemory::ReservedMemory(std::size_t bytes, std::string_view what)
    : device_(current_device()), bytes_(bytes), what_(what) {
  const auto& calls = address_calls();
  CUdeviceptr at = 0;
  calls.check(calls.reserve(&at, bytes, 0, 0, 0), cat(what, ": addresses for ", bytes, " bytes"));
  data_ = reinterpret_cast<std::byte*>(at);
}

ReservedMemory::~ReservedMemory() {
  if (data_ == nullptr) return;
  int before = 0;
  (void)cudaGetDevice(&before);
  (void)cudaSetDevice(device_);
  (void)cudaDeviceSynchronize();  // unlike cudaFree, the calls below do not wait
  while (!chunks_.empty()) release_last();
  (void)address_calls().free(reinterpret_cast<CUdeviceptr>(data_), bytes_);
  (void)cudaSetDevice(before);
}

void ReservedMemory::commit(std::size_t offset, std::size_t bytes) {
  const auto& calls = address_calls();
  const auto properties = memory_of(device_);
  CUmemGenericAllocationHandle memory = 0;
  const auto result = calls.create(&memory, bytes, &properties, 0);
  if (result == CUDA_ERROR_OUT_OF_MEMORY) {
    throw Error(ErrorCode::resource_exhausted, cat(what_, ": ", bytes, " bytes are needed, but ", free_device_bytes(),
                                                   " are free on device ", device_));
  }
  calls.check(result, what_);
  const auto at = reinterpret_cast<CUdeviceptr>(data_ + offset);
  if (const auto mapped = calls.map(at, bytes, 0, memory, 0); mapped != CUDA_SUCCESS) {
    (void)calls.release(memory);
    calls.check(mapped, what_);
  }
  chunks_.push_back({offset, bytes, memory});
  ++allocation_count;
  try {
    CUmemAccessDesc access{};
    access.location = properties.location;
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    calls.check(calls.set_access(at, bytes, &access, 1), what_);
    check(cudaMemset(data_ + offset, 0, bytes), what_);
    check(cudaStreamSynchronize(cudaStreamLegacy), what_);
  } catch (...) {
    release_last();
    throw;
  }
}

void ReservedMemory::release_last() noexcept {
  const auto chunk = chunks_.back();
  chunks_.pop_back();
  (void)address_calls().unmap(reinterpret_cast<CUdeviceptr>(data_ + chunk.offset), chunk.bytes);
  (void)address_calls().release(chunk.memory);
}

PinnedMemory::PinnedMemory(std::size_t bytes) : bytes_(bytes) {
  if (bytes == 0) return;
  ++allocation_count;
  const auto result = cudaHostAlloc(&data_, bytes, cudaHostAllocPortable);
  if (result == cudaErrorMemoryAllocation) {
    (void)cudaGetLastError();
    throw Error(ErrorCode::resource_exhausted, cat("cannot allocate ", bytes, " bytes of page-locked host memory"));
  }
  check(result, "page-locked host memory");
  std::memset(data_, 0, bytes);
}

PinnedMemory::~PinnedMemory() {
  if (data_ != nullptr) (void)cudaFreeHost(data_);
}

TensorMap make_tensor_map(const TensorBox& box) {
  check(box);
  static const auto kEncode = [] {
    decltype(&cuTensorMapEncodeTiled) call = nullptr;
    (void)find_call("cuTensorMapEncodeTiled", call, 12000);
    return call;
  }();
  if (kEncode == nullptr) throw Error(ErrorCode::internal, "a tensor map: the driver has no cuTensorMapEncodeTiled");
  std::array<cuuint64_t, TensorBox::kMaxRank> sizes{}, strides{};
  std::array<cuuint32_t, TensorBox::kMaxRank> extent{}, steps{};
  for (std::size_t i = 0; i < static_cast<std::size_t>(box.rank); ++i) {
    sizes[i] = static_cast<cuuint64_t>(box.sizes[i]);
    if (i > 0) strides[i - 1] = static_cast<cuuint64_t>(box.strides[i]);
    extent[i] = static_cast<cuuint32_t>(box.box[i]);
    steps[i] = 1;
  }
  const auto swizzle = box.swizzle == Swizzle::none     ? CU_TENSOR_MAP_SWIZZLE_NONE
                       : box.swizzle == Swizzle::of_32 ? CU_TENSOR_MAP_SWIZZLE_32B
                       : box.swizzle == Swizzle::of_64 ? CU_TENSOR_MAP_SWIZZLE_64B
                                                       : CU_TENSOR_MAP_SWIZZLE_128B;
  TensorMap out;
  static_assert(sizeof(CUtensorMap) == sizeof out.bytes && alignof(CUtensorMap) <= alignof(TensorMap));
  const auto type = box.type == DType::i8     ? CU_TENSOR_MAP_DATA_TYPE_UINT8
                    : box.type == DType::bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                              : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  const auto result = kEncode(reinterpret_cast<CUtensorMap*>(&out), type, static_cast<cuuint32_t>(box.rank),
                              const_cast<void*>(box.data), sizes.data(), strides.data(), extent.data(), steps.data(),
                              CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                              CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    throw Error(ErrorCode::internal, cat("a tensor map was rejected (CUresult ", static_cast<int>(result), ")"));
  }
  return out;
}

Stream::Stream() { check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "stream"); }
Stream::~Stream() { (void)cudaStreamDestroy(stream_); }

void Stream::upload(void* device, const void* host, std::size_t bytes, std::string_view what) {
  issue_copy(device, host, bytes, cudaMemcpyHostToDevice, stream_, what);
}
void Stream::download(void* host, const void* device, std::size_t bytes, std::string_view what) {
  issue_copy(host, device, bytes, cudaMemcpyDeviceToHost, stream_, what);
}
void Stream::copy(void* to_device, const void* from_device, std::size_t bytes, std::string_view what) {
  issue_copy(to_device, from_device, bytes, cudaMemcpyDeviceToDevice, stream_, what);
}
void Stream::fill_zero(void* device, std::size_t bytes, std::string_view what) {
  if (bytes > 0) check(cudaMemsetAsync(device, 0, bytes, stream_), what);
}
void Stream::wait(std::string_view what) { check(cudaStreamSynchronize(stream_), what); }
void Stream::wait_for(const Event& event, std::string_view what) {
  check(cudaStreamWaitEvent(stream_, event.native(), cudaEventWaitDefault), what);
}

Event::Event(bool timing) {
  check(cudaEventCreateWithFlags(&event_, timing ? cudaEventDefault : cudaEventDisableTiming), "event");
}
Event::~Event() { (void)cudaEventDestroy(event_); }
void Event::record(Stream& stream) { check(cudaEventRecord(event_, stream.native()), "event"); }
void Event::wait(std::string_view what) const { check(cudaEventSynchronize(event_), what); }
float Event::milliseconds(const Event& begin, const Event& end) {
  float out = 0;
  check(cudaEventElapsedTime(&out, begin.event_, end.event_), "time between events");
  return out;
}

// Calls of other threads, such as another rank's, do not affect the capture.
void Graph::begin(Stream& stream) {
  check(cudaStreamBeginCapture(stream.native(), cudaStreamCaptureModeThreadLocal), "start of a capture");
}

Graph Graph::end(Stream& stream) {
  cudaGraph_t captured = nullptr;
  check(cudaStreamEndCapture(stream.native(), &captured), "end of a capture");
  Graph out;
  const auto result = cudaGraphInstantiate(&out.graph_, captured, 0);
  (void)cudaGraphDestroy(captured);
  check(result, "graph of a capture");
  check(cudaGraphUpload(out.graph_, stream.native()), "upload of a graph");
  return out;
}

void Graph::abandon(Stream& stream) noexcept {
  if (!capturing(stream.native())) return;
  cudaGraph_t captured = nullptr;
  (void)cudaStreamEndCapture(stream.native(), &captured);
  if (captured != nullptr) (void)cudaGraphDestroy(captured);
  (void)cudaGetLastError();
}

Graph::~Graph() {
  if (graph_ != nullptr) (void)cudaGraphExecDestroy(graph_);
}
void Graph::launch(Stream& stream, std::string_view what) const {
  check(cudaGraphLaunch(graph_, stream.native()), what);
  if (waits_for_every_launch()) stream.wait(what);
}

Stream& Branch::fork(Stream& main) {
  forked_.record(main);
  side_.wait_for(forked_, "branch of a graph");
  open_ = true;
  return side_;
}

void Branch::join(Stream& main) {
  if (!std::exchange(open_, false)) return;
  joined_.record(side_);
  main.wait_for(joined_, "branch of a graph");
}

namespace {

// Allows the kernel at least this number of bytes of dynamic shared memory, and returns the limit. The limit belongs to
// the process, and several threads may run engines that use a kernel with different sizes, so it only grows.
std::size_t allow_shared_bytes(const void* kernel, int device, std::size_t bytes, std::string_view what) {
  static std::mutex mutex;
  static std::map<std::pair<int, const void*>, std::size_t> allowed;
  const std::lock_guard lock(mutex);
  auto& now = allowed[{device, kernel}];
  if (bytes > now) {
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)), what);
    now = bytes;
  }
  return now;
}

}  // namespace

void launch_kernel(NativeStream stream, std::string_view what, const Launch& shape, NativeKernel kernel) {
  const auto* const function = kernel.function;
  const int index = current_device();
  auto& device = known(index);
  auto& of_kernel = device.kernels[function];
  if (!of_kernel.divided) {
    const int carveout = carveout_setting();
    if (carveout >= 0) {
      check(cudaFuncSetAttribute(function, cudaFuncAttributePreferredSharedMemoryCarveout, carveout), what);
    }
    of_kernel.divided = true;
  }
  if (shape.dynamic_shared_bytes > of_kernel.shared_bytes) {
    of_kernel.shared_bytes = allow_shared_bytes(function, index, shape.dynamic_shared_bytes, what);
  }
  std::array<cudaLaunchAttribute, 2> attributes{};
  unsigned count = 0;
  if (shape.overlap && device.major >= 9 && overlap_setting() != Overlap::off) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (shape.cluster_y > 1) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count].val.clusterDim.x = attributes[count].val.clusterDim.z = 1;
    attributes[count++].val.clusterDim.y = shape.cluster_y;
  }
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(shape.grid_x, shape.grid_y, shape.grid_z);
  config.blockDim = dim3(shape.threads);
  config.dynamicSmemBytes = shape.dynamic_shared_bytes;
  config.stream = stream;
  config.attrs = attributes.data();
  config.numAttrs = count;
  check(cudaLaunchKernelExC(&config, function, &kernel.argument), what);
  if (waits_for_every_launch() && !capturing(stream)) check(cudaStreamSynchronize(stream), what);
}

}  // namespace charonia::cuda
