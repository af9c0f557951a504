#include "ops/cuda/kernels/sample_kernels.h"

namespace charonia::cuda::sampling {

void run_plain(Stream& stream, const SampleKernelParams& p, const Launch& scan, const Launch& histogram) {
  run<false>(stream, p, scan, histogram);
}

void scan_originals(Stream& stream, SampleKernelParams p, const Launch& scan) {
  p.originals = true;
  launch(stream, "sample: scan of the unmodified", scan, scan_kernel<false>, p);
}

}  // namespace charonia::cuda::sampling
