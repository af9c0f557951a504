#include "ops/cuda/kernels/sample_kernels.h"

namespace charonia::cuda::sampling {

void run_changed(Stream& stream, const SampleKernelParams& p, const Launch& scan, const Launch& histogram) {
  run<true>(stream, p, scan, histogram);
}

}  // namespace charonia::cuda::sampling
