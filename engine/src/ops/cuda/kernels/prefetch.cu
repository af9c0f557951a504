#include "ops/cuda/kernels/prefetch.h"

#include <algorithm>

#include "ops/cuda/device/portable.h"

namespace charonia::cuda {
namespace {

constexpr int kThreads = 128;
constexpr std::size_t kLine = 128, kMaxBlocks = 64;  // few, because the SMs are busy with another kernel

struct PrefetchParams {
  const unsigned char* from;
  std::size_t bytes;
};

CHARONIA_KERNEL(kThreads, 1)
void prefetch_kernel(const PrefetchParams p) {
  const std::size_t step = kLine * kThreads * gridDim.x;
  for (std::size_t at = kLine * (blockIdx.x * kThreads + threadIdx.x); at < p.bytes; at += step)
    prefetch_l2(p.from + at);
}

}  // namespace

void prefetch(Stream& stream, const void* from, std::size_t bytes) {
  const auto blocks = std::min(kMaxBlocks, (bytes + kLine * kThreads - 1) / (kLine * kThreads));
  launch(stream, "prefetch", {.grid_x = static_cast<unsigned>(blocks), .threads = kThreads, .overlap = false},
         &prefetch_kernel, PrefetchParams{static_cast<const unsigned char*>(from), bytes});
}

}  // namespace charonia::cuda
