// Attention of single rows over blocks of the KV cache.
//
//   q     [rows, heads, head_dim], bf16 or f16, rows q_stride apart
//   cache [block][k, v][kv head][slot][head_dim], the same type, or quantised (attention_quant.h)
//   out   as q
//   out[row, h] = sum over the item's positions p of softmax_p(q[row, h] . k[p, h / group] * scale) * v[p, h / group]
// With `weighs`, the softmax is over what ops::AttentionParams says, and positions before the window's first tile are
// not read; a split before the window takes one tile of zeros, so that copies and products stay in step.
//
// Bound by memory: 2 * head_dim * 2 bytes a position and kv head are read once, and with each element go 16
// multiplications of the tensor cores, of which `group` are of use. A tile of 64 positions is 32 KB at
// head_dim 128; an SM of an H200 gets about 20 bytes a cycle from memory, so a tile takes 1600 cycles, and
// the arithmetic of a tile takes 800 in its longest chain (barriers included), of which the other block's overlaps.
// Predicted: 85 to 90 % of the bandwidth of a copy once every SM has several units; not measured.
//
// A quantised tile takes 830 cycles of memory in 8 bits and 430 in 4 bits; the schedulers issue 530 cycles to widen it
// and some 250 for the rest, two warps each, which does not fill them: about 1200 cycles in 8 bits and 1050 in 4 bits
// where 16 bits take 1800. Predicted: 1.5 and 1.7 times the rate of 16 bits, 70 and 40 % of the bandwidth; not
// measured.
//
// A thread block of four warps takes one kv head of one item at a time; the query heads of the group are the 16 rows of
// the products' A operand (more than 16: several units). Blocks are persistent: a pipeline of `stages` tiles runs on
// over the borders of units, so that memory does not wait while a unit is finished. A tile:
//   q k^T   each warp: 16 of the 64 positions, all of head_dim; q in registers
//   max     over a warp by shuffles, over the warps by shared memory
//   p       each warp its 16 positions, relative to the maximum after their step of 32; to shared memory in 16 bits
//   p v     each warp: every fourth 8 columns of head_dim, all positions
// So that no warp has a result of its own to combine, and the order of all sums is that of the prefill kernel.
//
// Shared memory, as many stages as leave room for two blocks on an SM (at head_dim 128: 3 on compute
// capability 9.0, 2 on 8.0, and 2 with a single block on 8.9): stages of {k [positions][head_dim], v [the same], q
// [16][head_dim]}, then p [16][positions], maxima [4][16], rows of the cache [2][positions], a flag. Of a quantised
// cache, stages hold k and v as they are copied, and the wide tile that the products take stands between them and p.
#pragma once

#include <algorithm>

#include "ops/cuda/kernels/attention_quant.h"

namespace charonia::cuda {

// quant_bits: 0 where the cache is not quantised.
struct DecodeLayout {
  int tile_bytes, q_bytes, wide_bytes, p_bytes;
  CHARONIA_HD constexpr int stage_bytes() const { return tile_bytes + q_bytes; }
};
CHARONIA_HD constexpr DecodeLayout decode_layout(int head_dim, int quant_bits) {
  return {copied_tile_bytes(head_dim, quant_bits), kDecodeTileRows * head_dim * 2,
          quant_bits == 0 ? 0 : wide_tile_bytes(head_dim), kDecodeTileRows * tile_positions(head_dim) * 2};
}
constexpr std::size_t decode_shared_bytes(int head_dim, int stages, int quant_bits) {
  const auto layout = decode_layout(head_dim, quant_bits);
  return static_cast<std::size_t>(stages * layout.stage_bytes() + layout.wide_bytes + layout.p_bytes +
                                  kAttentionWarps * kDecodeTileRows * 4 +
                                  2 * tile_positions(head_dim) * shared_row_bytes(quant_bits) + 16);
}

// Until the oldest of the tiles under way is there, with a tile in every stage but one.
CHARONIA_DEVICE void wait_for_tile(int stages) {
  if (stages == 2) {
    copy_wait<0>();
  } else if (stages == 3) {
    copy_wait<1>();
  } else {
    copy_wait<2>();
  }
}

// Where the copies are: a walk over the tiles of all units of this block.
template <bool weighs>
struct Ahead {
  AttentionUnit unit, next;
  int turn, position;
  CHARONIA_DEVICE void begin(const AttentionParams& p, int units) {
    unit = attention_unit<weighs>(p, 0, units);
    next = attention_unit<weighs>(p, 1, units);  // long before it is needed: its loads are waited for by nobody
    turn = 1;
    position = unit.item.kv_begin;
  }
  CHARONIA_DEVICE void advance(const AttentionParams& p, int units, int positions) {
    position += positions;
    if (position < unit.item.kv_end || !unit.valid) return;
    unit = next;
    next = attention_unit<weighs>(p, ++turn, units);
    position = unit.item.kv_begin;
  }
  CHARONIA_DEVICE bool at_begin() const { return position == unit.item.kv_begin; }
};

template <class T, int kDim, bool weighs, bool quantised>
CHARONIA_KERNEL(kAttentionThreads, kBlocksPerSm)
void decode_kernel(const AttentionParams p) {
  constexpr int kRows = kDecodeTileRows;
  constexpr int kPositions = tile_positions(kDim), kUnits = kDim / 8, kPUnits = kPositions / 8;
  constexpr int kSteps = kPositions / kStep, kKBytes = kPositions * kDim * 2;
  constexpr int kColumnTiles = kDim / 8 / kAttentionWarps;  // of out, a warp's
  const auto layout = decode_layout(kDim, quantised ? p.cache.quant_bits : 0);
  using Row = typename CacheRow<quantised>::Shared;
  unsigned char* const stages = dynamic_shared();
  unsigned char* const wide = stages + p.stages * layout.stage_bytes();
  unsigned char* const p_tile = wide + layout.wide_bytes;
  float* const maxima = reinterpret_cast<float*>(p_tile + layout.p_bytes);       // [warp][row]
  Row* const k_rows = reinterpret_cast<Row*>(maxima + kAttentionWarps * kRows);  // [2][positions]
  int* const flag = reinterpret_cast<int*>(k_rows + 2 * kPositions);
  float* const sums = p.sums + blockIdx.x * p.sums_stride + threadIdx.x;
  const int thread = static_cast<int>(threadIdx.x), lane = lane_id(), warp = warp_id();
  const int g = lane / 4, t = lane % 4;
  // Where this lane's first row is for load_matrix_x4: of q and p as A operands, of k and v as B operands.
  const int q_at = unit_offset<kUnits>(lane % 16, lane / 16), p_at = unit_offset<kPUnits>(lane % 16, lane / 16);
  const int k_at = unit_offset<kUnits>(warp * 16 + lane / 16 * 8 + lane % 8, lane / 8 % 2);
  const int v_at = unit_offset<kUnits>(lane, warp);

  dependency_trigger();
  dependency_wait();
  const int units = *p.count * p.cache.kv_heads * p.tiles;
  Ahead<weighs> ahead;
  ahead.begin(p, units);
  if (!ahead.unit.valid) return;

  // Rows of the cache are looked up a tile before they are needed, one position a thread.
  const auto look_up = [&] { return cache_row<quantised>(p, ahead.unit, ahead.position + thread); };
  CacheRow<quantised> row_ahead;
  if (thread < kPositions) row_ahead = look_up();
  int parity = 0;
  const auto publish_rows = [&] {
    parity ^= 1;
    if (thread < kPositions) k_rows[parity * kPositions + thread] = row_ahead.shared(p);
  };
  const auto copy_ahead = [&](int stage) {
    unsigned char* const to = stages + stage * layout.stage_bytes();
    if (ahead.unit.valid) {
      if constexpr (quantised) {
        copy_quant_tile<kDim, 4>(to, p, k_rows + parity * kPositions, row_ahead);
      } else {
        copy_tile<kDim>(to, to + kKBytes, p, k_rows + parity * kPositions);
      }
      if (ahead.at_begin())
        copy_q<kDim, kRows>(to + layout.tile_bytes, p, ahead.unit, [](int i) { return QueryRow{0, i}; });
    }
    copy_commit();
    ahead.advance(p, units, kPositions);
    if (thread < kPositions) row_ahead = look_up();
  };
  for (int stage = 0; stage + 1 < p.stages; ++stage) {
    publish_rows();
    __syncthreads();
    copy_ahead(stage);
  }

  int stage = 0;
  for (int turn = 0;; ++turn) {
    const auto unit = attention_unit<weighs>(p, turn, units);
    if (!unit.valid) break;
    std::uint32_t q[kDim / 16][4];
    RowTile<kColumnTiles> rows;
    rows.clear();
    [[maybe_unused]] float slope[2] = {};
    if constexpr (weighs) {
      CHARONIA_UNROLL
      for (int half = 0; half < 2; ++half) {
        slope[half] = slope_of(p, unit.kv_head * p.group + unit.tile * kRows + half * 8 + g);
      }
    }

    for (int begin = unit.item.kv_begin; begin < unit.item.kv_end || (weighs && begin == unit.item.kv_begin);
         begin += kPositions) {
      publish_rows();
      wait_for_tile(p.stages);
      __syncthreads();  // this tile is there, and all are done with the one before, whose stage is the next to fill
      copy_ahead(stage == 0 ? p.stages - 1 : stage - 1);
      const unsigned char* const tile = stages + stage * layout.stage_bytes();
      if constexpr (quantised) {
        widen_tile<T, kDim, 2>(wide, tile, p.cache.quant_bits);
        __syncthreads();
      }
      const unsigned char* const k = quantised ? wide : tile;
      const unsigned char* const v = k + kKBytes;
      if (begin == unit.item.kv_begin) {
        CHARONIA_UNROLL
        for (int i = 0; i < kDim / 16; ++i) {
          load_matrix_x4(q[i], tile + layout.tile_bytes + unit_offset_by<kUnits>(q_at, 2 * i));
        }
      }

      float score[2][4] = {};
      if (warp * 16 < kPositions) {
        CHARONIA_UNROLL
        for (int i = 0; i < kDim / 16; ++i) {
          std::uint32_t b[4];
          load_matrix_x4(b, k + unit_offset_by<kUnits>(k_at, 2 * i));
          const std::uint32_t b0[2] = {b[0], b[1]}, b1[2] = {b[2], b[3]};
          mma_m16n8k16<T>(score[0], q[i], b0);
          mma_m16n8k16<T>(score[1], q[i], b1);
        }
        const auto position_of = [&](int i) { return begin + warp * 16 + i / 4 * 8 + 2 * t + i % 2; };
        if constexpr (weighs) {
          const int at = unit.item.first_position, first = window_begin(p, at);
          if (p.weighing.changes) {
            CHARONIA_UNROLL
            for (int i = 0; i < 8; ++i) {
              auto& x = score[i / 4][i % 4];
              x = weigh(p, x, slope[i % 4 / 2], position_of(i) - at);
            }
          }
          if (begin < first) {
            CHARONIA_UNROLL
            for (int i = 0; i < 8; ++i) {
              if (position_of(i) < first) score[i / 4][i % 4] = kMinusInfinity;
            }
          }
        }
        if (begin + kPositions > unit.item.kv_end) {
          CHARONIA_UNROLL
          for (int i = 0; i < 8; ++i) {
            if (position_of(i) >= unit.item.kv_end) score[i / 4][i % 4] = kMinusInfinity;
          }
        }
        CHARONIA_UNROLL
        for (int half = 0; half < 2; ++half) {
          const float greatest = quad_max(fmaxf(fmaxf(score[0][2 * half], score[0][2 * half + 1]),
                                                fmaxf(score[1][2 * half], score[1][2 * half + 1])));
          if (t == 0) maxima[warp * kRows + half * 8 + g] = greatest;
        }
      }
      __syncthreads();

      float factor[kSteps][2];
      CHARONIA_UNROLL
      for (int half = 0; half < 2; ++half) {
        float at_zero = 0;  // of this warp's step
        CHARONIA_UNROLL
        for (int i = 0; i < kSteps; ++i) {
          float now = rows.maximum[half];
          CHARONIA_UNROLL
          for (int w = i * kStep / 16; w < (i + 1) * kStep / 16; ++w) {
            now = fmaxf(now, maxima[w * kRows + half * 8 + g]);
          }
          factor[i][half] = rescale(rows.maximum[half], now, p.scale);
          if (warp * 16 / kStep == i) at_zero = -anchor(now) * p.scale;
          rows.maximum[half] = now;
        }
        if (warp * 16 < kPositions) {
          CHARONIA_UNROLL
          for (int j = 0; j < 2; ++j) {
            *reinterpret_cast<std::uint32_t*>(p_tile + unit_offset<kPUnits>(half * 8 + g, 2 * warp + j) + 4 * t) =
                pack<T>(fast_exp2(fmaf(score[j][2 * half], p.scale, at_zero)),
                        fast_exp2(fmaf(score[j][2 * half + 1], p.scale, at_zero)));
          }
        }
      }
      __syncthreads();

      CHARONIA_UNROLL
      for (int i = 0; i < kSteps; ++i) {
        rows.multiply(0, factor[i][0]);
        rows.multiply(1, factor[i][1]);
        std::uint32_t a[2][4];
        CHARONIA_UNROLL
        for (int half = 0; half < 2; ++half) {
          load_matrix_x4(a[half], p_tile + unit_offset_by<kPUnits>(p_at, 4 * i + 2 * half));
          add_row_sums<T>(rows.sum, a[half]);
        }
        CHARONIA_UNROLL
        for (int j = 0; j < kColumnTiles; ++j) {
          std::uint32_t b[4];
          load_matrix_x4_transposed(b, v + kStep * i * kDim * 2 + unit_offset_by<kUnits>(v_at, kAttentionWarps * j));
          const std::uint32_t b0[2] = {b[0], b[1]}, b1[2] = {b[2], b[3]};
          mma_m16n8k16<T>(rows.out[j], a[0], b0);
          mma_m16n8k16<T>(rows.out[j], a[1], b1);
        }
      }
      stage = stage + 1 == p.stages ? 0 : stage + 1;
      if (ends_chunk(p, unit.item, begin + kPositions)) end_chunk(rows, p, unit.item, begin + kPositions, sums);
    }
    add_chunks(rows, p, unit.item, sums);

    CHARONIA_UNROLL
    for (int half = 0; half < 2; ++half) {
      const int of_group = unit.tile * kRows + half * 8 + g;
      if (of_group >= p.group) continue;
      const int head = unit.kv_head * p.group + of_group;
      const int column = warp * 8 + 2 * t;  // and every 32nd
      if (unit.item.splits == 1) {
        const float norm = 1.0F / rows.sum[half];
        T* const to = static_cast<T*>(p.out) + unit.item.first_row * p.out_stride + head * kDim + column;
        CHARONIA_UNROLL
        for (int j = 0; j < kColumnTiles; ++j) {
          *reinterpret_cast<std::uint32_t*>(to + 32 * j) =
              pack<T>(rows.out[j][2 * half] * norm, rows.out[j][2 * half + 1] * norm);
        }
      } else {
        float* const to = partial_at<kDim>(p, unit.item.partial + unit.item.split, head);
        CHARONIA_UNROLL
        for (int j = 0; j < kColumnTiles; ++j) {
          *reinterpret_cast<float2*>(to + column + 32 * j) = {rows.out[j][2 * half], rows.out[j][2 * half + 1]};
        }
        if (warp == 0 && t == 0) *reinterpret_cast<float2*>(to + kDim) = {rows.maximum[half], rows.sum[half]};
      }
    }
    if (unit.item.splits > 1) split_done<T, kDim, kRows>(p, unit, flag);
  }
}

template <class T, int kDim>
void start_decode(Stream& stream, const DeviceInfo& device, AttentionParams params, std::int64_t items) {
  // As many stages as leave room for two blocks on an SM; a block has 1 KB besides its own.
  const int bits = params.cache.quant_bits;
  const auto fits = [&](int stages) {
    return 2 * (decode_shared_bytes(kDim, stages, bits) + 1024) <= device.shared_bytes + 1024;
  };
  params.stages = fits(4) ? 4 : fits(3) ? 3 : 2;
  params.tiles = static_cast<int>(divide_up(params.group, kDecodeTileRows));
  params.max_units = static_cast<int>(items) * params.cache.kv_heads * params.tiles;
  launch(stream, "attention (decode)",
         {.grid_x = static_cast<unsigned>(std::min(params.max_units, params.max_blocks)),
          .threads = kAttentionThreads,
          .dynamic_shared_bytes = decode_shared_bytes(kDim, params.stages, bits)},
         bits != 0             ? decode_kernel<T, kDim, true, true>
         : params.weighing.any ? decode_kernel<T, kDim, true, false>
                               : decode_kernel<T, kDim, false, false>,
         params);
}

}  // namespace charonia::cuda
