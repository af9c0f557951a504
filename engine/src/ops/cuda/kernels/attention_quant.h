// Tiles of a quantised cache (ops/kv_quant.h), for the kernels over tensor cores. Integers, scales and zeros are copied
// into shared memory as they lie in the cache, ahead of their use; when it is their turn they are made into the tile of
// the model's 16-bit type that these kernels work on: round(fmaf(integer, scale, zero)), once, in either kernel, so
// that a row has the same bits from both.
//
//   copied  [2 positions][row bytes] integers, k before v; [2 positions] scale, zero
//   wide    [2 positions][kDim], k before v, as unit_offset() has it
//
// What a tile of k and v of 64 positions takes at head_dim 128: 32 KB in 16 bits; 16.5 KB in 8 bits, (D + 4) / 2D of
// it; 8.5 KB in 4 bits. For every element 3.5 instructions (its byte to a place of its own, float by a subtraction, a
// multiplication and addition, half a conversion to 16 bits) and half a one for what 16 of them share, 530 cycles of an
// SM's four schedulers in all; the wide tile's way into shared memory takes 256 cycles beside them.
#pragma once

#include <cstdint>

#include "ops/cuda/kernels/attention_tile.h"

namespace charonia::cuda {

// Bytes of a tile of k and v together: as copied, where bits is not 0; as the products take it.
CHARONIA_HD constexpr int wide_tile_bytes(int head_dim) { return 2 * tile_positions(head_dim) * head_dim * 2; }
CHARONIA_HD constexpr int copied_tile_bytes(int head_dim, int bits) {
  return bits == 0 ? wide_tile_bytes(head_dim) : 2 * tile_positions(head_dim) * (head_dim * bits / 8 + 4);
}

// Where k is at a position: as the thread finds it that looks it up, and in `Shared` for all that copy it.
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
  using Shared = std::int64_t;  // byte of the layer; -1: none
  int block = -1, row = 0;      // of the block
  CHARONIA_DEVICE Shared shared(const AttentionParams& p) const {
    return block < 0 ? -1 : p.cache.integers_at(block, row);
  }
};
constexpr int shared_row_bytes(int quant_bits) {
  return static_cast<int>(quant_bits == 0 ? sizeof(CacheRow<false>::Shared) : sizeof(CacheRow<true>::Shared));
}

// Of the thread's own position; none where it has none.
template <bool quantised>
CHARONIA_DEVICE CacheRow<quantised> cache_row(const AttentionParams& p, const AttentionUnit& unit, int position) {
  if (!unit.valid || position >= unit.item.kv_end) return {};
  const auto at = static_cast<unsigned>(position), block_len = static_cast<unsigned>(p.cache.block_len);
  const int block = load_readonly(p.tables + unit.item.table + at / block_len);
  const int slot = static_cast<int>(at % block_len);
  if constexpr (quantised) {
    return {block, unit.kv_head * p.cache.block_len + slot};
  } else {
    return {(block * 2 * p.cache.kv_heads + unit.kv_head) * p.cache.block_len + slot};
  }
}

// kUnroll, here and below: how many turns of a loop stand behind each other. More hide more of the latency, and take
// more registers.
template <int kDim, int bits, int kUnroll>
CHARONIA_DEVICE void copy_integers(unsigned char* copied, const AttentionParams& p, const std::int64_t* rows) {
  constexpr int kRowBytes = kDim * bits / 8, kUnits = kRowBytes / kUnitBytes;
  constexpr int kCopies = tile_positions(kDim) * kUnits;
  static_assert(kRowBytes % kUnitBytes == 0);
  const auto* const cache = static_cast<const unsigned char*>(p.cache.data);
  const auto to_v = static_cast<std::int64_t>(p.cache.half_rows()) * kRowBytes;
  CHARONIA_UNROLL_BY(kUnroll)
  for (int index = static_cast<int>(threadIdx.x); index < kCopies; index += kAttentionThreads) {
    const auto row = rows[index / kUnits];
    const bool valid = row >= 0;
    const auto* const from = cache + (valid ? row : 0) + index % kUnits * kUnitBytes;
    unsigned char* const to = copied + index * kUnitBytes;
    copy_async_16(to, from, valid);
    copy_async_16(to + kCopies * kUnitBytes, from + to_v, valid);
  }
}

// Starts the copies of a tile of k and v; zeros where there is no row. rows: of the tile's positions; own: the one of
// the thread's.
template <int kDim, int kUnroll>
CHARONIA_DEVICE void copy_quant_tile(unsigned char* copied, const AttentionParams& p, const std::int64_t* rows,
                                     const CacheRow<true>& own) {
  constexpr int kPositions = tile_positions(kDim);
  const int bits = p.cache.quant_bits;
  if (bits == 8) {
    copy_integers<kDim, 8, kUnroll>(copied, p, rows);
  } else {
    copy_integers<kDim, 4, kUnroll>(copied, p, rows);
  }
  if (static_cast<int>(threadIdx.x) >= kPositions) return;
  const bool valid = own.block >= 0;
  const auto* const from =
      static_cast<const unsigned char*>(p.cache.data) + (valid ? p.cache.scale_at(own.block, own.row) : 0);
  unsigned char* const to = copied + 2 * kPositions * (kDim * bits / 8) + 4 * threadIdx.x;
  copy_async_4(to, from, valid);
  copy_async_4(to + 4 * kPositions, from + 4 * p.cache.half_rows(), valid);
}

// A scale and a zero as they are stored.
struct ScaleZero {
  float scale, zero;
  CHARONIA_DEVICE explicit ScaleZero(std::uint32_t both)
      : scale(to_float(f16{static_cast<std::uint16_t>(both & 0xffffU)})),
        zero(to_float(f16{static_cast<std::uint16_t>(both >> 16)})) {}
};

// Eight bytes as a unit of eight elements.
template <class T>
CHARONIA_DEVICE uint4 widen_unit(std::uint32_t low, std::uint32_t high, const ScaleZero& by) {
  const auto pair = [&](std::uint32_t word, int i) {
    return pack_at_once<T>(fmaf(byte_to_float(word, i), by.scale, by.zero),
                           fmaf(byte_to_float(word, i + 1), by.scale, by.zero));
  };
  return {pair(low, 0), pair(low, 2), pair(high, 0), pair(high, 2)};
}

// A thread makes two units of a row, half a row apart: in 4 bits that is what eight bytes hold. Reads and writes of
// shared memory are without bank conflicts at head sizes of 128 and 256, and of two ways at most at the others.
template <class T, int kDim, int bits, int kUnroll>
CHARONIA_DEVICE void widen_integers(unsigned char* wide, const unsigned char* copied) {
  constexpr int kUnits = kDim / 8, kHalf = kUnits / 2, kRows = 2 * tile_positions(kDim), kRowBytes = kDim * bits / 8;
  static_assert(kRows * kHalf % kAttentionThreads == 0);
  const auto load = [&](int at) { return *reinterpret_cast<const uint2*>(copied + at); };
  const auto store = [&](int row, int unit, const uint4& x) {
    *reinterpret_cast<uint4*>(wide + unit_offset<kUnits>(row, unit)) = x;
  };
  CHARONIA_UNROLL_BY(kUnroll)
  for (int i = 0; i < kRows * kHalf / kAttentionThreads; ++i) {
    const int index = i * kAttentionThreads + static_cast<int>(threadIdx.x);
    const int row = index / kHalf, unit = index % kHalf;
    const ScaleZero by(*reinterpret_cast<const std::uint32_t*>(copied + kRows * kRowBytes + 4 * row));
    if constexpr (bits == 4) {
      constexpr std::uint32_t kLow = 0x0f0f0f0fU;
      const auto x = load(row * kRowBytes + unit * 8);
      store(row, unit, widen_unit<T>(x.x & kLow, x.y & kLow, by));
      store(row, unit + kHalf, widen_unit<T>(x.x >> 4 & kLow, x.y >> 4 & kLow, by));
    } else {
      CHARONIA_UNROLL
      for (int j = 0; j < 2; ++j) {
        const int at = unit + kHalf * ((row + j) & 1);
        const auto x = load(row * kRowBytes + at * 8);
        store(row, at, widen_unit<T>(x.x, x.y, by));
      }
    }
  }
}

// All threads of the block, between barriers.
template <class T, int kDim, int kUnroll>
CHARONIA_DEVICE void widen_tile(unsigned char* wide, const unsigned char* copied, int bits) {
  if (bits == 8) {
    widen_integers<T, kDim, 8, kUnroll>(wide, copied);
  } else {
    widen_integers<T, kDim, 4, kUnroll>(wide, copied);
  }
}

}  // namespace charonia::cuda
