// GEMMs of few rows: the weight flows from memory through registers into the tensor cores.
//
//   out [rows, n] = in [rows, k] * weight [n, k]^T + bias, weight and in in bf16 or f16, sums in float; or both in 8
//   bits (w8a8_gemm.h), with two of them per element here.
//
// A warp computes 16 * kM outputs of 8 * kN rows over one part of K (split_k). The warps of a block take the parts of
// the same outputs, or, with fewer than 8 parts, of several groups of outputs. The sums of the parts are combined in
// shared memory.
//
// A step is 32 elements of K. With one 16-byte load, lane 4g + t holds elements 8t .. 8t + 7 of weight row g (and of
// row g + 8, ...), and of input row g. These are directly the operands of two m16n8k16 GEMMs: the first takes elements
// 8t .. 8t + 3 of every lane, the second 8t + 4 .. 8t + 7. A GEMM may permute the elements of K as long as both
// operands use the same order, and gemm_tile_kernel.h uses the same order. So weights need neither shared memory nor
// shuffles.
//
// A load of a warp is 16 sectors of 32 bytes, all of them useful. In row-major order they are 8 rows of 64 bytes:
// halves of 8 lines of 128 bytes. The next load takes the other halves from the L2 cache, because a load fetches whole
// lines. In a packed weight (gemm.h) they are 4 whole lines, 512 contiguous bytes, and the loads of a warp are
// contiguous too: 16 times part_length bytes. This saves half of the L1 tag lookups (4 instead of 8). It also opens
// each 1 KB page of memory for 1 KB instead of 128 bytes, if the page was closed since the previous step 0.7 us ago. At
// 4.8 TB/s that would be one page opening per 5 ns in each of the 192 channels of an H200, instead of one per 40 ns.
// Whether the memory controller's queue compensates for this must be measured (the benchmark has both orders).
//
// Gated (Gate): a warp's groups of 8 outputs alternate between the first and the second half of the weight, for the
// same outputs, so that both are in its sums. That saves the next kernel.
//
// Bound: memory. A weight is read once, 2 n k bytes. Other traffic is the input, which every warp reads through the L1
// cache (rows / (16 kM) of the weight's bytes), and the outputs. kRing steps are in flight, kRing * kM KB per warp.
// With (kM, kRing) = (1, 4) and at most 80 registers, 24 warps fit an SM: 96 KB in flight; (1, 8) and (2, 4) have 16
// warps and 128 KB. An H200 needs 4.8 TB/s * 0.8 us / 132 = 29 KB. Time is lost at the start and the end: about 1 us to
// fill and to drain, compared with 7 us for 4096 x 4096 and 38 us for 22016 x 4096; less if the launch overlaps the
// previous kernel, because the ring is filled before dependency_wait().
#pragma once

#include "ops/cuda/device/tensor_core.h"
#include "ops/cuda/kernels/activation.h"
#include "ops/cuda/kernels/gemm_device.h"

namespace charonia::cuda::gemm_stream {

inline constexpr int kWarps = 8, kThreads = kWarps * kWarp;
// Slots of the ring. A warp can distinguish six groups of loads in flight; two are for the input.
inline constexpr int kSlots = 4;

template <class T_, int kM_, int kN_, int kRing_, int kBlocks_, bool kPacked_, bool kGated_>
struct StreamShape {
  using T = T_;
  static constexpr int kM = kM_, kN = kN_, kRing = kRing_, kBlocks = kBlocks_;
  static constexpr bool kPacked = kPacked_;
  // A template parameter, because a run-time check would cost registers in the largest shape.
  static constexpr bool kGated = kGated_;
  static constexpr int kStep = kPacked ? kPackedRows * kPackedK : kPackedK;  // elements of the weight between steps
  static constexpr int kAhead = kM * kN < 4 ? 1 : 0;
  static constexpr int kSlotSteps = kRing / kSlots;  // steps whose weights are loaded together
  static_assert(kRing % kSlots == 0 && kSlotSteps <= 2);
  static constexpr int kOutputs = 16 * kM, kRows = 8 * kN;
  static constexpr int kPitch = kOutputs + 4;  // padded, so that the lanes of a store use different banks
};

// Adds the sums of the parts, and stores the outputs of a block. sums: of each warp.
template <class S>
CHARONIA_DEVICE void store_sums(const ParamsOf<typename S::T>& p, const SumType<typename S::T>* sums, int groups,
                                int first_row) {
  using T = typename S::T;
  const int rows = min(S::kRows, p.rows - first_row);
  const auto total = [&](const SumType<T>* from) {
    SumType<T> sum = from[0];
    for (int part_of = 1; part_of < p.parts; ++part_of) sum += from[part_of * S::kRows * S::kPitch];
    return sum;
  };
  if constexpr (S::kGated) {
    constexpr int kOutputs = S::kOutputs / 2;
    const int inter = p.n / 2;
    for (int i = static_cast<int>(threadIdx.x); i < groups * rows * kOutputs; i += static_cast<int>(blockDim.x)) {
      const int output = i % kOutputs, row = i / kOutputs % rows, of_group = i / kOutputs / rows;
      const int column = (static_cast<int>(blockIdx.x) * groups + of_group) * kOutputs + output;
      if (column >= inter) continue;
      const float* const from = sums + (of_group * p.parts * S::kRows + row) * S::kPitch + output / 8 * 16 + output % 8;
      float gate = total(from), up = total(from + 8);
      if (p.bias != nullptr) gate += p.bias[column], up += p.bias[inter + column];
      gate = to_float(from_float<T>(gate)), up = to_float(from_float<T>(up));
      gate =
          p.gate == Gate::silu ? activation<ops::Activation::silu>(gate) : activation<ops::Activation::gelu_tanh>(gate);
      static_cast<T*>(p.out)[(first_row + row) * p.out_stride + column] = from_float<T>(gate * up);
    }
  } else {
    for (int i = static_cast<int>(threadIdx.x); i < groups * rows * S::kOutputs; i += static_cast<int>(blockDim.x)) {
      const int output = i % S::kOutputs, row = i / S::kOutputs % rows, of_group = i / S::kOutputs / rows;
      const int column = (static_cast<int>(blockIdx.x) * groups + of_group) * S::kOutputs + output;
      if (column >= p.n) continue;
      const SumType<T>* const from = sums + (of_group * p.parts * S::kRows + row) * S::kPitch + output;
      store_out<T>(p, first_row + row, column, total(from));
    }
  }
}

template <class S>
CHARONIA_KERNEL(kThreads, S::kBlocks)
void stream_kernel(const ParamsOf<typename S::T> p) {
  using T = typename S::T;
  constexpr int kM = S::kM, kN = S::kN, kRing = S::kRing;
  CHARONIA_SHARED(SumType<T>, sums, [kWarps * S::kRows * S::kPitch]);

  const int lane = lane_id(), g = lane / 4, t = lane % 4;
  const int group = warp_id() / p.parts, part = warp_id() - group * p.parts;
  const int groups = static_cast<int>(blockDim.x) / kWarp / p.parts;
  const int first_output = (static_cast<int>(blockIdx.x) * groups + group) * S::kOutputs;
  const int first_row = static_cast<int>(blockIdx.y) * S::kRows;

  const int k_begin = part * p.part_length;
  const int k_left = min(p.part_length, p.k - k_begin);
  const int steps = 2 * static_cast<int>(divide_up(k_left, kKGrain));
  int left = k_left - 8 * t;  // remaining elements from the lane's next chunk on

  // Outputs beyond n recompute the last output.
  [[maybe_unused]] const int inter = p.n / 2;  // outputs of a half
  const T* weight[2 * kM];
  CHARONIA_UNROLL
  for (int i = 0; i < 2 * kM; ++i) {
    const int output = S::kGated ? i % 2 * inter + min((first_output + 8 * i) / 16 * 8 + g, inter - 1)
                                 : min(first_output + 8 * i + g, p.n - 1);
    const auto at = S::kPacked ? packed_at(output, k_begin, p.weight_stride)
                               : static_cast<std::int64_t>(output) * p.weight_stride + k_begin;
    weight[i] = static_cast<const T*>(p.weight) + at + 8 * t;
  }
  uint4 ring[kRing][2 * kM];
  const auto load_weight = [&](uint4(&to)[2 * kM], int ahead) {
    CHARONIA_UNROLL
    for (int i = 0; i < 2 * kM; ++i) {
      to[i] = 32 * ahead < left ? load_streaming(reinterpret_cast<const uint4*>(weight[i] + S::kStep * ahead))
                                : uint4{0, 0, 0, 0};
    }
  };
  CHARONIA_UNROLL
  for (int i = 0; i < kRing; ++i) load_weight(ring[i], i);

  if (!p.late_trigger) dependency_trigger();
  dependency_wait();

  // Lanes beyond the rows read the first row; their results are dropped.
  const T* in[kN];
  CHARONIA_UNROLL
  for (int j = 0; j < kN; ++j) {
    const int row = first_row + 8 * j + g;
    in[j] =
        static_cast<const T*>(p.in) + static_cast<std::int64_t>(row < p.rows ? row : 0) * p.in_stride + k_begin + 8 * t;
  }
  const auto load_in = [&](uint4(&to)[kN], int ahead) {
    CHARONIA_UNROLL
    for (int j = 0; j < kN; ++j) {
      to[j] = 32 * ahead < left ? load_cached(reinterpret_cast<const uint4*>(in[j] + 32 * ahead)) : uint4{0, 0, 0, 0};
    }
  };

  SumType<T> sum[kM][kN][4];
  CHARONIA_UNROLL
  for (int i = 0; i < kM; ++i) {
    CHARONIA_UNROLL
    for (int j = 0; j < kN; ++j) {
      CHARONIA_UNROLL
      for (int c = 0; c < 4; ++c) sum[i][j][c] = 0;
    }
  }
  // Inputs of this step, and of the next if registers allow it; otherwise the other warps hide the latency of the
  // cache.
  constexpr int kAhead = S::kAhead;
  uint4 x[1 + kAhead][kN];
  if constexpr (kAhead == 1) load_in(x[0], 0);
  for (int step = 0; step < steps; step += kRing) {
    if (p.late_trigger && step + kRing >= steps) dependency_trigger();  // all weights are requested
    CHARONIA_UNROLL
    for (int at = 0; at < kRing; ++at) {
      if (at % 2 == 0 && step + at >= steps) break;
      load_in(x[(at + kAhead) % (1 + kAhead)], at + kAhead);
      CHARONIA_UNROLL
      for (int i = 0; i < kM; ++i) {
        const uint4 upper = ring[at][2 * i], lower = ring[at][2 * i + 1];
        const std::uint32_t a0[4] = {upper.x, lower.x, upper.y, lower.y};
        const std::uint32_t a1[4] = {upper.z, lower.z, upper.w, lower.w};
        if constexpr (kIsPair<T>) {
          CHARONIA_UNROLL
          for (int j = 0; j < kN; ++j) {
            const uint4 of = x[at % (1 + kAhead)][j];
            const std::uint32_t b0[2] = {of.x, of.y}, b1[2] = {of.z, of.w};
            multiply_chunk<T>(sum[i][j], a0, a1, b0, b1);
          }
        } else {
          CHARONIA_UNROLL
          for (int j = 0; j < kN; ++j) {
            const std::uint32_t b0[2] = {x[at % (1 + kAhead)][j].x, x[at % (1 + kAhead)][j].y};
            mma_m16n8k16<T>(sum[i][j], a0, b0);
          }
          CHARONIA_UNROLL
          for (int j = 0; j < kN; ++j) {
            const std::uint32_t b1[2] = {x[at % (1 + kAhead)][j].z, x[at % (1 + kAhead)][j].w};
            mma_m16n8k16<T>(sum[i][j], a1, b1);
          }
        }
      }
      if (at % S::kSlotSteps == S::kSlotSteps - 1) {
        CHARONIA_UNROLL
        for (int i = at - S::kSlotSteps + 1; i <= at; ++i) load_weight(ring[i], i + kRing);
      }
    }
    left -= 32 * kRing;
    CHARONIA_UNROLL
    for (int i = 0; i < 2 * kM; ++i) weight[i] += S::kStep * kRing;
    CHARONIA_UNROLL
    for (int j = 0; j < kN; ++j) in[j] += 32 * kRing;
  }

  SumType<T>* const mine = sums + warp_id() * S::kRows * S::kPitch;
  CHARONIA_UNROLL
  for (int i = 0; i < kM; ++i) {
    CHARONIA_UNROLL
    for (int j = 0; j < kN; ++j) {
      CHARONIA_UNROLL
      for (int c = 0; c < 4; ++c) mine[(8 * j + 2 * t + c % 2) * S::kPitch + 16 * i + g + c / 2 * 8] = sum[i][j][c];
    }
  }
  __syncthreads();
  store_sums<S>(p, sums, groups, first_row);
}

template <class S>
void launch_shape(Stream& stream, const ParamsOf<typename S::T>& p) {
  const int groups = kWarps / p.parts;
  launch(stream, "GEMM (stream)",
         {.grid_x = static_cast<unsigned>(divide_up(p.n, groups * S::kOutputs)),
          .grid_y = static_cast<unsigned>(divide_up(p.rows, S::kRows)),
          .threads = static_cast<unsigned>(groups * p.parts * kWarp)},
         &stream_kernel<S>, p);
}

}  // namespace charonia::cuda::gemm_stream
