// GEMMs of few rows: the weight flows from memory through the TMA unit into rings in shared memory, row by row.
//
//   out [rows, n] = in [rows, k] * weight [n, k]^T + bias, weight and in in bf16 or f16, sums in float. Gates as in
//   gemm_stream_kernel.h.
//
// A unit is a part of K (split_k) of a tile of 16 weight rows. Each block takes the same number of units (one more or
// less), in order of the tiles, so that all SMs read the same number of bytes. Warp w computes part w of a tile, or,
// with fewer than 8 parts, of one of several tiles. The sums of a tile that is in one block are combined in shared
// memory. The units of a tile at the ends of a block's range go to the workspace; the warp that adds the last one
// combines them. Parts are always added in order, so a row has the bits of the stream kernel.
//
// Each warp has a ring of its own, and copies into it itself: stages of 16 rows of 512 bytes. Use i of the ring is
// stage i % stages, in phase i / stages of its barrier. A warp refills a stage after all of its lanes have waited for
// the phase and read the stage, so no lane is ever two phases behind. Rows are 64 bytes further apart than their
// length, so that the 16-byte reads of a warp (rows g, pieces t) use all banks. The rings are filled before the wait
// for the kernel in front, because weights do not change, and the next kernel may start when a warp of each block has
// issued its last copies. Warps without units do not trigger, because the others are then at their beginning.
//
// Bound: memory. A weight is read once, 2 n k bytes. With 2 stages a warp, an SM has 128 KB in flight; an H200 needs 29
// KB. With 2 stages a block takes 152 KB of shared memory, with 3 stages 224 KB: so two such kernels in a row never
// overlap, and after it no kernel starts early that needs more than the rest. Never measured.
#include "ops/cuda/device/hopper.h"
#include "ops/cuda/kernels/activation.h"
#include "ops/cuda/kernels/element_types.h"
#include "ops/cuda/kernels/gemm_device.h"

namespace charonia::cuda {
namespace {

constexpr int kWarps = 8;
constexpr int kTileRows = kBulkColumns, kStageK = 256, kSteps = kStageK / 32;
constexpr int kPitch = kStageK * 2 + 64, kStageBytes = kTileRows * kPitch;
constexpr int kMaxStages = 3;  // of a warp

struct BulkParams : GemmParams {
  int stages;
  int tiles;
  bool whole_tiles;  // no tile is divided among blocks
};

// The units of a block, and their rounds: in a round, each warp has at most one unit.
struct Range {
  int begin, end;  // units
  int groups;      // tiles of a round
  int first_round, rounds;
};
CHARONIA_DEVICE Range range_of(const BulkParams& p) {
  const auto share = [&](unsigned block) {
    const auto all = static_cast<std::int64_t>(p.whole_tiles ? p.tiles : p.tiles * p.parts);
    return static_cast<int>(all * block / gridDim.x) * (p.whole_tiles ? p.parts : 1);
  };
  Range out{};
  out.begin = share(blockIdx.x), out.end = share(blockIdx.x + 1);
  out.groups = kWarps / p.parts;
  const int units = out.groups * p.parts;  // of a round
  out.first_round = out.begin / units;
  out.rounds = out.end > out.begin ? (out.end - 1) / units - out.first_round + 1 : 0;
  return out;
}

// The units of a warp: one in each round from `first` to `end`.
struct WarpRounds {
  int first, end;
};
CHARONIA_DEVICE WarpRounds rounds_of(const BulkParams& p, const Range& range, int warp) {
  const int units = range.groups * p.parts, at = range.first_round * units + warp;  // of the first round
  if (warp >= units || range.rounds == 0) return {0, 0};
  return {at < range.begin ? 1 : 0, range.rounds - (at + (range.rounds - 1) * units >= range.end ? 1 : 0)};
}

// The elements of K of a stage.
struct Stretch {
  int begin, count;
};
CHARONIA_DEVICE Stretch stretch_of(const BulkParams& p, int part, int chunk) {
  const int begin = part * p.part_length + chunk * kStageK;
  return {begin, max(0, min(min(kStageK, p.part_length - chunk * kStageK), p.k - begin))};
}

// Stores the sums of a tile that one lane has in fragments.
template <class T, bool kGated>
CHARONIA_DEVICE void store_output(const BulkParams& p, int row, int tile, int output, float first, float second) {
  if (row >= p.rows) return;
  if constexpr (kGated) {
    const int inter = p.n / 2, column = tile * (kTileRows / 2) + output;
    if (column >= inter) return;
    if (p.bias != nullptr) first += p.bias[column], second += p.bias[inter + column];
    const float gate = to_float(from_float<T>(first)), up = to_float(from_float<T>(second));
    const float active =
        p.gate == Gate::silu ? activation<ops::Activation::silu>(gate) : activation<ops::Activation::gelu_tanh>(gate);
    static_cast<T*>(p.out)[row * p.out_stride + column] = from_float<T>(active * up);
  } else {
    const int column = tile * kTileRows + output;
    if (column < p.n) store_out<T>(p, row, column, first);
    if (column + 8 < p.n) store_out<T>(p, row, column + 8, second);
  }
}

// Adds a unit's sums to the workspace. The warp that adds the last unit of the tile combines and stores them.
template <class T, int kN, bool kGated>
CHARONIA_DEVICE void share_sums(const BulkParams& p, int tile, int part, int first_row, const float (&sum)[kN][4]) {
  const int lane = lane_id(), g = lane / 4, t = lane % 4;
  // The block with the tile's first unit, whose range ends with a part of this tile.
  const auto all = static_cast<std::int64_t>(p.tiles) * p.parts;
  auto slot = static_cast<unsigned>(static_cast<std::int64_t>(tile) * p.parts * gridDim.x / all);
  while (static_cast<int>(all * (slot + 1) / gridDim.x) <= tile * p.parts) ++slot;
  auto* const to = reinterpret_cast<float4*>(p.sums) + static_cast<std::int64_t>(slot) * p.parts * kN * kWarp + lane;
  CHARONIA_UNROLL
  for (int j = 0; j < kN; ++j) to[(part * kN + j) * kWarp] = float4{sum[j][0], sum[j][1], sum[j][2], sum[j][3]};
  __threadfence();
  __syncwarp();
  int arrived = 0;
  if (lane == 0) {
    arrived = atomicAdd(p.counters + slot, 1) + 1;
    if (arrived == p.parts) p.counters[slot] = 0;
  }
  if (shuffle_from(arrived, 0) != p.parts) return;
  __threadfence();
  CHARONIA_UNROLL
  for (int j = 0; j < kN; ++j) {
    float4 total = load_l2(to + j * kWarp);
    for (int i = 1; i < p.parts; ++i) add(total, load_l2(to + (i * kN + j) * kWarp));
    const int row = first_row + 8 * j + 2 * t;
    store_output<T, kGated>(p, row, tile, g, total.x, total.z);
    store_output<T, kGated>(p, row + 1, tile, g, total.y, total.w);
  }
}

// Copies a warp's units into its ring, in the order of their use.
template <class T, bool kGated>
struct Copies {
  const BulkParams& p;
  const Range& range;
  WarpRounds rounds;
  int chunks, uses;
  unsigned char* ring;
  std::uint64_t* full;  // [stages]

  // Lanes 0 to 15 copy a row each.
  CHARONIA_DEVICE void issue(int use) const {
    const int lane = lane_id(), stage = use % p.stages;
    const int unit = (range.first_round + rounds.first + use / chunks) * range.groups * p.parts + warp_id();
    const int tile = unit / p.parts;
    const auto stretch = stretch_of(p, unit - tile * p.parts, use % chunks);
    if (lane == 0) barrier_arrive_expect(full + stage, kTileRows * stretch.count * 2);
    __syncwarp();
    if (lane < kTileRows && stretch.count > 0) {
      const int inter = p.n / 2;  // outputs of a half
      const int row =
          kGated ? lane / 8 * inter + min(tile * 8 + lane % 8, inter - 1) : min(tile * kTileRows + lane, p.n - 1);
      const auto* const from =
          static_cast<const T*>(p.weight) + static_cast<std::int64_t>(row) * p.weight_stride + stretch.begin;
      copy_bulk(ring + stage * kStageBytes + lane * kPitch, from, stretch.count * 2, full + stage);
    }
    if (use + 1 == uses) dependency_trigger();
  }
};

// Adds the products of a stage. in: the lane's rows of the input.
template <class T, int kN>
CHARONIA_DEVICE void multiply_stage(float (&sum)[kN][4], const T* const (&in)[kN], const Stretch& stretch,
                                    const unsigned char* stage, std::uint64_t* full, int parity) {
  const int lane = lane_id(), g = lane / 4, t = lane % 4;
  uint4 x[kSteps][kN];
  CHARONIA_UNROLL
  for (int s = 0; s < kSteps; ++s) {
    CHARONIA_UNROLL
    for (int j = 0; j < kN; ++j) {
      x[s][j] = 32 * s + 8 * t < stretch.count
                    ? load_cached(reinterpret_cast<const uint4*>(in[j] + stretch.begin + 32 * s))
                    : uint4{0, 0, 0, 0};
    }
  }
  barrier_wait(full, parity);
  const unsigned char* const weight = stage + g * kPitch + 16 * t;
  CHARONIA_UNROLL
  for (int s = 0; s < kSteps; ++s) {
    if (32 * s >= stretch.count) break;
    uint4 upper{0, 0, 0, 0}, lower{0, 0, 0, 0};
    if (32 * s + 8 * t < stretch.count) {
      upper = *reinterpret_cast<const uint4*>(weight + 64 * s);
      lower = *reinterpret_cast<const uint4*>(weight + 64 * s + 8 * kPitch);
    }
    const std::uint32_t a0[4] = {upper.x, lower.x, upper.y, lower.y};
    const std::uint32_t a1[4] = {upper.z, lower.z, upper.w, lower.w};
    CHARONIA_UNROLL
    for (int j = 0; j < kN; ++j) {
      const std::uint32_t b0[2] = {x[s][j].x, x[s][j].y}, b1[2] = {x[s][j].z, x[s][j].w};
      mma_m16n8k16<T>(sum[j], a0, b0);
      mma_m16n8k16<T>(sum[j], a1, b1);
    }
  }
}

template <class T, int kN, bool kGated>
CHARONIA_KERNEL(kWarps* kWarp, 1)
void bulk_kernel(const BulkParams p) {
  constexpr int kRows = 8 * kN, kSums = kTileRows * kRows;
  CHARONIA_SHARED(std::uint64_t, full, [kWarps * kMaxStages]);
  CHARONIA_SHARED(float, sums, [2 * kWarps * kSums]);  // [round % 2][warp][fragment][lane]
  const int lane = lane_id(), warp = warp_id(), g = lane / 4, t = lane % 4;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kWarps * p.stages; ++i) barrier_init(full + i, 1);
    barrier_init_fence();
  }
  __syncthreads();
  const auto range = range_of(p);
  const auto rounds = rounds_of(p, range, warp);
  const int chunks = static_cast<int>(divide_up(p.part_length, kStageK));
  const Copies<T, kGated> copies{p,
                                 range,
                                 rounds,
                                 chunks,
                                 (rounds.end - rounds.first) * chunks,
                                 dynamic_shared() + warp * p.stages * kStageBytes,
                                 full + warp * p.stages};
  for (int i = 0; i < min(p.stages, copies.uses); ++i) copies.issue(i);
  dependency_wait();

  const int first_row = static_cast<int>(blockIdx.y) * kRows;
  const T* in[kN];  // lanes beyond the rows read the first row; their results are dropped
  CHARONIA_UNROLL
  for (int j = 0; j < kN; ++j) {
    const int row = first_row + 8 * j + g;
    in[j] = static_cast<const T*>(p.in) + static_cast<std::int64_t>(row < p.rows ? row : 0) * p.in_stride + 8 * t;
  }
  int use = 0;
  for (int r = 0; r < range.rounds; ++r) {
    const bool active = r >= rounds.first && r < rounds.end;
    const int unit = (range.first_round + r) * range.groups * p.parts + warp;
    const int tile = unit / p.parts, part = unit - tile * p.parts;
    float sum[kN][4];
    CHARONIA_UNROLL
    for (int j = 0; j < kN; ++j) {
      CHARONIA_UNROLL
      for (int c = 0; c < 4; ++c) sum[j][c] = 0;
    }
    for (int chunk = 0; active && chunk < chunks; ++chunk, ++use) {
      const int stage = use % p.stages;
      multiply_stage<T, kN>(sum, in, stretch_of(p, part, chunk), copies.ring + stage * kStageBytes, copies.full + stage,
                            use / p.stages % 2);
      __syncwarp();  // all lanes have read the stage
      if (use + p.stages < copies.uses) copies.issue(use + p.stages);
    }

    // Fragment i of a lane: row 8 (i / 2) + 2 t + i % 2, outputs g and g + 8.
    const auto is_whole = [&](int of) { return of * p.parts >= range.begin && (of + 1) * p.parts <= range.end; };
    if (active && !is_whole(tile)) share_sums<T, kN, kGated>(p, tile, part, first_row, sum);
    float* const of_round = sums + r % 2 * kWarps * kSums;
    CHARONIA_UNROLL
    for (int j = 0; j < kN; ++j) {
      CHARONIA_UNROLL
      for (int c = 0; c < 4; ++c) {
        of_round[warp * kSums + ((2 * j + c % 2) * 2 + c / 2) * kWarp + lane] = sum[j][c];
      }
    }
    __syncthreads();
    for (int i = warp * kWarp + lane; i < range.groups * 2 * kN * kWarp; i += kWarps * kWarp) {
      const int of = i % kWarp, fragment = i / kWarp % (2 * kN), group = i / (2 * kN * kWarp);
      const int whole = (range.first_round + r) * range.groups + group;
      if (!is_whole(whole)) continue;
      const float* const from = of_round + group * p.parts * kSums + fragment * 2 * kWarp + of;
      float first = from[0], second = from[kWarp];
      for (int part_of = 1; part_of < p.parts; ++part_of) {
        first += from[part_of * kSums], second += from[part_of * kSums + kWarp];
      }
      const int row = first_row + 8 * (fragment / 2) + 2 * (of % 4) + fragment % 2;
      store_output<T, kGated>(p, row, whole, of / 4, first, second);
    }
  }
}

template <class T, int kN>
void launch_shape(Stream& stream, const BulkParams& p, unsigned blocks) {
  launch(stream, "GEMM (bulk copies)",
         {.grid_x = blocks,
          .grid_y = static_cast<unsigned>(divide_up(p.rows, 8 * kN)),
          .threads = kWarps * kWarp,
          .dynamic_shared_bytes = static_cast<std::size_t>(kWarps * p.stages) * kStageBytes},
         p.gate == Gate::none ? &bulk_kernel<T, kN, false> : &bulk_kernel<T, kN, true>, p);
}

}  // namespace

std::vector<GemmTactic> bulk_tactics(const DeviceInfo& device, const Gemm& gemm) {
  if (!device.clusters || gemm.quant || gemm.type == DType::f32 || gemm.packed || !vectors(gemm) || gemm.rows > 16) {
    return {};
  }
  std::vector<GemmTactic> out;
  const int rows = gemm.rows <= 8 ? 8 : 16;
  const auto sums = static_cast<std::size_t>(2 * kWarps * kTileRows * rows) * sizeof(float) + 1024;  // and barriers
  for (int stages = kMaxStages; stages >= 2; --stages) {
    if (static_cast<std::size_t>(kWarps * stages) * kStageBytes + sums > device.shared_bytes) continue;
    out.push_back({GemmTactic::Kernel::bulk, rows, kBulkColumns, stages, device.sms});
  }
  return out;
}

bool launch_bulk(Stream& stream, const GemmParams& params, const GemmTactic& tactic, DType type) {
  if (tactic.stages > kMaxStages || tactic.stages < 1 || tactic.k_blocks < 1 || params.packed) return false;
  BulkParams p{params, tactic.stages, static_cast<int>(divide_up(params.n, kBulkColumns)), false};
  if (p.gate != Gate::none) p.tiles = static_cast<int>(divide_up(params.n / 2, kBulkColumns / 2));
  p.whole_tiles = params.rows > tactic.tile_rows;  // the workspace is for one tile of rows
  const auto blocks = static_cast<unsigned>(std::min(tactic.k_blocks, p.tiles * (p.whole_tiles ? 1 : p.parts)));
  return with_half(type, [&]<class T>(T) {
    if (tactic.tile_rows == 8) {
      launch_shape<T, 1>(stream, p, blocks);
    } else if (tactic.tile_rows == 16) {
      launch_shape<T, 2>(stream, p, blocks);
    } else {
      return false;
    }
    return true;
  });
}

}  // namespace charonia::cuda
