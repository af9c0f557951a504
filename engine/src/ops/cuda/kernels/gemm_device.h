// Common device code of the kernels of gemm.h: combines and stores the sums of a tile.
#pragma once

#include <cstdint>

#include "ops/cuda/device/tensor_core.h"
#include "ops/cuda/kernels/gemm_params.h"

namespace charonia::cuda {

// Scales a sum of products of 8-bit numbers. The CPU's integer kernels multiply in this order, and round each product.
CHARONIA_DEVICE float scaled(float of_column, float sum, float of_row) {
  return multiply_rounded(multiply_rounded(of_column, sum), of_row);
}
template <class T>
CHARONIA_DEVICE float scaled(const PairParams& p, std::int64_t row, std::int64_t column, SumType<T> sum) {
  return scaled(p.column_scales[column], static_cast<float>(sum), p.row_scales[row]);
}

template <class T>
CHARONIA_DEVICE void store_out(const ParamsOf<T>& p, std::int64_t row, std::int64_t column, SumType<T> of_products) {
  if constexpr (kIsPair<T>) {
    float sum = scaled<T>(p, row, column, of_products);
    if (p.bias != nullptr) sum += p.bias[column];
    const auto at = row * p.out_stride + column;
    if (p.out_f32) {
      static_cast<float*>(p.out)[at] = sum;
    } else {
      static_cast<std::uint16_t*>(p.out)[at] = p.out_f16 ? from_float<f16>(sum).bits : from_float<bf16>(sum).bits;
    }
  } else {
    float sum = of_products;
    if (p.bias != nullptr) sum += p.bias[column];
    const auto at = row * p.out_stride + column;
    if (p.out_f32) {
      static_cast<float*>(p.out)[at] = sum;
    } else {
      static_cast<T*>(p.out)[at] = from_float<T>(sum);
    }
  }
}

template <class Sum>
using Four = std::conditional_t<std::is_same_v<Sum, int>, int4, float4>;

CHARONIA_DEVICE void add(float4& a, const float4& b) { a.x += b.x, a.y += b.y, a.z += b.z, a.w += b.w; }
CHARONIA_DEVICE void add(int4& a, const int4& b) { a.x += b.x, a.y += b.y, a.z += b.z, a.w += b.w; }

// A thread's sums over K: kSums running sums of the current part, and the sums of earlier parts.
template <int kThreads, int kSums, class Sum = float>
struct PartSums {
  Sum now[kSums];
  Sum before[kSums];

  CHARONIA_DEVICE void clear() {
    CHARONIA_UNROLL
    for (int i = 0; i < kSums; ++i) now[i] = 0;
  }

  CHARONIA_DEVICE Four<Sum>* place(const GemmParams& p, int tile, int part) const {
    const auto block = static_cast<std::int64_t>(tile) * p.parts + part;
    return reinterpret_cast<Four<Sum>*>(p.sums) + block * (kThreads * (kSums / 4)) + threadIdx.x;
  }

  // Ends a part. `first`: the first part of this block.
  CHARONIA_DEVICE void end_part(const GemmParams& p, int tile, int part, bool first) {
    if (p.k_blocks > 1 && !p.cluster) {
      auto* const to = place(p, tile, part);
      CHARONIA_UNROLL
      for (int i = 0; i < kSums / 4; ++i) {
        to[i * kThreads] = Four<Sum>{now[4 * i], now[4 * i + 1], now[4 * i + 2], now[4 * i + 3]};
      }
    } else {
      CHARONIA_UNROLL
      for (int i = 0; i < kSums; ++i) before[i] = first ? now[i] : before[i] + now[i];
    }
    clear();
  }

  // Call after the last part: computes the sums of all parts in `before`; in a cluster, only the block's sums. If
  // several blocks share a tile, the last one does this, and the others get false. `shared`: an unused int of shared
  // memory.
  CHARONIA_DEVICE bool gather(const GemmParams& p, int tile, int* shared) {
    if (p.k_blocks == 1 || p.cluster) return true;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
      const int arrived = atomicAdd(p.counters + tile, 1) + 1;
      if (arrived == p.k_blocks) p.counters[tile] = 0;
      *shared = arrived;
    }
    __syncthreads();
    const bool last = *shared == p.k_blocks;
    __syncthreads();
    if (!last) return false;
    __threadfence();
    const auto* const from = place(p, tile, 0);
    constexpr int kStride = kThreads * (kSums / 4);
    constexpr int kAtOnce = kSums <= 32 ? 1 : kSums / 4;  // groups of four per iteration, limited by registers
    CHARONIA_UNROLL
    for (int first = 0; first < kSums / 4; first += kAtOnce) {
      Four<Sum> sum[kAtOnce];
      if constexpr (kAtOnce == 1) {
        Four<Sum> parts[kMaxKParts];  // all loads are in flight before the first addition
        CHARONIA_UNROLL
        for (int part = 0; part < kMaxKParts; ++part) {
          if (part < p.parts) parts[part] = load_l2(from + part * kStride + first * kThreads);
        }
        sum[0] = parts[0];
        CHARONIA_UNROLL
        for (int part = 1; part < kMaxKParts; ++part) {
          if (part < p.parts) add(sum[0], parts[part]);
        }
      } else {
        for (int part = 0; part < p.parts; ++part) {
          Four<Sum> next[kAtOnce];
          CHARONIA_UNROLL
          for (int i = 0; i < kAtOnce; ++i) next[i] = load_l2(from + part * kStride + i * kThreads);
          CHARONIA_UNROLL
          for (int i = 0; i < kAtOnce; ++i) {
            if (part == 0) {
              sum[i] = next[i];
            } else {
              add(sum[i], next[i]);
            }
          }
        }
      }
      CHARONIA_UNROLL
      for (int i = 0; i < kAtOnce; ++i) {
        Sum* const to = before + 4 * (first + i);
        to[0] = sum[i].x, to[1] = sum[i].y, to[2] = sum[i].z, to[3] = sum[i].w;
      }
    }
    return true;
  }
};

// Stores eight 16-bit outputs; the first is aligned to 16 bytes.
template <class T>
CHARONIA_DEVICE void store_eight(const GemmParams& p, std::int64_t at, const float (&x)[8]) {
  unsigned pairs[4];
  CHARONIA_UNROLL
  for (int j = 0; j < 4; ++j) {
    pairs[j] = static_cast<unsigned>(from_float<T>(x[2 * j + 1]).bits) << 16 | from_float<T>(x[2 * j]).bits;
  }
  *reinterpret_cast<uint4*>(static_cast<T*>(p.out) + at) = uint4{pairs[0], pairs[1], pairs[2], pairs[3]};
}

// Stores a tile of sums from the block's dynamic shared memory, [tile rows][pitch]; pitch is a multiple of 4, the
// columns are a multiple of 8. In a cluster, every block stores a part of the tile.
template <class T, int kThreads, int kRows, int kColumns, int kPitch>
CHARONIA_DEVICE void store_tile(const ParamsOf<T>& p, const SumType<T>* sums, std::int64_t first_row,
                                std::int64_t first_column) {
  constexpr int kEights = kRows * kColumns / 8;
  static_assert(kColumns % 8 == 0 && kPitch % 4 == 0 && kEights % kMaxKParts == 0);
  const int blocks = p.cluster ? p.k_blocks : 1, share = kEights / blocks;
  const int begin = p.cluster ? cluster_rank() * share : 0;
  if (p.cluster) {
    cluster_sync();
  } else {
    __syncthreads();
  }
  for (int i = begin + static_cast<int>(threadIdx.x); i < begin + share; i += kThreads) {
    const std::int64_t row = first_row + i / (kColumns / 8), column = first_column + i % (kColumns / 8) * 8;
    if (row >= p.rows || column >= p.n) continue;
    const SumType<T>* const from = sums + i / (kColumns / 8) * kPitch + i % (kColumns / 8) * 8;
    SumType<T> sum[8];
    CHARONIA_UNROLL
    for (int j = 0; j < 8; j += 4) {
      const auto* const at = reinterpret_cast<const Four<SumType<T>>*>(from + j);
      auto four = *(p.cluster ? map_shared_rank(at, 0) : at);
      for (int rank = 1; rank < blocks; ++rank) add(four, *map_shared_rank(at, rank));
      sum[j] = four.x, sum[j + 1] = four.y, sum[j + 2] = four.z, sum[j + 3] = four.w;
    }
    if (!p.out_vectors || column + 8 > p.n) {
      CHARONIA_UNROLL
      for (int j = 0; j < 8; ++j) {
        if (column + j < p.n) store_out<T>(p, row, column + j, sum[j]);
      }
      continue;
    }
    float out[8];
    CHARONIA_UNROLL
    for (int j = 0; j < 8; ++j) {
      if constexpr (kIsPair<T>) {
        out[j] = scaled<T>(p, row, column + j, sum[j]);
      } else {
        out[j] = sum[j];
      }
    }
    if (p.bias != nullptr) {
      CHARONIA_UNROLL
      for (int j = 0; j < 8; ++j) out[j] += p.bias[column + j];
    }
    const auto at = row * p.out_stride + column;
    if (p.out_f32) {
      auto* const to = reinterpret_cast<float4*>(static_cast<float*>(p.out) + at);
      to[0] = float4{out[0], out[1], out[2], out[3]};
      to[1] = float4{out[4], out[5], out[6], out[7]};
    } else if constexpr (!kIsPair<T>) {
      if constexpr (sizeof(T) == 2) store_eight<T>(p, at, out);
    } else if (p.out_f16) {
      store_eight<f16>(p, at, out);
    } else {
      store_eight<bf16>(p, at, out);
    }
  }
  if (p.cluster) cluster_sync();  // the other blocks have read this block's sums
}

}  // namespace charonia::cuda
