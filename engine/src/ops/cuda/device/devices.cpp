// Lists the CUDA devices and creates the operations of one of them.
#include "base/text.h"
#include "charonia/error.h"
#include "ops/cuda/collectives/nccl.h"
#include "ops/cuda/cuda_ops.h"
#include "ops/cuda/make_cuda_ops.h"

namespace charonia::ops {
namespace {

constexpr int kOldest = 8;  // oldest supported compute capability

std::string too_old(const cuda::DeviceInfo& info) {
  return cat("device ", info.index, " (", info.name, ") has compute capability ", info.major, ".", info.minor, "; ",
             kOldest, ".0 or newer is needed");
}

}  // namespace

std::vector<CudaDevice> cuda_devices(std::string& why) {
  std::vector<CudaDevice> out;
  const int count = cuda::device_count(why);
  if (count == 0) return out;
  try {
    for (int i = 0; i < count; ++i) {
      const auto info = cuda::device_info(i);
      if (info.major < kOldest) {
        why = too_old(info);
        continue;
      }
      const cuda::OnDevice on(i);
      out.push_back({.index = i,
                     .name = info.name,
                     .major = info.major,
                     .minor = info.minor,
                     .fp8 = info.fp8,
                     .sms = info.sms,
                     .total_bytes = info.total_bytes,
                     .free_bytes = cuda::free_device_bytes()});
    }
  } catch (const Error& error) {
    why = error.what();
    return {};
  }
  if (!out.empty()) why.clear();
  return out;
}

int num_cuda_devices() {
  std::string why;
  const int count = cuda::device_count(why);
  int usable = 0;
  for (int i = 0; i < count; ++i) usable += cuda::major_capability(i) >= kOldest;
  return usable;
}

std::unique_ptr<Ops> make_cuda_ops(const CudaOptions& options, std::shared_ptr<NcclGroup> group, int rank) {
  std::string why;
  const int count = cuda::device_count(why);
  if (count == 0) {
    throw Error(ErrorCode::unsupported, cat("device = cuda: ", why, ". Fix this, or set device = cpu"));
  }
  if (options.device < 0 || options.device >= count) {
    throw Error(ErrorCode::unsupported, cat("CUDA device ", options.device, " does not exist: this process sees ",
                                            count, " devices, numbered from 0 (CUDA_VISIBLE_DEVICES)"));
  }
  const auto info = cuda::device_info(options.device);
  if (info.major < kOldest) throw Error(ErrorCode::unsupported, too_old(info));
  cuda::check_settings();
  const cuda::OnDevice on(options.device);
  return std::make_unique<cuda::CudaOps>(options, std::move(group), rank);
}

}  // namespace charonia::ops
