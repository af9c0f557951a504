// GEMMs of experts with the rows that selected them.
//
//   out [places, n] = in [places, k] * weight[expert of the place] [n, k]^T + its bias [n], sums in float;
//   gated: weight rows are in groups of sixteen, 8 of gate and the corresponding 8 of up, which give 8 outputs, their
//   activation, so that the intermediate values are never written to memory.
//
// Places are sorted by expert and divided into tiles of one expert (experts_route.cu). Only the device knows how many
// places each expert has. So a launch has a block for every possible tile, and blocks without rows end immediately.
// Blocks with neighbouring numbers are tiles with the same columns of weight, so the tiles of one expert run at the
// same time and read its weight from memory once.
//
//   stream   gemm_stream_kernel.h with tiles of 8 rows: weights from memory into registers, a warp per part of K
//   tile     gemm_tile_kernel.h with tiles of 32, 64 or 128 rows: stages of shared memory
//   plain    float, without tensor cores, tiles of 8 rows
// K is divided and processed as in those kernels; stream and tile give the same bits.
//
// Bound: memory for few rows. The kernels must read the weights of the selected experts: 3 * d * inter * hidden
// elements for d experts. For hidden 2048, inter 768 and 8 of 128 experts in bf16 (Qwen3-30B-A3B) one row reads 75.5 MB
// per layer; inputs and outputs are 60 KB. The expert of a block is known only after the previous kernel has ended, so
// nothing is read ahead. An expert with more than 8 rows is read again for every 8 rows, mostly from the L2 cache. For
// many rows the bound is arithmetic, as in gemm_tile_kernel.h. An expert's last tile is padded: at an average of 128
// rows per expert, tiles of 128 are three quarters full.
#include "ops/cuda/kernels/experts.h"

#include "ops/cuda/kernels/activation.h"
#include "ops/cuda/kernels/gemm.h"
#include "ops/cuda/kernels/gemm_tile_device.h"
#include "ops/cuda/kernels/quant_gemm.h"

namespace charonia::cuda {
namespace {

constexpr int kUnit = 8;  // outputs per store of a thread

struct ExpertGemmParams {
  const void* in = nullptr;
  const std::int32_t* rows_of = nullptr;
  const void* weight = nullptr;
  const float* bias = nullptr;  // [experts, n]; null: none
  void* out = nullptr;
  const ExpertTile* tiles = nullptr;
  std::int64_t expert_size = 0;  // elements between the weights of two experts
  int in_stride = 0, out_stride = 0;
  int n = 0, k = 0;
  int parts = 1, part_length = 0;  // see split_k
  ops::Activation activation;
};

template <class T>
CHARONIA_DEVICE const T* weight_of(const ExpertGemmParams& p, const ExpertTile& tile) {
  return static_cast<const T*>(p.weight) + tile.expert * p.expert_size;
}
// The row of `in` for a row of the tile.
CHARONIA_DEVICE int in_row(const ExpertGemmParams& p, const ExpertTile& tile, int row) {
  return p.rows_of != nullptr ? p.rows_of[tile.first + row] : tile.first + row;
}

CHARONIA_DEVICE void store_unit(float* to, const float (&x)[kUnit]) {
  auto* const fours = reinterpret_cast<float4*>(to);
  fours[0] = float4{x[0], x[1], x[2], x[3]};
  fours[1] = float4{x[4], x[5], x[6], x[7]};
}
template <class T>
CHARONIA_DEVICE void store_unit(T* to, const float (&x)[kUnit]) {
  *reinterpret_cast<uint4*>(to) =
      uint4{pack<T>(x[0], x[1]), pack<T>(x[2], x[3]), pack<T>(x[4], x[5]), pack<T>(x[6], x[7])};
}

// Stores a tile's outputs for weight rows from first_column on. sum(row, column) returns the sum over K, with the
// column relative to first_column.
template <class T, bool gated, int kColumns, class Sum>
CHARONIA_DEVICE void store_outputs(const ExpertGemmParams& p, const ExpertTile& tile, int first_column, int thread,
                                   int threads, Sum sum) {
  constexpr int kStep = gated ? 2 * kUnit : kUnit;
  const float* const bias =
      p.bias == nullptr ? nullptr : p.bias + std::int64_t{tile.expert} * p.n + first_column;
  for (int i = thread; i < tile.rows * (kColumns / kStep); i += threads) {
    const int row = i / (kColumns / kStep), from = i % (kColumns / kStep) * kStep, column = first_column + from;
    if (column >= p.n) continue;
    float x[kUnit];
    CHARONIA_UNROLL
    for (int j = 0; j < kUnit; ++j) {
      float own = sum(row, from + j);
      if (bias != nullptr) own += bias[from + j];
      if constexpr (gated) {
        float up = sum(row, from + kUnit + j);
        if (bias != nullptr) up += bias[from + kUnit + j];
        own = cuda::gated(p.activation, own, up);
      }
      x[j] = own;
    }
    store_unit(static_cast<T*>(p.out) + static_cast<std::int64_t>(tile.first + row) * p.out_stride +
                   (gated ? column / 2 : column),
               x);
  }
}

// Stream kernel.

constexpr int kStreamWarps = 8, kStreamThreads = kStreamWarps * kWarp, kStreamRows = 8, kStreamColumns = 16;

template <class T, bool gated>
CHARONIA_KERNEL(kStreamThreads, 3)
void stream_kernel(const ExpertGemmParams p) {
  constexpr int kRing = 4, kPitch = kStreamColumns + 4;  // padded, so that the lanes of a store use different banks
  CHARONIA_SHARED(float, sums, [kStreamWarps * kStreamRows * kPitch]);
  dependency_trigger();
  dependency_wait();
  const ExpertTile tile = p.tiles[blockIdx.x];
  if (tile.rows == 0) return;

  const int g = lane_id() / 4, t = lane_id() % 4;
  const int group = warp_id() / p.parts, part = warp_id() - group * p.parts;
  const int groups = static_cast<int>(blockDim.x) / kWarp / p.parts;
  const int first_column = (static_cast<int>(blockIdx.y) * groups + group) * kStreamColumns;
  const int k_begin = part * p.part_length;
  const int k_left = min(p.part_length, p.k - k_begin);
  const int steps = 2 * static_cast<int>(divide_up(k_left, kKGrain));
  int left = k_left - 8 * t;  // remaining elements from the lane's next chunk on

  // Outputs beyond n recompute the last output, and rows beyond the tile the first row; these results are dropped.
  const T* weight[2];
  CHARONIA_UNROLL
  for (int i = 0; i < 2; ++i) {
    const int column = min(first_column + 8 * i + g, p.n - 1);
    weight[i] = weight_of<T>(p, tile) + static_cast<std::int64_t>(column) * p.k + k_begin + 8 * t;
  }
  const T* in = static_cast<const T*>(p.in) +
                static_cast<std::int64_t>(in_row(p, tile, g < tile.rows ? g : 0)) * p.in_stride + k_begin + 8 * t;
  uint4 ring[kRing][2];
  const auto load_weight = [&](uint4(&to)[2], int ahead) {
    CHARONIA_UNROLL
    for (int i = 0; i < 2; ++i) {
      to[i] = 32 * ahead < left ? load_streaming(reinterpret_cast<const uint4*>(weight[i] + 32 * ahead))
                                : uint4{0, 0, 0, 0};
    }
  };
  const auto load_in = [&](int ahead) {
    return 32 * ahead < left ? load_cached(reinterpret_cast<const uint4*>(in + 32 * ahead)) : uint4{0, 0, 0, 0};
  };
  CHARONIA_UNROLL
  for (int i = 0; i < kRing; ++i) load_weight(ring[i], i);

  float sum[4] = {0, 0, 0, 0};
  uint4 next = load_in(0);
  for (int step = 0; step < steps; step += kRing) {
    CHARONIA_UNROLL
    for (int at = 0; at < kRing; ++at) {
      if (at % 2 == 0 && step + at >= steps) break;
      const uint4 x = next, upper = ring[at][0], lower = ring[at][1];
      next = load_in(at + 1);
      const std::uint32_t a0[4] = {upper.x, lower.x, upper.y, lower.y}, b0[2] = {x.x, x.y};
      mma_m16n8k16<T>(sum, a0, b0);
      const std::uint32_t a1[4] = {upper.z, lower.z, upper.w, lower.w}, b1[2] = {x.z, x.w};
      mma_m16n8k16<T>(sum, a1, b1);
      load_weight(ring[at], at + kRing);
    }
    left -= 32 * kRing;
    CHARONIA_UNROLL
    for (int i = 0; i < 2; ++i) weight[i] += 32 * kRing;
    in += 32 * kRing;
  }

  float* const mine = sums + warp_id() * kStreamRows * kPitch;
  CHARONIA_UNROLL
  for (int c = 0; c < 4; ++c) mine[(2 * t + c % 2) * kPitch + g + c / 2 * 8] = sum[c];
  __syncthreads();
  // The threads of a group's warps store its outputs.
  const float* const of_group = sums + group * p.parts * kStreamRows * kPitch;
  store_outputs<T, gated, kStreamColumns>(p, tile, first_column,
                                          static_cast<int>(threadIdx.x) - group * p.parts * kWarp, p.parts * kWarp,
                                          [&](int row, int column) {
                                            const float* const from = of_group + row * kPitch + column;
                                            float total = from[0];
                                            for (int i = 1; i < p.parts; ++i) total += from[i * kStreamRows * kPitch];
                                            return total;
                                          });
}

// Tile kernel.

template <class S, bool gated>
CHARONIA_KERNEL(S::kThreads, S::kBlocks)
void tile_kernel(const ExpertGemmParams p) {
  using T = typename S::T;
  constexpr int kStep = S::kThreads / kChunks;  // rows that the block copies at a time; even, see swizzled()
  constexpr int kSums = S::kM * S::kN * 4;
  static_assert(S::kColumns % kStep == 0 && S::kRows % kStep == 0 && kStep % 2 == 0);
  unsigned char* const stages = dynamic_shared();
  dependency_trigger();
  dependency_wait();
  const ExpertTile tile = p.tiles[blockIdx.x];
  if (tile.rows == 0) return;

  const int first_column = static_cast<int>(blockIdx.y) * S::kColumns;
  const int chunk_of = static_cast<int>(threadIdx.x) % kChunks, own = static_cast<int>(threadIdx.x) / kChunks;
  const T* const weight = weight_of<T>(p, tile) + static_cast<std::int64_t>(first_column + own) * p.k;
  int in_rows[S::kRows / kStep];  // -1: beyond the tile's rows
  CHARONIA_UNROLL
  for (int i = 0; i < S::kRows / kStep; ++i) {
    const int row = own + i * kStep;
    in_rows[i] = row < tile.rows ? in_row(p, tile, row) : -1;
  }
  const int chunks = static_cast<int>(divide_up(p.k, kKGrain));
  const auto fill = [&](int chunk) {
    if (chunk < chunks) {
      unsigned char* const to = stages + chunk % S::kStages * S::kStageBytes + swizzled(own, chunk_of);
      const int k = chunk * kKGrain + chunk_of * kChunkElements;
      const bool inside = k < p.k;
      CHARONIA_UNROLL
      for (int i = 0; i < S::kColumns; i += kStep) {
        copy_async_16(to + i * kRowBytes, weight + static_cast<std::int64_t>(i) * p.k + k,
                      inside && first_column + own + i < p.n);
      }
      CHARONIA_UNROLL
      for (int i = 0; i < S::kRows / kStep; ++i) {
        copy_async_16(to + (S::kColumns + i * kStep) * kRowBytes,
                      static_cast<const T*>(p.in) + static_cast<std::int64_t>(in_rows[i]) * p.in_stride + k,
                      inside && in_rows[i] >= 0);
      }
    }
    copy_commit();
  };

  const int warp_column = warp_id() % S::kColumnWarps * (S::kColumns / S::kColumnWarps);
  const int warp_row = warp_id() / S::kColumnWarps * (S::kRows / S::kRowWarps);
  float now[kSums], before[kSums];
  CHARONIA_UNROLL
  for (int i = 0; i < kSums; ++i) now[i] = before[i] = 0;
  const int chunks_of_part = p.part_length / kKGrain;
  int part_left = chunks_of_part;

  CHARONIA_UNROLL
  for (int i = 0; i < S::kStages - 1; ++i) fill(i);
  CHARONIA_UNROLL_BY(1)
  for (int chunk = 0; chunk < chunks; ++chunk) {
    copy_wait<S::kStages - 2>();
    __syncthreads();  // this chunk is complete, and all threads are done with the previous one
    fill(chunk + S::kStages - 1);
    const unsigned char* const stage = stages + chunk % S::kStages * S::kStageBytes;
    multiply_stage<S>(now, stage, stage + S::kColumns * kRowBytes, warp_column, warp_row);
    if (--part_left == 0 || chunk + 1 == chunks) {
      CHARONIA_UNROLL
      for (int i = 0; i < kSums; ++i) {
        before[i] += now[i];  // no sum is -0, because all start at 0
        now[i] = 0;
      }
      part_left = chunks_of_part;
    }
  }

  copy_wait<0>();
  __syncthreads();
  auto* const out = reinterpret_cast<float*>(stages);  // [kRows][kPitch]
  store_sums<S>(out, before, warp_column, warp_row);
  __syncthreads();
  store_outputs<T, gated, S::kColumns>(p, tile, first_column, static_cast<int>(threadIdx.x), S::kThreads,
                                       [&](int row, int column) { return out[row * S::kPitch + column]; });
}

// Plain kernel.

constexpr int kPlainColumns = 64, kPlainRows = 8, kPlainThreads = 128, kPlainChunk = 32;
constexpr int kPlainPitch = kPlainChunk + 4;  // in floats; threads that read four elements of eight rows use all banks
constexpr int kSumPitch = kPlainColumns + 4;

// A thread computes 2 outputs of 2 rows, half a tile apart, with sequential fused multiply-adds.
template <bool gated>
CHARONIA_KERNEL(kPlainThreads, 4)
void plain_kernel(const ExpertGemmParams p) {
  CHARONIA_SHARED(float4, fours, [(kPlainColumns + kPlainRows) * kPlainPitch / 4]);
  CHARONIA_SHARED(float, sums, [kPlainRows * kSumPitch]);
  dependency_trigger();
  dependency_wait();
  const ExpertTile tile = p.tiles[blockIdx.x];
  if (tile.rows == 0) return;
  const int tid = static_cast<int>(threadIdx.x), first_column = static_cast<int>(blockIdx.y) * kPlainColumns;
  const int column = tid % (kPlainColumns / 2), row = tid / (kPlainColumns / 2);
  auto* const stage = reinterpret_cast<float*>(fours);  // [kPlainColumns of weight, kPlainRows of in][kPlainPitch]
  const auto* const weight = weight_of<float>(p, tile);
  float sum[2][2] = {{0, 0}, {0, 0}};
  for (int k = 0; k < p.k; k += kPlainChunk) {
    for (int i = tid; i < (kPlainColumns + kPlainRows) * (kPlainChunk / 4); i += kPlainThreads) {
      const int of = i / (kPlainChunk / 4), at = k + i % (kPlainChunk / 4) * 4, of_in = of - kPlainColumns;
      const bool is_weight = of < kPlainColumns;
      const bool inside = at < p.k && (is_weight ? first_column + of < p.n : of_in < tile.rows);
      float4 four{0, 0, 0, 0};
      if (inside) {
        const float* const from = is_weight ? weight + static_cast<std::int64_t>(first_column + of) * p.k
                                            : static_cast<const float*>(p.in) +
                                                  static_cast<std::int64_t>(in_row(p, tile, of_in)) * p.in_stride;
        four = *reinterpret_cast<const float4*>(from + at);
      }
      *reinterpret_cast<float4*>(stage + of * kPlainPitch + at - k) = four;
    }
    __syncthreads();
    for (int at = 0; at < kPlainChunk; ++at) {
      CHARONIA_UNROLL
      for (int i = 0; i < 2; ++i) {
        CHARONIA_UNROLL
        for (int j = 0; j < 2; ++j) {
          sum[i][j] = fmaf(stage[(column + i * (kPlainColumns / 2)) * kPlainPitch + at],
                           stage[(kPlainColumns + row + j * (kPlainRows / 2)) * kPlainPitch + at], sum[i][j]);
        }
      }
    }
    __syncthreads();
  }
  CHARONIA_UNROLL
  for (int i = 0; i < 2; ++i) {
    CHARONIA_UNROLL
    for (int j = 0; j < 2; ++j) {
      sums[(row + j * (kPlainRows / 2)) * kSumPitch + column + i * (kPlainColumns / 2)] = sum[i][j];
    }
  }
  __syncthreads();
  store_outputs<float, gated, kPlainColumns>(p, tile, first_column, tid, kPlainThreads,
                                             [&](int r, int c) { return sums[r * kSumPitch + c]; });
}

struct Shape {
  const DeviceInfo& device;
  int tile_rows;
  unsigned tiles;
  int n;
  unsigned columns(int of_block) const { return static_cast<unsigned>(divide_up(n, of_block)); }
};

template <class S, bool gated>
void launch_tile(Stream& stream, const ExpertGemmParams& p, const Shape& shape) {
  launch(stream, "experts: GEMM (tile)",
         {.grid_x = shape.tiles,
          .grid_y = shape.columns(S::kColumns),
          .threads = S::kThreads,
          .dynamic_shared_bytes = S::kSharedBytes},
         &tile_kernel<S, gated>, p);
}

template <class T, bool gated>
void launch_typed(Stream& stream, const ExpertGemmParams& p, const Shape& shape) {
  switch (shape.tile_rows) {
    case kStreamRows: {
      const int groups = kStreamWarps / p.parts;
      launch(stream, "experts: GEMM (stream)",
             {.grid_x = shape.tiles,
              .grid_y = shape.columns(groups * kStreamColumns),
              .threads = static_cast<unsigned>(groups * p.parts * kWarp)},
             &stream_kernel<T, gated>, p);
      return;
    }
    case 32:
      return launch_tile<TileShape<T, 64, 32, 2, 1, 6, 3>, gated>(stream, p, shape);
    case 64:
      return launch_tile<TileShape<T, 128, 64, 4, 1, 4, 2>, gated>(stream, p, shape);
    default:
      if (shape.device.shared_bytes >= (std::size_t{128} << 10)) {
        return launch_tile<TileShape<T, 128, 128, 2, 4, 4, 1>, gated>(stream, p, shape);
      }
      return launch_tile<TileShape<T, 128, 128, 2, 4, 3, 1>, gated>(stream, p, shape);
  }
}

template <bool gated>
void launch_gated(Stream& stream, const ExpertGemmParams& p, const Shape& shape, DType type) {
  if (type == DType::bf16) return launch_typed<bf16, gated>(stream, p, shape);
  if (type == DType::f16) return launch_typed<f16, gated>(stream, p, shape);
  launch(stream, "experts: GEMM (plain)",
         {.grid_x = shape.tiles, .grid_y = shape.columns(kPlainColumns), .threads = kPlainThreads},
         &plain_kernel<gated>, p);
}

}  // namespace

int expert_tile_rows(DType type, std::int64_t assignments, int experts) {
  if (type == DType::f32) return kPlainRows;
  const auto average = assignments / experts;
  return average <= 4 ? kStreamRows : average <= 32 ? 32 : average <= 96 ? 64 : 128;
}

void multiply_experts(Stream& stream, const DeviceInfo& device, const ExpertGemm& gemm) {
  if (gemm.quant) return multiply_quant_experts(stream, device, gemm);
  const auto split = split_k(gemm.k);
  ExpertGemmParams p;
  p.in = gemm.in;
  p.rows_of = gemm.rows_of;
  p.weight = gemm.weight;
  p.bias = gemm.bias;
  p.out = gemm.out;
  p.tiles = gemm.tiles;
  p.expert_size = gemm.n * gemm.k;
  p.in_stride = static_cast<int>(gemm.in_stride);
  p.out_stride = static_cast<int>(gemm.gated ? gemm.n / 2 : gemm.n);
  p.n = static_cast<int>(gemm.n);
  p.k = static_cast<int>(gemm.k);
  p.parts = split.parts;
  p.part_length = static_cast<int>(split.length);
  p.activation = gemm.activation;
  const Shape shape{device, gemm.tile_rows, static_cast<unsigned>(gemm.num_tiles), p.n};
  if (gemm.gated) {
    launch_gated<true>(stream, p, shape, gemm.type);
  } else {
    launch_gated<false>(stream, p, shape, gemm.type);
  }
}

}  // namespace charonia::cuda
