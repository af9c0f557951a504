// GEMMs of 17 to 512 rows with a quantised weight, on compute capability 9.0: products of warpgroups (hopper.h), whose
// operand A is the converted codes in registers.
//
//   out [rows, n] = in [rows, k] * weight [n, k]^T + bias, in in bf16 or f16, weight in the layout of quant_layout.h;
//   also for experts, as in experts_gemm.cu.
//
// A tile has kColumns outputs (weight rows) of kRows rows. Two warpgroups multiply; each of their 8 warps has kM units
// of 16 weight rows. A third warpgroup fills a ring of stages of 64 columns:
//   - codes, by bulk copies, in their memory layout: 512 bytes for each unit and 4 bits of a code
//   - inputs, through registers: rows of 128 bytes, swizzled. A lane's codes are columns 8t .. 8t + 7 of each half of a
//     unit, but operand A has columns 2t, 2t + 1, 2t + 8, 2t + 9 in a lane. So the inputs change places instead: of the
//     16 words of a half, word 4t + j is stored as word 4j + t. Thus word j of all lanes' columns is one row of 16
//     bytes of operand B.
// The registers of operand A are converted while the previous products are in flight. After each group of columns, its
// sums are multiplied by the scales and added to the total.
//
// The steps of 64 columns of all tiles are in a row, tile after tile, and divided evenly among the wgmma_blocks().
// A block may begin and end within a tile. Then the warps that share a part of a tile write their sums to the
// workspace, and the last one adds them, in the order of the blocks.
//
// Bound: memory up to about 64 rows with 4 bits, then the L2 cache. It delivers about 24 bytes per cycle and SM. A step
// of 256 outputs and 64 rows reads 8 KB of codes and 8 KB of inputs, and takes 512 cycles of the tensor cores. Never
// measured.
#pragma once

#include "ops/cuda/device/hopper.h"
#include "ops/cuda/kernels/quant_device.h"
#include "ops/cuda/kernels/shared_tiles.h"

namespace charonia::cuda::quant_wgmma {

constexpr int kStages = kWgmmaStages, kWarps = kWgmmaWarps, kProducers = 128, kThreads = kProducers + kWarps * kWarp;
constexpr int kRowBytes = kQuantK * 2, kPieces = kRowBytes / 16, kRowsAtOnce = kProducers / kPieces;
constexpr int kStagedRows = 32, kPitch = kQuantRows + 4;  // padded so that the lanes of a store use different banks

// kHalves: sums are multiplied by the scale after every 32 columns, otherwise at the end of a group.
template <class T_, ops::Code kCode_, bool kHalves_, int kRows_, int kM_>
struct Shape {
  using T = T_;
  static constexpr ops::Code kCode = kCode_;
  static constexpr bool kHalves = kHalves_;
  static constexpr int kM = kM_, kRows = kRows_, kUnits = kM * kWarps, kColumns = kUnits * kQuantRows;
  static constexpr int kCloses = kHalves ? 2 : 1, kSums = kRows / 2;
  static constexpr int kLoads = kCodeBits<kCode> / 4, kUnitBytes = kLoads * kWarp * 16;
  static constexpr int kInBytes = kRows * kRowBytes, kStageBytes = kInBytes + kUnits * kUnitBytes;
  static constexpr int kStagedBytes = kStagedRows * kPitch * 4;  // of a warp
  static constexpr int kSharedBytes = kStages * kStageBytes + kWarps * kStagedBytes;
  static_assert(kSharedBytes <= 226 << 10);
  // Steps whose inputs a producer has in flight, in 4 registers for each 16 rows; and the registers of a thread.
  static constexpr int kPasses = kRows / kRowsAtOnce, kAhead = (kRows == 128 ? 16 : 8) / kPasses;
  static constexpr int kConsumerRegisters = kRows == 128 ? 192 : 208, kProducerRegisters = kRows == 128 ? 120 : 88;
  // setmaxnreg would wait forever for more registers than the block has: a multiple of 8 for each thread.
  static constexpr int kBlockRegisters = 65536 / kThreads / 8 * 8 * kThreads;
  static_assert(kProducers * kProducerRegisters + kWarps * kWarp * kConsumerRegisters <= kBlockRegisters);
};

// Steps of 64 columns, numbered over all tiles.
struct Work : SharedTiles {
  ExpertTile expert;  // zeros if the GEMM is not for experts
  int begin, end;     // of this block
};

CHARONIA_DEVICE Work work_of_block(const QuantParams& p) {
  Work work{{p.row_tiles * p.column_tiles, p.weight_stride / kQuantK, static_cast<int>(gridDim.x)}, {}, 0, 0};
  if (p.tiles != nullptr) {  // a whole tile
    work.expert = p.tiles[blockIdx.x];
    work.begin = static_cast<int>(blockIdx.y) * work.steps;
    work.end = work.begin + (work.expert.rows > 0 ? work.steps : 0);
  } else {
    work.begin = work.first_of(static_cast<int>(blockIdx.x));
    work.end = work.first_of(static_cast<int>(blockIdx.x) + 1);
  }
  return work;
}

template <class S>
CHARONIA_DEVICE QuantRows rows_of(const QuantParams& p, const Work& work, int tile) {
  if (p.tiles != nullptr) return {work.expert.first, work.expert.rows};
  const int first = tile % p.row_tiles * S::kRows;
  return {first, min(S::kRows, p.rows - first)};
}
template <class S>
CHARONIA_DEVICE int first_unit(const QuantParams& p, int tile) {
  return (p.tiles != nullptr ? tile : tile / p.row_tiles) * S::kUnits;
}

// A producer's copies of codes, step after step: each of the warps copies a part of the units.
template <class S>
class CodeCopies {
 public:
  CHARONIA_DEVICE CodeCopies(const QuantParams& p, const Work& work) : p_(p), work_(work), next_(work.begin) {}

  // Copies the codes of the next step. All lanes of a warp call it.
  CHARONIA_DEVICE void next(unsigned char* stage, std::uint64_t* full) {
    if (left_ == 0) begin_tile();
    if (lane_id() == 0) barrier_arrive_expect(full, units_ * S::kUnitBytes);
    __syncwarp();
    if (lane_id() < units_) copy_bulk(stage + S::kInBytes + own() * S::kUnitBytes, from_, S::kUnitBytes, full);
    from_ += S::kUnitBytes;
    --left_;
  }

 private:
  static constexpr int kOwn = S::kUnits / (kProducers / kWarp);
  static CHARONIA_DEVICE int own() { return warp_id() * kOwn + lane_id(); }  // the lane's unit in a tile
  CHARONIA_DEVICE void begin_tile() {
    const int tile = next_ / work_.steps, step = next_ - tile * work_.steps, first = first_unit<S>(p_, tile);
    const int units = static_cast<int>(divide_up(p_.n, kQuantRows)) - first - warp_id() * kOwn;
    units_ = max(0, min(kOwn, units));
    from_ = static_cast<const unsigned char*>(p_.weight) + work_.expert.expert * p_.expert_codes +
            (static_cast<std::int64_t>(first + own()) * work_.steps + step) * S::kUnitBytes;
    left_ = work_.steps - step;
    next_ += left_;
  }

  const QuantParams& p_;
  const Work& work_;
  int next_;      // the first step of the next tile
  int left_ = 0;  // steps of this tile
  int units_ = 0;
  const unsigned char* from_ = nullptr;
};

template <class S>
CHARONIA_DEVICE void produce(const QuantParams& p, const Work& work, unsigned char* stages, std::uint64_t* full,
                             std::uint64_t* empty) {
  using T = typename S::T;
  const int count = work.end - work.begin;
  CodeCopies<S> codes(p, work);
  int copied = 0;  // steps whose codes are requested
  const auto copy_until = [&](int end) {
    CHARONIA_UNROLL_BY(1)
    for (; copied < end; ++copied) {
      codes.next(stages + copied % kStages * S::kStageBytes, full + copied % kStages);
    }
  };
  copy_until(min(count, kStages / 2));  // weights may be read while the previous kernel runs
  dependency_wait();

  const int piece = static_cast<int>(threadIdx.x) % kPieces, own = static_cast<int>(threadIdx.x) / kPieces;
  int tile = work.begin / work.steps, step = work.begin % work.steps;  // of the next load
  int in_rows[S::kPasses];                                             // -1: beyond the tile's rows
  bool new_tile = true;
  uint4 data[S::kAhead][S::kPasses];
  const auto load = [&](uint4(&to)[S::kPasses]) {
    if (new_tile) {
      new_tile = false;
      const auto rows = rows_of<S>(p, work, tile);
      CHARONIA_UNROLL
      for (int i = 0; i < S::kPasses; ++i) {
        const int row = own + i * kRowsAtOnce;
        in_rows[i] = row < rows.rows ? rows.in_row(p, row) : -1;
      }
    }
    const int k = step * kQuantK + piece * (16 / static_cast<int>(sizeof(T)));
    CHARONIA_UNROLL
    for (int i = 0; i < S::kPasses; ++i) {
      const auto* const from = static_cast<const T*>(p.in) + static_cast<std::int64_t>(in_rows[i]) * p.in_stride + k;
      to[i] = k < p.k && in_rows[i] >= 0 ? load_cached(reinterpret_cast<const uint4*>(from)) : uint4{0, 0, 0, 0};
    }
    if (++step == work.steps) step = 0, ++tile, new_tile = true;
  };
  std::uint32_t places[4];  // of the words of a piece; the swizzle is the same for rows whose distance is 8
  CHARONIA_UNROLL
  for (int j = 0; j < 4; ++j) {
    const int at = own * kRowBytes + (piece / 4 * 4 + j) * 16 + piece % 4 * 4;
    places[j] = swizzled(static_cast<std::uint32_t>(at), Swizzle::of_128);
  }
  static_assert(kRowsAtOnce % 8 == 0);
  const auto store = [&](const uint4(&from)[S::kPasses], unsigned char* stage) {
    CHARONIA_UNROLL
    for (int i = 0; i < S::kPasses; ++i) {
      const std::uint32_t words[4] = {from[i].x, from[i].y, from[i].z, from[i].w};
      CHARONIA_UNROLL
      for (int j = 0; j < 4; ++j) {
        *reinterpret_cast<std::uint32_t*>(stage + places[j] + i * kRowsAtOnce * kRowBytes) = words[j];
      }
    }
  };

  CHARONIA_UNROLL
  for (int j = 0; j < S::kAhead; ++j) {
    if (j < count) load(data[j]);
  }
  copy_until(min(count, kStages));
  CHARONIA_UNROLL_BY(1)
  for (int first = 0; first < count; first += S::kAhead) {
    CHARONIA_UNROLL
    for (int j = 0; j < S::kAhead; ++j) {
      const int i = first + j, stage = i % kStages;
      if (i >= count) break;
      barrier_wait(empty + stage, (i / kStages + 1) % 2);
      copy_until(i + 1);
      store(data[j], stages + stage * S::kStageBytes);
      async_fence();
      __syncwarp();
      if (lane_id() == 0) barrier_arrive(full + stage);
      if (i + S::kAhead < count) load(data[j]);
      if (p.late_trigger && i + 1 == count) dependency_trigger();  // the last codes are requested
    }
  }
}

// Scales and zeros of a warp's units. kCloses: how often sums are multiplied by scales in a step.
template <class S>
using Scales = ScalePair[S::kCloses][S::kM];
template <class S>
using Zeros = std::uint32_t[S::kCloses][S::kM];
template <class S>
using Operand = std::uint32_t[S::kM][2][4];  // for 32 columns
template <class S>
using Sums = float[S::kM][S::kSums];

// Converts half of a step's codes to operand A. from: the lane's codes of the warp's first unit.
template <class S>
CHARONIA_DEVICE void convert(Operand<S>& a, const uint4* from, int half, const std::uint32_t (&zeros)[S::kM]) {
  CHARONIA_UNROLL
  for (int m = 0; m < S::kM; ++m) {
    uint4 codes[S::kLoads];
    CHARONIA_UNROLL
    for (int l = 0; l < S::kLoads; ++l) codes[l] = from[(4 * m * S::kLoads + l) * kWarp];
    std::uint32_t upper[4], lower[4];
    unit_numbers<typename S::T, S::kCode>(codes, half, zeros[m], upper, lower);
    CHARONIA_UNROLL
    for (int q = 0; q < 2; ++q) {
      a[m][q][0] = upper[2 * q], a[m][q][1] = lower[2 * q];
      a[m][q][2] = upper[2 * q + 1], a[m][q][3] = lower[2 * q + 1];
    }
  }
}

// Issues the products of 32 columns.
template <class S>
CHARONIA_DEVICE void multiply(Sums<S>& sums, Operand<S>& a, std::uint64_t b, bool add) {
  wgmma_fence();
  CHARONIA_UNROLL
  for (int q = 0; q < 2; ++q) {
    CHARONIA_UNROLL
    for (int m = 0; m < S::kM; ++m) wgmma<typename S::T, S::kRows>(sums[m], a[m][q], b + q * 32 / 16, add || q > 0);
  }
  wgmma_commit();
}

// total += the sums, times the scales of their group.
template <class S>
CHARONIA_DEVICE void close_group(const QuantParams& p, Sums<S>& total, const Sums<S>& sums,
                                 const ScalePair (&scales)[S::kM]) {
  CHARONIA_UNROLL
  for (int m = 0; m < S::kM; ++m) {
    float scale[2];
    decode_scales(p, scales[m], scale);
    CHARONIA_UNROLL
    for (int i = 0; i < S::kSums; ++i) total[m][i] = fmaf(scale[i % 4 / 2], sums[m][i], total[m][i]);
  }
}

// Stores the warp's outputs, through its `staged` memory [kStagedRows][kPitch].
template <class S>
CHARONIA_DEVICE void store(const QuantParams& p, const QuantRows& rows, int unit, const Sums<S>& total, float* staged) {
  const int lane = lane_id(), g = lane / 4, t = lane % 4;
  CHARONIA_UNROLL
  for (int m = 0; m < S::kM; ++m) {
    CHARONIA_UNROLL
    for (int first = 0; first < S::kRows; first += kStagedRows) {
      __syncwarp();
      CHARONIA_UNROLL
      for (int i = 0; i < kStagedRows / 2; ++i) {
        staged[(i / 4 * 8 + 2 * t + i % 2) * kPitch + g + i % 4 / 2 * 8] = total[m][first / 2 + i];
      }
      __syncwarp();
      const QuantRows part{rows.first_row + first, min(kStagedRows, rows.rows - first)};
      store_quant_outputs<typename S::T, kQuantRows>(
          p, part, (unit + 4 * m) * kQuantRows, lane, kWarp,
          [&](int row, int column) { return staged[row * kPitch + column]; });
    }
  }
}

// A warp's reads. i: steps, counted from the block's first one.
template <class S>
struct Consumer {
  const QuantParams& p;
  const Work& work;
  unsigned char* stages;
  std::uint64_t* full;
  std::uint64_t* empty;
  int own_unit;  // the first of the warp's units in the tile; they are 4 apart

  CHARONIA_DEVICE void wait_for(int i) const { barrier_wait(full + i % kStages, i / kStages % 2); }
  CHARONIA_DEVICE void release(int i) const {
    __syncwarp();
    if (lane_id() == 0) barrier_arrive(empty + i % kStages);
  }
  CHARONIA_DEVICE std::uint64_t inputs(int i) const {
    return matrix_descriptor(stages + i % kStages * S::kStageBytes, Swizzle::of_128, 8 * kRowBytes);
  }
  CHARONIA_DEVICE const uint4* codes(int i) const {
    const auto* const stage = stages + i % kStages * S::kStageBytes;
    return reinterpret_cast<const uint4*>(stage + S::kInBytes + own_unit * S::kUnitBytes) + lane_id();
  }
  // The place of the scales and zeros of unit m. Units beyond the weight use the factors of the last unit.
  CHARONIA_DEVICE std::int64_t place(int unit, int m, int step, int close) const {
    const int last_unit = static_cast<int>(divide_up(p.n, kQuantRows)) - 1;
    const int group = (step * kQuantK + close * (kQuantK / 2)) >> p.group_shift;
    return work.expert.expert * p.expert_scales + lane_id() / 4 * 2 +
           (static_cast<std::int64_t>(min(unit + 4 * m, last_unit)) * p.groups + group) * kQuantRows;
  }
  CHARONIA_DEVICE void load(Scales<S>& to, int unit, int step) const {
    CHARONIA_UNROLL
    for (int i = 0; i < S::kCloses; ++i) {
      CHARONIA_UNROLL
      for (int m = 0; m < S::kM; ++m) to[i][m] = load_scales(p, place(unit, m, step, i));
    }
  }
  CHARONIA_DEVICE void load(Zeros<S>& to, int unit, int step) const {
    CHARONIA_UNROLL
    for (int i = 0; i < S::kCloses; ++i) {
      CHARONIA_UNROLL
      for (int m = 0; m < S::kM; ++m) to[i][m] = load_zeros(p, place(unit, m, step, i));
    }
  }
};

constexpr int kHalf = kRowBytes / 2 / 16;  // from the first half of a descriptor's columns to the second

// total += the sums of steps of a tile; i: the first of them. The codes of a step are converted while the products of
// the previous ones are in flight.
template <class S>
CHARONIA_DEVICE void multiply_groups(const Consumer<S>& of, int unit, int i, int begin, int end, Sums<S>& total) {
  const int group_steps = of.p.groups == 1 ? of.work.steps : (1 << of.p.group_shift) / kQuantK;
  Operand<S> first_half, second_half;
  Sums<S> sums;
  CHARONIA_UNROLL
  for (int m = 0; m < S::kM; ++m) {
    CHARONIA_UNROLL
    for (int j = 0; j < S::kSums; ++j) sums[m][j] = 0;  // otherwise nvcc needs more registers
  }
  Zeros<S> zeros, next_zeros;
  of.load(zeros, unit, begin);
  of.wait_for(i);
  convert<S>(first_half, of.codes(i), 0, zeros[0]);
  CHARONIA_UNROLL_BY(1)
  for (int step = begin; step < end;) {
    const int first = step, group_end = min(end, step - step % group_steps + group_steps);
    Scales<S> scales;
    of.load(scales, unit, step);
    of.load(next_zeros, unit, min(group_end, end - 1));
    CHARONIA_UNROLL_BY(1)
    do {
      multiply<S>(sums, first_half, of.inputs(i), step > first);
      wgmma_wait<1>();
      if (step > first) of.release(i - 1);
      convert<S>(second_half, of.codes(i), 1, zeros[0]);
      multiply<S>(sums, second_half, of.inputs(i) + kHalf, true);
      const int ahead = step + 1 == end ? i : i + 1;  // the last codes are converted in vain
      if (ahead > i) of.wait_for(ahead);
      wgmma_wait<1>();
      ++step, ++i;
      CHARONIA_UNROLL
      for (int m = 0; m < S::kM; ++m) zeros[0][m] = step == group_end ? next_zeros[0][m] : zeros[0][m];
      convert<S>(first_half, of.codes(ahead), 0, zeros[0]);
    } while (step < group_end);
    wgmma_wait<0>(sums);
    of.release(i - 1);
    close_group<S>(of.p, total, sums, scales[0]);
  }
}

// The same if every half of a step has its own scales. The products of both halves are issued in a row. The next codes
// are converted while the products of the second half are in flight.
template <class S>
CHARONIA_DEVICE void multiply_halves(const Consumer<S>& of, int unit, int i, int begin, int end, Sums<S>& total) {
  Operand<S> first_half, second_half;
  Zeros<S> zeros, next_zeros;
  of.load(zeros, unit, begin);
  of.wait_for(i);
  convert<S>(first_half, of.codes(i), 0, zeros[0]);
  CHARONIA_UNROLL_BY(1)
  for (int step = begin; step < end; ++step, ++i) {
    const int ahead = step + 1 == end ? 0 : 1;  // the last codes are converted in vain
    Scales<S> scales;
    of.load(scales, unit, step);
    of.load(next_zeros, unit, step + ahead);
    Sums<S> first, second;
    multiply<S>(first, first_half, of.inputs(i), false);
    convert<S>(second_half, of.codes(i), 1, zeros[1]);
    multiply<S>(second, second_half, of.inputs(i) + kHalf, false);
    if (ahead > 0) of.wait_for(i + ahead);
    wgmma_wait<1>(first);
    close_group<S>(of.p, total, first, scales[0]);
    convert<S>(first_half, of.codes(i + ahead), 0, next_zeros[0]);
    wgmma_wait<0>(second);
    of.release(i);
    close_group<S>(of.p, total, second, scales[1]);
    CHARONIA_UNROLL
    for (int m = 0; m < S::kM; ++m) zeros[1][m] = next_zeros[1][m];
  }
}

template <class S>
CHARONIA_DEVICE void consume(const QuantParams& p, const Work& work, unsigned char* stages, std::uint64_t* full,
                             std::uint64_t* empty) {
  dependency_wait();
  const int warp = warp_id() - kProducers / kWarp, count = work.end - work.begin;
  const Consumer<S> of{p, work, stages, full, empty, warp / 4 * (4 * S::kM) + warp % 4};
  float* const staged = reinterpret_cast<float*>(stages + kStages * S::kStageBytes + warp * S::kStagedBytes);
  for (int i = 0; i < count;) {
    const int tile = (work.begin + i) / work.steps, begin = work.begin + i - tile * work.steps;
    const int end = min(work.steps, begin + count - i), unit = first_unit<S>(p, tile) + of.own_unit;
    Sums<S> total;
    CHARONIA_UNROLL
    for (int m = 0; m < S::kM; ++m) {
      CHARONIA_UNROLL
      for (int j = 0; j < S::kSums; ++j) total[m][j] = 0;
    }
    if constexpr (S::kHalves) {
      multiply_halves<S>(of, unit, i, begin, end, total);
    } else {
      multiply_groups<S>(of, unit, i, begin, end, total);
    }
    i += end - begin;
    const bool whole = begin == 0 && end == work.steps;
    if (whole || combine(p, work, tile, warp, total)) {
      store<S>(p, rows_of<S>(p, work, tile), unit, total, staged);
    }
  }
}

template <class S>
CHARONIA_KERNEL(kThreads, 1)
void wgmma_kernel(const QuantParams p) {
  if constexpr (kCompilesWgmma) {
    CHARONIA_SHARED(std::uint64_t, full, [kStages]);
    CHARONIA_SHARED(std::uint64_t, empty, [kStages]);
    unsigned char* const stages = swizzled_shared();
    if (threadIdx.x == 0) {
      for (int i = 0; i < kStages; ++i) {
        barrier_init(full + i, 2 * kProducers / kWarp);  // each warp's codes and inputs
        barrier_init(empty + i, kWarps);
      }
      barrier_init_fence();
    }
    __syncthreads();
    if (!p.late_trigger) dependency_trigger();
    if (p.tiles != nullptr) dependency_wait();
    const Work work = work_of_block(p);
    if (work.begin == work.end) return;
    if (threadIdx.x < kProducers) {
      leave_registers<S::kProducerRegisters>();
      produce<S>(p, work, stages, full, empty);
    } else {
      take_registers<S::kConsumerRegisters>();
      consume<S>(p, work, stages, full, empty);
    }
  }
}

template <class S>
bool launch_if(Stream& stream, const QuantParams& p, const GemmTactic& tactic) {
  if (tactic.tile_rows != S::kRows || tactic.tile_columns != S::kColumns || tactic.stages != kStages) return false;
  const bool experts = p.tiles != nullptr;
  const std::int64_t steps = std::int64_t{p.row_tiles} * p.column_tiles * (p.weight_stride / kQuantK);
  launch(stream, experts ? "experts: quantised GEMM (wgmma)" : "quantised GEMM (wgmma)",
         {.grid_x = static_cast<unsigned>(experts ? p.row_tiles : std::min<std::int64_t>(tactic.k_blocks, steps)),
          .grid_y = static_cast<unsigned>(experts ? p.column_tiles : 1),
          .threads = kThreads,
          .dynamic_shared_bytes = S::kSharedBytes},
         &wgmma_kernel<S>, p);
  return true;
}

// The tiles have as many outputs as registers allow. With kHalves, the sums of both halves are in registers.
template <class T, ops::Code code, int kCloses>
bool launch_typed(Stream& stream, const QuantParams& p, const GemmTactic& tactic) {
  constexpr bool kHalves = kCloses == kQuantK / 2;
  if (launch_if<Shape<T, code, kHalves, 32, 2>>(stream, p, tactic)) return true;
  if constexpr (kHalves) {
    return launch_if<Shape<T, code, true, 64, 1>>(stream, p, tactic);
  } else {
    return launch_if<Shape<T, code, false, 64, 2>>(stream, p, tactic) ||
           launch_if<Shape<T, code, false, 128, 1>>(stream, p, tactic);
  }
}

}  // namespace charonia::cuda::quant_wgmma

namespace charonia::cuda {

template <ops::Code code>
bool launch_quant_wgmma(Stream& stream, const QuantParams& params, const GemmTactic& tactic, DType type, int closes) {
  return with_closes<code>(type, closes, [&]<class T>(T, auto close) {
    return quant_wgmma::launch_typed<T, code, close()>(stream, params, tactic);
  });
}

}  // namespace charonia::cuda
