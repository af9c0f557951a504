// Creates the CUDA device. In a build without CUDA these functions report that.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "ops/ops.h"

namespace charonia::ops {

struct CudaDevice {
  int index = 0;
  std::string name;          // "NVIDIA H200"
  int major = 0, minor = 0;  // compute capability
  bool fp8 = false;          // it has FP8, which an FP8 KV cache needs
  int sms = 0;
  std::size_t total_bytes = 0, free_bytes = 0;
};

inline constexpr std::string_view kNoFp8Cache =
    "quant_policy = 16 (fp8) needs a GPU of compute capability 8.9 or newer, and an engine that is compiled for it: "
    "set quant_policy = 8, or device = cpu";

// The usable devices: compute capability 8.0 and newer. If there are none, `why` has the reason for the user: no
// driver, no device, too old, or a build without CUDA.
std::vector<CudaDevice> cuda_devices(std::string& why);

// The number of usable devices. Unlike cuda_devices(), creates no context, which takes memory of each GPU until the
// process ends.
int num_cuda_devices();

inline Precision cuda_precision(DType weight) {
  return {.weight = weight, .residual = DType::f32, .gemm_out = weight, .activation = weight, .kv = weight};
}

struct CudaOptions {
  int device = 0;             // index among the devices that the process sees
  bool reproducible = false;  // one instruction path and one order of sums for any batch
  bool graphs = true;         // capture decode steps and replay them
  // Whether experts with quantised weights (ExpertKernels) and attention of prompts (PromptKernels) use wgmma where they
  // can, without a measurement. Not in reproducible mode.
  std::optional<bool> wgmma_experts{}, wgmma_prompts{};
};

// The group of ranks of one process that communicate through NCCL, in the order of `devices`. Throws Error(unavailable)
// with the library's name if NCCL cannot be found. Several ranks on one device, for tests, do not need NCCL.
class NcclGroup;
std::shared_ptr<NcclGroup> make_nccl_group(const std::vector<int>& devices);

// Throws Error: unsupported (no such device, or too old), unavailable (a library is missing), with the remedy.
std::unique_ptr<Ops> make_cuda_ops(const CudaOptions& options, std::shared_ptr<NcclGroup> group = nullptr,
                                   int rank = 0);

}  // namespace charonia::ops
