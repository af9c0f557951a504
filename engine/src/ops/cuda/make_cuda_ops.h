// The CUDA device, as the runtime sees it. In a build without CUDA these functions say that it has none.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "ops/ops.h"

namespace charonia::ops {

struct CudaDevice {
  int index = 0;
  std::string name;          // "NVIDIA H200"
  int major = 0, minor = 0;  // compute capability
  int sms = 0;
  std::size_t total_bytes = 0, free_bytes = 0;
};

// The devices that can be used: compute capability 8.0 and newer. When there is none, `why` says so in words for a
// user: no driver, no device, too old, a build without CUDA.
std::vector<CudaDevice> cuda_devices(std::string& why);

inline Precision cuda_precision(DType weight) {
  return {.weight = weight, .residual = DType::f32, .gemm_out = weight, .activation = weight, .kv = weight};
}

struct CudaOptions {
  int device = 0;             // index into what the process sees
  bool reproducible = false;  // one instruction path and one order of sums whatever the batch
  bool graphs = true;         // capture decode steps and replay them
};

// Ranks of one process that communicate over NCCL, in the order of `devices`. Throws Error(unavailable) naming the
// library when NCCL is not to be found. Several ranks on one device, for tests, do without it.
class NcclGroup;
std::shared_ptr<NcclGroup> make_nccl_group(const std::vector<int>& devices);

// Throws Error: unsupported (no such device, too old), unavailable (a library is missing), with what to do.
std::unique_ptr<Ops> make_cuda_ops(const CudaOptions& options, std::shared_ptr<NcclGroup> group = nullptr,
                                   int rank = 0);

}  // namespace charonia::ops
