#include "ops/cuda/collectives/nccl.h"

#include <atomic>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include <nccl.h>

#include "base/text.h"
#include "charonia/error.h"
#include "ops/cuda/collectives/local_collectives.h"
#include "ops/cuda/device/library.h"

namespace charonia::ops {
namespace {

constexpr const char* kInstall = "install it with: pip install nvidia-nccl-cu13, or set CHARONIA_NCCL to its path";

// NCCL's functions, from the loaded library.
class Nccl {
 public:
  static const Nccl& get() {
    static const Nccl one;
    return one;
  }

  const std::string& missing() const { return missing_; }

  decltype(&ncclCommInitAll) comm_init_all = nullptr;
  decltype(&ncclCommDestroy) comm_destroy = nullptr;
  decltype(&ncclCommAbort) comm_abort = nullptr;
  decltype(&ncclAllReduce) all_reduce = nullptr;
  decltype(&ncclAllGather) all_gather = nullptr;
  decltype(&ncclGetErrorString) error_string = nullptr;
  decltype(&ncclGetLastError) last_error = nullptr;

  void check(ncclResult_t result, std::string_view operation, ncclComm_t comm = nullptr) const {
    if (result == ncclSuccess) return;
    const char* const detail = last_error(comm);
    throw Error(ErrorCode::internal,
                cat("NCCL ", operation, ": ", error_string(result), " (", detail == nullptr ? "" : detail, ")"));
  }

 private:
  Nccl() : library_("CHARONIA_NCCL", {"libnccl.so.2"}, {"nvidia/nccl/lib"}) {
    if (!library_) {
      missing_ = cat("NCCL, which ranks on several GPUs need, was not found: ", library_.why(), "; ", kInstall);
      return;
    }
    get(comm_init_all, "ncclCommInitAll");
    get(comm_destroy, "ncclCommDestroy");
    get(comm_abort, "ncclCommAbort");
    get(all_reduce, "ncclAllReduce");
    get(all_gather, "ncclAllGather");
    get(error_string, "ncclGetErrorString");
    get(last_error, "ncclGetLastError");
  }

  template <class Function>
  void get(Function& function, const char* name) {
    function = reinterpret_cast<Function>(library_.symbol(name));
    if (function == nullptr) missing_ = cat(library_.path(), " has no ", name, "; ", kInstall);
  }

  cuda::Library library_;
  std::string missing_;
};

ncclDataType_t nccl_type(DType type) {
  switch (type) {
    case DType::f32:
      return ncclFloat32;
    case DType::f16:
      return ncclFloat16;
    case DType::bf16:
      return ncclBfloat16;
    default:
      throw Error(ErrorCode::internal, cat("NCCL: unsupported type ", to_string(type)));
  }
}

class LibraryGroup final : public NcclGroup {
 public:
  explicit LibraryGroup(const std::vector<int>& devices) : comms_(devices.size()) {
    nccl_.check(nccl_.comm_init_all(comms_.data(), static_cast<int>(devices.size()), devices.data()),
                cat("set-up of ", devices.size(), " ranks"));
  }
  ~LibraryGroup() override {
    for (const auto comm : comms_) {
      if (!aborted_) (void)nccl_.comm_destroy(comm);
    }
  }
  LibraryGroup(const LibraryGroup&) = delete;
  LibraryGroup& operator=(const LibraryGroup&) = delete;

  int ranks() const override { return static_cast<int>(comms_.size()); }
  bool capturable() const override { return true; }

  void all_reduce(cuda::Stream& stream, int rank, void* data, DType type, std::int64_t count) override {
    check();  // another rank may have aborted the communicator during this step
    const auto comm = comms_[static_cast<std::size_t>(rank)];
    nccl_.check(
        nccl_.all_reduce(data, data, static_cast<std::size_t>(count), nccl_type(type), ncclSum, comm, stream.native()),
        "all-reduce", comm);
  }

  void all_gather(cuda::Stream& stream, int rank, void* out, const void* in, std::size_t bytes) override {
    check();  // another rank may have aborted the communicator during this step
    const auto comm = comms_[static_cast<std::size_t>(rank)];
    nccl_.check(nccl_.all_gather(in, out, bytes, ncclUint8, comm, stream.native()), "all-gather", comm);
  }

  // Kernels of other ranks would wait for this rank's kernels forever, so they must be aborted. That also ends the
  // communicator, which captured steps use.
  void abort(int rank, std::string_view why) noexcept override {
    const std::lock_guard lock(mutex_);
    if (aborted_) return;
    aborted_ = true;
    try {
      why_ = cat("rank ", rank, ": ", why);
    } catch (...) {  // keep the error without its reason
    }
    for (const auto comm : comms_) (void)nccl_.comm_abort(comm);
  }
  void check() override {
    if (!aborted_) return;
    const std::lock_guard lock(mutex_);
    throw Error(ErrorCode::internal, cat("the collectives between GPUs were aborted: ", why_));
  }

 private:
  const Nccl& nccl_ = Nccl::get();
  std::vector<ncclComm_t> comms_;
  std::atomic<bool> aborted_ = false;
  std::mutex mutex_;
  std::string why_;  // guarded by mutex_
};

}  // namespace

std::string nccl_missing() { return Nccl::get().missing(); }

std::shared_ptr<NcclGroup> make_nccl_group(const std::vector<int>& devices) {
  if (devices.empty()) throw Error(ErrorCode::invalid_argument, "ranks need at least one device");
  const std::set<int> different(devices.begin(), devices.end());
  if (different.size() == 1 && devices.size() > 1) {
    return std::make_shared<cuda::LocalCollectives>(devices.front(), static_cast<int>(devices.size()));
  }
  if (different.size() != devices.size()) {
    throw Error(ErrorCode::invalid_argument, "ranks must have one device each, or all the same device");
  }
  if (auto missing = nccl_missing(); !missing.empty()) throw Error(ErrorCode::unavailable, missing);
  return std::make_shared<LibraryGroup>(devices);
}

}  // namespace charonia::ops
