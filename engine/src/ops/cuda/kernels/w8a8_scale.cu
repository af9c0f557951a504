// Scales integer sums that a library computed. Reads 4 bytes a sum, which are in the L2 cache if there are few enough.
#include "ops/cuda/kernels/element_types.h"
#include "ops/cuda/kernels/gemm_device.h"
#include "ops/cuda/kernels/w8a8_gemm.h"

namespace charonia::cuda {
namespace {

constexpr int kThreads = 256, kEach = 4;

struct ScaleParams {
  void* out;
  const std::int32_t* sums;
  const float* column_scales;
  const float* row_scales;
  const float* bias;
  std::int64_t out_stride, sums_stride;
  int columns;
};

template <class T>
CHARONIA_KERNEL(kThreads, 4)
void scale_kernel(const ScaleParams p) {
  dependency_trigger();
  dependency_wait();
  const std::int32_t* const sums = p.sums + blockIdx.x * p.sums_stride;
  T* const out = static_cast<T*>(p.out) + blockIdx.x * p.out_stride;
  const float of_row = p.row_scales[blockIdx.x];
  const int first = static_cast<int>(blockIdx.y) * (kThreads * kEach) + static_cast<int>(threadIdx.x);
  CHARONIA_UNROLL
  for (int i = 0; i < kEach; ++i) {
    const int column = first + i * kThreads;
    if (column >= p.columns) break;
    const float x = scaled(p.column_scales[column], static_cast<float>(sums[column]), of_row);
    out[column] = from_float<T>(p.bias == nullptr ? x : x + p.bias[column]);
  }
}

}  // namespace

void scale_sums(Stream& stream, const Gemm& gemm, std::int64_t first, const Gemm& sums) {
  const auto at = first * static_cast<std::int64_t>(size_of(gemm.out_type));
  const ScaleParams params{.out = static_cast<unsigned char*>(gemm.out) + at,
                           .sums = static_cast<const std::int32_t*>(sums.out),
                           .column_scales = gemm.quant->column_scales + first,
                           .row_scales = gemm.quant->row_scales,
                           .bias = gemm.bias == nullptr ? nullptr : gemm.bias + first,
                           .out_stride = gemm.out_stride,
                           .sums_stride = sums.out_stride,
                           .columns = static_cast<int>(sums.n)};
  const Launch shape{.grid_x = static_cast<unsigned>(gemm.rows),
                     .grid_y = static_cast<unsigned>(divide_up(sums.n, kThreads * kEach)),
                     .threads = kThreads};
  with_type(gemm.out_type, [&]<class T>(T) { launch(stream, "scales of sums", shape, &scale_kernel<T>, params); });
}

}  // namespace charonia::cuda
