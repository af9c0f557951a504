// The CUDA runtime's types for runtime.h.
#pragma once

#include <cuda_runtime.h>

#include <string_view>

namespace charonia::cuda {

using NativeStream = cudaStream_t;
using NativeEvent = cudaEvent_t;
using NativeGraph = cudaGraphExec_t;
// Throws the errors that runtime.h describes.
void check(cudaError_t result, std::string_view operation);

// A kernel with its argument, which must live until the launch.
struct NativeKernel {
  const void* function;
  void* argument;
};
template <class Params>
NativeKernel bind_kernel(void (*kernel)(Params), Params& params) {
  return {reinterpret_cast<const void*>(kernel), &params};
}

}  // namespace charonia::cuda
