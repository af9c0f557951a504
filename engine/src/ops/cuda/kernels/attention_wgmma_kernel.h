// Attention of several consecutive rows of a sequence over blocks of a 16-bit KV cache, on compute capability 9.0: the
// function of attention_prefill_kernel.h with products of warpgroups (hopper.h).
//
// A thread block takes one kv head of one item at a time: the item's rows times the query heads of the group are up to
// 128 rows of the products. Two warpgroups multiply, each of them 64 rows; a third one copies through the TMA unit:
//   q      one box [rows][heads of the group][64 elements] for each 64 elements of a head, once for each unit
//   k, v   a ring of stages for each. A tile has 128 positions (64 for heads of 256 elements), in boxes of
//          [64 slots][64 elements], or of [block_len slots] if blocks are shorter. Boxes without positions of the item
//          are not copied.
// Rows in shared memory have 128 bytes, swizzled.
//
// Tiles come from the last one to the first, so that the tiles with masks come first. The products of q with the next k
// and of the probabilities with v are in flight while a warpgroup computes its softmax. The warpgroups issue their
// products alternately, so that the tensor cores work for one while the other computes exponentials. The first tile of
// a unit may have slots of a block that the sequence does not own yet, and the last tile blocks before the window, which
// belong to other sequences. Their v may be infinite or NaN: a warp of the third warpgroup sets these rows to zero
// before the products.
//
// Sums of probabilities are in float, before the probabilities are rounded, and tiles are not aligned to chunks of the
// sequence. So a row has other bits than with the other kernels, and reproducible mode does not use this kernel.
//
// Bound: arithmetic, 4 * head_dim operations per row, head and attended position. At head_dim 128, the products of a
// tile of a warpgroup take 1024 cycles of the tensor cores, its exponentials 512 cycles, which the other warpgroup's
// products hide. Expected: 55 % (2048 positions) to 62 % (8192) of the rate of a GEMM. Never measured.
//
// Shared memory: q; stages of k; stages of v.
#pragma once

#include <algorithm>

#include "ops/cuda/device/hopper.h"
#include "ops/cuda/kernels/attention_tile.h"

namespace charonia::cuda::wgmma_attention {

constexpr int kRows = kWgmmaPrefillRows, kConsumers = 2, kGroupThreads = 128, kGroupRows = kRows / kConsumers;
constexpr int kThreads = (1 + kConsumers) * kGroupThreads, kWarps = kConsumers * kGroupThreads / kWarp;
constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
constexpr int kRowBytes = 128, kRowElements = kRowBytes / 2;  // of a row in shared memory
constexpr int kEights = 8 * kRowBytes;

struct Params : AttentionParams {
  TensorMap q_map;        // [rows][heads][head_dim]
  TensorMap cache_map;    // [blocks][k and v heads][slots][head_dim]
  int box_positions = 0;  // of a box of the cache
};

template <class T_, int kDim_, bool kScoreMod_>
struct Shape {
  using T = T_;
  static constexpr int kDim = kDim_;
  static constexpr bool kScoreMod = kScoreMod_;
  static constexpr int kPositions = kDim <= 128 ? 128 : 64, kStages = kDim == 64 ? 4 : 2;
  static constexpr int kSlabs = kDim / kRowElements;  // of 64 columns
  static constexpr int kQSlab = kRows * kRowBytes, kTileSlab = kPositions * kRowBytes;
  static constexpr int kQBytes = kSlabs * kQSlab, kTileBytes = kSlabs * kTileSlab;
  static constexpr int kSharedBytes = kQBytes + 2 * kStages * kTileBytes;
  static constexpr int kScores = kPositions / 2, kSums = kDim / 2;  // registers of a thread
  static_assert(kSharedBytes <= 226 << 10);
  // setmaxnreg would wait forever for more registers than the block has: a multiple of 8 for each thread.
  static_assert(kProducerRegisters + kConsumers * kConsumerRegisters <= 65536 / kThreads / 8 * 8 * (1 + kConsumers));
};

// The barriers of a block, and the parts of its shared memory. Tiles are counted over all units of the block.
template <class S>
struct Ring {
  std::uint64_t* barriers;
  unsigned char* q;

  static constexpr int kTurns = 3, kStagesBegin = kTurns + kConsumers, kBarriers = kStagesBegin + 5 * S::kStages;
  CHARONIA_DEVICE std::uint64_t* q_full() const { return barriers; }
  CHARONIA_DEVICE std::uint64_t* q_empty() const { return barriers + 1; }
  CHARONIA_DEVICE std::uint64_t* consumers() const { return barriers + 2; }
  CHARONIA_DEVICE std::uint64_t* turn_of(int consumer) const { return barriers + kTurns + consumer; }
  CHARONIA_DEVICE std::uint64_t* full(int tile, bool of_v) const { return stage_barrier(tile, of_v ? 1 : 0); }
  CHARONIA_DEVICE std::uint64_t* empty(int tile, bool of_v) const { return stage_barrier(tile, of_v ? 3 : 2); }
  // Used for the copies of v instead of full() if rows must become zero.
  CHARONIA_DEVICE std::uint64_t* copied(int tile) const { return stage_barrier(tile, 4); }
  CHARONIA_DEVICE unsigned char* tile_at(int tile, bool of_v) const {
    return q + S::kQBytes + ((of_v ? S::kStages : 0) + tile % S::kStages) * S::kTileBytes;
  }
  static CHARONIA_DEVICE int parity(int tile) { return tile / S::kStages % 2; }

  CHARONIA_DEVICE void init() const {
    barrier_init(q_full(), 1);
    barrier_init(q_empty(), kWarps);
    barrier_init(consumers(), kConsumers * kGroupThreads);
    for (int i = 0; i < kConsumers; ++i) barrier_init(turn_of(i), kGroupThreads / kWarp);
    for (int i = 0; i < S::kStages; ++i) {
      barrier_init(copied(i), 1);
      for (const bool of_v : {false, true}) barrier_init(full(i, of_v), 1), barrier_init(empty(i, of_v), kWarps);
    }
    barrier_init_fence();
  }

 private:
  CHARONIA_DEVICE std::uint64_t* stage_barrier(int tile, int kind) const {
    return barriers + kStagesBegin + kind * S::kStages + tile % S::kStages;
  }
};

template <class S>
CHARONIA_DEVICE AttentionUnit unit_at(const Params& p, int turn) {
  return attention_unit<S::kScoreMod>(p, turn, *p.count * p.cache.kv_heads);
}
// An item without positions (see attention.h) has one tile too, in which all scores are masked.
template <class S>
CHARONIA_DEVICE int tiles_of(const AttentionItem& item) {
  return max(1, (item.kv_end - item.kv_begin + S::kPositions - 1) / S::kPositions);
}

// The rows of a tile's v that belong to the item's sequence. begin: the tile's first position. Blocks of 64 slots and
// more begin no later than the tiles, so the first one contains a position within the window.
struct OwnRows {
  int begin, end;
};
template <class S>
CHARONIA_DEVICE OwnRows own_rows(const Params& p, const AttentionItem& item, int begin) {
  OwnRows rows{0, min(S::kPositions, item.kv_end - begin)};
  if constexpr (S::kScoreMod) {
    if (p.box_positions < kAttentionTile) {
      rows.begin = min(max(0, window_begin(p, item.first_position) - begin), rows.end);
    }
  }
  return rows;
}
template <class S>
CHARONIA_DEVICE bool all_own(const OwnRows& rows) {
  return rows.begin == 0 && rows.end == S::kPositions;
}

// Copies q, k and v. One thread calls it.
template <class S>
CHARONIA_DEVICE void produce(const Params& p, const Ring<S>& ring) {
  int tile = 0;
  for (int turn = 0;; ++turn) {
    const auto unit = unit_at<S>(p, turn);
    if (!unit.valid) return;
    const auto& item = unit.item;
    const auto copy = [&](int begin, bool of_v, std::uint64_t* full) {
      const int end = min(begin + S::kPositions, item.kv_end), box = p.box_positions;
      barrier_arrive_expect(full, (end - begin + box - 1) / box * box * S::kDim * 2);
      for (int at = begin; at < end; at += box) {
        const auto position = static_cast<unsigned>(at), block_len = static_cast<unsigned>(p.cache.block_len);
        const int entry = item.table + static_cast<int>(position / block_len);
        const int block = p.tables == nullptr ? entry : load_readonly(p.tables + entry);
        unsigned char* const to = ring.tile_at(tile, of_v) + (at - begin) * kRowBytes;
        for (int i = 0; i < S::kSlabs; ++i) {
          copy_box(to + i * S::kTileSlab, p.cache_map,
                   {i * kRowElements, static_cast<int>(position % block_len),
                    unit.kv_head + (of_v ? p.cache.kv_heads : 0), block},
                   full);
        }
      }
    };
    const int tiles = tiles_of<S>(item);
    for (int left = tiles - 1; left >= 0; --left, ++tile) {
      const int begin = item.kv_begin + left * S::kPositions, before = 1 - ring.parity(tile);
      barrier_wait(ring.empty(tile, false), before);
      copy(begin, false, ring.full(tile, false));
      if (left == tiles - 1) {
        barrier_wait(ring.q_empty(), 1 - turn % 2);
        barrier_arrive_expect(ring.q_full(), S::kSlabs * (kRows / p.group) * p.group * kRowBytes);
        for (int i = 0; i < S::kSlabs; ++i) {
          copy_box(ring.q + i * S::kQSlab, p.q_map, {i * kRowElements, unit.kv_head * p.group, item.first_row},
                   ring.q_full());
        }
      }
      barrier_wait(ring.empty(tile, true), before);
      copy(begin, true, all_own<S>(own_rows<S>(p, item, begin)) ? ring.full(tile, true) : ring.copied(tile));
    }
  }
}

// Sets the rows of v to zero that are not the item's own, in the first and the last tile of each unit. One warp calls
// it.
template <class S>
CHARONIA_DEVICE void clear_rows(const Params& p, const Ring<S>& ring) {
  int tile = 0;
  unsigned parities = 0;  // of the next wait, a bit for each stage
  for (int turn = 0;; ++turn) {
    const auto unit = unit_at<S>(p, turn);
    if (!unit.valid) return;
    const int tiles = tiles_of<S>(unit.item);
    for (int left = tiles - 1; left >= 0; left = left > 0 ? 0 : -1) {
      const auto own = own_rows<S>(p, unit.item, unit.item.kv_begin + left * S::kPositions);
      if (all_own<S>(own)) continue;
      const int at = tile + tiles - 1 - left, stage = at % S::kStages;
      barrier_wait(ring.copied(at), static_cast<int>(parities >> stage & 1U));
      parities ^= 1U << stage;
      const auto clear = [&](int begin, int end) {
        for (int byte = begin * kRowBytes + lane_id() * kUnitBytes; byte < end * kRowBytes;
             byte += kWarp * kUnitBytes) {
          for (int i = 0; i < S::kSlabs; ++i) {
            *reinterpret_cast<uint4*>(ring.tile_at(at, true) + i * S::kTileSlab + byte) = uint4{0, 0, 0, 0};
          }
        }
      };
      clear(0, own.begin);
      clear(own.end, S::kPositions);
      async_fence();
      __syncwarp();
      if (lane_id() == 0) barrier_arrive(ring.full(at, true));
    }
    tile += tiles;
  }
}

// A consumer's lane: it has rows of the products `rows` and rows + 8, as in hopper.h.
struct Lane {
  int consumer;
  int row;        // of the block's rows
  int first_row;  // of the warpgroup
  QueryRow at[2];
  int t;
};
CHARONIA_DEVICE Lane lane_of(const Params& p) {
  const int consumer = warp_id() / 4 - 1, row = consumer * kGroupRows + warp_id() % 4 * 16 + lane_id() / 4;
  return {consumer,
          row,
          consumer * kGroupRows,
          {{row / p.group, row % p.group}, {(row + 8) / p.group, (row + 8) % p.group}},
          lane_id() % 4};
}

CHARONIA_DEVICE void release(std::uint64_t* barrier) {
  __syncwarp();
  if (lane_id() == 0) barrier_arrive(barrier);
}

// Issues x = q * k^T.
template <class S>
CHARONIA_DEVICE void multiply_q(float (&x)[S::kScores], const Ring<S>& ring, const Lane& lane, int tile) {
  const auto q = matrix_descriptor(ring.q + lane.first_row * kRowBytes, Swizzle::of_128, kEights);
  const auto k = matrix_descriptor(ring.tile_at(tile, false), Swizzle::of_128, kEights);
  CHARONIA_UNROLL
  for (int i = 0; i < S::kDim / 16; ++i) {
    wgmma<typename S::T, S::kPositions>(x, q + (i / 4 * S::kQSlab + i % 4 * 32) / 16,
                                        k + (i / 4 * S::kTileSlab + i % 4 * 32) / 16, i > 0);
  }
  wgmma_commit();
}

// Issues out += probabilities * v.
template <class S>
CHARONIA_DEVICE void multiply_v(float (&out)[S::kSums], std::uint32_t (&a)[S::kPositions / 16][4], const Ring<S>& ring,
                                int tile) {
  const auto v = matrix_descriptor(ring.tile_at(tile, true), Swizzle::of_128, kEights, S::kTileSlab);
  CHARONIA_UNROLL
  for (int i = 0; i < S::kPositions / 16; ++i) {
    wgmma<typename S::T, S::kDim, true>(out, a[i], v + i * 16 * kRowBytes / 16, true);
  }
  wgmma_commit();
}

// Products of q and k become scores; those that a row does not attend to become minus infinity. begin: the tile's
// first position.
template <class S>
CHARONIA_DEVICE void score(float (&x)[S::kScores], const Params& p, const AttentionUnit& unit, const Lane& lane,
                           int begin) {
  const auto& item = unit.item;
  const auto position_of = [&](int i) { return begin + i / 4 * 8 + 2 * lane.t + i % 2; };
  const auto own_position = [&](int half) { return item.first_position + lane.at[half].row; };
  if constexpr (S::kScoreMod) {
    if (p.score_mod.changes) {
      const float slopes[2] = {slope_of(p, unit.kv_head * p.group + lane.at[0].head),
                               slope_of(p, unit.kv_head * p.group + lane.at[1].head)};
      CHARONIA_UNROLL
      for (int i = 0; i < S::kScores; ++i) {
        x[i] = modify_score(p, x[i], slopes[i % 4 / 2], position_of(i) - own_position(i % 4 / 2));
      }
    }
    const int last_row = (lane.first_row + kGroupRows - 1) / p.group;
    if (begin < window_begin(p, item.first_position + last_row)) {
      CHARONIA_UNROLL
      for (int i = 0; i < S::kScores; ++i) {
        if (position_of(i) < window_begin(p, own_position(i % 4 / 2))) x[i] = kMinusInfinity;
      }
    }
  }
  // Rows beyond the item have limits too, so that no value is infinite; they are not stored.
  const auto limit = [&](int row) { return min(item.first_position + row, item.kv_end - 1); };
  if (begin + S::kPositions - 1 > limit(lane.first_row / p.group)) {
    const int limits[2] = {limit(lane.at[0].row), limit(lane.at[1].row)};
    CHARONIA_UNROLL
    for (int i = 0; i < S::kScores; ++i) {
      if (position_of(i) > limits[i % 4 / 2]) x[i] = kMinusInfinity;
    }
  }
}

// The state of the softmax of a lane's rows. Each lane of a quad has the sum of its own columns.
struct Softmax {
  float maximum[2], sum[2];
  float factor[2];  // of the sums of earlier tiles
};

// Scores become probabilities relative to the new maximum.
template <class S>
CHARONIA_DEVICE void exponentials(float (&x)[S::kScores], Softmax& rows, float scale) {
  CHARONIA_UNROLL
  for (int half = 0; half < 2; ++half) {
    float greatest = rows.maximum[half];
    CHARONIA_UNROLL
    for (int i = 2 * half; i < S::kScores; i += 4) greatest = fmaxf(greatest, fmaxf(x[i], x[i + 1]));
    const float now = quad_max(greatest), at_zero = -anchor(now) * scale;
    rows.factor[half] = rescale(rows.maximum[half], now, scale);
    rows.maximum[half] = now;
    float sum = 0;
    CHARONIA_UNROLL
    for (int i = 2 * half; i < S::kScores; i += 4) {
      x[i] = fast_exp2(fmaf(x[i], scale, at_zero));
      x[i + 1] = fast_exp2(fmaf(x[i + 1], scale, at_zero));
      sum += x[i] + x[i + 1];
    }
    rows.sum[half] = fmaf(rows.sum[half], rows.factor[half], sum);
  }
}

template <class S>
CHARONIA_DEVICE void pack_operand(std::uint32_t (&a)[S::kPositions / 16][4], const float (&x)[S::kScores]) {
  CHARONIA_UNROLL
  for (int i = 0; i < S::kScores / 2; ++i) a[i / 4][i % 4] = pack_at_once<typename S::T>(x[2 * i], x[2 * i + 1]);
}

// Stores the outputs of an item that is not divided, 16 bytes at a time.
template <class S>
CHARONIA_DEVICE void store_rows(const Params& p, const AttentionUnit& unit, const Lane& lane, const Softmax& rows,
                                const float (&out)[S::kSums]) {
  using T = typename S::T;
  CHARONIA_UNROLL
  for (int half = 0; half < 2; ++half) {
    const int head = unit.kv_head * p.group + lane.at[half].head;
    const float norm = norm_of<S::kScoreMod>(p, rows.sum[half], rows.maximum[half], head);
    T* const to = static_cast<T*>(p.out) + (unit.item.first_row + lane.at[half].row) * p.out_stride + head * S::kDim;
    const bool valid = lane.row + 8 * half < unit.item.num_rows * p.group;
    CHARONIA_UNROLL
    for (int j = 0; j < S::kSums / 4; j += 4) {
      std::uint32_t words[4];
      CHARONIA_UNROLL
      for (int i = 0; i < 4; ++i) {
        const float* const from = out + 4 * (j + i) + 2 * half;
        words[i] = pack_at_once<T>(from[0] * norm, from[1] * norm);
      }
      transpose_quad(words);
      if (valid) *reinterpret_cast<uint4*>(to + 8 * (j + lane.t)) = uint4{words[0], words[1], words[2], words[3]};
    }
  }
}

// The threads of the consumers, for split_done().
struct Consumers {
  std::uint64_t* barrier;
  int& phase;
  static constexpr int kWarps = wgmma_attention::kWarps;
  static CHARONIA_DEVICE int warp() { return warp_id() - kGroupThreads / kWarp; }
  CHARONIA_DEVICE void sync() const {
    barrier_arrive(barrier);
    barrier_wait(barrier, phase++ % 2);
  }
};

// Stores the result of a split.
template <class S>
CHARONIA_DEVICE void store_partials(const Params& p, const AttentionUnit& unit, const Lane& lane, const Softmax& rows,
                                    const float (&out)[S::kSums]) {
  const auto& item = unit.item;
  CHARONIA_UNROLL
  for (int half = 0; half < 2; ++half) {
    if (lane.row + 8 * half >= item.num_rows * p.group) continue;
    float* const to = partial_at<S::kDim>(p, item.partial + item.split * item.num_rows + lane.at[half].row,
                                          unit.kv_head * p.group + lane.at[half].head);
    CHARONIA_UNROLL
    for (int j = 0; j < S::kSums / 4; ++j) {
      *reinterpret_cast<float2*>(to + 8 * j + 2 * lane.t) = {out[4 * j + 2 * half], out[4 * j + 2 * half + 1]};
    }
    if (lane.t == 0) *reinterpret_cast<float2*>(to + S::kDim) = {rows.maximum[half], rows.sum[half]};
  }
}

// Computes units. All threads of both consumers call it.
template <class S>
CHARONIA_DEVICE void consume(const Params& p, const Ring<S>& ring, int* flag) {
  const Lane lane = lane_of(p);
  std::uint64_t* const own_turn = ring.turn_of(lane.consumer);
  std::uint64_t* const next_turn = ring.turn_of(1 - lane.consumer);
  int tile = 0, turns = lane.consumer == 0 ? 1 : 0, syncs = 0;  // turns: parity of the next wait
  for (int turn = 0;; ++turn) {
    const auto unit = unit_at<S>(p, turn);
    if (!unit.valid) return;
    const int tiles = tiles_of<S>(unit.item);
    float out[S::kSums];
    CHARONIA_UNROLL
    for (int i = 0; i < S::kSums; ++i) out[i] = 0;
    std::uint32_t a[S::kPositions / 16][4];
    Softmax rows{{kMinusInfinity, kMinusInfinity}, {0, 0}, {1, 1}};
    const auto begin_of = [&](int left) { return unit.item.kv_begin + left * S::kPositions; };
    barrier_wait(ring.q_full(), turn % 2);
    {
      float x[S::kScores];
      barrier_wait(ring.full(tile, false), ring.parity(tile));
      wgmma_fence();
      multiply_q<S>(x, ring, lane, tile);
      wgmma_wait<0>(x);
      release(ring.empty(tile, false));
      score<S>(x, p, unit, lane, begin_of(tiles - 1));
      exponentials<S>(x, rows, p.scale);
      pack_operand<S>(a, x);
    }
    CHARONIA_UNROLL_BY(1)
    for (int left = tiles - 2; left >= 0; --left, ++tile) {
      float x[S::kScores];
      barrier_wait(ring.full(tile + 1, false), ring.parity(tile + 1));
      barrier_wait(ring.full(tile, true), ring.parity(tile));
      barrier_wait(own_turn, turns++ % 2);
      wgmma_fence();
      multiply_q<S>(x, ring, lane, tile + 1);
      multiply_v<S>(out, a, ring, tile);
      release(next_turn);
      wgmma_wait<1>(x);
      release(ring.empty(tile + 1, false));
      score<S>(x, p, unit, lane, begin_of(left));
      exponentials<S>(x, rows, p.scale);
      wgmma_wait<0>(out, a);
      release(ring.empty(tile, true));
      CHARONIA_UNROLL
      for (int i = 0; i < S::kSums; ++i) out[i] *= rows.factor[i % 4 / 2];
      pack_operand<S>(a, x);
    }
    release(ring.q_empty());
    barrier_wait(ring.full(tile, true), ring.parity(tile));
    wgmma_fence();
    multiply_v<S>(out, a, ring, tile);
    wgmma_wait<0>(out);
    release(ring.empty(tile, true));
    ++tile;
    CHARONIA_UNROLL
    for (int half = 0; half < 2; ++half) {
      rows.sum[half] += shuffle_xor(rows.sum[half], 1);
      rows.sum[half] += shuffle_xor(rows.sum[half], 2);
    }
    if (unit.item.splits == 1) {
      store_rows<S>(p, unit, lane, rows, out);
    } else {
      store_partials<S>(p, unit, lane, rows, out);
      split_done<typename S::T, S::kDim, kRows>(p, unit, flag, Consumers{ring.consumers(), syncs});
    }
  }
}

template <class S>
CHARONIA_KERNEL(kThreads, 1)
void wgmma_prefill_kernel(CHARONIA_GRID_CONSTANT const Params p) {
  if constexpr (kCompilesWgmma) {
    CHARONIA_SHARED(std::uint64_t, barriers, [Ring<S>::kBarriers]);
    CHARONIA_SHARED(int, flag, [1]);
    const Ring<S> ring{barriers, swizzled_shared()};
    if (threadIdx.x == 0) ring.init();
    __syncthreads();
    dependency_trigger();
    dependency_wait();
    if (warp_id() < kGroupThreads / kWarp) {
      leave_registers<kProducerRegisters>();
      if (threadIdx.x == 0) produce<S>(p, ring);
      if (warp_id() == 1) clear_rows<S>(p, ring);
    } else {
      take_registers<kConsumerRegisters>();
      consume<S>(p, ring, flag);
    }
  }
}

}  // namespace charonia::cuda::wgmma_attention

namespace charonia::cuda {

template <class T, int kDim>
void start_wgmma_prefill(Stream& stream, const AttentionParams& params, std::int64_t items, std::int64_t rows,
                         std::int64_t num_blocks) {
  namespace own = wgmma_attention;
  own::Params p{params, {}, {}};
  const auto& cache = params.cache;
  p.tiles = 1;
  p.max_units = static_cast<int>(items) * cache.kv_heads;
  p.box_positions = wgmma_box_positions(cache.block_len);
  constexpr int kElement = sizeof(T);
  p.q_map = make_tensor_map({.data = params.q,
                             .type = cache.dtype,
                             .rank = 3,
                             .sizes = {kDim, params.heads, rows},
                             .strides = {0, kDim * kElement, params.q_stride * kElement},
                             .box = {own::kRowElements, params.group, own::kRows / params.group},
                             .swizzle = Swizzle::of_128});
  p.cache_map = make_tensor_map({.data = cache.data,
                                 .type = cache.dtype,
                                 .rank = 4,
                                 .sizes = {kDim, cache.block_len, 2 * cache.kv_heads, num_blocks},
                                 .strides = {0, kDim * kElement, cache.head_size() * kElement, cache.block_bytes()},
                                 .box = {own::kRowElements, p.box_positions, 1, 1},
                                 .swizzle = Swizzle::of_128});
  const auto start = [&]<bool kScoreMod>() {
    using S = own::Shape<T, kDim, kScoreMod>;
    launch(stream, "attention (prefill, wgmma)",
           {.grid_x = static_cast<unsigned>(std::min(p.max_units, p.max_blocks)),
            .threads = own::kThreads,
            .dynamic_shared_bytes = S::kSharedBytes},
           &own::wgmma_prefill_kernel<S>, p);
  };
  params.score_mod.any ? start.template operator()<true>() : start.template operator()<false>();
}

}  // namespace charonia::cuda
