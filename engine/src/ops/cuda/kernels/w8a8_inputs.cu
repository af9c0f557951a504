// Converts the inputs of a GEMM of 8-bit numbers: codes, and a scale for each row.
//
// A block takes a row: once for its largest element, once for its codes. Bound: launch latency, and memory for many
// rows: an element is read twice, the second time from the cache, and a byte is written.
#include <algorithm>

#include "ops/cuda/kernels/element_types.h"
#include "ops/cuda/kernels/row_vectors.h"
#include "ops/cuda/kernels/w8a8_gemm.h"
#include "ops/cuda/kernels/w8a8_rows.h"

namespace charonia::cuda {
namespace {

constexpr int kThreads = 256;

struct InputParams {
  const void* in;  // [rows, in_stride]
  unsigned char* codes;
  const std::int32_t* order;  // null: ascending
  float* scales;
  std::int64_t in_stride;
  int k;
  float scale;   // 0: one scale per row
  bool vectors;  // rows can be read 16 bytes at a time
};

template <class T>
CHARONIA_DEVICE void load_eight(const InputParams& p, const T* row, int at, float (&x)[kVector]) {
  if (p.order == nullptr) return to_floats(load_raw(row, at, p.k, p.vectors), x);
  CHARONIA_UNROLL
  for (int i = 0; i < kVector; ++i) x[i] = to_float(row[p.order[at + i]]);
}

template <class T, bool kFp8>
CHARONIA_KERNEL(kThreads, 4)
void quantise_kernel(const InputParams p) {
  CHARONIA_SHARED(float, scratch, [kWarp]);
  dependency_trigger();
  dependency_wait();
  const std::int64_t row = blockIdx.x;
  const T* const in = static_cast<const T*>(p.in) + row * p.in_stride;
  const int first = static_cast<int>(threadIdx.x) * kVector, step = static_cast<int>(blockDim.x) * kVector;
  float greatest = 0, x[kVector];
  for (int at = first; at < p.k; at += step) {
    load_eight(p, in, at, x);
    CHARONIA_UNROLL
    for (int i = 0; i < kVector; ++i) greatest = fmaxf(greatest, magnitude(x[i]));
  }
  const float scale = scale_of_row<kFp8>(block_max(greatest, scratch), p.scale);
  if (threadIdx.x == 0) p.scales[row] = scale;
  for (int at = first; at < p.k; at += step) {
    load_eight(p, in, at, x);
    *reinterpret_cast<uint2*>(p.codes + row * p.k + at) = codes_of<kFp8>(x, scale);
  }
}

template <class T>
void launch_typed(Stream& stream, const InputParams& p, const Launch& shape, bool fp8) {
  const auto* const what = "inputs of a GEMM of 8-bit numbers";
  if constexpr (sizeof(T) == 2) {
    if (fp8) return launch(stream, what, shape, &quantise_kernel<T, true>, p);
  }
  launch(stream, what, shape, &quantise_kernel<T, false>, p);
}

}  // namespace

void quantise_inputs(Stream& stream, const Gemm& gemm, void* codes, float* scales) {
  const auto& quant = *gemm.quant;
  const InputParams p{.in = gemm.in,
                      .codes = static_cast<unsigned char*>(codes),
                      .order = quant.order,
                      .scales = scales,
                      .in_stride = gemm.in_stride,
                      .k = static_cast<int>(gemm.k),
                      .scale = quant.input_scale,
                      .vectors = vectors(gemm)};
  const Launch shape{
      .grid_x = static_cast<unsigned>(gemm.rows),
      .threads = static_cast<unsigned>(std::min<std::int64_t>(kThreads, round_up(divide_up(gemm.k, kVector), kWarp)))};
  const bool fp8 = quant.format.code == ops::Code::f8_e4m3;
  with_type(gemm.type, [&]<class T>(T) { launch_typed<T>(stream, p, shape, fp8); });
}

}  // namespace charonia::cuda
