// Programmatic dependent launch on and off, for benchmarks that measure what it gains.
#pragma once

namespace charonia::cuda {

// Whether launches may overlap the kernel before them, from now on and in all threads, where the device can. At first:
// unless the environment has CHARONIA_CUDA_PDL=0. Captured launches stay as they were captured.
#if defined(CHARONIA_CUDA_ON_HOST)
inline void allow_overlap(bool) {}  // the host runs one kernel after the other
#else
void allow_overlap(bool allowed);
#endif

}  // namespace charonia::cuda
