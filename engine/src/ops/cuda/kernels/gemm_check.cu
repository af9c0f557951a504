// Counts the outputs of a kernel that differ from a reference: the self-check of kernels at the start of an engine.
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
  std::int64_t stride, reference_stride;
  int n;
  float relative, absolute;  // tolerances
};

// A thread block compares a row.
template <class T>
CHARONIA_KERNEL(kThreads, 4)
void check_kernel(const CheckParams p) {
  dependency_wait();
  dependency_trigger();
  const T* const out = static_cast<const T*>(p.out) + blockIdx.x * p.stride;
  const T* const reference = static_cast<const T*>(p.reference) + blockIdx.x * p.reference_stride;
  unsigned different = 0;
  for (int i = static_cast<int>(threadIdx.x); i < p.n; i += kThreads) {
    const float x = to_float(out[i]), right = to_float(reference[i]);
    // Written so that NaN differs.
    if (!(x == right || fabsf(x - right) <= p.relative * fabsf(right) + p.absolute)) ++different;
  }
  if (different > 0) atomicAdd(p.different, different);
}

void count(Stream& stream, const ops::Tensor& out, const void* reference, std::int64_t reference_stride, float relative,
           float absolute, unsigned* different) {
  const CheckParams params{.out = out.data,
                           .reference = reference,
                           .different = different,
                           .stride = out.stride,
                           .reference_stride = reference_stride,
                           .n = static_cast<int>(out.cols),
                           .relative = relative,
                           .absolute = absolute};
  const Launch shape{.grid_x = static_cast<unsigned>(out.rows), .threads = kThreads};
  with_type(out.dtype, [&]<class T>(T) { launch(stream, "check of results", shape, &check_kernel<T>, params); });
}

}  // namespace

void count_different(Stream& stream, const Gemm& gemm, std::int64_t columns, const void* reference,
                     std::int64_t reference_stride, unsigned* different) {
  const float roundoff = gemm.out_type == DType::f32 ? 0x1p-24F : gemm.out_type == DType::f16 ? 0x1p-11F : 0x1p-8F;
  count(stream, {gemm.out, gemm.out_type, gemm.rows, columns, gemm.out_stride}, reference, reference_stride,
        4 * roundoff, 2 * roundoff * kMaxCheckedBias, different);
}

void count_different(Stream& stream, const ops::Tensor& out, const void* reference, float relative, float absolute,
                     unsigned* different) {
  count(stream, out, reference, out.stride, relative, absolute, different);
}

}  // namespace charonia::cuda
