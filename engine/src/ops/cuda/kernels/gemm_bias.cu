// out [rows, n] += bias [n]: the bias of GEMMs that a library computed. Reads and writes the outputs once more; they
// are still in the L2 cache, unless there are many.
#include "ops/cuda/device/portable.h"
#include "ops/cuda/kernels/element_types.h"
#include "ops/cuda/kernels/gemm.h"

namespace charonia::cuda {
namespace {

constexpr int kThreads = 256, kEach = 4;

struct BiasParams {
  void* out;
  const float* bias;
  std::int64_t stride;
  int n;
};

template <class T>
CHARONIA_KERNEL(kThreads, 4)
void bias_kernel(const BiasParams p) {
  dependency_trigger();
  dependency_wait();
  T* const row = static_cast<T*>(p.out) + blockIdx.x * p.stride;
  const int first = static_cast<int>(blockIdx.y) * (kThreads * kEach) + static_cast<int>(threadIdx.x);
  CHARONIA_UNROLL
  for (int i = 0; i < kEach; ++i) {
    const int column = first + i * kThreads;
    if (column < p.n) row[column] = from_float<T>(to_float(row[column]) + p.bias[column]);
  }
}

}  // namespace

void add_bias(Stream& stream, const Gemm& gemm) {
  if (gemm.bias == nullptr) return;
  const BiasParams params{gemm.out, gemm.bias, gemm.out_stride, static_cast<int>(gemm.n)};
  const Launch shape{.grid_x = static_cast<unsigned>(gemm.rows),
                     .grid_y = static_cast<unsigned>(divide_up(gemm.n, kThreads * kEach)),
                     .threads = kThreads};
  with_type(gemm.out_type, [&]<class T>(T) { launch(stream, "bias", shape, &bias_kernel<T>, params); });
}

}  // namespace charonia::cuda
