// GEMMs of more rows with a quantised weight: codes and inputs go through stages of shared memory, and the warp that
// multiplies codes converts them to 16-bit numbers in its registers.
//
//   out [rows, n] = in [rows, k] * weight [n, k]^T + bias, in in bf16 or f16, weight in the layout of quant_layout.h;
//   also for experts, as in experts_gemm.cu.
//
// Like gemm_tile_kernel.h: a block computes kColumns outputs of kRows rows over one or several parts of K (split_k); if
// blocks share a tile, their sums are combined in the workspace. A stage holds 64 columns: kColumns / 16 units of codes
// in their memory layout, with 16 bytes for each lane, and swizzled rows of 128 bytes of the inputs. Scales and zeros
// are read while a stage is waited for. Sums of finished parts of K are accumulated in shared memory. The arithmetic is
// the same as in quant_stream_kernel.h, bit for bit.
//
// Bound: memory up to about 64 rows. A stage of 64 outputs has 2 KB of int4 codes; 3 blocks with 5 stages ahead keep 30
// KB in flight, as much as an H200 needs. Inputs come from the L2 cache, 128 bytes per row for every 64 outputs: with
// 64 rows 4 times the codes' bytes. The L2 cache delivers about 24 bytes per cycle and SM, so from 48 rows on that is
// the bound; with 256 rows, tiles of 128 by 128 halve it. For more rows the bound is arithmetic: for 64 columns a warp
// of a 64 x 64 tile issues 32 GEMMs, about 100 instructions for numbers and 64 for sums, and reads 5 KB: 160 cycles of
// shared memory for about 200 of the tensor cores at the rate of mma.sync.
#pragma once

#include "ops/cuda/kernels/gemm_tile_device.h"
#include "ops/cuda/kernels/quant_device.h"

namespace charonia::cuda::quant_tile {

template <class T_, ops::Code kCode_, int kClose_, int kColumns_, int kRows_, int kColumnWarps_, int kRowWarps_,
          int kStages_, int kBlocks_>
struct Shape {
  using T = T_;
  static constexpr ops::Code kCode = kCode_;
  static constexpr int kClose = kClose_, kColumns = kColumns_, kRows = kRows_;
  static constexpr int kColumnWarps = kColumnWarps_, kRowWarps = kRowWarps_, kStages = kStages_, kBlocks = kBlocks_;
  static constexpr int kThreads = kColumnWarps * kRowWarps * kWarp;
  static constexpr int kM = kColumns / kColumnWarps / 16, kN = kRows / kRowWarps / 8;  // GEMMs per warp
  static constexpr int kSums = kM * kN * 4;
  static constexpr int kLoads = kCodeBits<kCode> / 4;  // loads of a lane for a unit
  static constexpr int kCloses = kQuantK / kClose;     // per stage
  static constexpr int kUnits = kColumns / kQuantRows, kUnitBytes = kLoads * kWarp * 16;
  static constexpr int kCodeBytes = kUnits * kUnitBytes, kStageBytes = kCodeBytes + kRows * kRowBytes;
  // The pitch of the sums in shared memory, padded so that the lanes of a store use different banks.
  static constexpr int kPitch = kColumns + 4;
  static constexpr int kStagesBytes = kStages * kStageBytes;
  static constexpr int kSharedBytes = kStagesBytes + kThreads * kSums * 4;  // with the sums of finished parts
  static_assert(kM * kColumnWarps * 16 == kColumns && kN * kRowWarps * 8 == kRows);
  static_assert(kRows * kPitch * 4 <= kStagesBytes);
};

template <class S>
CHARONIA_KERNEL(S::kThreads, S::kBlocks)
void tile_kernel(const QuantParams p) {
  using T = typename S::T;
  constexpr int kM = S::kM, kN = S::kN;
  constexpr int kStep = S::kThreads / kChunks;  // rows that the block copies at a time; even, see swizzled()
  static_assert(S::kRows % kStep == 0 && kStep % 2 == 0);
  unsigned char* const stages = dynamic_shared();

  const int index = static_cast<int>(blockIdx.x);
  QuantRows tile{0, 0};
  int first_column = 0, first_part = 0;
  std::int64_t codes_at = 0, scales_at = 0;  // offsets of the expert's codes and scales
  if (p.tiles != nullptr) {
    if (!p.late_trigger) dependency_trigger();
    dependency_wait();
    const ExpertTile of = p.tiles[index];
    if (of.rows == 0) return;
    tile = {of.first, of.rows};
    first_column = static_cast<int>(blockIdx.y) * S::kColumns;
    codes_at = of.expert * p.expert_codes;
    scales_at = of.expert * p.expert_scales;
  } else {
    const auto place = tile_place(index, p.row_tiles, p.column_tiles);
    tile.first_row = place.row_tile * S::kRows;
    tile.rows = min(S::kRows, p.rows - tile.first_row);
    first_column = place.column_tile * S::kColumns;
    first_part = static_cast<int>(blockIdx.y) * p.parts_of_block;
  }
  const int k_begin = first_part * p.part_length;
  const int k_end = min(p.k, k_begin + p.parts_of_block * p.part_length);
  const int chunks = static_cast<int>(divide_up(k_end - k_begin, kQuantK));
  const int chunks_of_part = p.part_length / kQuantK;
  const int all_steps = p.weight_stride / kQuantK, last_unit = static_cast<int>(divide_up(p.n, kQuantRows)) - 1;
  const int first_unit = first_column / kQuantRows;
  const auto* const codes = static_cast<const unsigned char*>(p.weight) + codes_at;
  const auto code_at = [&](int unit, int chunk) {
    return codes +
           (static_cast<std::int64_t>(first_unit + unit) * all_steps + k_begin / kQuantK + chunk) * S::kUnitBytes;
  };
  if (p.tiles == nullptr) {
    // Prefetches codes into the L2 cache while the previous kernel still runs: one line per thread.
    constexpr int kLines = S::kUnitBytes / 128;
    for (int i = static_cast<int>(threadIdx.x); i < S::kUnits * (S::kStages - 1) * kLines; i += S::kThreads) {
      const int unit = i / kLines % S::kUnits, chunk = i / kLines / S::kUnits;
      if (first_unit + unit <= last_unit && chunk < chunks) prefetch_l2(code_at(unit, chunk) + i % kLines * 128);
    }
    if (!p.late_trigger) dependency_trigger();
    dependency_wait();
  }

  const int chunk_of = static_cast<int>(threadIdx.x) % kChunks, own = static_cast<int>(threadIdx.x) / kChunks;
  int in_rows[S::kRows / kStep];  // -1: beyond the tile's rows
  CHARONIA_UNROLL
  for (int i = 0; i < S::kRows / kStep; ++i) {
    const int row = own + i * kStep;
    in_rows[i] = row < tile.rows ? tile.in_row(p, row) : -1;
  }
  const auto fill = [&](int chunk) {
    if (chunk < chunks) {
      unsigned char* const to = stages + chunk % S::kStages * S::kStageBytes;
      for (int i = static_cast<int>(threadIdx.x); i < S::kCodeBytes / 16; i += S::kThreads) {
        const int unit = i / (S::kUnitBytes / 16);
        copy_async_16(to + i * 16, code_at(unit, chunk) + i % (S::kUnitBytes / 16) * 16,
                      first_unit + unit <= last_unit);
      }
      unsigned char* const to_in = to + S::kCodeBytes + swizzled(own, chunk_of);
      const int k = k_begin + chunk * kQuantK + chunk_of * kChunkElements;
      CHARONIA_UNROLL
      for (int i = 0; i < S::kRows / kStep; ++i) {
        copy_async_16(to_in + i * kStep * kRowBytes,
                      static_cast<const T*>(p.in) + static_cast<std::int64_t>(in_rows[i]) * p.in_stride + k,
                      k < k_end && in_rows[i] >= 0);
      }
      if (p.late_trigger && chunk + 1 == chunks) dependency_trigger();
    }
    copy_commit();
  };

  const int lane = lane_id(), g = lane / 4, t = lane % 4;
  const int warp_column = warp_id() % S::kColumnWarps * (S::kColumns / S::kColumnWarps);
  const int warp_row = warp_id() / S::kColumnWarps * (S::kRows / S::kRowWarps);
  struct Factors {
    ScalePair scales[kM][S::kCloses];
    std::uint32_t zeros[kM][S::kCloses];
  };
  const auto load_factors = [&](Factors& to, int chunk) {
    CHARONIA_UNROLL
    for (int i = 0; i < kM; ++i) {
      const int unit = min(first_unit + warp_column / kQuantRows + i, last_unit);
      CHARONIA_UNROLL
      for (int j = 0; j < S::kCloses; ++j) {
        const int group = (k_begin + chunk * kQuantK + j * S::kClose) >> p.group_shift;
        const std::int64_t at = scales_at + (static_cast<std::int64_t>(unit) * p.groups + group) * kQuantRows + 2 * g;
        to.scales[i][j] = load_scales(p, at);
        to.zeros[i][j] = load_zeros(p, at);
      }
    }
  };

  float sum[S::kSums];
  PartSums<S::kThreads, S::kSums> sums;
  CHARONIA_UNROLL
  for (int i = 0; i < S::kSums; ++i) sum[i] = 0;
  sums.clear();
  auto* const closed = reinterpret_cast<float4*>(stages + S::kStagesBytes) + threadIdx.x;
  int part = first_part, part_left = chunks_of_part;

  Factors factors;
  CHARONIA_UNROLL
  for (int i = 0; i < S::kStages - 1; ++i) fill(i);
  CHARONIA_UNROLL_BY(1)
  for (int chunk = 0; chunk < chunks; ++chunk) {
    load_factors(factors, chunk);
    copy_wait<S::kStages - 2>();
    __syncthreads();  // this chunk is complete, and all threads are done with the previous one
    fill(chunk + S::kStages - 1);
    const unsigned char* const stage = stages + chunk % S::kStages * S::kStageBytes;
    const unsigned char* const in = stage + S::kCodeBytes;
    const auto* const own_codes =
        reinterpret_cast<const uint4*>(stage + warp_column / kQuantRows * S::kUnitBytes) + lane;
    CHARONIA_UNROLL
    for (int half = 0; half < 2; ++half) {
      uint4 x[kN];
      CHARONIA_UNROLL
      for (int j = 0; j < kN; ++j) {
        x[j] = *reinterpret_cast<const uint4*>(in + swizzled(warp_row + 8 * j + g, 4 * half + t));
      }
      CHARONIA_UNROLL
      for (int i = 0; i < kM; ++i) {
        uint4 of_unit[S::kLoads];
        CHARONIA_UNROLL
        for (int l = 0; l < S::kLoads; ++l) of_unit[l] = own_codes[(i * S::kLoads + l) * kWarp];
        const int close = half * S::kCloses / 2;
        std::uint32_t upper[4], lower[4];
        unit_numbers<T, S::kCode>(of_unit, half, factors.zeros[i][close], upper, lower);
        CHARONIA_UNROLL
        for (int quarter = 0; quarter < 2; ++quarter) {
          const std::uint32_t a[4] = {upper[2 * quarter], lower[2 * quarter], upper[2 * quarter + 1],
                                      lower[2 * quarter + 1]};
          CHARONIA_UNROLL
          for (int j = 0; j < kN; ++j) {
            const std::uint32_t b[2] = {quarter == 0 ? x[j].x : x[j].z, quarter == 0 ? x[j].y : x[j].w};
            mma_m16n8k16<T>(*reinterpret_cast<float (*)[4]>(&sum[(i * kN + j) * 4]), a, b);
          }
        }
        if (S::kCloses == 2 || half == 1) {
          float scale[2];
          decode_scales(p, factors.scales[i][close], scale);
          CHARONIA_UNROLL
          for (int c = 0; c < kN * 4; ++c) {
            const int at = i * kN * 4 + c;
            sums.now[at] = fmaf(scale[c % 4 / 2], sum[at], sums.now[at]);
            sum[at] = 0;
          }
        }
      }
    }
    if (--part_left == 0 || chunk + 1 == chunks) {
      float4* const to = p.k_blocks > 1 ? sums.place(p, index, part) : closed;
      const bool adds = p.k_blocks == 1 && part > first_part;
      CHARONIA_UNROLL
      for (int i = 0; i < S::kSums / 4; ++i) {
        const float4 four{sums.now[4 * i], sums.now[4 * i + 1], sums.now[4 * i + 2], sums.now[4 * i + 3]};
        float4 all = adds ? to[i * S::kThreads] : four;
        if (adds) add(all, four);
        to[i * S::kThreads] = all;
      }
      sums.clear();
      ++part;
      part_left = chunks_of_part;
    }
  }

  copy_wait<0>();
  __syncthreads();
  if (!sums.gather(p, index, reinterpret_cast<int*>(stages))) return;
  CHARONIA_UNROLL
  for (int i = 0; i < S::kSums / 4; ++i) {
    const float4 four = closed[i * S::kThreads];
    const bool own = p.k_blocks == 1;
    sum[4 * i] = own ? four.x : sums.before[4 * i];
    sum[4 * i + 1] = own ? four.y : sums.before[4 * i + 1];
    sum[4 * i + 2] = own ? four.z : sums.before[4 * i + 2];
    sum[4 * i + 3] = own ? four.w : sums.before[4 * i + 3];
  }
  auto* const out = reinterpret_cast<float*>(stages);  // [kRows][kPitch]
  store_sums<S>(out, sum, warp_column, warp_row);
  __syncthreads();
  store_quant_outputs<T, S::kColumns>(p, tile, first_column, static_cast<int>(threadIdx.x), S::kThreads,
                                      [&](int row, int column) { return out[row * S::kPitch + column]; });
}

template <class S>
bool launch_if(Stream& stream, const QuantParams& p, const GemmTactic& tactic) {
  if (tactic.tile_rows != S::kRows || tactic.tile_columns != S::kColumns || tactic.stages != S::kStages) {
    return false;
  }
  const bool experts = p.tiles != nullptr;
  launch(stream, experts ? "experts: quantised GEMM (tile)" : "quantised GEMM (tile)",
         {.grid_x = static_cast<unsigned>(experts ? p.row_tiles : p.row_tiles * p.column_tiles),
          .grid_y = static_cast<unsigned>(experts ? p.column_tiles : p.k_blocks),
          .threads = S::kThreads,
          .dynamic_shared_bytes = S::kSharedBytes},
         &tile_kernel<S>, p);
  return true;
}

// Returns whether such a kernel exists.
template <class T, ops::Code code, int kClose>
bool launch_typed(Stream& stream, const QuantParams& p, const GemmTactic& tactic) {
  const auto launch_large = [](Stream& on, const QuantParams& params, const GemmTactic& how) {
    // With two scales per stage there are not enough registers. The same is true for four column warps: each would have
    // 64 rows.
    constexpr int kColumnWarps = 2;
    using Large = Shape<T, code, kClose, 128, 128, kColumnWarps, 8 / kColumnWarps, 4, 1>;
    if constexpr (kClose == kQuantK) return launch_if<Large>(on, params, how);
    return false;
  };
  return launch_if<Shape<T, code, kClose, 64, 32, 4, 1, 6, 3>>(stream, p, tactic) ||
         launch_if<Shape<T, code, kClose, 64, 64, 2, 2, 4, 3>>(stream, p, tactic) || launch_large(stream, p, tactic);
}

}  // namespace charonia::cuda::quant_tile

namespace charonia::cuda {

template <ops::Code code>
bool launch_quant_tile(Stream& stream, const QuantParams& params, const GemmTactic& tactic, DType type, int closes) {
  return with_closes<code>(type, closes, [&]<class T>(T, auto close) {
    return quant_tile::launch_typed<T, code, close()>(stream, params, tactic);
  });
}

}  // namespace charonia::cuda
