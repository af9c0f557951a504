// GEMMs in float without tensor cores: all products and sums in float, with sequential fused multiply-adds.
//
//   out [rows, n] = in [rows, k] * weight [n, k]^T + bias, all in float.
//
// Like gemm_tile_kernel.h: a block computes kColumns outputs of kRows rows, with stages of 32 elements of K in shared
// memory. Rows have 36 floats, so that eight threads that read four elements of eight rows use all 32 banks. A thread
// computes kM outputs of kN rows, kColumns / kM and kRows / kN apart.
//
// Bound: memory for few rows (72 KB in flight per SM with 64 x 8), otherwise shared memory: 16 (kM + kN) bytes for 4 kM
// kN multiply-adds, half the rate of the arithmetic with 4 x 4. Float weights are for verification; cuBLASLt is the
// fast path.
#include "ops/cuda/device/tensor_core.h"
#include "ops/cuda/kernels/gemm_device.h"

namespace charonia::cuda {
namespace {

constexpr int kChunk = 32, kRowFloats = kChunk + 4;

template <int kColumns_, int kRows_, int kM_, int kN_, bool kVectors_>
struct PlainShape {
  static constexpr int kColumns = kColumns_, kRows = kRows_, kM = kM_, kN = kN_, kStages = 3;
  static constexpr bool kVectors = kVectors_;
  static constexpr int kThreadColumns = kColumns / kM, kThreadRows = kRows / kN;
  static constexpr int kThreads = kThreadColumns * kThreadRows;
  static constexpr int kStageFloats = (kColumns + kRows) * kRowFloats;
  static constexpr int kPitch = kColumns + 4;
  static constexpr int kSharedBytes = kStages * kStageFloats * 4;
  static_assert(kRows * kPitch <= kStages * kStageFloats);
};

// Copies rows from `first` on of a matrix of `rows` rows, elements k .. k + 31; zeros beyond the matrix and from k_end
// on.
template <int kCount, int kThreads, bool kVectors>
CHARONIA_DEVICE void copy_floats(float* to, const float* from, std::int64_t stride, int first, int rows, int k,
                                 int k_end) {
  for (int i = static_cast<int>(threadIdx.x); i < kCount * (kChunk / 4); i += kThreads) {
    const int row = i / (kChunk / 4), at = i % (kChunk / 4) * 4;
    const float* const source = from + (first + row) * stride + k + at;
    float* const target = to + row * kRowFloats + at;
    if constexpr (kVectors) {
      copy_async_16(target, source, first + row < rows && k + at < k_end);
    } else {
      for (int j = 0; j < 4; ++j) target[j] = first + row < rows && k + at + j < k_end ? source[j] : 0.0F;
    }
  }
}

template <class S>
CHARONIA_KERNEL(S::kThreads, 2)
void plain_kernel(const GemmParams p) {
  constexpr int kM = S::kM, kN = S::kN;
  auto* const stages = reinterpret_cast<float*>(dynamic_shared());

  const int tile = static_cast<int>(blockIdx.x);
  const auto place = tile_place(tile, p.row_tiles, p.column_tiles);
  const int first_column = place.column_tile * S::kColumns, first_row = place.row_tile * S::kRows;
  const int first_part = static_cast<int>(blockIdx.y) * p.parts_of_block;
  const int k_begin = first_part * p.part_length;
  const int k_end = min(p.k, k_begin + p.parts_of_block * p.part_length);
  const int chunks = static_cast<int>(divide_up(k_end - k_begin, kKGrain)) * (kKGrain / kChunk);
  const int chunks_of_part = p.part_length / kChunk;

  dependency_trigger();
  dependency_wait();

  const auto fill = [&](int chunk) {
    if (chunk < chunks) {
      float* const to = stages + chunk % S::kStages * S::kStageFloats;
      const int k = k_begin + chunk * kChunk;
      // k_end may divide the weight's last group of four; it is zero beyond.
      copy_floats<S::kColumns, S::kThreads, true>(to, static_cast<const float*>(p.weight), p.weight_stride,
                                                  first_column, p.n, k, k_end);
      copy_floats<S::kRows, S::kThreads, S::kVectors>(to + S::kColumns * kRowFloats, static_cast<const float*>(p.in),
                                                      p.in_stride, first_row, p.rows, k, k_end);
    }
    copy_commit();
  };

  const int column = static_cast<int>(threadIdx.x) % S::kThreadColumns,
            row = static_cast<int>(threadIdx.x) / S::kThreadColumns;
  PartSums<S::kThreads, kM * kN> sums;
  sums.clear();
  int part = first_part, part_left = chunks_of_part;
  CHARONIA_UNROLL
  for (int i = 0; i < S::kStages - 1; ++i) fill(i);
  for (int chunk = 0; chunk < chunks; ++chunk) {
    copy_wait<S::kStages - 2>();
    __syncthreads();
    fill(chunk + S::kStages - 1);
    const float* const weight = stages + chunk % S::kStages * S::kStageFloats;
    const float* const in = weight + S::kColumns * kRowFloats;
    for (int k = 0; k < kChunk; k += 4) {
      float4 w[kM], x[kN];
      CHARONIA_UNROLL
      for (int i = 0; i < kM; ++i) {
        w[i] = *reinterpret_cast<const float4*>(weight + (column + i * S::kThreadColumns) * kRowFloats + k);
      }
      CHARONIA_UNROLL
      for (int j = 0; j < kN; ++j) {
        x[j] = *reinterpret_cast<const float4*>(in + (row + j * S::kThreadRows) * kRowFloats + k);
      }
      CHARONIA_UNROLL
      for (int i = 0; i < kM; ++i) {
        CHARONIA_UNROLL
        for (int j = 0; j < kN; ++j) {
          float& sum = sums.now[i * kN + j];
          sum = fmaf(w[i].x, x[j].x, sum);
          sum = fmaf(w[i].y, x[j].y, sum);
          sum = fmaf(w[i].z, x[j].z, sum);
          sum = fmaf(w[i].w, x[j].w, sum);
        }
      }
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
  CHARONIA_UNROLL
  for (int i = 0; i < kM; ++i) {
    CHARONIA_UNROLL
    for (int j = 0; j < kN; ++j) {
      stages[(row + j * S::kThreadRows) * S::kPitch + column + i * S::kThreadColumns] = sums.before[i * kN + j];
    }
  }
  store_tile<float, S::kThreads, S::kRows, S::kColumns, S::kPitch>(p, stages, first_row, first_column);
}

template <class S>
bool launch_if(Stream& stream, const GemmParams& p, const GemmTactic& tactic, bool vectors) {
  if (tactic.tile_rows != S::kRows || tactic.tile_columns != S::kColumns || tactic.stages != S::kStages ||
      vectors != S::kVectors) {
    return false;
  }
  launch(stream, "GEMM (plain)",
         {.grid_x = static_cast<unsigned>(p.row_tiles * p.column_tiles),
          .grid_y = static_cast<unsigned>(p.k_blocks),
          .threads = S::kThreads,
          .dynamic_shared_bytes = S::kSharedBytes,
          .cluster_y = p.cluster ? static_cast<unsigned>(p.k_blocks) : 1},
         &plain_kernel<S>, p);
  return true;
}

}  // namespace

bool launch_plain(Stream& stream, const GemmParams& params, const GemmTactic& tactic, bool vectors) {
  return launch_if<PlainShape<64, 8, 2, 2, true>>(stream, params, tactic, vectors) ||
         launch_if<PlainShape<64, 64, 4, 4, true>>(stream, params, tactic, vectors) ||
         launch_if<PlainShape<64, 8, 2, 2, false>>(stream, params, tactic, vectors) ||
         launch_if<PlainShape<64, 64, 4, 4, false>>(stream, params, tactic, vectors);
}

}  // namespace charonia::cuda
