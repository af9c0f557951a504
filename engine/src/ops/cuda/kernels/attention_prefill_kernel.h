// Attention of several consecutive rows of a sequence over blocks of the KV cache.
//
//   q     [rows, heads, head_dim], bf16 or f16, rows q_stride apart
//   cache [block][k, v][kv head][slot][head_dim], the same type, or quantised (attention_quant.h)
//   out   like q
//   out[row, h] = sum over positions p <= row's of softmax_p(q[row, h] . k[p, h / group] * scale) * v[p, h / group]
// With `has_score_mod`, the softmax is over the scores of ops::AttentionParams: positions before the first row's window
// are not read, and a warp skips the steps before the window of its own first row. A soft cap takes two more
// exponentials per product, slopes one more multiplication.
//
// After "FlashAttention-2" (Dao 2023): one pass over k and v with a running maximum and sum. Compute bound: 4 *
// head_dim operations per row, head and attended position, on tensor cores with mma.m16n8k16. At head_dim 128, a
// block's 128 rows with 64 positions take about 1640 cycles of Hopper's tensor cores (mma.sync reaches about 60 % of
// wgmma there; 2048 cycles on Ampere), 1536 of shared memory (a third each for q, k and v) and 512 of exponentials. Two
// blocks per SM overlap them (one on compute capability 8.x). Predicted: 50 to 60 % of mma.sync's rate. Measured on an
// H200: 29 % (4 prompts of 512), 39 % (2048), 45 % (2048 over 8192). In a model of 4096 columns, attention is 4 % of
// the operations at 2048 positions. With a quantised cache every tile is first widened by all warps, with a barrier:
// about 700 cycles, compared with 3700.
//
// A thread block of four warps takes one kv head of one item at a time. The item's rows times the query heads of the
// group are the rows of its products, flattened: 128 rows (64 at head_dim 256), so that k and v are read once for the
// group. A warp has 32 (16) of them and computes all of their softmax, in steps of 32 positions, which fit the
// registers. The block needs one barrier per tile of 64 (32) positions. k and v of the next tile are copied while one
// is computed. Masks are applied only if a step goes beyond the last position of a warp's first row. A warp skips steps
// that none of its rows attends to.
//
// Shared memory: q [rows][head_dim] (later out); with a quantised cache the wide tile {k [positions][head_dim], v [the
// same]}; rows of the cache [2][positions]; the query rows [rows]; a flag; the unit; 2 stages of tiles as they are
// copied.
#pragma once

#include <algorithm>

#include "ops/cuda/kernels/attention_quant.h"

namespace charonia::cuda {

constexpr int prefill_q_bytes(int head_dim) { return prefill_tile_rows(head_dim) * head_dim * 2; }
constexpr std::size_t prefill_shared_bytes(int head_dim, int quant_bits) {
  return static_cast<std::size_t>(prefill_q_bytes(head_dim) + 2 * copied_tile_bytes(head_dim, quant_bits) +
                                  (quant_bits == 0 ? 0 : wide_tile_bytes(head_dim)) +
                                  2 * tile_positions(head_dim) * shared_row_bytes(quant_bits) +
                                  prefill_tile_rows(head_dim) * 4 + 16 + static_cast<int>(sizeof(AttentionUnit)));
}
static_assert(prefill_shared_bytes(128, 0) <= 99 << 10 && prefill_shared_bytes(256, 0) <= 99 << 10 &&
                  prefill_shared_bytes(128, 8) <= 99 << 10 && prefill_shared_bytes(256, 8) <= 99 << 10,
              "what a block has on compute capability 8.9");

// Stores the outputs of a unit, or its partial results. query_row(i): row i of the tile. warp_rows(): the number of
// rows of the warp.
template <class T, int kDim, bool has_score_mod, int kRowTiles, class QueryRowOf, class WarpRows>
CHARONIA_DEVICE void store_unit(const AttentionParams& p, const AttentionUnit& unit,
                                const RowTile<kDim / 8> (&rows)[kRowTiles], unsigned char* q_tile, int* flag,
                                const QueryRowOf& query_row, const WarpRows& warp_rows) {
  constexpr int kRows = prefill_tile_rows(kDim), kUnits = kDim / 8, kColumnTiles = kDim / 8;
  const int lane = lane_id(), g = lane / 4, t = lane % 4, warp_row = warp_id() * kRowTiles * 16;
  const int first_head = unit.kv_head * p.group + unit.tile * kRows;
  const auto& item = unit.item;
  if (item.splits == 1) {
    // Through q's memory, so that stores have 16 bytes. A warp has read only its own rows of q.
    const int at = unit_offset<kUnits>(warp_row + g, 0) + 4 * t;
    CHARONIA_UNROLL
    for (int r = 0; r < kRowTiles; ++r) {
      CHARONIA_UNROLL
      for (int half = 0; half < 2; ++half) {
        const int head = has_score_mod ? first_head + query_row(warp_row + r * 16 + half * 8 + g).head : 0;
        const float norm = norm_of<has_score_mod>(p, rows[r].sum[half], rows[r].maximum[half], head);
        CHARONIA_UNROLL
        for (int j = 0; j < kColumnTiles; ++j) {
          *reinterpret_cast<std::uint32_t*>(q_tile + (r * 16 + half * 8) * kDim * 2 + unit_offset_by<kUnits>(at, j)) =
              pack<T>(rows[r].out[j][2 * half] * norm, rows[r].out[j][2 * half + 1] * norm);
        }
      }
    }
    __syncwarp();
    CHARONIA_UNROLL_BY(1)
    for (int i = lane; i < warp_rows() * kUnits; i += kWarp) {
      const int row = warp_row + i / kUnits;
      const auto at = query_row(row);
      T* const to = static_cast<T*>(p.out) + (item.first_row + at.row) * p.out_stride + (first_head + at.head) * kDim +
                    i % kUnits * 8;
      *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(q_tile + unit_offset<kUnits>(row, i % kUnits));
    }
  } else {
    CHARONIA_UNROLL
    for (int i = 0; i < kRowTiles * 2; ++i) {
      const int r = i / 2, half = i % 2;
      if (i * 8 + g >= warp_rows()) continue;
      const auto at = query_row(warp_row + i * 8 + g);
      float* const to = partial_at<kDim>(p, item.partial + item.split * item.num_rows + at.row, first_head + at.head);
      CHARONIA_UNROLL
      for (int j = 0; j < kColumnTiles; ++j) {
        *reinterpret_cast<float2*>(to + 8 * j + 2 * t) = {rows[r].out[j][2 * half], rows[r].out[j][2 * half + 1]};
      }
      if (t == 0) *reinterpret_cast<float2*>(to + kDim) = {rows[r].maximum[half], rows[r].sum[half]};
    }
    split_done<T, kDim, kRows>(p, unit, flag);
  }
}

template <class T, int kDim, bool has_score_mod, bool quantised>
CHARONIA_KERNEL(kAttentionThreads, kBlocksPerSm)
void prefill_kernel(const AttentionParams p) {
  constexpr int kRows = prefill_tile_rows(kDim), kWarpRows = kRows / kAttentionWarps, kRowTiles = kWarpRows / 16;
  constexpr int kPositions = tile_positions(kDim), kUnits = kDim / 8, kColumnTiles = kDim / 8;
  constexpr int kKBytes = kPositions * kDim * 2, kQBytes = kRows * kDim * 2;
  using Row = typename CacheRow<quantised>::Shared;
  const int tile_bytes = copied_tile_bytes(kDim, quantised ? p.cache.quant_bits : 0);
  unsigned char* const q_tile = dynamic_shared();
  unsigned char* const wide = q_tile + kQBytes;
  Row* const k_rows = reinterpret_cast<Row*>(wide + (quantised ? wide_tile_bytes(kDim) : 0));
  int* const query_rows = reinterpret_cast<int*>(k_rows + 2 * kPositions);  // QueryRow, packed
  int* const flag = query_rows + kRows;
  auto& unit = *reinterpret_cast<AttentionUnit*>(flag + 4);  // in shared memory, because all registers are in use
  unsigned char* const stages = reinterpret_cast<unsigned char*>(&unit + 1);
  const int thread = static_cast<int>(threadIdx.x), lane = lane_id(), warp = warp_id();
  const int g = lane / 4, t = lane % 4;
  // Offsets of this lane's first row for load_matrix_x4: of q as an A operand, of k and v as B operands.
  const int q_at = unit_offset<kUnits>(warp * kWarpRows + lane % 16, lane / 16);
  const int k_at = unit_offset<kUnits>(lane / 16 * 8 + lane % 8, lane / 8 % 2);
  const int v_at = unit_offset<kUnits>(lane % 16, lane / 16);

  const auto sums_of = [&](int row_tile) {
    return p.sums + blockIdx.x * p.sums_stride + row_tile * RowTile<kColumnTiles>::kFloats * kAttentionThreads +
           threadIdx.x;
  };
  const auto query_row = [&](int i) { return QueryRow{query_rows[i] >> 16, query_rows[i] & 0xffff}; };
  if (thread < kRows) query_rows[thread] = (thread / p.group) << 16 | thread % p.group;

  const auto copy = [&](unsigned char* to, const Row* rows, [[maybe_unused]] const CacheRow<quantised>& own) {
    if constexpr (quantised) {
      copy_quant_tile<kDim, 1>(to, p, rows, own);
    } else {
      copy_tile<kDim>(to, to + kKBytes, p, rows);
    }
  };

  dependency_trigger();
  dependency_wait();
  for (int turn = 0;;) {
    const auto next = attention_unit<has_score_mod>(p, turn, *p.count * p.cache.kv_heads * p.tiles);
    if (!next.valid) break;
    if (thread == 0) unit = next;
    // Cache rows are looked up one tile before they are needed, one position per thread.
    const auto look_up = [&](const AttentionUnit& of, int begin) {
      return thread < kPositions ? cache_row<quantised, has_score_mod>(p, of, begin + thread) : CacheRow<quantised>{};
    };
    auto row_ahead = look_up(next, next.item.kv_begin);
    if (thread < kPositions) k_rows[thread] = row_ahead.shared(p);
    __syncthreads();
    const auto& item = unit.item;
    copy_q<kDim, kRows>(q_tile, p, unit, query_row);
    copy(stages, k_rows, row_ahead);
    copy_commit();
    if constexpr (!quantised) row_ahead = look_up(unit, item.kv_begin + kPositions);

    // The last positions that the warp's first and last row attend to; -1: the item has no row for it.
    const int warp_row = warp * kWarpRows;
    const auto warp_rows = [&] { return min(kWarpRows, item.num_rows * p.group - unit.tile * kRows - warp_row); };
    const auto last_seen = [&](int i) { return min(item.first_position + query_row(i).row, item.kv_end - 1); };
    const int first_limit = last_seen(warp_row),
              last_limit = warp_rows() > 0 ? last_seen(warp_row + warp_rows() - 1) : -1;

    RowTile<kColumnTiles> rows[kRowTiles];
    CHARONIA_UNROLL
    for (int r = 0; r < kRowTiles; ++r) rows[r].clear();
    int stage = 0;
    for (int begin = item.kv_begin; begin < item.kv_end || (has_score_mod && begin == item.kv_begin);
         begin += kPositions) {
      const unsigned char* const tile = stages + stage * tile_bytes;
      const unsigned char* const k = quantised ? wide : tile;
      const unsigned char* const v = k + kKBytes;
      stage ^= 1;
      // Saving registers is more important here than avoiding the wait for a table that is in L1.
      if constexpr (quantised) row_ahead = look_up(unit, begin + kPositions);
      if (thread < kPositions) k_rows[stage * kPositions + thread] = row_ahead.shared(p);
      copy_wait<0>();
      __syncthreads();  // this tile is complete, and all threads are done with the previous one
      if (begin + kPositions < item.kv_end) {
        copy(stages + stage * tile_bytes, k_rows + stage * kPositions, row_ahead);
        copy_commit();
        if constexpr (!quantised) row_ahead = look_up(unit, begin + 2 * kPositions);
      }
      if constexpr (quantised) {
        widen_tile<T, kDim, 1>(wide, tile, p.cache.quant_bits);
        __syncthreads();
      }

      CHARONIA_UNROLL_BY(1)
      for (int step = begin; step < begin + kPositions && step <= last_limit; step += kStep) {
        [[maybe_unused]] const auto position_of_row = [&](int i) { return item.first_position + query_row(i).row; };
        if constexpr (has_score_mod) {
          if (step + kStep <= window_begin(p, position_of_row(warp_row))) continue;
        }
        const unsigned char* const k_step = k + (step - begin) * kDim * 2;
        const unsigned char* const v_step = v + (step - begin) * kDim * 2;
        float score[kRowTiles][kStep / 8][4] = {};
        CHARONIA_UNROLL
        for (int i = 0; i < kDim / 16; ++i) {
          std::uint32_t a[kRowTiles][4];
          CHARONIA_UNROLL
          for (int r = 0; r < kRowTiles; ++r) {
            load_matrix_x4(a[r], q_tile + r * 16 * kDim * 2 + unit_offset_by<kUnits>(q_at, 2 * i));
          }
          CHARONIA_UNROLL
          for (int j = 0; j < kStep / 16; ++j) {
            std::uint32_t b[4];
            load_matrix_x4(b, k_step + j * 16 * kDim * 2 + unit_offset_by<kUnits>(k_at, 2 * i));
            const std::uint32_t b0[2] = {b[0], b[1]}, b1[2] = {b[2], b[3]};
            CHARONIA_UNROLL
            for (int r = 0; r < kRowTiles; ++r) {
              mma_m16n8k16<T>(score[r][2 * j], a[r], b0);
              mma_m16n8k16<T>(score[r][2 * j + 1], a[r], b1);
            }
          }
        }
        if constexpr (has_score_mod) {
          if (p.score_mod.changes) {
            CHARONIA_UNROLL
            for (int half = 0; half < 2 * kRowTiles; ++half) {
              const int row = warp_row + half * 8 + g, at = position_of_row(row);
              const float slope = slope_of(p, unit.kv_head * p.group + unit.tile * kRows + query_row(row).head);
              CHARONIA_UNROLL
              for (int i = 0; i < kStep / 8 * 2; ++i) {
                auto& x = score[half / 2][i / 2][half % 2 * 2 + i % 2];
                x = modify_score(p, x, slope, step + i / 2 * 8 + 2 * t + i % 2 - at);
              }
            }
          }
          if (step < window_begin(p, position_of_row(warp_row + kWarpRows - 1))) {
            CHARONIA_UNROLL
            for (int half = 0; half < 2 * kRowTiles; ++half) {
              const int first = window_begin(p, position_of_row(warp_row + half * 8 + g));
              CHARONIA_UNROLL
              for (int i = 0; i < kStep / 8 * 2; ++i) {
                if (step + i / 2 * 8 + 2 * t + i % 2 < first) {
                  score[half / 2][i / 2][half % 2 * 2 + i % 2] = kMinusInfinity;
                }
              }
            }
          }
        }
        if (step + kStep - 1 > first_limit) {
          CHARONIA_UNROLL
          for (int r = 0; r < kRowTiles; ++r) {
            // Rows beyond the item get the same limits, so that no value is infinite; they are not stored.
            const int limit[2] = {last_seen(warp_row + r * 16 + g), last_seen(warp_row + r * 16 + 8 + g)};
            CHARONIA_UNROLL
            for (int i = 0; i < kStep / 8 * 4; ++i) {
              const int position = step + i / 4 * 8 + 2 * t + i % 2;
              if (position > limit[i % 4 / 2]) score[r][i / 4][i % 4] = kMinusInfinity;
            }
          }
        }

        CHARONIA_UNROLL
        for (int r = 0; r < kRowTiles; ++r) {
          CHARONIA_UNROLL
          for (int half = 0; half < 2; ++half) {
            float greatest = kMinusInfinity;
            CHARONIA_UNROLL
            for (int j = 0; j < kStep / 8; ++j) {
              greatest = fmaxf(greatest, fmaxf(score[r][j][2 * half], score[r][j][2 * half + 1]));
            }
            const float before = rows[r].maximum[half], now = fmaxf(before, quad_max(greatest));
            const float at_zero = -anchor(now) * p.scale;
            rows[r].maximum[half] = now;
            // Most steps have no new maximum, and a product with 1 changes nothing.
            if (any_lane(before != now)) rows[r].multiply(half, rescale(before, now, p.scale));
            CHARONIA_UNROLL
            for (int j = 0; j < kStep / 8; ++j) {
              score[r][j][2 * half] = fast_exp2(fmaf(score[r][j][2 * half], p.scale, at_zero));
              score[r][j][2 * half + 1] = fast_exp2(fmaf(score[r][j][2 * half + 1], p.scale, at_zero));
            }
          }
        }

        CHARONIA_UNROLL
        for (int i = 0; i < kStep / 16; ++i) {
          std::uint32_t a[kRowTiles][4];
          CHARONIA_UNROLL
          for (int r = 0; r < kRowTiles; ++r) {
            CHARONIA_UNROLL
            for (int part = 0; part < 4; ++part) {
              const auto& from = score[r][2 * i + part / 2];
              a[r][part] = pack<T>(from[part % 2 * 2], from[part % 2 * 2 + 1]);
            }
            add_row_sums<T>(rows[r].sum, a[r]);
          }
          CHARONIA_UNROLL
          for (int j = 0; j < kColumnTiles / 2; ++j) {
            std::uint32_t b[4];
            load_matrix_x4_transposed(b, v_step + i * 16 * kDim * 2 + unit_offset_by<kUnits>(v_at, 2 * j));
            const std::uint32_t b0[2] = {b[0], b[1]}, b1[2] = {b[2], b[3]};
            CHARONIA_UNROLL
            for (int r = 0; r < kRowTiles; ++r) {
              mma_m16n8k16<T>(rows[r].out[2 * j], a[r], b0);
              mma_m16n8k16<T>(rows[r].out[2 * j + 1], a[r], b1);
            }
          }
        }
      }

      if (ends_chunk(p, item, begin + kPositions)) {
        CHARONIA_UNROLL
        for (int r = 0; r < kRowTiles; ++r) end_chunk(rows[r], p, item, begin + kPositions, sums_of(r));
      }
    }
    CHARONIA_UNROLL
    for (int r = 0; r < kRowTiles; ++r) add_chunks(rows[r], p, item, sums_of(r));

    store_unit<T, kDim, has_score_mod>(p, unit, rows, q_tile, flag, query_row, warp_rows);
    turn = unit.turn + 1;
    __syncthreads();  // all threads are done with the data that the next unit's copies overwrite
  }
}

template <class T, int kDim>
void start_prefill(Stream& stream, AttentionParams params, std::int64_t items) {
  params.tiles = static_cast<int>(divide_up(params.group, prefill_tile_rows(kDim)));
  params.max_units = static_cast<int>(items) * params.cache.kv_heads * params.tiles;
  launch(stream, "attention (prefill)",
         {.grid_x = static_cast<unsigned>(std::min(params.max_units, params.max_blocks)),
          .threads = kAttentionThreads,
          .dynamic_shared_bytes = prefill_shared_bytes(kDim, params.cache.quant_bits)},
         params.cache.quant_bits != 0 ? prefill_kernel<T, kDim, true, true>
         : params.score_mod.any       ? prefill_kernel<T, kDim, true, false>
                                      : prefill_kernel<T, kDim, false, false>,
         params);
}

}  // namespace charonia::cuda
