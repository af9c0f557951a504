// Tiles of a quantised cache (ops/kv_quant.h), for the tensor-core kernels. Integers, scales and zeros are copied to
// shared memory in the cache's layout before they are needed. Then they become elements of the model's 16-bit type:
// round(fmaf(integer, scale, zero)), once, in both kernels, so that a row has the same bits from both. The prefill
// kernel, in which every warp needs the whole tile, writes a wide tile. The decode kernel converts to operands of
// products, in registers. FP8 is converted at the same places, without rounding, scale and zero.
//
//   copied  [2 positions][row bytes] integers or FP8, k before v; [2 positions] scale, zero (not with FP8)
//   wide    [2 positions][kDim], k before v, in the layout of unit_offset()
//
// A tile of k and v of 64 positions at head_dim 128 takes 32 KB in 16 bits; 16.5 KB in 8 bits ((D + 4) / 2D of it); 8.5
// KB in 4 bits; 16 KB in FP8. In registers, an element takes 2.5 instructions (its byte moves into a float's mantissa,
// a multiply-add, half a conversion to 16 bits), and 0.4 more in 4 bits. In a wide tile it takes 3.5, plus half an
// instruction for work that 16 elements share: 530 cycles of an SM's four schedulers in all, and 256 of shared memory.
#pragma once

#include <cstdint>

#include "ops/cuda/kernels/attention_tile.h"

namespace charonia::cuda {

// Bytes of a tile of k and v together: wide, and as copied (the wide size if bits is 0).
CHARONIA_HD constexpr int wide_tile_bytes(int head_dim) { return 2 * tile_positions(head_dim) * head_dim * 2; }
CHARONIA_HD constexpr int copied_tile_bytes(int head_dim, int bits) {
  return bits == 0 ? wide_tile_bytes(head_dim)
                   : 2 * tile_positions(head_dim) * static_cast<int>(ops::kv_quant_token_bytes(head_dim, bits));
}

// The address of k at a position: in the form of the thread that looks it up, and, in `Shared`, for all threads that
// copy it.
template <bool quantised>
struct CacheRow;
template <>
struct CacheRow<false> {
  using Shared = int;
  int row = -1;
  CHARONIA_DEVICE Shared shared(const AttentionParams&) const { return row; }
};
template <>
struct CacheRow<true> {
  using Shared = std::int64_t;  // byte offset in the layer; no_row() if there is no row: see copy_codes()
  int block = -1, row = 0;      // row of the block
  CHARONIA_DEVICE static int no_row(const AttentionParams& p) { return ops::kv_holds_integers(p.cache.quant_bits) ? 0 : -1; }
  CHARONIA_DEVICE Shared shared(const AttentionParams& p) const {
    return block < 0 ? no_row(p) : block_at(p) + row * p.cache.row_bytes();
  }
  CHARONIA_DEVICE std::int64_t block_at(const AttentionParams& p) const {
    return static_cast<std::int64_t>(block) * static_cast<int>(p.cache.quant_block_bytes());  // one multiplication
  }
};
constexpr int shared_row_bytes(int quant_bits) {
  return static_cast<int>(quant_bits == 0 ? sizeof(CacheRow<false>::Shared) : sizeof(CacheRow<true>::Shared));
}

// The row of the thread's own position; empty if it has none. Before the window of the item's first row, tables have
// blocks of other sequences, whose values may be NaN.
template <bool quantised, bool has_score_mod>
CHARONIA_DEVICE CacheRow<quantised> cache_row(const AttentionParams& p, const AttentionUnit& unit, int position) {
  if (!unit.valid || position >= unit.item.kv_end) return {};
  if constexpr (has_score_mod) {
    if (position < window_begin(p, unit.item.first_position)) return {};
  }
  const auto at = static_cast<unsigned>(position), block_len = static_cast<unsigned>(p.cache.block_len);
  const int block = load_readonly(p.tables + unit.item.table + at / block_len);
  const int slot = static_cast<int>(at % block_len);
  if constexpr (quantised) {
    return {block, unit.kv_head * p.cache.block_len + slot};
  } else {
    return {(block * 2 * p.cache.kv_heads + unit.kv_head) * p.cache.block_len + slot};
  }
}

// kUnroll, here and below: how many iterations of a loop are unrolled. More of them hide more of the latency, and take
// more registers. swizzled_rows: rows have the layout of unit_offset(), otherwise they are contiguous. A position
// without a row gets the integers at the start of the layer; their values do not matter, because its scale and zero are
// 0. With FP8 it gets zeros.
template <int kDim, int bits, bool swizzled_rows, int kUnroll>
CHARONIA_DEVICE void copy_codes(unsigned char* copied, const AttentionParams& p, const std::int64_t* rows) {
  constexpr int kRowBytes = static_cast<int>(ops::kv_quant_row_bytes(kDim, bits)), kUnits = kRowBytes / kUnitBytes;
  constexpr int kCopies = tile_positions(kDim) * kUnits;
  static_assert(kRowBytes % kUnitBytes == 0);
  const auto* const k = static_cast<const unsigned char*>(p.cache.data);
  const auto* const v = k + static_cast<std::int64_t>(p.cache.half_rows()) * kRowBytes;
  const auto copy = [&](std::int64_t row, int unit, int to) {
    const bool valid = ops::kv_holds_integers(bits) || row >= 0;
    const std::int64_t from = (valid ? row : 0) + unit * kUnitBytes;
    copy_async_16(copied + to, k + from, valid);
    copy_async_16(copied + kCopies * kUnitBytes + to, v + from, valid);
  };
  const int thread = static_cast<int>(threadIdx.x);
  constexpr int kRowsAtOnce = kAttentionThreads / kUnits;
  if constexpr (kAttentionThreads % kUnits == 0 && kRowsAtOnce % 8 == 0 && kCopies % kAttentionThreads == 0) {
    // A thread copies the same unit of every row.
    const int first = thread / kUnits, unit = thread % kUnits;
    const int to = swizzled_rows ? unit_offset<kUnits>(first, unit) : thread * kUnitBytes;
    constexpr int kTurns = kCopies / kAttentionThreads, kAtOnce = kUnroll < kTurns ? kUnroll : kTurns;
    static_assert(kTurns % kAtOnce == 0);
    CHARONIA_UNROLL_BY(1)
    for (int i = 0; i < kTurns; i += kAtOnce) {
      std::int64_t row[kAtOnce];
      CHARONIA_UNROLL
      for (int j = 0; j < kAtOnce; ++j) row[j] = rows[first + (i + j) * kRowsAtOnce];
      CHARONIA_UNROLL
      for (int j = 0; j < kAtOnce; ++j) copy(row[j], unit, to + (i + j) * kAttentionThreads * kUnitBytes);
    }
  } else {
    CHARONIA_UNROLL_BY(kUnroll)
    for (int index = thread; index < kCopies; index += kAttentionThreads) {
      const int row = index / kUnits, unit = index % kUnits;
      copy(rows[row], unit, swizzled_rows ? unit_offset<kUnits>(row, unit) : index * kUnitBytes);
    }
  }
}

// Copies the scale and the zero of k and v of every position, or zeros if there is no row. own: the row of the thread's
// position.
template <int kDim, int bits>
CHARONIA_DEVICE void copy_scales(unsigned char* copied, const AttentionParams& p, const CacheRow<true>& own) {
  constexpr int kPositions = tile_positions(kDim);
  if (static_cast<int>(threadIdx.x) >= kPositions) return;
  const bool valid = own.block >= 0;
  const int at = 2 * p.cache.half_rows() * (kDim * bits / 8) + 4 * own.row;  // CacheLayer::scale_at()
  const auto* const from = static_cast<const unsigned char*>(p.cache.data) + (valid ? own.block_at(p) + at : 0);
  unsigned char* const to = copied + 2 * kPositions * (kDim * bits / 8) + 4 * threadIdx.x;
  copy_async_4(to, from, valid);
  copy_async_4(to + 4 * kPositions, from + 4 * p.cache.half_rows(), valid);
}

// Starts the copies of a tile of k and v. rows: of the tile's positions; own: the row of the thread's position.
template <int kDim, int bits, bool swizzled_rows, int kUnroll>
CHARONIA_DEVICE void copy_quant_tile(unsigned char* copied, const AttentionParams& p, const std::int64_t* rows,
                                     const CacheRow<true>& own) {
  copy_codes<kDim, bits, swizzled_rows, kUnroll>(copied, p, rows);
  if constexpr (ops::kv_holds_integers(bits)) copy_scales<kDim, bits>(copied, p, own);
}
template <int kDim, int kUnroll>
CHARONIA_DEVICE void copy_quant_tile(unsigned char* copied, const AttentionParams& p, const std::int64_t* rows,
                                     const CacheRow<true>& own) {
  if (p.cache.quant_bits == 8) {
    copy_quant_tile<kDim, 8, false, kUnroll>(copied, p, rows, own);
  } else if (p.cache.quant_bits == ops::kKvFp8) {
    copy_quant_tile<kDim, ops::kKvFp8, false, kUnroll>(copied, p, rows, own);
  } else {
    copy_quant_tile<kDim, 4, false, kUnroll>(copied, p, rows, own);
  }
}

inline constexpr std::uint32_t kLowHalves = 0x0f0f0f0fU;  // the low halves of bytes: 4-bit codes

// A stored scale and zero.
struct ScaleZero {
  float scale, zero;
  CHARONIA_DEVICE ScaleZero(float scale_, float zero_) : scale(scale_), zero(zero_) {}
  CHARONIA_DEVICE explicit ScaleZero(std::uint32_t both)
      : scale(to_float(f16{static_cast<std::uint16_t>(both & 0xffffU)})),
        zero(to_float(f16{static_cast<std::uint16_t>(both >> 16)})) {}
};

// Saves a subtraction per code: the float of a code contains a constant base, which is subtracted from the zero
// instead. fmaf(code + base, scale, zero - base * scale) equals fmaf(code, scale, zero) bit for bit if that difference
// is exact. It is exact unless the zero has bits below the 24 bits of the difference. Such a zero is less than a 500th
// of the row's range (and not 0) in 4 bits, or a 16th in 8 bits. The bases are the smallest that one instruction can
// give.
template <int bits>
struct FoldedZero {
  static constexpr float kBase = bits == 8 ? 0x1p15F : 0x1p7F;
  float zero;
  bool exact;
  CHARONIA_DEVICE explicit FoldedZero(const ScaleZero& by) {
    const float base = kBase * by.scale;  // exact, and so is one of the two differences
    zero = by.zero - base;
    exact = base + zero == by.zero && by.zero - zero == base;
  }
};

// Converts two codes (bytes of a word, of one row or of two) to a register of two elements. folded: zeros come from
// FoldedZero.
template <class T, int bits, bool folded>
CHARONIA_DEVICE std::uint32_t widen_pair(std::uint32_t word, int i, const ScaleZero& by_i, int j,
                                         const ScaleZero& by_j) {
  const auto code = [&](int at) {
    return !folded ? byte_to_float(word, at) : bits == 8 ? byte_above_2_15(word, at) : byte_above_2_7(word, at);
  };
  return pack_at_once<T>(fmaf(code(i), by_i.scale, by_i.zero), fmaf(code(j), by_j.scale, by_j.zero));
}

// Converts FP8 codes (bytes i and j of a word) to a register of two elements.
template <class T>
CHARONIA_DEVICE std::uint32_t widen_fp8(std::uint32_t word, int i, int j) {
  const std::uint32_t both = f16_from_e4m3(word, i, j);
  if constexpr (std::is_same_v<T, f16>) return both;
  return pack_at_once<T>(to_float(f16{static_cast<std::uint16_t>(both)}),
                         to_float(f16{static_cast<std::uint16_t>(both >> 16)}));
}
// The same for eight codes, which become a unit.
template <class T>
CHARONIA_DEVICE uint4 widen_fp8_unit(std::uint32_t low, std::uint32_t high) {
  return {widen_fp8<T>(low, 0, 1), widen_fp8<T>(low, 2, 3), widen_fp8<T>(high, 0, 1), widen_fp8<T>(high, 2, 3)};
}

// Converts eight bytes to a unit of eight elements.
template <class T>
CHARONIA_DEVICE uint4 widen_unit(std::uint32_t low, std::uint32_t high, const ScaleZero& by) {
  const auto pair = [&](std::uint32_t word, int i) {
    return pack_at_once<T>(fmaf(byte_to_float(word, i), by.scale, by.zero),
                           fmaf(byte_to_float(word, i + 1), by.scale, by.zero));
  };
  return {pair(low, 0), pair(low, 2), pair(high, 0), pair(high, 2)};
}

// A thread writes two units of a row, half a row apart: in 4 bits, eight bytes contain both. Accesses to shared memory
// have no bank conflicts at head sizes 128 and 256, and at most two-way conflicts at other sizes.
template <class T, int kDim, int bits, int kUnroll>
CHARONIA_DEVICE void widen_codes(unsigned char* wide, const unsigned char* copied) {
  constexpr int kUnits = kDim / 8, kHalf = kUnits / 2, kRows = 2 * tile_positions(kDim);
  constexpr int kRowBytes = static_cast<int>(ops::kv_quant_row_bytes(kDim, bits));
  constexpr bool kFp8 = !ops::kv_holds_integers(bits);
  static_assert(kRows * kHalf % kAttentionThreads == 0);
  const auto load = [&](int at) { return *reinterpret_cast<const uint2*>(copied + at); };
  const auto store = [&](int row, int unit, const uint4& x) {
    *reinterpret_cast<uint4*>(wide + unit_offset<kUnits>(row, unit)) = x;
  };
  CHARONIA_UNROLL_BY(kUnroll)
  for (int i = 0; i < kRows * kHalf / kAttentionThreads; ++i) {
    const int index = i * kAttentionThreads + static_cast<int>(threadIdx.x);
    const int row = index / kHalf, unit = index % kHalf;
    const ScaleZero by(kFp8 ? 0 : *reinterpret_cast<const std::uint32_t*>(copied + kRows * kRowBytes + 4 * row));
    if constexpr (bits == 4) {
      const auto x = load(row * kRowBytes + unit * 8);
      store(row, unit, widen_unit<T>(x.x & kLowHalves, x.y & kLowHalves, by));
      store(row, unit + kHalf, widen_unit<T>(x.x >> 4 & kLowHalves, x.y >> 4 & kLowHalves, by));
    } else {
      CHARONIA_UNROLL
      for (int j = 0; j < 2; ++j) {
        const int at = unit + kHalf * ((row + j) & 1);
        const auto x = load(row * kRowBytes + at * 8);
        store(row, at, kFp8 ? widen_fp8_unit<T>(x.x, x.y) : widen_unit<T>(x.x, x.y, by));
      }
    }
  }
}

// All threads of the block call it, between barriers.
template <class T, int kDim, int kUnroll>
CHARONIA_DEVICE void widen_tile(unsigned char* wide, const unsigned char* copied, int bits) {
  if (bits == 8) {
    widen_codes<T, kDim, 8, kUnroll>(wide, copied);
  } else if (bits == ops::kKvFp8) {
    widen_codes<T, kDim, ops::kKvFp8, kUnroll>(wide, copied);
  } else {
    widen_codes<T, kDim, 4, kUnroll>(wide, copied);
  }
}

}  // namespace charonia::cuda
