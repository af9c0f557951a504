// Switches programmatic dependent launch on and off, for benchmarks of its effect.
#pragma once

namespace charonia::cuda {

// Whether launches may overlap the previous kernel, from now on in all threads, if the device supports it. Initially
// true, unless CHARONIA_CUDA_PDL=0 is set. Captured launches do not change.
#if defined(CHARONIA_CUDA_ON_HOST)
inline void allow_overlap(bool) {}  // the emulated device runs one kernel after another
#else
void allow_overlap(bool allowed);
#endif

}  // namespace charonia::cuda
