// GEMMs of 17 rows and more with int8 codes, on compute capability 9.0: products of warpgroups (hopper.h).
//
//   out [rows, n], as in w8a8_gemm.h, for both layouts of the weight.
//
// A tile has kRows rows and kColumns outputs. Two warpgroups multiply: each has half of the rows, or of the outputs if
// there are 64 rows, as m64n256k32 or m64n128k32. Operand A is the inputs, operand B the weight, both from shared
// memory. One thread of a third warpgroup fills a ring of stages of 128 columns of K through the TMA unit:
//   - inputs: a box [kRows][128 bytes], swizzled
//   - the weight: a box [kColumns][128 bytes]; if it is packed, two boxes [kColumns][64 bytes] of its blocks of 8 rows
//     by 64 codes, which have the order of operand B
// Boxes have zeros beyond the columns of the inputs, so codes behind the end of packed rows do not count.
//
// Block b computes tiles b, b + blocks, and so on, so that blocks that run at the same time read the same rows and
// columns from the L2 cache. The steps of the last tiles, fewer than there are blocks, are divided evenly among all
// blocks (shared_tiles.h), or each is computed by one block (whole_tiles; always with 128 sums in a thread, because
// adding others to them needs too many registers).
//
// Sums are scaled in registers, and the lanes of a quad exchange words, so that each stores 16 bytes. Sums of integers
// are exact, and then come the operations of the other kernels, so the bits are the same with every tile and any number
// of blocks.
//
// Bound: memory up to about 64 rows. With many rows the L2 cache: the tensor cores need 1024 cycles for a step of the
// largest tile, and it reads 48 KB. With 24 bytes per cycle and SM that is half of their rate, 990 TOP/s on an H200. A
// GEMM [2048, 4096] x [28672, 4096]^T has 481 G operations, 126 MB of operands and 117 MB of 16-bit outputs. A library
// that writes integer sums for scale_sums() writes and reads 235 MB of them besides, in the L2 cache if its parts are
// small. Never measured.
#include "ops/cuda/device/hopper.h"
#include "ops/cuda/kernels/shared_tiles.h"
#include "ops/cuda/kernels/w8a8_params.h"

namespace charonia::cuda {
namespace {

constexpr int kGroupThreads = 128, kGroups = 2, kThreads = (1 + kGroups) * kGroupThreads, kGroupRows = 64;
constexpr int kStepK = 128;            // codes of a row in a stage
constexpr int kBlockK = 2 * kPackedK;  // codes of a row in a block of a packed weight
constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
static_assert(kGroups * kGroupThreads == kWgmmaWarps * kWarp);
// setmaxnreg would wait forever for more registers than the block has: a multiple of 8 for each thread.
static_assert(kProducerRegisters + kGroups * kConsumerRegisters <= 65536 / kThreads / 8 * 8 * (1 + kGroups));

struct WgmmaParams : PairParams {
  TensorMap in_map, weight_map;
  bool whole_tiles;
};

template <int kRows_, int kColumns_, int kStages_>
struct Shape {
  static constexpr int kRows = kRows_, kColumns = kColumns_, kStages = kStages_;
  static constexpr bool kDividesRows = kRows == kGroups * kGroupRows;
  static constexpr int kN = kDividesRows ? kColumns : kColumns / kGroups, kSums = kN / 2;  // of a warpgroup, a thread
  static constexpr bool kShares = kSums <= 64;
  static constexpr int kInBytes = kRows * kStepK, kStageBytes = kInBytes + kColumns * kStepK;
  static constexpr int kSharedBytes = kStages * kStageBytes;
  static_assert((kDividesRows || kRows == kGroupRows) && kSharedBytes <= 226 << 10);
};

template <class S>
struct Ring {
  unsigned char* stages;
  std::uint64_t* full;   // [kStages]
  std::uint64_t* empty;  // [kStages]
  CHARONIA_DEVICE unsigned char* inputs(int stage) const { return stages + stage * S::kStageBytes; }
  CHARONIA_DEVICE unsigned char* weights(int stage) const { return inputs(stage) + S::kInBytes; }
};

// Steps of a tile.
struct Part {
  int tile = 0, begin = 0, end = 0;
};

// The work of a block: whole tiles, then steps of the tiles that the blocks share. A template, because builds for GPUs without
// wgmma do not use it, and would warn.
template <class S>
struct Work : SharedTiles {
  int whole;       // tiles
  int begin, end;  // steps
  int taken = 0;   // whole tiles

  // Returns false after the last part.
  CHARONIA_DEVICE bool next(Part& part) {
    if (taken < whole) {
      part = {taken++ * static_cast<int>(gridDim.x) + static_cast<int>(blockIdx.x), 0, steps};
      return true;
    }
    if (begin == end) return false;
    const int tile = begin / steps, first = begin - tile * steps, last = min(steps, first + end - begin);
    part = {first_shared() + tile, first, last};
    begin += last - first;
    return true;
  }
  CHARONIA_DEVICE int first_shared() const { return whole * static_cast<int>(gridDim.x); }
};

template <class S>
CHARONIA_DEVICE Work<S> work_of_block(const WgmmaParams& p) {
  const int tiles = p.row_tiles * p.column_tiles, blocks = static_cast<int>(gridDim.x);
  const int block = static_cast<int>(blockIdx.x), steps = static_cast<int>(divide_up(2 * p.k, kStepK));
  if (p.whole_tiles) return {{0, steps, 0}, (tiles - block + blocks - 1) / blocks, 0, 0};
  const SharedTiles shared{tiles % blocks, steps, min(blocks, tiles % blocks * steps)};
  if (block >= shared.blocks) return {shared, tiles / blocks, 0, 0};
  return {shared, tiles / blocks, shared.first_of(block), shared.first_of(block + 1)};
}

// The steps of a block, one after the other.
template <class S>
struct Steps {
  const WgmmaParams& p;
  Work<S> work;
  Part part{};
  int step = 0;
  TilePlace place{};

  CHARONIA_DEVICE bool next() {
    if (++step < part.end) return true;
    if (!work.next(part)) return false;
    step = part.begin;
    place = tile_place(part.tile, p.row_tiles, p.column_tiles);
    return true;
  }
};

// Copies both operands. One thread calls it.
template <class S>
CHARONIA_DEVICE void produce(const WgmmaParams& p, const Work<S>& work, const Ring<S>& ring) {
  Steps<S> weights{p, work}, inputs{p, work};
  const auto copy_weights = [&](int stage) {
    const int first = weights.place.column_tile * S::kColumns;
    barrier_arrive_expect(ring.full + stage, S::kStageBytes);
    if (p.packed) {
      CHARONIA_UNROLL
      for (int i = 0; i < kStepK / kBlockK; ++i) {
        copy_box(ring.weights(stage) + i * S::kColumns * kBlockK, p.weight_map,
                 {0, 0, weights.step * (kStepK / kBlockK) + i, first / kPackedRows}, ring.full + stage);
      }
    } else {
      copy_box(ring.weights(stage), p.weight_map, {weights.step * kStepK, first}, ring.full + stage);
    }
  };
  CHARONIA_UNROLL_BY(1)
  for (int i = 0; i < S::kStages && weights.next(); ++i) copy_weights(i);  // they do not depend on earlier kernels
  dependency_wait();
  for (int i = 0; inputs.next(); ++i) {
    const int stage = i % S::kStages;
    if (i >= S::kStages) {
      barrier_wait(ring.empty + stage, (i / S::kStages + 1) % 2);
      weights.next();
      copy_weights(stage);
    }
    copy_box(ring.inputs(stage), p.in_map, {inputs.step * kStepK, inputs.place.row_tile * S::kRows}, ring.full + stage);
  }
  if (p.late_trigger) dependency_trigger();
}

// Scales and stores a warp's outputs: 16 rows of kN columns.
template <class S>
CHARONIA_DEVICE void store(const WgmmaParams& p, int first_row, int first_column, const int (&sums)[S::kSums]) {
  const int t = lane_id() % 4, rows[2] = {first_row + lane_id() / 4, first_row + lane_id() / 4 + 8};
  const float of_row[2] = {rows[0] < p.rows ? p.row_scales[rows[0]] : 0, rows[1] < p.rows ? p.row_scales[rows[1]] : 0};
  CHARONIA_UNROLL
  for (int eight = 0; eight < S::kN / 8; eight += 4) {
    float x[2][4][2];  // rows g and g + 8; columns 2t and 2t + 1 of four times eight
    CHARONIA_UNROLL
    for (int i = 0; i < 8; ++i) {
      const int column = first_column + 8 * (eight + i / 2) + 2 * t + i % 2;
      const float of_column = column < p.n ? p.column_scales[column] : 0;
      const float bias = p.bias != nullptr && column < p.n ? p.bias[column] : 0;
      CHARONIA_UNROLL
      for (int half = 0; half < 2; ++half) {
        const int sum = sums[4 * (eight + i / 2) + 2 * half + i % 2];
        const float one = scaled(of_column, static_cast<float>(sum), of_row[half]);
        x[half][i / 2][i % 2] = p.bias == nullptr ? one : one + bias;
      }
    }
    CHARONIA_UNROLL
    for (int half = 0; half < 2; ++half) {
      const std::int64_t row = rows[half] * p.out_stride;
      if (p.out_f32) {
        CHARONIA_UNROLL
        for (int i = 0; i < 4; ++i) {
          const int column = first_column + 8 * (eight + i) + 2 * t;
          float* const to = static_cast<float*>(p.out) + row + column;
          if (rows[half] >= p.rows || column >= p.n) continue;
          if (p.out_vectors && column + 2 <= p.n) {
            *reinterpret_cast<float2*>(to) = {x[half][i][0], x[half][i][1]};
          } else {
            to[0] = x[half][i][0];
            if (column + 1 < p.n) to[1] = x[half][i][1];
          }
        }
        continue;
      }
      std::uint32_t words[4];
      CHARONIA_UNROLL
      for (int i = 0; i < 4; ++i) {
        words[i] = p.out_f16 ? pack<f16>(x[half][i][0], x[half][i][1]) : pack<bf16>(x[half][i][0], x[half][i][1]);
      }
      transpose_quad(words);
      const int column = first_column + 8 * (eight + t);
      if (rows[half] >= p.rows || column >= p.n) continue;
      auto* const to = static_cast<std::uint16_t*>(p.out) + row + column;
      if (p.out_vectors && column + 8 <= p.n) {
        *reinterpret_cast<uint4*>(to) = uint4{words[0], words[1], words[2], words[3]};
      } else {
        CHARONIA_UNROLL
        for (int i = 0; i < 8; ++i) {
          if (column + i < p.n) to[i] = static_cast<std::uint16_t>(words[i / 2] >> 16 * (i % 2));
        }
      }
    }
  }
}

template <class S>
CHARONIA_DEVICE void consume(const WgmmaParams& p, Work<S> work, const Ring<S>& ring) {
  dependency_wait();
  const int warp = warp_id() - kGroupThreads / kWarp, group = warp / 4;
  const int own_row = S::kDividesRows ? group * kGroupRows : 0, own_column = S::kDividesRows ? 0 : group * S::kN;
  const int width = p.packed ? kBlockK : kStepK;                          // of a box of weights
  const int half = (p.packed ? S::kColumns * kBlockK : kStepK / 2) / 16;  // of a stage, in a descriptor
  const auto release = [&](int i) {
    __syncwarp();
    if (lane_id() == 0) barrier_arrive(ring.empty + i % S::kStages);
  };
  Part part;
  for (int i = 0; work.next(part);) {
    int sums[1][S::kSums];
    CHARONIA_UNROLL
    for (int j = 0; j < S::kSums; ++j) sums[0][j] = 0;
    CHARONIA_UNROLL_BY(1)
    for (int step = part.begin; step < part.end; ++step, ++i) {
      const int stage = i % S::kStages;
      const auto a = matrix_descriptor(ring.inputs(stage) + own_row * kStepK, Swizzle::of_128, 8 * kStepK);
      const auto b = matrix_descriptor(ring.weights(stage) + own_column * width,
                                       p.packed ? Swizzle::of_64 : Swizzle::of_128, 8 * width);
      barrier_wait(ring.full + stage, i / S::kStages % 2);
      wgmma_fence();
      CHARONIA_UNROLL
      for (int q = 0; q < kStepK / 32; ++q) {
        wgmma<i8x2, S::kN>(sums[0], a + q * 2, b + q / 2 * half + q % 2 * 2, true);
      }
      wgmma_commit();
      wgmma_wait<1>();
      if (step > part.begin) release(i - 1);
    }
    wgmma_wait<0>(sums);
    release(i - 1);
    bool complete = part.begin == 0 && part.end == work.steps;
    if constexpr (S::kShares) {
      complete = complete || combine(p, work, part.tile - work.first_shared(), warp, sums);
    }
    if (complete) {
      const auto place = tile_place(part.tile, p.row_tiles, p.column_tiles);
      store<S>(p, place.row_tile * S::kRows + own_row + warp % 4 * 16, place.column_tile * S::kColumns + own_column,
               sums[0]);
    }
  }
}

template <class S>
CHARONIA_KERNEL(kThreads, 1)
void w8a8_wgmma_kernel(CHARONIA_GRID_CONSTANT const WgmmaParams p) {
  if constexpr (kCompilesWgmma) {
    CHARONIA_SHARED(std::uint64_t, full, [S::kStages]);
    CHARONIA_SHARED(std::uint64_t, empty, [S::kStages]);
    const Ring<S> ring{swizzled_shared(), full, empty};
    if (threadIdx.x == 0) {
      for (int i = 0; i < S::kStages; ++i) barrier_init(full + i, 1), barrier_init(empty + i, kWgmmaWarps);
      barrier_init_fence();
    }
    __syncthreads();
    if (!p.late_trigger) dependency_trigger();
    const auto work = work_of_block<S>(p);
    if (threadIdx.x < kGroupThreads) {
      leave_registers<kProducerRegisters>();
      if (threadIdx.x == 0) {
        produce<S>(p, work, ring);
      } else {
        dependency_wait();
      }
    } else {
      take_registers<kConsumerRegisters>();
      consume<S>(p, work, ring);
    }
  }
}

template <class S>
bool launch_if(Stream& stream, const PairParams& params, const GemmTactic& tactic) {
  if (tactic.tile_rows != S::kRows || tactic.tile_columns != S::kColumns || tactic.stages != S::kStages) return false;
  WgmmaParams p{params, {}, {}, tactic.sums == GemmTactic::Sums::parts};
  if (!p.whole_tiles && !S::kShares) return false;
  const std::int64_t k = 2 * std::int64_t{p.k}, stride = 2 * std::int64_t{p.weight_stride};
  p.in_map = make_tensor_map({.data = p.in,
                              .type = DType::i8,
                              .sizes = {k, p.rows},
                              .strides = {0, 2 * std::int64_t{p.in_stride}},
                              .box = {kStepK, S::kRows},
                              .swizzle = Swizzle::of_128});
  TensorBox weight{.data = p.weight, .type = DType::i8};
  if (p.packed) {
    weight.rank = 4;
    weight.sizes = {kBlockK, kPackedRows, stride / kBlockK, divide_up(p.n, kPackedRows)};
    weight.strides = {0, kBlockK, kBlockK * kPackedRows, stride * kPackedRows};
    weight.box = {kBlockK, kPackedRows, 1, S::kColumns / kPackedRows};
    weight.swizzle = Swizzle::of_64;
  } else {
    weight.sizes = {k, p.n};
    weight.strides = {0, stride};
    weight.box = {kStepK, S::kColumns};
    weight.swizzle = Swizzle::of_128;
  }
  p.weight_map = make_tensor_map(weight);
  const auto tiles = std::int64_t{p.row_tiles} * p.column_tiles;
  const auto most = p.whole_tiles ? tiles : tiles * divide_up(k, kStepK);
  launch(stream, "int8 GEMM (wgmma)",
         {.grid_x = static_cast<unsigned>(std::min<std::int64_t>(tactic.k_blocks, most)),
          .threads = kThreads,
          .dynamic_shared_bytes = S::kSharedBytes},
         &w8a8_wgmma_kernel<S>, p);
  return true;
}

}  // namespace

bool launch_w8a8_wgmma(Stream& stream, const PairParams& params, const GemmTactic& tactic) {
  return launch_if<Shape<64, 256, 5>>(stream, params, tactic) ||
         launch_if<Shape<128, 128, 6>>(stream, params, tactic) || launch_if<Shape<128, 256, 4>>(stream, params, tactic);
}

}  // namespace charonia::cuda
