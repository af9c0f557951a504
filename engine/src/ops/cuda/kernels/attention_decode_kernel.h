// Attention of single rows over blocks of the KV cache.
//
//   q     [rows, heads, head_dim], bf16 or f16, rows q_stride apart
//   cache [block][k, v][kv head][slot][head_dim], the same type, or quantised (attention_quant.h)
//   out   like q
//   out[row, h] = sum over the item's positions p of softmax_p(q[row, h] . k[p, h / group] * scale) * v[p, h / group]
// With `has_score_mod`, the softmax is over the scores of ops::AttentionParams, and positions before the window's first
// tile are not read. A split before the window processes one tile of zeros, so that copies and products stay
// synchronised.
//
// Memory bound: 2 * head_dim * 2 bytes per position and kv head are read once. Each element takes part in 16
// multiplications of the tensor cores, and `group` of these are useful. A tile of 64 positions is 32 KB at head_dim
// 128. An SM of an H200 reads about 20 bytes per cycle, so a tile takes 1600 cycles. The arithmetic of a tile takes 800
// cycles in its longest chain (with barriers), and the other block overlaps with it. Predicted: 85 to 90 % of the
// bandwidth of a copy when every SM has several units. Measured on an H200 (64 rows, a context of 32768, 32 heads over
// 8 of 128): 101 %, 1872 us.
//
// With a quantised cache the bound is instruction issue. A tile takes 830 cycles of memory in 8 bits and 430 in 4 bits.
// Each of an SM's four schedulers issues about 800 instructions per tile in 8 bits and 815 in 4 bits (counted in the
// machine code for 9.0, for one warp): 440 and 460 for products and the conversion of codes to operands, the rest for
// copies, softmax and loops. Therefore each code is widened in registers by the single warp that needs it: k by the
// warp of its positions, v by the warp of its columns. Also, as many warps run as registers allow: four per scheduler
// at head_dim 128, which is possible because q is in shared memory. Predicted: 950 to 1050 cycles per tile for both,
// where 16 bits take 1740: 1.6 to 1.8 times the rate of 16 bits. Measured on an H200 (as above): 1609 and 1665 us, 1.16
// and 1.12 times.
//
// With k_outside, codes of k become 1024 + code in f16, two of them with one instruction instead of five. The scale
// and the zero of a position are applied to its scores: q k = scale * (q (1024 + code)) + (zero - 1024 scale) * sum(q).
// Therefore q is in f16 too: it is converted once for a unit, in shared memory. The products of a tile then take a warp
// 193 instructions instead of 265 in 8 bits, and 170 instead of 271 in 4 bits (machine code for 9.0, bf16, head_dim
// 128). A row has other bits than from the prefill kernel, so this is not for reproducible mode. Codes of v are not
// treated like this. Their scales would be part of p, whose rounding to f16 loses small weights, and bf16 cannot
// represent 128 + code in 8 bits. Not measured.
//
// A thread block of four warps takes one kv head of one item at a time. The query heads of the group are the 16 rows of
// the products' A operand (more than 16 heads: several units). Blocks are persistent: a pipeline of `stages` tiles
// continues across units, so that memory stays busy while a unit is finished. A tile:
//   q k^T   each warp: 16 of the 64 positions, all of head_dim; q in registers (quantised: in shared memory)
//   max     over a warp by shuffles, over the warps through shared memory
//   p       each warp its 16 positions, relative to the maximum after their step of 32; to shared memory in 16 bits
//   p v     each warp: every fourth 8 columns of head_dim, all positions; with a quantised cache, see QuantColumns
// So warps have no separate results to combine, and all sums have the same order as in the prefill kernel.
//
// Shared memory, with as many stages as fit with two blocks per SM (at head_dim 128: 3 on compute capability 9.0, 2 on
// 8.0, and 2 with a single block on 8.9): stages of {k [positions][head_dim], v [the same], q [16][head_dim]}, then p
// [16][positions], maxima [4][16], rows of the cache [2][positions], flags. With a quantised cache, stages hold k and v
// as they are copied, and the scales and zeros of v [positions] come after the maxima. Then up to four blocks run per
// SM (at head_dim 128 and 8 bits: 4 on 9.0, 3 on 8.0, 2 on 8.9, with 2 stages).
#pragma once

#include <algorithm>
#include <type_traits>

#include "ops/cuda/kernels/attention_quant.h"

namespace charonia::cuda {

// quant_bits: CacheLayer::quant_bits.
struct DecodeLayout {
  int tile_bytes, q_bytes, p_bytes, by_bytes;
  CHARONIA_HD constexpr int stage_bytes() const { return tile_bytes + q_bytes; }
};
CHARONIA_HD constexpr DecodeLayout decode_layout(int head_dim, int quant_bits) {
  return {copied_tile_bytes(head_dim, quant_bits), kDecodeTileRows * head_dim * 2,
          kDecodeTileRows * tile_positions(head_dim) * 2,
          ops::kv_holds_integers(quant_bits) ? tile_positions(head_dim) * 8 : 0};
}
constexpr std::size_t decode_shared_bytes(int head_dim, int stages, int quant_bits) {
  const auto layout = decode_layout(head_dim, quant_bits);
  return static_cast<std::size_t>(stages * layout.stage_bytes() + layout.p_bytes + layout.by_bytes +
                                  kAttentionWarps * kDecodeTileRows * 4 +
                                  2 * tile_positions(head_dim) * shared_row_bytes(quant_bits) + 16);
}
// The maximum blocks per SM, limited by the registers of the compiled kernel for the compute capability.
constexpr int decode_blocks_per_sm(int head_dim, int quant_bits, int major) {
  if (quant_bits == 0) return kBlocksPerSm;
  return major >= 9 ? (head_dim == 128 ? 4 : 3) : head_dim <= 128 ? 3 : 2;
}
#if defined(__CUDA_ARCH__)
inline constexpr int kCompiledMajor = __CUDA_ARCH__ / 100;
#else
inline constexpr int kCompiledMajor = 9;
#endif
// The stride of AttentionParams::sums with a quantised cache: there are more thread blocks than in prefill_kernel, with
// less data each.
template <int kDim>
constexpr std::int64_t decode_sums_stride() {
  return std::int64_t{2} * RowTile<kDim / 8 / kAttentionWarps>::kFloats * kAttentionThreads;
}

// Waits for the oldest tile, with a copy in progress in every stage but one.
CHARONIA_DEVICE void wait_for_tile(int stages) {
  if (stages == 2) {
    copy_wait<0>();
  } else if (stages == 3) {
    copy_wait<1>();
  } else {
    copy_wait<2>();
  }
}

// The position of the copies: iterates over the tiles of all units of this block. early: loads a unit long before it is
// needed, so that nothing waits for its loads; this takes registers.
template <bool has_score_mod, bool early>
struct Ahead {
  struct None {};
  AttentionUnit unit;
  [[no_unique_address]] std::conditional_t<early, AttentionUnit, None> next;
  int turn, position;
  CHARONIA_DEVICE void begin(const AttentionParams& p, int units) {
    unit = attention_unit<has_score_mod>(p, 0, units);
    if constexpr (early) next = attention_unit<has_score_mod>(p, 1, units);
    turn = 1;
    position = unit.item.kv_begin;
  }
  CHARONIA_DEVICE void advance(const AttentionParams& p, int units, int positions) {
    position += positions;
    if (position < unit.item.kv_end || !unit.valid) return;
    if constexpr (early) {
      unit = next;
      next = attention_unit<has_score_mod>(p, ++turn, units);
    } else {
      unit = attention_unit<has_score_mod>(p, turn++, units);
    }
    position = unit.item.kv_begin;
  }
  CHARONIA_DEVICE bool at_begin() const { return position == unit.item.kv_begin; }
};

// The 8 columns of out for a tile of a warp's products, with a quantised cache. A matrix of v is 8 positions by 16
// bytes (a unit). Loaded as transposed 16-bit elements, it gives each lane two neighbouring bytes of two positions:
// even bytes are one tile, odd bytes another. With 4 bits, their high halves are two more tiles.
template <int kDim, int bits>
struct QuantColumns {
  static constexpr int kInUnit = bits == 4 ? 4 : 2;
  int unit, byte, high;  // byte: 0 or 1; high: 0 or 1
  CHARONIA_DEVICE explicit QuantColumns(int tile)
      : unit(tile / kInUnit), byte(tile % 2), high(bits == 4 ? tile / 2 % 2 : 0) {}
  CHARONIA_DEVICE int column(int i) const { return unit * kUnitBytes + 2 * i + byte + high * (kDim / 2); }
};

// Converts a tile of q to f16 in place; magnitudes beyond its range become its largest number, and NaN stays NaN.
template <class T, int kDim>
CHARONIA_DEVICE void narrow_q(unsigned char* q) {
  if constexpr (!std::is_same_v<T, f16>) {
    for (int i = static_cast<int>(threadIdx.x); i < kDecodeTileRows * kDim / 8; i += kAttentionThreads) {
      auto* const at = reinterpret_cast<uint4*>(q) + i;
      const auto narrowed = [](std::uint32_t both) {
        const auto limited = [](std::uint32_t bits) {
          const float x = to_float(T{static_cast<std::uint16_t>(bits)});
          return x > ops::kKvF16Max ? ops::kKvF16Max : x < -ops::kKvF16Max ? -ops::kKvF16Max : x;
        };
        return pack_at_once<f16>(limited(both), limited(both >> 16));
      };
      const uint4 x = *at;
      *at = {narrowed(x.x), narrowed(x.y), narrowed(x.z), narrowed(x.w)};
    }
  }
}

// The types and sizes of a kernel.
template <class T_, int kDim_, bool kScoreMod_, int kBits_, bool kOutside_>
struct DecodeShape {
  using T = T_;
  using Product = std::conditional_t<kOutside_, f16, T>;  // of q and k
  static constexpr int kDim = kDim_, kBits = kBits_;
  static constexpr bool kScoreMod = kScoreMod_, kOutside = kOutside_;
  static constexpr bool kQuantised = kBits != 0, kFp8 = kBits == ops::kKvFp8;
  static constexpr int kRows = kDecodeTileRows, kPositions = tile_positions(kDim), kSteps = kPositions / kStep;
  static constexpr int kUnits = kDim / 8, kPUnits = kPositions / 8;
  static constexpr int kColumnTiles = kDim / 8 / kAttentionWarps;  // column tiles of out per warp
  // Bytes of a row's codes.
  static constexpr int kCodes = kQuantised ? static_cast<int>(ops::kv_quant_row_bytes(kDim, kBits)) : kUnitBytes;
  static constexpr int kCodeUnits = kCodes / kUnitBytes, kCodeBytes = kPositions * kCodes;  // of k, or of v
};

// score += q k^T of a warp's 16 positions, over a quantised cache. Columns 2t, 2t + 1, 2t + 8, 2t + 9 of 16 are a B
// operand, as in the prefill kernel. q_at, k_at: offsets of the lane's first row. by: of the lane's two positions.
template <class S, bool kFolded>
CHARONIA_DEVICE void multiply_k_codes(float (&score)[2][4], const unsigned char* q, int q_at, const unsigned char* k,
                                      int k_at, const ScaleZero (&by)[2]) {
  using T = typename S::T;
  const auto load = [&](int row, int unit, int half) -> std::uint32_t {
    const auto* const at = k + unit_offset_by<S::kCodeUnits>(k_at, unit) + row * 8 * S::kCodes + half * 8;
    return *reinterpret_cast<const std::uint16_t*>(at);
  };
  [[maybe_unused]] std::uint32_t both[S::kBits == 4 ? S::kCodeUnits : 1][2];
  CHARONIA_UNROLL
  for (int i = 0; i < S::kDim / 16; ++i) {
    std::uint32_t a[4];
    load_matrix_x4(a, q + unit_offset_by<S::kUnits>(q_at, 2 * i));
    CHARONIA_UNROLL
    for (int j = 0; j < 2; ++j) {
      std::uint32_t b[2];
      if constexpr (S::kOutside && S::kBits == 8) {
        b[0] = above_1024(load(j, i, 0), 0, 1);
        b[1] = above_1024(load(j, i, 1), 0, 1);
      } else if constexpr (S::kFp8) {
        b[0] = widen_fp8<T>(load(j, i, 0), 0, 1);
        b[1] = widen_fp8<T>(load(j, i, 1), 0, 1);
      } else if constexpr (S::kBits == 8) {
        CHARONIA_UNROLL
        for (int half = 0; half < 2; ++half) {
          b[half] = widen_pair<T, S::kBits, kFolded>(load(j, i, half), 0, by[j], 1, by[j]);
        }
      } else {
        const bool high = i >= S::kCodeUnits;
        auto& word = both[high ? i - S::kCodeUnits : i][j];
        if (!high) word = load(j, i, 0) | load(j, i, 1) << 16;
        const auto codes = (high ? word >> 4 : word) & kLowHalves;
        const auto widened = [&](int first, int second) {
          if constexpr (S::kOutside) return above_1024(codes, first, second);
          return widen_pair<T, S::kBits, kFolded>(codes, first, by[j], second, by[j]);
        };
        b[0] = widened(0, 1);
        b[1] = widened(2, 3);
      }
      mma_m16n8k16<typename S::Product>(score[j], a, b);
    }
  }
}

// The same with the scales and zeros of k. scale_zero(position): of the tile. q_sum: sums of the lane's two rows of q.
template <class S, class ScaleZeroOf>
CHARONIA_DEVICE void multiply_k_codes(float (&score)[2][4], const unsigned char* q, int q_at, const unsigned char* k,
                                      int k_at, [[maybe_unused]] ScaleZeroOf scale_zero,
                                      [[maybe_unused]] const float (&q_sum)[2]) {
  [[maybe_unused]] const int g = lane_id() / 4, t = lane_id() % 4, first = warp_id() * 16;
  if constexpr (S::kFp8 || S::kOutside) {
    multiply_k_codes<S, true>(score, q, q_at, k, k_at, {{1, 0}, {1, 0}});
  } else {
    const ScaleZero by[2] = {scale_zero(first + g), scale_zero(first + 8 + g)};
    const FoldedZero<S::kBits> other[2] = {FoldedZero<S::kBits>(by[0]), FoldedZero<S::kBits>(by[1])};
    if (any_lane(!other[0].exact || !other[1].exact)) {
      multiply_k_codes<S, false>(score, q, q_at, k, k_at, by);
    } else {
      multiply_k_codes<S, true>(score, q, q_at, k, k_at, {{by[0].scale, other[0].zero}, {by[1].scale, other[1].zero}});
    }
  }
  if constexpr (S::kOutside) {
    CHARONIA_UNROLL
    for (int i = 0; i < 4; ++i) {
      const auto by = scale_zero(first + i / 2 * 8 + 2 * t + i % 2);
      const float zero = fmaf(-1024.0F, by.scale, by.zero);
      CHARONIA_UNROLL
      for (int half = 0; half < 2; ++half) {
        auto& x = score[i / 2][2 * half + i % 2];
        x = fmaf(x, by.scale, zero * q_sum[half]);
      }
    }
  }
}

// Products of q and k become scores; those of positions that the row does not attend to become minus infinity. begin:
// the tile's first position; slope: of the lane's two heads.
template <class S>
CHARONIA_DEVICE void score_positions(float (&score)[2][4], const AttentionParams& p, const AttentionItem& item,
                                     int begin, [[maybe_unused]] const float (&slope)[2]) {
  const int t = lane_id() % 4;
  const auto position_of = [&](int i) { return begin + warp_id() * 16 + i / 4 * 8 + 2 * t + i % 2; };
  if constexpr (S::kScoreMod) {
    const int at = item.first_position, first = window_begin(p, at);
    if (p.score_mod.changes) {
      CHARONIA_UNROLL
      for (int i = 0; i < 8; ++i) {
        auto& x = score[i / 4][i % 4];
        x = modify_score(p, x, slope[i % 4 / 2], position_of(i) - at);
      }
    }
    if (begin < first) {
      CHARONIA_UNROLL
      for (int i = 0; i < 8; ++i) {
        if (position_of(i) < first) score[i / 4][i % 4] = kMinusInfinity;
      }
    }
  }
  if (begin + S::kPositions > item.kv_end) {
    CHARONIA_UNROLL
    for (int i = 0; i < 8; ++i) {
      if (position_of(i) >= item.kv_end) score[i / 4][i % 4] = kMinusInfinity;
    }
  }
}

// out += p v of the warp's columns for a step, over a quantised cache. v: codes of the step. v_by: scales and zeros of
// the step.
template <class S, bool kFolded>
CHARONIA_DEVICE void multiply_v_codes(RowTile<S::kColumnTiles>& rows, const std::uint32_t (&a)[2][4],
                                      const unsigned char* v, [[maybe_unused]] const unsigned char* v_by) {
  using T = typename S::T;
  using Columns = QuantColumns<S::kDim, S::kBits>;
  // Tiles of one unit that a warp always has together.
  constexpr int kTogether = S::kColumnTiles % Columns::kInUnit == 0 ? Columns::kInUnit
                            : S::kColumnTiles % 2 == 0              ? 2
                                                                    : 1;
  const int lane = lane_id(), first_tile = warp_id() * S::kColumnTiles;
  [[maybe_unused]] float4 by[4];  // of positions 8 m + 2t and the next one
  CHARONIA_UNROLL
  for (int m = 0; m < 4 && !S::kFp8; ++m) {
    by[m] = *reinterpret_cast<const float4*>(v_by + (8 * m + 2 * (lane % 4)) * 8);
  }
  CHARONIA_UNROLL
  for (int first = 0; first < S::kColumnTiles; first += kTogether) {
    std::uint32_t codes[4];
    load_matrix_x4_transposed(codes, v + unit_offset<S::kCodeUnits>(lane, Columns(first_tile + first).unit));
    CHARONIA_UNROLL
    for (int j = first; j < first + kTogether; ++j) {
      // A compile-time constant, if that is enough for `byte` and `high`.
      const Columns columns(kTogether == Columns::kInUnit ? j : first_tile + j);
      const int byte = kTogether == 1 ? columns.byte : j % 2;
      std::uint32_t b[4];
      CHARONIA_UNROLL
      for (int m = 0; m < 4; ++m) {
        if constexpr (S::kFp8) {
          b[m] = widen_fp8<T>(codes[m], byte, 2 + byte);
          continue;
        }
        const auto word = S::kBits == 8 ? codes[m] : codes[m] >> 4 * columns.high & kLowHalves;
        b[m] = widen_pair<T, S::kBits, kFolded>(word, byte, ScaleZero(by[m].x, by[m].y), 2 + byte,
                                                ScaleZero(by[m].z, by[m].w));
      }
      const std::uint32_t b0[2] = {b[0], b[1]}, b1[2] = {b[2], b[3]};
      mma_m16n8k16<T>(rows.out[j], a[0], b0);
      mma_m16n8k16<T>(rows.out[j], a[1], b1);
    }
  }
}

// Stores the outputs of a unit, or its partial results.
template <class S>
CHARONIA_DEVICE void store_unit(const AttentionParams& p, const AttentionUnit& ended,
                                const RowTile<S::kColumnTiles>& rows) {
  using T = typename S::T;
  constexpr int kDim = S::kDim;
  const int warp = warp_id(), g = lane_id() / 4, t = lane_id() % 4;
  CHARONIA_UNROLL
  for (int half = 0; half < 2; ++half) {
    const int of_group = ended.tile * S::kRows + half * 8 + g;
    if (of_group >= p.group) continue;
    const int head = ended.kv_head * p.group + of_group;
    const int column = warp * 8 + 2 * t;  // and every 32nd column, if the cache is not quantised
    const auto column_of = [&](int j, int i) {
      return QuantColumns<kDim, S::kBits>(warp * S::kColumnTiles + j).column(2 * t + i);
    };
    if (ended.item.splits == 1) {
      const float norm = norm_of<S::kScoreMod>(p, rows.sum[half], rows.maximum[half], head);
      T* const to = static_cast<T*>(p.out) + ended.item.first_row * p.out_stride + head * kDim;
      CHARONIA_UNROLL
      for (int j = 0; j < S::kColumnTiles; ++j) {
        if constexpr (S::kQuantised) {
          CHARONIA_UNROLL
          for (int i = 0; i < 2; ++i) to[column_of(j, i)] = from_float<T>(rows.out[j][2 * half + i] * norm);
        } else {
          *reinterpret_cast<std::uint32_t*>(to + column + 32 * j) =
              pack<T>(rows.out[j][2 * half] * norm, rows.out[j][2 * half + 1] * norm);
        }
      }
    } else {
      float* const to = partial_at<kDim>(p, ended.item.partial + ended.item.split, head);
      CHARONIA_UNROLL
      for (int j = 0; j < S::kColumnTiles; ++j) {
        if constexpr (S::kQuantised) {
          CHARONIA_UNROLL
          for (int i = 0; i < 2; ++i) to[column_of(j, i)] = rows.out[j][2 * half + i];
        } else {
          *reinterpret_cast<float2*>(to + column + 32 * j) = {rows.out[j][2 * half], rows.out[j][2 * half + 1]};
        }
      }
      if (warp == 0 && t == 0) *reinterpret_cast<float2*>(to + kDim) = {rows.maximum[half], rows.sum[half]};
    }
  }
}

template <class T, int kDim, bool has_score_mod, int kBits, bool kOutside>
CHARONIA_KERNEL(kAttentionThreads, decode_blocks_per_sm(kDim, kBits, kCompiledMajor))
void decode_kernel(const AttentionParams p) {
  using S = DecodeShape<T, kDim, has_score_mod, kBits, kOutside>;
  constexpr int kRows = S::kRows, kPositions = S::kPositions, kUnits = S::kUnits, kPUnits = S::kPUnits;
  constexpr int kSteps = S::kSteps, kColumnTiles = S::kColumnTiles, kKBytes = kPositions * kDim * 2;
  constexpr bool quantised = S::kQuantised, kFp8 = S::kFp8;
  constexpr auto layout = decode_layout(kDim, kBits);
  using Row = typename CacheRow<quantised>::Shared;
  unsigned char* const stages = dynamic_shared();
  unsigned char* const p_tile = stages + p.stages * layout.stage_bytes();
  float* const maxima = reinterpret_cast<float*>(p_tile + layout.p_bytes);                         // [warp][row]
  unsigned char* const v_by = reinterpret_cast<unsigned char*>(maxima + kAttentionWarps * kRows);  // ScaleZero
  Row* const k_rows = reinterpret_cast<Row*>(v_by + layout.by_bytes);                              // [2][positions]
  // The flag of split_done(), then, for each step, whether the zeros of v are folded.
  int* const flag = reinterpret_cast<int*>(k_rows + 2 * kPositions);
  float* const sums = p.sums + blockIdx.x * p.sums_stride + threadIdx.x;
  const int thread = static_cast<int>(threadIdx.x), lane = lane_id(), warp = warp_id();
  const int g = lane / 4, t = lane % 4;
  // Offsets of this lane's first row for load_matrix_x4: of q and p as A operands, of k and v as B operands.
  const int q_at = unit_offset<kUnits>(lane % 16, lane / 16), p_at = unit_offset<kPUnits>(lane % 16, lane / 16);
  const int k_at = unit_offset<kUnits>(warp * 16 + lane / 16 * 8 + lane % 8, lane / 8 % 2);
  const int v_at = unit_offset<kUnits>(lane, warp);
  // With a quantised cache: for k, the offset of the lane's codes in its first row.
  [[maybe_unused]] const int k_codes_at = unit_offset<S::kCodeUnits>(warp * 16 + g, 0) + 2 * t;

  // This kernel has no register left for a late trigger.
  const bool late_trigger = p.late_trigger && !(kDim == 96 && kBits == 4);
  if (!late_trigger) dependency_trigger();
  dependency_wait();
  const int units = *p.count * p.cache.kv_heads * p.tiles;
  Ahead<has_score_mod, !quantised> ahead;
  ahead.begin(p, units);
  if (!ahead.unit.valid) return;

  // Rows of the cache are looked up one tile before they are needed, one position per thread.
  const auto look_up = [&] { return cache_row<quantised, has_score_mod>(p, ahead.unit, ahead.position + thread); };
  CacheRow<quantised> row_ahead;
  if (thread < kPositions) row_ahead = look_up();
  // With a quantised cache q stays in shared memory to save registers, in the stages' q tiles, used alternately by
  // unit.
  [[maybe_unused]] int q_now = 0;
  const auto q_tile = [&](int of) { return stages + of * layout.stage_bytes() + layout.tile_bytes; };
  int parity = 0;
  const auto publish_rows = [&] {
    parity ^= 1;
    if (thread < kPositions) k_rows[parity * kPositions + thread] = row_ahead.shared(p);
  };
  const auto copy_ahead = [&](int stage) {
    unsigned char* const to = stages + stage * layout.stage_bytes();
    if (ahead.unit.valid) {
      if constexpr (quantised) {
        copy_quant_tile<kDim, kBits, true, 4>(to, p, k_rows + parity * kPositions, row_ahead);
      } else {
        copy_tile<kDim>(to, to + kKBytes, p, k_rows + parity * kPositions);
      }
      if (ahead.at_begin()) {
        const auto row_of = [](int i) { return QueryRow{0, i}; };
        if constexpr (quantised) {
          const int turn = ahead.turn - 1;
          copy_q<kDim, kRows>(q_tile(turn % p.stages), p, attention_unit<has_score_mod>(p, turn, units), row_of);
        } else {
          copy_q<kDim, kRows>(to + layout.tile_bytes, p, ahead.unit, row_of);
        }
      }
    }
    copy_commit();
    ahead.advance(p, units, kPositions);
    if (late_trigger && !ahead.unit.valid) dependency_trigger();
    if (thread < kPositions) row_ahead = look_up();
  };
  for (int stage = 0; stage + 1 < p.stages; ++stage) {
    publish_rows();
    __syncthreads();
    copy_ahead(stage);
  }

  int stage = 0;
  for (int turn = 0;; ++turn) {
    const auto unit = attention_unit<has_score_mod>(p, turn, units);
    if (!unit.valid) break;
    [[maybe_unused]] std::uint32_t q[kDim / 16][4];
    RowTile<kColumnTiles> rows;
    rows.clear();
    [[maybe_unused]] float slope[2] = {}, q_sum[2] = {};
    if constexpr (has_score_mod) {
      CHARONIA_UNROLL
      for (int half = 0; half < 2; ++half) {
        slope[half] = slope_of(p, unit.kv_head * p.group + unit.tile * kRows + half * 8 + g);
      }
    }

    for (int begin = unit.item.kv_begin; begin < unit.item.kv_end || (has_score_mod && begin == unit.item.kv_begin);
         begin += kPositions) {
      publish_rows();
      wait_for_tile(p.stages);
      __syncthreads();  // this tile is complete, and all threads are done with the previous one
      copy_ahead(stage == 0 ? p.stages - 1 : stage - 1);
      const unsigned char* const tile = stages + stage * layout.stage_bytes();
      [[maybe_unused]] const unsigned char* const k = tile;
      [[maybe_unused]] const unsigned char* const v = tile + (quantised ? S::kCodeBytes : kKBytes);
      [[maybe_unused]] const auto scale_zero = [&](int row) {  // row: k's rows, then v's rows
        return ScaleZero(*reinterpret_cast<const std::uint32_t*>(tile + 2 * S::kCodeBytes + 4 * row));
      };
      if constexpr (ops::kv_holds_integers(kBits)) {
        // Each warp writes the scales and zeros of v for one step. They are read after the next barrier.
        if (thread < kPositions) {
          auto by = scale_zero(kPositions + thread);
          const FoldedZero<kBits> other(by);
          const bool folded = !any_lane(!other.exact);
          if (folded) by.zero = other.zero;
          *reinterpret_cast<float2*>(v_by + 8 * thread) = {by.scale, by.zero};
          if (lane == 0) flag[1 + warp] = folded ? 1 : 0;
        }
      }
      if constexpr (kOutside) {
        if (begin == unit.item.kv_begin) {
          narrow_q<T, kDim>(q_tile(q_now));
          __syncthreads();
          CHARONIA_UNROLL_BY(1)
          for (int i = 0; i < kDim / 16; ++i) {
            std::uint32_t a[4];
            load_matrix_x4(a, q_tile(q_now) + unit_offset_by<kUnits>(q_at, 2 * i));
            add_row_sums<f16>(q_sum, a);
          }
        }
      }
      if (!quantised && begin == unit.item.kv_begin) {
        CHARONIA_UNROLL
        for (int i = 0; i < kDim / 16; ++i) {
          load_matrix_x4(q[i], tile + layout.tile_bytes + unit_offset_by<kUnits>(q_at, 2 * i));
        }
      }

      float score[2][4] = {};
      if (warp * 16 < kPositions) {
        if constexpr (quantised) {
          multiply_k_codes<S>(score, q_tile(q_now), q_at, k, k_codes_at, scale_zero, q_sum);
        } else {
          CHARONIA_UNROLL
          for (int i = 0; i < kDim / 16; ++i) {
            std::uint32_t b[4];
            load_matrix_x4(b, k + unit_offset_by<kUnits>(k_at, 2 * i));
            const std::uint32_t b0[2] = {b[0], b[1]}, b1[2] = {b[2], b[3]};
            mma_m16n8k16<T>(score[0], q[i], b0);
            mma_m16n8k16<T>(score[1], q[i], b1);
          }
        }
        score_positions<S>(score, p, unit.item, begin, slope);
        CHARONIA_UNROLL
        for (int half = 0; half < 2; ++half) {
          const float greatest = quad_max(fmaxf(fmaxf(score[0][2 * half], score[0][2 * half + 1]),
                                                fmaxf(score[1][2 * half], score[1][2 * half + 1])));
          if (t == 0) maxima[warp * kRows + half * 8 + g] = greatest;
        }
      }
      __syncthreads();

      [[maybe_unused]] float factor[kSteps][2];
      // With a quantised cache: the maxima before and after each step. Few tiles have a new maximum and need factors.
      [[maybe_unused]] float reached[kSteps + 1][2] = {{rows.maximum[0], rows.maximum[1]}};
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
          if constexpr (quantised) {
            reached[i + 1][half] = now;
          } else {
            factor[i][half] = rescale(rows.maximum[half], now, p.scale);
          }
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

      [[maybe_unused]] const bool changed =
          quantised && any_lane(reached[0][0] != rows.maximum[0] || reached[0][1] != rows.maximum[1]);
      CHARONIA_UNROLL
      for (int i = 0; i < kSteps; ++i) {
        if constexpr (quantised) {
          if (changed) {  // otherwise all factors are 1
            rows.multiply(0, rescale(reached[i][0], reached[i + 1][0], p.scale));
            rows.multiply(1, rescale(reached[i][1], reached[i + 1][1], p.scale));
          }
        } else {
          rows.multiply(0, factor[i][0]);
          rows.multiply(1, factor[i][1]);
        }
        std::uint32_t a[2][4];
        CHARONIA_UNROLL
        for (int half = 0; half < 2; ++half) {
          load_matrix_x4(a[half], p_tile + unit_offset_by<kPUnits>(p_at, 4 * i + 2 * half));
          add_row_sums<T>(rows.sum, a[half]);
        }
        if constexpr (quantised) {
          const unsigned char* const v_step = v + kStep * i * S::kCodes;
          if (kFp8 || flag[1 + i] != 0) {
            multiply_v_codes<S, true>(rows, a, v_step, v_by + i * kStep * 8);
          } else {
            multiply_v_codes<S, false>(rows, a, v_step, v_by + i * kStep * 8);
          }
        } else {
          CHARONIA_UNROLL
          for (int j = 0; j < kColumnTiles; ++j) {
            std::uint32_t b[4];
            load_matrix_x4_transposed(b, v + kStep * i * kDim * 2 + unit_offset_by<kUnits>(v_at, kAttentionWarps * j));
            const std::uint32_t b0[2] = {b[0], b[1]}, b1[2] = {b[2], b[3]};
            mma_m16n8k16<T>(rows.out[j], a[0], b0);
            mma_m16n8k16<T>(rows.out[j], a[1], b1);
          }
        }
      }
      stage = stage + 1 == p.stages ? 0 : stage + 1;
      if (ends_chunk(p, unit.item, begin + kPositions)) end_chunk(rows, p, unit.item, begin + kPositions, sums);
    }
    add_chunks(rows, p, unit.item, sums);
    if constexpr (quantised) q_now = q_now + 1 == p.stages ? 0 : q_now + 1;

    // Loads data again that is only needed at the end, to save registers.
    const auto again = quantised ? attention_unit<has_score_mod>(p, turn, units) : AttentionUnit{};
    const auto& ended = quantised ? again : unit;
    store_unit<S>(p, ended, rows);
    if (ended.item.splits > 1) split_done<T, kDim, kRows>(p, ended, flag);
  }
}

template <class T, int kDim, bool has_score_mod, int kBits, bool kOutside = false>
void start_decode(Stream& stream, const DeviceInfo& device, AttentionParams params, std::int64_t items) {
  // As many blocks per SM as fit with two stages, then as many stages as fit with these blocks. A block takes 1 KB in
  // addition to its own memory.
  const auto fits = [&](int blocks, int stages) {
    return static_cast<std::size_t>(blocks) * (decode_shared_bytes(kDim, stages, kBits) + 1024) <=
           device.shared_bytes + 1024;
  };
  int blocks = decode_blocks_per_sm(kDim, kBits, device.major);
  if constexpr (kBits != 0) {
    static_assert(
        decode_blocks_per_sm(kDim, kBits, 9) * decode_sums_stride<kDim>() <= kBlocksPerSm * attention_sums_stride(kDim),
        "what there is room for");
    while (blocks > kBlocksPerSm && !fits(blocks, 2)) --blocks;
    params.sums_stride = decode_sums_stride<kDim>();
  }
  params.stages = fits(blocks, 4) ? 4 : fits(blocks, 3) ? 3 : 2;
  params.tiles = static_cast<int>(divide_up(params.group, kDecodeTileRows));
  params.max_units = static_cast<int>(items) * params.cache.kv_heads * params.tiles;
  launch(stream, "attention (decode)",
         {.grid_x = static_cast<unsigned>(std::min(params.max_units, params.max_blocks / kBlocksPerSm * blocks)),
          .threads = kAttentionThreads,
          .dynamic_shared_bytes = decode_shared_bytes(kDim, params.stages, kBits)},
         decode_kernel<T, kDim, has_score_mod, kBits, kOutside>, params);
}

template <class T, int kDim>
void start_decode(Stream& stream, const DeviceInfo& device, AttentionParams params, std::int64_t items) {
  if (params.k_outside && params.cache.quant_bits == 8) {
    start_decode<T, kDim, true, 8, true>(stream, device, params, items);
  } else if (params.k_outside && params.cache.quant_bits == 4) {
    start_decode<T, kDim, true, 4, kDim != 96>(stream, device, params, items);  // 96 has too few registers for it
  } else if (params.cache.quant_bits == 8) {
    start_decode<T, kDim, true, 8>(stream, device, params, items);
  } else if (params.cache.quant_bits == 4) {
    start_decode<T, kDim, true, 4>(stream, device, params, items);
  } else if (params.cache.quant_bits == ops::kKvFp8) {
    start_decode<T, kDim, true, ops::kKvFp8>(stream, device, params, items);
  } else if (params.score_mod.any) {
    start_decode<T, kDim, true, 0>(stream, device, params, items);
  } else {
    start_decode<T, kDim, false, 0>(stream, device, params, items);
  }
}

}  // namespace charonia::cuda
