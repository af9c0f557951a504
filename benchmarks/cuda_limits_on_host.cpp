// The same kernels on the CPU: see ops/cuda/device/portable.h.
#include "cuda_limits.cu"
