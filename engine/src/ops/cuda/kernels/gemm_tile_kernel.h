// GEMMs of more rows: tiles of weight and input go through stages of shared memory into the tensor cores.
//
//   out [rows, n] = in [rows, k] * weight [n, k]^T + bias, weight and in in bf16 or f16, sums in float; or both in 8
//   bits (w8a8_gemm.h), with two of them per element here.
//
// A block computes kColumns outputs of kRows rows over one or several parts of K (split_k). A stage holds 64 elements
// of K: [kColumns + kRows] rows of 128 bytes, with eight chunks of 16 bytes each. Asynchronous copies fill stages ahead
// of the computation. Lane 4g + t takes chunk t (then 4 + t) of a row g. These 16 bytes are directly its operands of
// two m16n8k16 GEMMs, in gemm_stream_kernel.h's order of K. Eight lanes read two rows at a time. The chunks of odd rows
// are moved by four positions (swizzled), so the lanes use all 32 banks once; a copy of eight lanes, which is one row,
// does too.
//
// When a part ends, its sums are added to those of earlier parts in registers. If k_blocks blocks share the parts of a
// tile, they are written to the workspace for the last block. If the order of additions is free, a block writes one sum
// for all its parts. In a cluster it writes the sum to its own shared memory, and each block adds and stores a part of
// the tile from the shared memory of all blocks. For s sums of a tile (8 parts, or 2 to 8 blocks) this saves writing 4
// s kRows kColumns bytes to the L2 cache and reading them, and there is no fence, no counter and no block that works
// alone at the end.
//
// A stage of a packed weight has kColumns / 8 pieces of 1 KB instead of kColumns rows of 128 bytes. Both are whole
// lines.
//
// Bound: memory up to about 64 rows. Each of the 2 or 3 blocks per SM keeps (kStages - 1) * kColumns * 128 bytes of
// weight in flight: 120 KB (64 x 16), 120 KB (64 x 32), 128 KB (128 x 32), 96 KB (128 x 64) per SM, where an H200 needs
// 29 KB. Every column of tiles reads the input: kRows / kColumns of the weight's bytes, from the L2 cache. Shared
// memory reads per byte of weight: 2 (64 x 16, 64 x 32, 128 x 32) and 3 (128 x 64); with the copies 3.3 to 4.5 of the 6
// that 128 bytes per cycle allow at 4.8 TB/s. For more rows the bound is arithmetic: a warp of the largest tile loads 3
// KB for 16 GEMMs of 16 x 8 x 16: 24 cycles of shared memory for about 25 of the tensor cores at the rate that mma.sync
// reaches on Hopper, about 60 % of wgmma.
#pragma once

#include "ops/cuda/kernels/gemm_device.h"
#include "ops/cuda/kernels/gemm_tile_device.h"

namespace charonia::cuda::gemm_tile {

// Copies rows from `first` on of a matrix of `rows` rows, elements k .. k + 63; zeros beyond the matrix and from k_end
// on.
template <class T, int kCount, int kThreads>
CHARONIA_DEVICE void copy_rows(unsigned char* to, const T* from, int stride, int first, int rows, int k, int k_end) {
  constexpr int kStep = kThreads / kChunks;  // even, so that all rows of a thread have the same swizzle
  static_assert(kCount % kStep == 0 && kStep % 2 == 0);
  const int chunk = static_cast<int>(threadIdx.x) % kChunks, own = static_cast<int>(threadIdx.x) / kChunks;
  // number of rows from the thread's first row on
  const int valid = k + chunk * kChunkElements < k_end ? rows - first - own : 0;
  const T* at = from + static_cast<std::int64_t>(first + own) * stride + k + chunk * kChunkElements;
  unsigned char* const shared = to + swizzled(own, chunk);
  CHARONIA_UNROLL
  for (int i = 0; i < kCount; i += kStep) {
    copy_async_16(shared + i * kRowBytes, at + static_cast<std::int64_t>(i) * stride, i < valid);
  }
}

// Like copy_rows(), for a packed matrix (gemm.h).
template <class T, int kCount, int kThreads>
CHARONIA_DEVICE void copy_packed(unsigned char* to, const T* from, int stride, int first, int rows, int k, int k_end) {
  constexpr int kStep = kThreads / kChunks;
  static_assert(kCount % kStep == 0 && kStep % kPackedRows == 0);
  const int chunk = static_cast<int>(threadIdx.x) % kChunks, own = static_cast<int>(threadIdx.x) / kChunks;
  const int valid = k + chunk * kChunkElements < k_end ? rows - first - own : 0;
  const T* const at = from + packed_at(first + own, k + chunk * kChunkElements, stride);
  unsigned char* const shared = to + swizzled(own, chunk);
  CHARONIA_UNROLL
  for (int i = 0; i < kCount; i += kStep) {
    copy_async_16(shared + i * kRowBytes, at + static_cast<std::int64_t>(i) * stride, i < valid);
  }
}

template <class T, int kCount, int kThreads>
CHARONIA_DEVICE void copy_elements(unsigned char* to, const T* from, int stride, int first, int rows, int k,
                                   int k_end) {
  for (int i = static_cast<int>(threadIdx.x); i < kCount * kChunks; i += kThreads) {
    const int row = i / kChunks, chunk = i % kChunks;
    T eight[kChunkElements];
    for (int j = 0; j < kChunkElements; ++j) {
      const int at = k + chunk * kChunkElements + j;
      const bool valid = first + row < rows && at < k_end;
      eight[j] = valid ? from[static_cast<std::int64_t>(first + row) * stride + at] : T{0};
    }
    auto* const shared = reinterpret_cast<T*>(to + swizzled(row, chunk));
    for (int j = 0; j < kChunkElements; ++j) shared[j] = eight[j];
  }
}

template <class S>
CHARONIA_KERNEL(S::kThreads, S::kBlocks)
void tile_kernel(const ParamsOf<typename S::T> p) {
  using T = typename S::T;
  unsigned char* const stages = dynamic_shared();

  const int tile = static_cast<int>(blockIdx.x);
  const auto place = tile_place(tile, p.row_tiles, p.column_tiles);
  const int first_column = place.column_tile * S::kColumns, first_row = place.row_tile * S::kRows;
  const int first_part = static_cast<int>(blockIdx.y) * p.parts_of_block;
  const int k_begin = first_part * p.part_length;
  const int k_end = min(p.k, k_begin + p.parts_of_block * p.part_length);
  const int chunks = static_cast<int>(divide_up(k_end - k_begin, kKGrain));
  const int chunks_of_part = p.part_length / kKGrain;

  // Prefetches weights into the L2 cache while the previous kernel still runs.
  for (int i = static_cast<int>(threadIdx.x); i < S::kColumns * (S::kStages - 1); i += S::kThreads) {
    const int column = first_column + i % S::kColumns, k = k_begin + i / S::kColumns * kKGrain;
    // For a packed weight: the 8 lines of two blocks, one for each of their rows.
    const auto at = p.packed ? packed_at(column, k, p.weight_stride) + column % kPackedRows * kPackedK
                             : static_cast<std::int64_t>(column) * p.weight_stride + k;
    const int last_k = p.packed ? k + column % kPackedRows / 4 * kPackedK : k;  // start of that line
    if (column < p.n && last_k < k_end) prefetch_l2(static_cast<const T*>(p.weight) + at);
  }
  if (!p.late_trigger) dependency_trigger();
  dependency_wait();

  const auto fill = [&](int chunk) {
    if (chunk < chunks) {
      unsigned char* const to = stages + chunk % S::kStages * S::kStageBytes;
      const int k = k_begin + chunk * kKGrain;
      if (p.packed) {
        copy_packed<T, S::kColumns, S::kThreads>(to, static_cast<const T*>(p.weight), p.weight_stride, first_column,
                                                 p.n, k, k_end);
      } else {
        copy_rows<T, S::kColumns, S::kThreads>(to, static_cast<const T*>(p.weight), p.weight_stride, first_column, p.n,
                                               k, k_end);
      }
      unsigned char* const to_in = to + S::kColumns * kRowBytes;
      if constexpr (S::kVectors) {
        copy_rows<T, S::kRows, S::kThreads>(to_in, static_cast<const T*>(p.in), p.in_stride, first_row, p.rows, k,
                                            k_end);
      } else {
        copy_elements<T, S::kRows, S::kThreads>(to_in, static_cast<const T*>(p.in), p.in_stride, first_row, p.rows, k,
                                                k_end);
      }
      if (p.late_trigger && chunk + 1 == chunks) dependency_trigger();
    }
    copy_commit();
  };

  const int warp_column = warp_id() % S::kColumnWarps * (S::kColumns / S::kColumnWarps);
  const int warp_row = warp_id() / S::kColumnWarps * (S::kRows / S::kRowWarps);
  PartSums<S::kThreads, S::kM * S::kN * 4, SumType<T>> sums;
  sums.clear();
  int part = first_part, part_left = chunks_of_part;

  CHARONIA_UNROLL
  for (int i = 0; i < S::kStages - 1; ++i) fill(i);
  for (int chunk = 0; chunk < chunks; ++chunk) {
    copy_wait<S::kStages - 2>();
    __syncthreads();  // this chunk is complete, and all threads are done with the previous one
    fill(chunk + S::kStages - 1);
    const unsigned char* const weight = stages + chunk % S::kStages * S::kStageBytes;
    const unsigned char* const in = weight + S::kColumns * kRowBytes;
    if constexpr (kIsPair<T>) {
      multiply_pairs<S>(sums.now, weight, in, warp_column, warp_row);
    } else {
      multiply_stage<S>(sums.now, weight, in, warp_column, warp_row);
    }
    if (--part_left == 0 || chunk + 1 == chunks) {
      sums.end_part(p, tile, part, part == first_part);
      ++part;
      part_left = chunks_of_part;
    }
  }

  copy_wait<0>();
  __syncthreads();
  if (!sums.gather(p, tile, reinterpret_cast<int*>(stages))) return;
  auto* const out = reinterpret_cast<SumType<T>*>(stages);  // [kRows][kPitch]
  store_sums<S>(out, sums.before, warp_column, warp_row);
  store_tile<T, S::kThreads, S::kRows, S::kColumns, S::kPitch>(p, out, first_row, first_column);
}

template <class S>
bool launch_if(Stream& stream, const ParamsOf<typename S::T>& p, const GemmTactic& tactic, bool vectors) {
  if (tactic.tile_rows != S::kRows || tactic.tile_columns != S::kColumns || tactic.stages != S::kStages ||
      vectors != S::kVectors) {
    return false;
  }
  launch(stream, "GEMM (tile)",
         {.grid_x = static_cast<unsigned>(p.row_tiles * p.column_tiles),
          .grid_y = static_cast<unsigned>(p.k_blocks),
          .threads = S::kThreads,
          .dynamic_shared_bytes = S::kSharedBytes,
          .cluster_y = p.cluster ? static_cast<unsigned>(p.k_blocks) : 1},
         &tile_kernel<S>, p);
  return true;
}

// Returns whether such a kernel exists. Each type has its own source file, so that they compile in parallel.
template <class T>
bool launch_typed(Stream& stream, const GemmParams& p, const GemmTactic& tactic, bool vectors) {
  return launch_if<TileShape<T, 64, 16, 4, 1, 6, 3>>(stream, p, tactic, vectors) ||
         launch_if<TileShape<T, 64, 32, 2, 1, 6, 3>>(stream, p, tactic, vectors) ||
         launch_if<TileShape<T, 128, 32, 4, 1, 5, 2>>(stream, p, tactic, vectors) ||
         launch_if<TileShape<T, 128, 32, 4, 1, 4, 2>>(stream, p, tactic, vectors) ||
         launch_if<TileShape<T, 128, 64, 4, 1, 4, 2>>(stream, p, tactic, vectors) ||
         launch_if<TileShape<T, 128, 128, 2, 4, 4, 1>>(stream, p, tactic, vectors) ||
         launch_if<TileShape<T, 128, 128, 2, 4, 3, 1>>(stream, p, tactic, vectors) ||
         launch_if<TileShape<T, 64, 32, 2, 1, 6, 3, false>>(stream, p, tactic, vectors);
}

}  // namespace charonia::cuda::gemm_tile
