// Common parts of the decode and the prefill kernel of attention: the layout of shared memory, the copies of k and v
// tiles, and the arithmetic of the softmax. A row gets the same bits from both kernels, for these reasons:
//   - Softmax has steps: positions [32 i, 32 (i + 1)) of the sequence, wherever an item begins.
//   - Every element of q k^T and of p v is summed by the same tensor-core products in the same order; the other rows of
//     the product do not matter. A fully masked step changes nothing: its products are zeros, and everything is
//     multiplied by 2^0. (Before a row's window all values are zeros, so it does not matter how far before the window
//     an item begins, or how many splits or chunks lie there.)
//   - The sum of p is a column of the product p v, with a v of ones. The maximum is exact in any order.
//   - Multiply-adds that the compiler may or may not fuse are written as fmaf.
#pragma once

#include <cstdint>

#include "ops/cuda/device/tensor_core.h"
#include "ops/cuda/kernels/attention_kernels.h"

namespace charonia::cuda {

inline constexpr int kAttentionThreads = 128;
inline constexpr int kAttentionWarps = kAttentionThreads / kWarp;
inline constexpr int kUnitBytes = 16;  // size of one copy, and of one row of an 8x8 matrix

// Positions of a tile of k or v, as copied, and of a step of the softmax.
CHARONIA_HD constexpr int tile_positions(int head_dim) { return head_dim <= 128 ? 64 : 32; }
inline constexpr int kStep = 32;

constexpr float kMinusInfinity = -__builtin_inff();

// The layout of rows of kUnits units in shared memory. Eight consecutive rows, and any eight units that a quarter of a
// warp copies, are in different banks: units are permuted within a row, depending on the row, among up to
// kSwizzledUnits units.
template <int kUnits>
inline constexpr int kSwizzledUnits = kUnits % 8 == 0   ? 8
                                      : kUnits % 4 == 0 ? 4
                                      : kUnits % 2 == 0 ? 2
                                                        : 1;
template <int kUnits>
CHARONIA_DEVICE int unit_offset(int row, int unit) {
  constexpr int kSwizzled = kSwizzledUnits<kUnits>;
  constexpr int kShift = kSwizzled == 8 ? 0 : kSwizzled == 4 ? 1 : 2;
  const int turn = row >> kShift & (kSwizzled - 1);
  return (row * kUnits + (unit ^ turn)) * kUnitBytes;
}

// The offset of the unit `by` units after the one at `offset`, in the same row. Requires that the unit's index has no
// common bits with `by` and is below kSwizzledUnits. With a constant `by` this is a constant exclusive or and a
// constant sum, so that a loop over a row needs few registers.
template <int kUnits>
CHARONIA_DEVICE int unit_offset_by(int offset, int by) {
  constexpr int kSwizzled = kSwizzledUnits<kUnits> - 1;
  return (offset ^ (by & kSwizzled) * kUnitBytes) + (by & ~kSwizzled) * kUnitBytes;
}

// The work of a thread block at a time: one kv head of one item, or a tile of its rows.
struct AttentionUnit {
  AttentionItem item;
  int kv_head = 0, tile = 0;
  int turn = 0;  // index among the units of the thread block
  bool valid = false;
};

// The first position that the row at `position` attends to; negative if it attends to all.
CHARONIA_DEVICE int window_begin(const AttentionParams& p, int position) { return position - p.score_mod.window + 1; }

// Blocks take units round-robin, in alternating direction. Items are sorted by length, so this balances the work.
// has_score_mod: items begin at their first row's window; an item before it keeps no position.
template <bool has_score_mod>
CHARONIA_DEVICE AttentionUnit attention_unit(const AttentionParams& p, int turn, int units) {
  const int blocks = static_cast<int>(gridDim.x), block = static_cast<int>(blockIdx.x);
  const int index = turn * blocks + (turn % 2 == 0 ? block : blocks - 1 - block);
  AttentionUnit unit;
  unit.turn = turn;
  if (index >= p.max_units) return unit;
  const int of_item = p.cache.kv_heads * p.tiles;
  unit.item = p.items[index / of_item];
  unit.kv_head = index % of_item / p.tiles;
  unit.tile = index % p.tiles;
  if constexpr (has_score_mod) {
    auto& item = unit.item;
    item.kv_begin = min(max(item.kv_begin, window_begin(p, item.first_position) & ~(kAttentionTile - 1)), item.kv_end);
  }
  unit.valid = index < units;  // computed late: the item is loaded meanwhile
  return unit;
}

// Whether a chunk ends before `end`, and the item continues.
CHARONIA_DEVICE bool ends_chunk(const AttentionParams& p, const AttentionItem& item, int end) {
  return (end & (p.chunk - 1)) == 0 && end < item.kv_end;
}

// The slope of a head; undefined for a head that does not exist.
CHARONIA_DEVICE float slope_of(const AttentionParams& p, int head) {
  return p.score_mod.slopes == nullptr ? 0.0F : load_readonly(p.score_mod.slopes + min(head, p.heads - 1));
}

// The score for a product of q and k, if p.score_mod.changes. `distance`: the key's position minus the row's. cap *
// tanh(x / cap) is cap - 2 cap / (1 + e^(2 x / cap)): an error of a few units in the last place of cap.
CHARONIA_DEVICE float modify_score(const AttentionParams& p, float product, float slope, int distance) {
  const auto& how = p.score_mod;
  float x = product * how.scale;
  if (how.cap != 0) x = fmaf(-2.0F * how.cap, fast_divide(1.0F, 1.0F + fast_exp2(x * how.to_exponent)), how.cap);
  return fmaf(slope, static_cast<float>(distance), x);
}

// Starts the copies of a tile of k and v, each [kPositions][kDim]. rows: the rows (of head_dim elements) of the cache
// layer with k at its positions; -1: zeros.
template <int kDim>
CHARONIA_DEVICE void copy_tile(unsigned char* k, unsigned char* v, const AttentionParams& p, const int* rows) {
  constexpr int kUnits = kDim / 8, kPositions = tile_positions(kDim);
  const auto* const cache = static_cast<const unsigned char*>(p.cache.data);
  const auto to_v = static_cast<std::int64_t>(p.cache.kv_heads) * p.cache.block_len * kDim * 2;
  CHARONIA_UNROLL_BY(4)
  for (int i = 0; i < kPositions * kUnits / kAttentionThreads; ++i) {
    const int index = i * kAttentionThreads + static_cast<int>(threadIdx.x);
    const int position = index / kUnits, unit = index % kUnits;
    const int row = rows[position];
    const bool valid = row >= 0;
    const auto* const from = cache + (valid ? static_cast<std::int64_t>(row) * kDim * 2 : 0) + unit * kUnitBytes;
    const int to = unit_offset<kUnits>(position, unit);
    copy_async_16(k + to, from, valid);
    copy_async_16(v + to, from + to_v, valid);
  }
}

// Row i of the products of an item: one query head of one row. The heads of a group are consecutive rows. If a
// group has more heads than a tile, the item has one row, and tile * (rows of a tile) heads come before.
struct QueryRow {
  int row = 0;   // of the item
  int head = 0;  // of the group, without the heads of earlier tiles
};

// Starts the copies of a tile of q [kRows][kDim]. row_of(i): its QueryRow; rows beyond the item are zeros.
template <int kDim, int kRows, class RowOf>
CHARONIA_DEVICE void copy_q(unsigned char* q, const AttentionParams& p, const AttentionUnit& unit, RowOf row_of) {
  constexpr int kUnits = kDim / 8;
  const auto* const from = static_cast<const unsigned char*>(p.q);
  CHARONIA_UNROLL_BY(2)
  for (int index = static_cast<int>(threadIdx.x); index < kRows * kUnits; index += kAttentionThreads) {
    const int i = index / kUnits, part = index % kUnits;
    const bool valid = unit.tile * kRows + i < unit.item.num_rows * p.group;
    const QueryRow at = row_of(i);
    const auto element = (unit.item.first_row + at.row) * p.q_stride +
                         (unit.kv_head * p.group + unit.tile * kRows + at.head) * kDim + part * 8;
    copy_async_16(q + unit_offset<kUnits>(i, part), from + (valid ? 2 * element : 0), valid);
  }
}

// 2^(score * scale) relative to a maximum is 2^(score * scale - anchor(maximum) * scale). The anchor of a row without
// attended positions is 0, to avoid infinity minus infinity.
CHARONIA_DEVICE float anchor(float maximum) { return maximum == kMinusInfinity ? 0.0F : maximum; }

// The factor that converts a sum relative to `maximum` to one relative to `now`; exactly 1 if they are equal.
CHARONIA_DEVICE float rescale(float maximum, float now, float scale) {
  return fast_exp2((maximum - anchor(now)) * scale);
}

// Combines the results of two consecutive ranges of positions: the maximum, and first * a + second * b.
struct Merge {
  float maximum, first, second;
  CHARONIA_DEVICE float operator()(float a, float b) const { return fmaf(b, second, a * first); }
};
CHARONIA_DEVICE Merge merge(float first_maximum, float second_maximum, float scale) {
  const float maximum = fmaxf(first_maximum, second_maximum);
  return {maximum, rescale(first_maximum, maximum, scale), rescale(second_maximum, maximum, scale)};
}

// The factor of a row's sum of p v: the scale of v divided by the sum of p and of the head's sink, if there is one. A
// sum that is too large for a float gives 0.
template <bool has_score_mod>
CHARONIA_DEVICE float norm_of(const AttentionParams& p, float sum, float maximum, int head) {
  if constexpr (has_score_mod) {
    if (p.score_mod.sinks != nullptr) {
      const float sink = load_readonly(p.score_mod.sinks + min(head, p.heads - 1));
      sum += fast_exp2(fmaf(sink, kLog2E, -anchor(maximum) * p.scale));
    }
    if (p.v_scales != nullptr) return load_readonly(p.v_scales + min(head, p.heads - 1) / p.group) / sum;
  }
  return 1.0F / sum;
}

CHARONIA_DEVICE float quad_max(float x) {
  x = fmaxf(x, shuffle_xor(x, 1));
  return fmaxf(x, shuffle_xor(x, 2));
}

// A pair of ones.
template <class T>
CHARONIA_DEVICE std::uint32_t ones() {
  return pack<T>(1.0F, 1.0F);
}

// sum[0] += the row sums of p's rows g, sum[1] += those of rows g + 8; p: an A operand.
template <class T>
CHARONIA_DEVICE void add_row_sums(float (&sum)[2], const std::uint32_t (&p)[4]) {
  const std::uint32_t b[2] = {ones<T>(), ones<T>()};
  float d[4] = {sum[0], sum[0], sum[1], sum[1]};
  mma_m16n8k16<T>(d, p, b);
  sum[0] = d[0];
  sum[1] = d[2];
}

// The data of a warp for 16 rows. Each lane has rows g and g + 8 (see tensor_core.h): kColumnTiles times 2 columns of
// out, and sums relative to the rows' maxima.
template <int kColumnTiles>
struct RowTile {
  float out[kColumnTiles][4];
  float sum[2], maximum[2];

  CHARONIA_DEVICE void clear() {
    CHARONIA_UNROLL
    for (int j = 0; j < kColumnTiles; ++j) out[j][0] = out[j][1] = out[j][2] = out[j][3] = 0;
    sum[0] = sum[1] = 0;
    maximum[0] = maximum[1] = kMinusInfinity;
  }
  CHARONIA_DEVICE void multiply(int half, float factor) {
    sum[half] *= factor;
    CHARONIA_UNROLL
    for (int j = 0; j < kColumnTiles; ++j) {
      out[j][2 * half] *= factor;
      out[j][2 * half + 1] *= factor;
    }
  }

  // Chunks: the sums of earlier chunks in the span are in memory of the thread, with a stride of kAttentionThreads
  // floats. The sums of earlier spans follow, p.sums_stride / 2 further.
  static constexpr int kFloats = kColumnTiles * 4 + 4;
  CHARONIA_DEVICE void store(float* to) const {
    CHARONIA_UNROLL
    for (int i = 0; i < kColumnTiles * 4; ++i) to[i * kAttentionThreads] = out[i / 4][i % 4];
    CHARONIA_UNROLL
    for (int half = 0; half < 2; ++half) {
      to[(kColumnTiles * 4 + half) * kAttentionThreads] = sum[half];
      to[(kColumnTiles * 4 + 2 + half) * kAttentionThreads] = maximum[half];
    }
  }
  // Combines `before` and this into this.
  CHARONIA_DEVICE void merge_after(const float* before, float scale) {
    CHARONIA_UNROLL
    for (int half = 0; half < 2; ++half) {
      const auto both = merge(before[(kColumnTiles * 4 + 2 + half) * kAttentionThreads], maximum[half], scale);
      maximum[half] = both.maximum;
      sum[half] = both(before[(kColumnTiles * 4 + half) * kAttentionThreads], sum[half]);
      CHARONIA_UNROLL
      for (int j = 0; j < kColumnTiles; ++j) {
        CHARONIA_UNROLL
        for (int i = 2 * half; i < 2 * half + 2; ++i) {
          out[j][i] = both(before[(j * 4 + i) * kAttentionThreads], out[j][i]);
        }
      }
    }
  }
};

// Call if ends_chunk(): adds the rows to the sums in memory.
template <int kColumnTiles>
CHARONIA_DEVICE void end_chunk(RowTile<kColumnTiles>& rows, const AttentionParams& p, const AttentionItem& item,
                               int end, float* sums) {
  const int chunk = end - p.chunk;
  const bool ends_span = (end & (p.span - 1)) == 0;
  bool before = chunk > item.kv_begin && (chunk & (p.span - 1)) != 0;
  CHARONIA_UNROLL_BY(1)
  for (int level = ends_span ? 0 : 1; level < 2; ++level) {
    if (before) rows.merge_after(sums, p.scale);
    before = end - p.span > item.kv_begin;
    if (level == 0) sums += p.sums_stride / 2;
  }
  rows.store(sums);
  rows.clear();
}

// Call at the end of an item: adds the sums in memory to the rows.
template <int kColumnTiles>
CHARONIA_DEVICE void add_chunks(RowTile<kColumnTiles>& rows, const AttentionParams& p, const AttentionItem& item,
                                const float* sums) {
  const int chunk = (item.kv_end - 1) & ~(p.chunk - 1), span = (item.kv_end - 1) & ~(p.span - 1);
  if (chunk > max(item.kv_begin, span)) rows.merge_after(sums, p.scale);
  if (span > item.kv_begin) rows.merge_after(sums + p.sums_stride / 2, p.scale);
}

template <int kDim>
CHARONIA_DEVICE float* partial_at(const AttentionParams& p, std::int64_t partial, int head) {
  return p.partials + (partial * p.heads + head) * (kDim + 4);
}

// The data of a lane for a row while the results of its splits are combined: every 32nd four columns of out.
template <int kDim>
struct Combined {
  static constexpr int kFours = static_cast<int>(divide_up(kDim / 4, kWarp));
  float4 out[kFours];
  float sum, maximum;
  CHARONIA_DEVICE static int column(int i) { return 4 * (lane_id() + i * kWarp); }
};

// Combines one head of one row of several splits, in their order; called by a warp. split_at(i): address of the result
// of split i. All lanes first compute the factors from the maxima, then sum the columns with 16 loads per lane in
// flight.
template <int kDim, class SplitAt>
CHARONIA_DEVICE Combined<kDim> combine(int count, float scale, SplitAt split_at) {
  constexpr int kFours = Combined<kDim>::kFours, kAtOnce = 16 / kFours;
  Combined<kDim> all;
  CHARONIA_UNROLL
  for (int k = 0; k < kFours; ++k) all.out[k] = {-0.0F, -0.0F, -0.0F, -0.0F};  // -0 is the neutral element of addition
  all.sum = 0;
  all.maximum = kMinusInfinity;
  for (int first = 0; first < count; first += kWarp) {
    float maximum = kMinusInfinity, sum = 0;
    if (first + lane_id() < count) {
      const float4 state = load_l2(reinterpret_cast<const float4*>(split_at(first + lane_id()) + kDim));
      maximum = state.x;
      sum = state.y;
    }
    float now = fmaxf(maximum, all.maximum);  // the largest of the splits up to the lane's
    CHARONIA_UNROLL
    for (int delta = 1; delta < kWarp; delta *= 2) now = fmaxf(now, shuffle_up(now, delta));
    const float lower = shuffle_up(now, 1), before = lane_id() == 0 ? all.maximum : lower;
    const float old_factor = rescale(before, now, scale), new_factor = rescale(maximum, now, scale);
    for (int i = first; i < min(first + kWarp, count); i += kAtOnce) {
      float4 next[kAtOnce][kFours];
      CHARONIA_UNROLL
      for (int j = 0; j < kAtOnce; ++j) {
        CHARONIA_UNROLL
        for (int k = 0; k < kFours; ++k) {
          const int column = Combined<kDim>::column(k);
          const bool valid = i + j < count && column < kDim;
          next[j][k] = valid ? load_l2(reinterpret_cast<const float4*>(split_at(i + j) + column)) : float4{0, 0, 0, 0};
        }
      }
      CHARONIA_UNROLL
      for (int j = 0; j < kAtOnce; ++j) {
        if (i + j >= count) continue;
        const int lane = i + j - first;
        const float a = shuffle_from(old_factor, lane), b = shuffle_from(new_factor, lane);
        all.sum = fmaf(shuffle_from(sum, lane), b, all.sum * a);
        CHARONIA_UNROLL
        for (int k = 0; k < kFours; ++k) {
          auto& out = all.out[k];
          out = {fmaf(next[j][k].x, b, out.x * a), fmaf(next[j][k].y, b, out.y * a), fmaf(next[j][k].z, b, out.z * a),
                 fmaf(next[j][k].w, b, out.w * a)};
        }
      }
    }
    all.maximum = shuffle_from(now, kWarp - 1);
  }
  return all;
}

// All threads of a block, for split_done().
struct BlockThreads {
  static constexpr int kWarps = kAttentionWarps;
  static CHARONIA_DEVICE int warp() { return warp_id(); }
  CHARONIA_DEVICE void sync() const { __syncthreads(); }
};

// Called by `threads` after they have written the unit's partial results. Splits are combined in sets of
// kCombinedSplits, then the sets are combined; always by the block that finds all others finished, so that sets are
// combined in parallel. The result of a set replaces the result of its first split. In reproducible mode a set is the
// item's part of a span. kRows: rows of a unit's tile.
template <class T, int kDim, int kRows, class Threads = BlockThreads>
CHARONIA_DEVICE void split_done(const AttentionParams& p, const AttentionUnit& unit, int* last, Threads threads = {}) {
  const auto& item = unit.item;
  const int begin = unit.tile * kRows, end = min(begin + kRows, item.num_rows * p.group);
  // Number of splits that are missing in the first set.
  const int lead = p.span == p.chunk ? 0 : ((item.kv_end - 1) / p.chunk - item.split) % kCombinedSplits;
  const int sets = (lead + item.splits - 1) / kCombinedSplits + 1, set = (lead + item.split) / kCombinedSplits;
  const auto first_of = [&](int of) { return max(of * kCombinedSplits - lead, 0); };

  // Whether the block is the last of `count` that call this.
  const auto is_last = [&](int split, int level, int count) {
    __threadfence();
    threads.sync();
    if (threads.warp() == 0 && lane_id() == 0) {
      const auto partial = static_cast<std::int64_t>(item.partial) + split * item.num_rows;
      auto* const counter =
          p.counters + ((partial * p.cache.kv_heads + unit.kv_head) * p.tiles + unit.tile) * kCombineLevels + level;
      *last = atomicAdd(counter, 1) == count - 1 ? 1 : 0;
      if (*last != 0) *counter = 0;
    }
    threads.sync();
    if (*last == 0) return false;
    __threadfence();
    return true;
  };
  // split_of(i): the splits to combine. If they are all splits, the result becomes out, otherwise it replaces the
  // result of the first split.
  const auto combine_rows = [&](int count, bool all, auto split_of) {
    for (int flat = begin + threads.warp(); flat < end; flat += Threads::kWarps) {
      const int row = flat / p.group, head = unit.kv_head * p.group + flat % p.group;
      const auto split_at = [&](int i) {
        return partial_at<kDim>(p, item.partial + static_cast<std::int64_t>(split_of(i)) * item.num_rows + row, head);
      };
      const auto sum = combine<kDim>(count, p.scale, split_at);
      const float norm = norm_of<true>(p, sum.sum, sum.maximum, head);
      CHARONIA_UNROLL
      for (int k = 0; k < Combined<kDim>::kFours; ++k) {
        const int column = Combined<kDim>::column(k);
        const float4 x = sum.out[k];
        if (column >= kDim) continue;
        if (all) {
          *reinterpret_cast<uint2*>(static_cast<T*>(p.out) + (item.first_row + row) * p.out_stride + head * kDim +
                                    column) = {pack<T>(x.x * norm, x.y * norm), pack<T>(x.z * norm, x.w * norm)};
        } else {
          *reinterpret_cast<float4*>(split_at(0) + column) = x;
        }
      }
      if (!all && lane_id() == 0) *reinterpret_cast<float2*>(split_at(0) + kDim) = {sum.maximum, sum.sum};
    }
  };

  const int first = first_of(set), count = min(first_of(set + 1), static_cast<int>(item.splits)) - first;
  if (!is_last(first, 0, count)) return;
  combine_rows(count, sets == 1, [&](int i) { return first + i; });
  if (sets == 1 || !is_last(0, 1, sets)) return;
  combine_rows(sets, true, first_of);
}

}  // namespace charonia::cuda
