// Counts the outputs of a GEMM that differ from a reference: the self-check of kernels at the start of an engine.
#include "ops/cuda/device/portable.h"
#include "ops/cuda/kernels/element_types.h"
#include "ops/cuda/kernels/gemm.h"

namespace charonia::cuda {
namespace {

constexpr int kThreads = 256;

struct CheckParams {
  const void* out;
  const void* reference;
  unsigned* different;
  std::int64_t stride;
  int n;
};

// A thread block compares a row.
template <class T>
CHARONIA_KERNEL(kThreads, 4)
void check_kernel(const CheckParams p) {
  CHARONIA_SHARED(float, scratch, [32]);
  dependency_wait();
  dependency_trigger();
  const T* const out = static_cast<const T*>(p.out) + blockIdx.x * p.stride;
  const T* const reference = static_cast<const T*>(p.reference) + blockIdx.x * p.stride;
  float sum = 0;
  for (int i = static_cast<int>(threadIdx.x); i < p.n; i += kThreads) {
    const float x = to_float(reference[i]);
    if (fabsf(x) <= 0x1p60F) sum = fmaf(x, x, sum);
  }
  const float size = sqrtf(block_sum(sum, scratch) / static_cast<float>(p.n));
  unsigned different = 0;
  for (int i = static_cast<int>(threadIdx.x); i < p.n; i += kThreads) {
    const float x = to_float(reference[i]);
    // A sum that leaves the range of the type depends on the order of additions. Written so that NaN differs.
    if (fabsf(x) <= 0x1p60F && !(fabsf(to_float(out[i]) - x) <= kGemmTolerance * (size + fabsf(x)))) ++different;
  }
  if (different > 0) atomicAdd(p.different, different);
}

}  // namespace

void count_different(Stream& stream, const Gemm& gemm, std::int64_t columns, const void* reference,
                     unsigned* different) {
  const CheckParams params{gemm.out, reference, different, gemm.out_stride, static_cast<int>(columns)};
  const Launch shape{.grid_x = static_cast<unsigned>(gemm.rows), .threads = kThreads};
  with_type(gemm.out_type, [&]<class T>(T) { launch(stream, "check of a GEMM", shape, &check_kernel<T>, params); });
}

}  // namespace charonia::cuda
