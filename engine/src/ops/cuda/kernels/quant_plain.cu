// GEMMs with a quantised weight in float, without tensor cores: for float inputs, and for groups that the fast kernels
// do not support.
//
//   out [rows, n] = in [rows, k] * weight [n, k]^T + bias
//
// A block computes 32 outputs of 8 rows, with stages of 32 columns in shared memory; the weight is converted to float.
// The products of a group are summed with sequential fused multiply-adds, and the sum is added to the row's sum after
// multiplication with the scale. K has no parts. This kernel is not optimised: float inputs are for verification, and
// few weights have such groups.
#include "ops/cuda/kernels/quant_device.h"

namespace charonia::cuda {
namespace {

constexpr int kColumns = 32, kRows = 8, kChunk = 32, kPitch = kChunk + 1, kThreads = 128;
constexpr int kThreadColumns = kColumns / 2, kSumPitch = kColumns + 1;

// Converts codes to float, without their zero.
template <class N, ops::Code code>
CHARONIA_DEVICE void float_numbers(std::uint32_t word, float (&out)[32 / kCodeBits<code>]) {
  std::uint32_t pairs[16 / kCodeBits<code>];
  numbers<N, code>(word, zero_term<N, code>(0), pairs);
  CHARONIA_UNROLL
  for (int i = 0; i < 16 / kCodeBits<code>; ++i) {
    out[2 * i] = to_float(N{static_cast<std::uint16_t>(pairs[i])});
    out[2 * i + 1] = to_float(N{static_cast<std::uint16_t>(pairs[i] >> 16)});
  }
}

CHARONIA_DEVICE float scale_of(const QuantParams& p, std::int64_t at) {
  if (p.scale_type == DType::f32) return static_cast<const float*>(p.scales)[at];
  const auto bits = static_cast<const std::uint16_t*>(p.scales)[at];
  return p.scale_type == DType::bf16 ? to_float(bf16{bits}) : to_float(f16{bits});
}

template <class T, ops::Code code>
CHARONIA_KERNEL(kThreads, 4)
void plain_kernel(const QuantParams p) {
  using N = NumberType<T>;
  constexpr int kOfWord = 32 / kCodeBits<code>;
  CHARONIA_SHARED(float, weight, [kColumns * kPitch]);
  CHARONIA_SHARED(float, in, [kRows * kPitch]);
  CHARONIA_SHARED(float, sums, [kRows * kSumPitch]);
  dependency_trigger();
  dependency_wait();
  QuantRows tile{static_cast<int>(blockIdx.x) * kRows, 0};
  std::int64_t codes_at = 0, scales_at = 0;
  if (p.tiles != nullptr) {
    const ExpertTile of = p.tiles[blockIdx.x];
    if (of.rows == 0) return;
    tile = {of.first, of.rows};
    codes_at = of.expert * p.expert_codes;
    scales_at = of.expert * p.expert_scales;
  } else {
    tile.rows = min(kRows, p.rows - tile.first_row);
  }
  const int first_column = static_cast<int>(blockIdx.y) * kColumns, tid = static_cast<int>(threadIdx.x);
  const auto* const words =
      reinterpret_cast<const std::uint32_t*>(static_cast<const unsigned char*>(p.weight) + codes_at);
  const int column = tid % kThreadColumns, row = tid / kThreadColumns;

  float total[2] = {0, 0}, sum[2] = {0, 0};
  int group = 0, left = p.group;  // remaining columns of the group
  for (int k = 0; k < p.k; k += kChunk) {
    const int chunk = min(kChunk, p.k - k);
    for (int i = tid; i < kColumns * (kChunk / kOfWord); i += kThreads) {
      const int of = i / (kChunk / kOfWord), at = k + i % (kChunk / kOfWord) * kOfWord;
      float eight[kOfWord] = {};
      if (first_column + of < p.n && at < p.k) {
        float_numbers<N, code>(
            words[code_place(first_column + of, at, kCodeBits<code>, p.weight_stride / kQuantK).word], eight);
        for (int j = 0; j < kOfWord && at + j < p.k; ++j) {
          const auto place = scales_at + scale_place(first_column + of, (at + j) / p.group, p.groups);
          const int zero = p.zeros == nullptr ? static_cast<int>(p.zero_pair & 0xffU)
                                              : static_cast<const std::int8_t*>(p.zeros)[place];
          eight[j] -= static_cast<float>(zero);
        }
      }
      for (int j = 0; j < kOfWord; ++j) weight[of * kPitch + at - k + j] = eight[j];
    }
    for (int i = tid; i < kRows * kChunk; i += kThreads) {
      const int of = i / kChunk, at = k + i % kChunk;
      in[of * kPitch + at - k] =
          of < tile.rows && at < p.k
              ? to_float(static_cast<const T*>(p.in)[static_cast<std::int64_t>(tile.in_row(p, of)) * p.in_stride + at])
              : 0.0F;
    }
    __syncthreads();
    for (int at = 0; at < chunk; ++at) {
      CHARONIA_UNROLL
      for (int i = 0; i < 2; ++i) {
        sum[i] = fmaf(weight[(column + i * kThreadColumns) * kPitch + at], in[row * kPitch + at], sum[i]);
      }
      if (--left > 0) continue;
      CHARONIA_UNROLL
      for (int i = 0; i < 2; ++i) {
        const int of = first_column + column + i * kThreadColumns;
        if (of < p.n) total[i] = fmaf(scale_of(p, scales_at + scale_place(of, group, p.groups)), sum[i], total[i]);
        sum[i] = 0;
      }
      ++group;
      left = p.group;
    }
    __syncthreads();
  }
  CHARONIA_UNROLL
  for (int i = 0; i < 2; ++i) sums[row * kSumPitch + column + i * kThreadColumns] = total[i];
  __syncthreads();
  store_quant_outputs<T, kColumns>(p, tile, first_column, tid, kThreads,
                                   [&](int r, int c) { return sums[r * kSumPitch + c]; });
}

}  // namespace

bool launch_quant_plain(Stream& stream, const QuantParams& params, const GemmTactic& tactic, DType type,
                        ops::Code code) {
  if (tactic.tile_rows != kRows || tactic.tile_columns != kColumns) return false;
  const Launch shape{.grid_x = static_cast<unsigned>(params.row_tiles),
                     .grid_y = static_cast<unsigned>(divide_up(params.n, kColumns)),
                     .threads = kThreads};
  const auto* const what = params.tiles != nullptr ? "experts: quantised GEMM (plain)" : "quantised GEMM (plain)";
  with_type(type, [&]<class T>(T) {
    with_code(code, [&](auto of) { launch(stream, what, shape, &plain_kernel<T, of()>, params); });
  });
  return true;
}

}  // namespace charonia::cuda
