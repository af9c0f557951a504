// The sum of the ranks' shards. A thread adds the 16 bytes at its position of each rank, so that every element is added
// in rank order for any number of rows. Memory bound: ranks + 1 times the tensor.
#include "ops/cuda/kernels/collective.h"

#include "ops/cuda/device/portable.h"
#include "ops/cuda/kernels/element_types.h"

namespace charonia::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kBytes = 16;  // per thread

struct SumParams {
  void* out;
  const void* shards;
  std::int64_t elements;  // of a shard
  int ranks;
};

template <class T>
CHARONIA_KERNEL(kThreads, 1)
void sum_kernel(const SumParams p) {
  constexpr int kElements = kBytes / static_cast<int>(sizeof(T));
  dependency_wait();
  const auto first = (static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x) * kElements;
  const auto* const shards = static_cast<const T*>(p.shards);
  auto* const out = static_cast<T*>(p.out);
  if (first < p.elements) {
    float sum[kElements];
    CHARONIA_UNROLL
    for (int i = 0; i < kElements; ++i) sum[i] = 0;
    // If the size is a multiple of 16 bytes, all shards are aligned to 16 bytes and have no rest.
    if (p.elements % kElements == 0) {
      for (int rank = 0; rank < p.ranks; ++rank) {
        alignas(kBytes) T x[kElements];
        *reinterpret_cast<uint4*>(x) = *reinterpret_cast<const uint4*>(shards + rank * p.elements + first);
        CHARONIA_UNROLL
        for (int i = 0; i < kElements; ++i) sum[i] += to_float(x[i]);
      }
      alignas(kBytes) T x[kElements];
      CHARONIA_UNROLL
      for (int i = 0; i < kElements; ++i) x[i] = from_float<T>(sum[i]);
      *reinterpret_cast<uint4*>(out + first) = *reinterpret_cast<const uint4*>(x);
    } else {
      CHARONIA_UNROLL
      for (int i = 0; i < kElements; ++i) {
        if (first + i >= p.elements) continue;
        float one = 0;
        for (int rank = 0; rank < p.ranks; ++rank) one += to_float(shards[rank * p.elements + first + i]);
        out[first + i] = from_float<T>(one);
      }
    }
  }
  dependency_trigger();
}

template <class T>
void launch_sum(Stream& stream, const SumParams& params) {
  const auto threads = divide_up(params.elements, kBytes / static_cast<int>(sizeof(T)));
  launch(stream, "sum of the ranks' shards",
         {.grid_x = static_cast<unsigned>(divide_up(threads, kThreads)), .threads = kThreads}, sum_kernel<T>, params);
}

}  // namespace

void sum_shards(Stream& stream, const ops::Tensor& out, const void* shards, int ranks) {
  const SumParams params{out.data, shards, out.rows * out.cols, ranks};
  with_type(out.dtype, [&]<class T>(T) { launch_sum<T>(stream, params); });
}

}  // namespace charonia::cuda
