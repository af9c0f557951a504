// GEMMs of few rows with a quantised weight: codes flow from memory through registers, where they become 16-bit
// numbers, into the tensor cores.
//
//   out [rows, n] = in [rows, k] * weight [n, k]^T + bias, in in bf16 or f16, weight as quant_layout.h has it.
//
// As gemm_stream_kernel.h: a warp computes 16 * kM outputs of 8 * kN rows over one part of K (split_k), and the sums of
// the parts meet in shared memory. A step is 64 columns.
//
// Arithmetic, which quant_tile_kernel.h shares bit for bit. Codes less their zero are exact 16-bit numbers, so the
// tensor cores multiply what the file says with the inputs as they are. Of every kClose columns (64, or 32 where groups
// are of 32) the products are added up from 0, in float, and then enter the part's sum times the group's scale, with
// one fused multiply-add: scales are neither rounded nor multiplied into weights. A row's bits depend on the row and on
// the weight alone.
//
// Bound: memory. For each 16 columns' codes a lane issues 22 instructions for int4 with its numbers, 2 for GEMMs, and
// for each step 4 kN for sums and some 20 for scales, zeros, inputs and addresses: some 80 for a step of 512 bytes a
// warp, 16 * kN fewer than a third of what an SM issues at 4.8 TB/s (36 bytes a nanosecond: 14 steps in 200, 1100 of
// 1300 instructions with kM = 1). kRing steps are under way, kM times 512 bytes each for 4 bits and 1 KB for 8: with kM
// = 1 and 24 warps an SM 36 to 48 KB, with 2 and 16 warps 32 to 64 KB, against the 29 KB that are needed. Scales are 2
// bytes for a group's row: 3 % more for int4 in groups of 128.
#pragma once

#include "ops/cuda/kernels/quant_device.h"

namespace charonia::cuda::quant_stream {

inline constexpr int kWarps = 8, kThreads = kWarps * kWarp;

template <class T_, ops::Code kCode_, int kClose_, int kM_, int kN_, int kBlocks_>
struct Shape {
  using T = T_;
  static constexpr ops::Code kCode = kCode_;
  static constexpr int kClose = kClose_, kM = kM_, kN = kN_, kBlocks = kBlocks_;
  static constexpr int kRing = quant_stream_ring(kCodeBits<kCode>, kClose, kM, kN);
  static constexpr int kLoads = kCodeBits<kCode> / 4;  // of a lane, for a unit of 16 rows by 64 columns
  static constexpr int kCloses = kQuantK / kClose;     // of a step
  static constexpr int kOutputs = kQuantRows * kM_, kRows = 8 * kN;
  static constexpr int kPitch = kOutputs + 4;  // lanes of a store hit different banks
};

template <class S>
CHARONIA_KERNEL(kThreads, S::kBlocks)
void stream_kernel(const QuantParams p) {
  using T = typename S::T;
  constexpr int kM = S::kM, kN = S::kN, kRing = S::kRing;
  CHARONIA_SHARED(float, sums, [kWarps * S::kRows * S::kPitch]);

  const int lane = lane_id(), g = lane / 4, t = lane % 4;
  const int group = warp_id() / p.parts, part = warp_id() - group * p.parts;
  const int groups = static_cast<int>(blockDim.x) / kWarp / p.parts;
  QuantRows tile{static_cast<int>(blockIdx.y) * S::kRows, 0};
  int column_block = static_cast<int>(blockIdx.x);
  std::int64_t codes_at = 0, scales_at = 0;  // where the expert's begin
  if (p.tiles != nullptr) {
    dependency_trigger();
    dependency_wait();
    const ExpertTile of = p.tiles[blockIdx.x];
    if (of.rows == 0) return;
    tile = {of.first, of.rows};
    column_block = static_cast<int>(blockIdx.y);
    codes_at = of.expert * p.expert_codes;
    scales_at = of.expert * p.expert_scales;
  } else {
    tile.rows = min(S::kRows, p.rows - tile.first_row);
  }
  const int first_output = (column_block * groups + group) * S::kOutputs;
  const int k_begin = part * p.part_length;
  const int k_left = min(p.part_length, p.k - k_begin);
  const int steps = static_cast<int>(divide_up(k_left, kQuantK));
  const int all_steps = p.weight_stride / kQuantK, last_unit = static_cast<int>(divide_up(p.n, kQuantRows)) - 1;

  // Outputs beyond n compute the last ones again.
  const uint4* codes[kM];
  int scale_row[kM];  // of row g, in elements; scales, as all of a weight's outputs, are fewer than 2^31
  CHARONIA_UNROLL
  for (int i = 0; i < kM; ++i) {
    const int unit = min(first_output / kQuantRows + i, last_unit);
    codes[i] = reinterpret_cast<const uint4*>(static_cast<const unsigned char*>(p.weight) + codes_at) +
               (static_cast<std::int64_t>(unit) * all_steps + k_begin / kQuantK) * (S::kLoads * kWarp) + lane;
    scale_row[i] = unit * p.groups * kQuantRows + 2 * g;
  }
  struct Slot {
    uint4 codes[kM][S::kLoads];
    ScalePair scales[kM][S::kCloses];
    std::uint32_t zeros[kM][S::kCloses];
  };
  Slot ring[kRing];
  const auto load = [&](Slot& to, int step) {
    if (step >= steps) return;
    CHARONIA_UNROLL
    for (int i = 0; i < kM; ++i) {
      CHARONIA_UNROLL
      for (int j = 0; j < S::kLoads; ++j) {
        to.codes[i][j] = load_streaming(codes[i] + (step * S::kLoads + j) * kWarp);
      }
      CHARONIA_UNROLL
      for (int j = 0; j < S::kCloses; ++j) {
        const int of = (k_begin + step * kQuantK + j * S::kClose) >> p.group_shift;
        const std::int64_t at = scales_at + scale_row[i] + of * kQuantRows;
        to.scales[i][j] = load_scales(p, at);
        to.zeros[i][j] = load_zeros(p, at);
      }
    }
  };
  CHARONIA_UNROLL
  for (int i = 0; i < kRing; ++i) load(ring[i], i);

  if (p.tiles == nullptr) {
    dependency_trigger();
    dependency_wait();
  }

  // Lanes beyond the rows read the first one; what becomes of it is dropped.
  const T* in[kN];
  CHARONIA_UNROLL
  for (int j = 0; j < kN; ++j) {
    const int row = 8 * j + g;
    in[j] = static_cast<const T*>(p.in) +
            static_cast<std::int64_t>(tile.in_row(p, row < tile.rows ? row : 0)) * p.in_stride + k_begin + 8 * t;
  }

  float total[kM][kN][4], sum[kM][kN][4];
  CHARONIA_UNROLL
  for (int i = 0; i < kM; ++i) {
    CHARONIA_UNROLL
    for (int j = 0; j < kN; ++j) {
      CHARONIA_UNROLL
      for (int c = 0; c < 4; ++c) total[i][j][c] = sum[i][j][c] = 0;
    }
  }
  for (int first = 0; first < steps; first += kRing) {
    CHARONIA_UNROLL
    for (int at = 0; at < kRing; ++at) {
      const int step = first + at;
      if (step >= steps) break;
      CHARONIA_UNROLL
      for (int half = 0; half < 2; ++half) {
        uint4 x[kN];
        const int k = step * kQuantK + 32 * half;
        CHARONIA_UNROLL
        for (int j = 0; j < kN; ++j) {
          x[j] = k + 8 * t < k_left ? load_cached(reinterpret_cast<const uint4*>(in[j] + k)) : uint4{0, 0, 0, 0};
        }
        CHARONIA_UNROLL
        for (int i = 0; i < kM; ++i) {
          const int close = half * S::kCloses / 2;
          std::uint32_t upper[4], lower[4];
          unit_numbers<T, S::kCode>(ring[at].codes[i], half, ring[at].zeros[i][close], upper, lower);
          CHARONIA_UNROLL
          for (int quarter = 0; quarter < 2; ++quarter) {
            const std::uint32_t a[4] = {upper[2 * quarter], lower[2 * quarter], upper[2 * quarter + 1],
                                        lower[2 * quarter + 1]};
            CHARONIA_UNROLL
            for (int j = 0; j < kN; ++j) {
              const std::uint32_t b[2] = {quarter == 0 ? x[j].x : x[j].z, quarter == 0 ? x[j].y : x[j].w};
              mma_m16n8k16<T>(sum[i][j], a, b);
            }
          }
          if (S::kCloses == 2 || half == 1) {
            float scale[2];
            decode_scales(p, ring[at].scales[i][close], scale);
            CHARONIA_UNROLL
            for (int j = 0; j < kN; ++j) {
              CHARONIA_UNROLL
              for (int c = 0; c < 4; ++c) {
                total[i][j][c] = fmaf(scale[c / 2], sum[i][j][c], total[i][j][c]);
                sum[i][j][c] = 0;
              }
            }
          }
        }
      }
      load(ring[at], step + kRing);
    }
  }

  float* const mine = sums + warp_id() * S::kRows * S::kPitch;
  CHARONIA_UNROLL
  for (int i = 0; i < kM; ++i) {
    CHARONIA_UNROLL
    for (int j = 0; j < kN; ++j) {
      CHARONIA_UNROLL
      for (int c = 0; c < 4; ++c) mine[(8 * j + 2 * t + c % 2) * S::kPitch + 16 * i + g + c / 2 * 8] = total[i][j][c];
    }
  }
  __syncthreads();
  // The threads of a group's warps store its outputs.
  const float* const of_group = sums + group * p.parts * S::kRows * S::kPitch;
  store_quant_outputs<T, S::kOutputs>(p, tile, first_output, static_cast<int>(threadIdx.x) - group * p.parts * kWarp,
                                      p.parts * kWarp, [&](int row, int column) {
                                        const float* const from = of_group + row * S::kPitch + column;
                                        float whole = from[0];
                                        for (int i = 1; i < p.parts; ++i) whole += from[i * S::kRows * S::kPitch];
                                        return whole;
                                      });
}

template <class S>
bool launch_if(Stream& stream, const QuantParams& p, const GemmTactic& tactic) {
  if (tactic.tile_rows != S::kRows || tactic.tile_columns != S::kOutputs || tactic.stages != S::kRing) return false;
  const int groups = kWarps / p.parts;
  const auto columns = static_cast<unsigned>(divide_up(p.n, groups * S::kOutputs));
  const auto rows = static_cast<unsigned>(p.row_tiles);
  launch(stream, p.tiles != nullptr ? "experts: quantised GEMM (stream)" : "quantised GEMM (stream)",
         {.grid_x = p.tiles != nullptr ? rows : columns,
          .grid_y = p.tiles != nullptr ? columns : rows,
          .threads = static_cast<unsigned>(groups * p.parts * kWarp)},
         &stream_kernel<S>, p);
  return true;
}

// Whether there is such a kernel.
template <class T, ops::Code code, int kClose>
bool launch_typed(Stream& stream, const QuantParams& p, const GemmTactic& tactic) {
  // int4 with groups of 32 keeps four scales and four zeros: a second block would not leave registers for them on 8.0.
  constexpr int kWideBlocks = code == ops::Code::u4 && kClose < kQuantK ? 1 : 2;
  return launch_if<Shape<T, code, kClose, 1, 1, 3>>(stream, p, tactic) ||
         launch_if<Shape<T, code, kClose, 2, 1, kWideBlocks>>(stream, p, tactic) ||
         launch_if<Shape<T, code, kClose, 2, 2, kCodeBits<code> == 8 ? 1 : 2>>(stream, p, tactic);
}

}  // namespace charonia::cuda::quant_stream
