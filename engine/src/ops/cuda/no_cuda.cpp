// The CUDA device in a build without CUDA.
#include "charonia/error.h"
#include "ops/cuda/make_cuda_ops.h"

namespace charonia::ops {
namespace {

constexpr const char* kWhy =
    "this build has no CUDA; build it on a machine with nvcc and a GPU (make setup), or set device = cpu";

}  // namespace

std::vector<CudaDevice> cuda_devices(std::string& why) {
  why = kWhy;
  return {};
}

int num_cuda_devices() { return 0; }

std::shared_ptr<NcclGroup> make_nccl_group(const std::vector<int>&) { throw Error(ErrorCode::unsupported, kWhy); }

std::unique_ptr<Ops> make_cuda_ops(const CudaOptions&, std::shared_ptr<NcclGroup>, int) {
  throw Error(ErrorCode::unsupported, kWhy);
}

}  // namespace charonia::ops
