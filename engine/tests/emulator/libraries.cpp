// The emulated device has no libraries: ranks share memory, GEMMs are not timed, and cuBLASLt can be replaced by tests.
#include <utility>

#include "emulator/emulated_device.h"
#include "ops/cuda/collectives/local_collectives.h"
#include "ops/cuda/gemm/gemm_runner.h"

namespace charonia::cuda {
namespace {

std::function<std::unique_ptr<Blas>()> host_blas;

}  // namespace

void set_host_blas(std::function<std::unique_ptr<Blas>()> make) { host_blas = std::move(make); }

std::unique_ptr<Blas> load_cublas(std::string& why) {
  why.clear();
  if (host_blas) return host_blas();
  why = "kernels run on the CPU here, and cuBLASLt does not";
  return nullptr;
}

std::string driver_version() { return "host"; }

GemmTimer make_gemm_timer() { return nullptr; }

}  // namespace charonia::cuda

namespace charonia::ops {

std::string nccl_missing() { return {}; }

std::shared_ptr<NcclGroup> make_nccl_group(const std::vector<int>& devices) {
  return std::make_shared<cuda::LocalCollectives>(devices.empty() ? 0 : devices.front(),
                                                  static_cast<int>(devices.size()));
}

}  // namespace charonia::ops
