// The two kernels of cuda_limits.h. Nothing but reads, and nothing but GEMMs: results are folded into a number that
// decides whether anything is written, so that the compiler keeps them.
#include "cuda_limits.h"

#include "ops/cuda/device/tensor_core.h"

namespace charonia::bench {
namespace {

using namespace charonia::cuda;

constexpr int kReadThreads = 512, kReadsAtOnce = 4, kReadBlocks = 4;  // blocks per SM
constexpr int kGemmThreads = 256, kGemmBlocks = 2;
constexpr int kSums = 8;  // independent GEMMs of a warp: more than the instruction's latency needs
constexpr std::uint32_t kNever = 0x9e3779b9U;

struct ReadParams {
  const uint4* data;
  std::int64_t count;
  std::uint32_t* sink;
};

CHARONIA_KERNEL(kReadThreads, kReadBlocks)
void read_kernel(const ReadParams p) {
  dependency_wait();
  const std::int64_t stride = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  std::int64_t at = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  std::uint32_t folded = 0;
  for (; at + (kReadsAtOnce - 1) * stride < p.count; at += kReadsAtOnce * stride) {
    uint4 words[kReadsAtOnce];
    CHARONIA_UNROLL
    for (int i = 0; i < kReadsAtOnce; ++i) words[i] = load_streaming(p.data + at + i * stride);
    CHARONIA_UNROLL
    for (int i = 0; i < kReadsAtOnce; ++i) folded ^= words[i].x ^ words[i].y ^ words[i].z ^ words[i].w;
  }
  for (; at < p.count; at += stride) {
    const uint4 words = load_streaming(p.data + at);
    folded ^= words.x ^ words.y ^ words.z ^ words.w;
  }
  if (folded == kNever) *p.sink = folded;
}

struct ProductParams {
  int iterations;
  float* sink;
};

CHARONIA_KERNEL(kGemmThreads, kGemmBlocks)
void gemm_kernel(const ProductParams p) {
  dependency_wait();
  // Small numbers of all kinds, so that the arithmetic draws what real operands draw.
  const std::uint32_t one = 0x3c003c00U + (threadIdx.x * 0x01930571U & 0x007f007fU);
  const std::uint32_t a[4] = {one, one ^ 0x80000000U, one ^ 0x00008000U, one ^ 0x00130029U};
  const std::uint32_t b[2] = {one ^ 0x00050011U, one ^ 0x80000003U};
  float sums[kSums][4] = {};
  for (int i = 0; i < p.iterations; ++i) {
    CHARONIA_UNROLL
    for (int s = 0; s < kSums; ++s) mma_m16n8k16<bf16>(sums[s], a, b);
  }
  float folded = 0;
  CHARONIA_UNROLL
  for (int s = 0; s < kSums; ++s) folded += sums[s][0] + sums[s][1] + sums[s][2] + sums[s][3];
  if (folded == 12345.678F) *p.sink = folded;
}

}  // namespace

void read_all(Stream& stream, const DeviceInfo& device, const void* data, std::int64_t bytes, std::uint32_t* sink) {
  launch(stream, "read of memory", {.grid_x = static_cast<unsigned>(device.sms * kReadBlocks), .threads = kReadThreads},
         read_kernel,
         ReadParams{static_cast<const uint4*>(data), bytes / static_cast<std::int64_t>(sizeof(uint4)), sink});
}

double multiply_in_registers(Stream& stream, const DeviceInfo& device, int iterations, float* sink) {
  const int blocks = device.sms * kGemmBlocks;
  launch(stream, "GEMMs in registers", {.grid_x = static_cast<unsigned>(blocks), .threads = kGemmThreads}, gemm_kernel,
         ProductParams{iterations, sink});
  return 2.0 * 16 * 8 * 16 * kSums * iterations * blocks * (kGemmThreads / kWarp);
}

}  // namespace charonia::bench
