// Common code of kernels that compute tiles from stages of shared memory on the tensor cores. gemm_tile_kernel.h
// describes the layout of a stage.
#pragma once

#include <cstdint>

#include "ops/cuda/device/tensor_core.h"

namespace charonia::cuda {

inline constexpr int kRowBytes = 128, kChunks = 8, kChunkElements = 8;

// vectors: the input can be read 16 bytes at a time; otherwise element by element.
template <class T_, int kColumns_, int kRows_, int kColumnWarps_, int kRowWarps_, int kStages_, int kBlocks_,
          bool kVectors_ = true>
struct TileShape {
  using T = T_;
  static constexpr int kColumns = kColumns_, kRows = kRows_, kColumnWarps = kColumnWarps_, kRowWarps = kRowWarps_;
  static constexpr int kStages = kStages_, kBlocks = kBlocks_;
  static constexpr bool kVectors = kVectors_;
  static constexpr int kThreads = kColumnWarps * kRowWarps * kWarp;
  static constexpr int kM = kColumns / kColumnWarps / 16, kN = kRows / kRowWarps / 8;  // GEMMs per warp
  static constexpr int kStageBytes = (kColumns + kRows) * kRowBytes;
  // The pitch of the sums in shared memory, padded so that the lanes of a store use different banks.
  static constexpr int kPitch = kColumns + 4;
  static constexpr int kSharedBytes = kStages * kStageBytes;
  static_assert(kM * kColumnWarps * 16 == kColumns && kN * kRowWarps * 8 == kRows);
  static_assert(kRows * kPitch * 4 <= kSharedBytes);
};

CHARONIA_DEVICE int swizzled(int row, int chunk) { return row * kRowBytes + (chunk ^ (row % 2 * 4)) * 16; }

// The GEMMs of a stage of 64 elements of K, added to sums [kM][kN][4]. The warp's columns begin at warp_column of
// `weight`, its rows at warp_row of `in`.
template <class S>
CHARONIA_DEVICE void multiply_stage(float (&sums)[S::kM * S::kN * 4], const unsigned char* weight,
                                    const unsigned char* in, int warp_column, int warp_row) {
  constexpr int kM = S::kM, kN = S::kN;
  const int g = lane_id() / 4, t = lane_id() % 4;
  CHARONIA_UNROLL
  for (int half = 0; half < 2; ++half) {
    uint4 w[2 * kM], x[kN];
    CHARONIA_UNROLL
    for (int i = 0; i < 2 * kM; ++i) {
      w[i] = *reinterpret_cast<const uint4*>(weight + swizzled(warp_column + 8 * i + g, 4 * half + t));
    }
    CHARONIA_UNROLL
    for (int j = 0; j < kN; ++j) {
      x[j] = *reinterpret_cast<const uint4*>(in + swizzled(warp_row + 8 * j + g, 4 * half + t));
    }
    CHARONIA_UNROLL
    for (int quarter = 0; quarter < 2; ++quarter) {
      CHARONIA_UNROLL
      for (int i = 0; i < kM; ++i) {
        const uint4 upper = w[2 * i], lower = w[2 * i + 1];
        const std::uint32_t a[4] = {quarter == 0 ? upper.x : upper.z, quarter == 0 ? lower.x : lower.z,
                                    quarter == 0 ? upper.y : upper.w, quarter == 0 ? lower.y : lower.w};
        CHARONIA_UNROLL
        for (int j = 0; j < kN; ++j) {
          const std::uint32_t b[2] = {quarter == 0 ? x[j].x : x[j].z, quarter == 0 ? x[j].y : x[j].w};
          mma_m16n8k16<typename S::T>(*reinterpret_cast<float (*)[4]>(&sums[(i * kN + j) * 4]), a, b);
        }
      }
    }
  }
}

// The same for pairs of 8-bit numbers. It keeps few operands in registers, because FP8 needs additional registers for a
// chunk's sums.
template <class S>
CHARONIA_DEVICE void multiply_pairs(SumType<typename S::T> (&sums)[S::kM * S::kN * 4], const unsigned char* weight,
                                    const unsigned char* in, int warp_column, int warp_row) {
  using T = typename S::T;
  constexpr int kN = S::kN;
  const int g = lane_id() / 4, t = lane_id() % 4;
  CHARONIA_UNROLL_BY(1)
  for (int half = 0; half < 2; ++half) {
    uint4 x[kN];
    CHARONIA_UNROLL
    for (int j = 0; j < kN; ++j) {
      x[j] = *reinterpret_cast<const uint4*>(in + swizzled(warp_row + 8 * j + g, 4 * half + t));
    }
    CHARONIA_UNROLL
    for (int i = 0; i < S::kM; ++i) {
      const auto row = [&](int of) {
        return *reinterpret_cast<const uint4*>(weight + swizzled(warp_column + 16 * i + of + g, 4 * half + t));
      };
      const uint4 upper = row(0), lower = row(8);
      const std::uint32_t a0[4] = {upper.x, lower.x, upper.y, lower.y}, a1[4] = {upper.z, lower.z, upper.w, lower.w};
      CHARONIA_UNROLL
      for (int j = 0; j < kN; ++j) {
        const std::uint32_t b0[2] = {x[j].x, x[j].y}, b1[2] = {x[j].z, x[j].w};
        multiply_chunk<T>(*reinterpret_cast<SumType<T>(*)[4]>(&sums[(i * kN + j) * 4]), a0, a1, b0, b1);
      }
    }
  }
}

// Writes the sums of all parts to shared memory, [kRows][kPitch].
template <class S>
CHARONIA_DEVICE void store_sums(SumType<typename S::T>* out, const SumType<typename S::T> (&sums)[S::kM * S::kN * 4],
                                int warp_column, int warp_row) {
  const int g = lane_id() / 4, t = lane_id() % 4;
  CHARONIA_UNROLL
  for (int i = 0; i < S::kM; ++i) {
    CHARONIA_UNROLL
    for (int j = 0; j < S::kN; ++j) {
      CHARONIA_UNROLL
      for (int c = 0; c < 4; ++c) {
        const int row = warp_row + 8 * j + 2 * t + c % 2, column = warp_column + 16 * i + g + c / 2 * 8;
        out[row * S::kPitch + column] = sums[(i * S::kN + j) * 4 + c];
      }
    }
  }
}

}  // namespace charonia::cuda
