// Fixed-point rows (FixedRow in kernels.h) for AVX2. Numbers are 16-bit words, and codes are unpacked to 16-bit words,
// two neighbouring k of a feature next to each other. vpmaddwd multiplies 16 of them, twice as many as a vector has
// floats.
#pragma once

#include "ops/cpu/kernels/fixed_block.h"

namespace charonia::ops::cpu::CHARONIA_ISA {
namespace {

// Rows of a tile, and the vectors of features that it processes together: all with one row, half of them with two rows.
constexpr int kTileRows = 6;
constexpr int fixed_vectors(int rows, bool only) { return only && rows <= 2 ? 8 / rows : 2; }
// From this number of row tiles on, codes are unpacked once for all tiles.
constexpr int kCopiedFrom = 4;

template <Code C>
constexpr int kPairs = kWordK<C> / 2;  // pairs per word

// Converts the codes of pair P of a vector of words to factors.
template <Code C, int P>
inline __attribute__((always_inline)) __m256i pair_of(__m256i words) {
  if constexpr (C == Code::i8) {
    return P == 0 ? _mm256_and_si256(words, _mm256_set1_epi16(0xff)) : _mm256_srli_epi16(words, 8);
  } else if constexpr (C == Code::u4) {
    const __m256i down = P == 0 ? words : _mm256_srli_epi16(words, 4 * P);
    return P == 3 ? down : _mm256_and_si256(down, _mm256_set1_epi16(15));
  } else {
    const __m256i table = _mm256_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0,  //
                                           12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0);
    const __m256i down = P % 2 == 0 ? words : _mm256_srli_epi16(words, 4);
    const __m256i bytes = _mm256_shuffle_epi8(table, _mm256_and_si256(down, _mm256_set1_epi8(15)));
    return P < 2 ? _mm256_and_si256(bytes, _mm256_set1_epi16(0xff)) : _mm256_srli_epi16(bytes, 8);
  }
}
// Calls each<P>() for every pair of a word.
template <Code C, class F>
inline __attribute__((always_inline)) void for_pairs(const F& each) {
  each.template operator()<0>();
  each.template operator()<1>();
  if constexpr (kPairs<C> == 4) {
    each.template operator()<2>();
    each.template operator()<3>();
  }
}

inline __m256i load_line(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }

// Unpacks the codes of a block to [pairs][64][2].
template <Code C>
void copy_codes(const FixedBlock& block, std::int16_t* to) {
  constexpr int kPair_bytes = 4 * kWidth;
  const char* words = block.words;
  for (std::int64_t i = 0; i < block.count; ++i) {
#pragma GCC unroll 4
    for (int line = 0; line < kWord_bytes; line += kLine_bytes) __builtin_prefetch(words + kAhead_bytes + line, 0, 2);
#pragma GCC unroll 8
    for (int v = 0; v < kPanel / kWidth; ++v) {
      const __m256i of_feature = load_line(words + v * kPair_bytes);
      for_pairs<C>([&]<int P>() __attribute__((always_inline)) {
        _mm256_store_si256(reinterpret_cast<__m256i*>(to + 2 * (P * kPanel + v * kWidth)), pair_of<C, P>(of_feature));
      });
    }
    words += kWord_bytes;
    to += kWordK<C> * kPanel;
  }
}

inline __m256i broadcast_pair(const char* p) { return broadcast_word(reinterpret_cast<const std::uint8_t*>(p)).v; }
// The addition is in assembly. Otherwise the compiler first adds several products, which needs more registers than
// available.
inline __attribute__((always_inline)) __m256i add_product(__m256i sum, __m256i codes, __m256i numbers) {
  asm("vpaddd %1, %0, %0" : "+x"(sum) : "x"(_mm256_madd_epi16(codes, numbers)));
  return sum;
}
// Adds the products of one pair of k, for V vectors of features and M rows.
template <int M, int V>
inline __attribute__((always_inline)) void add_pair(IntVec (&sums)[M][V], const __m256i (&codes)[V], const char* a,
                                                    std::int64_t a_stride) {
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
    const __m256i x = broadcast_pair(a + m * a_stride);
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) sums[m][v].v = add_product(sums[m][v].v, codes[v], x);
  }
}

// Computes the sums of rows [0, M) over a block with unpacked codes, for V vectors of features from j on.
template <Code C, int M, int V>
inline __attribute__((always_inline)) void add_copied(IntVec (&sums)[M][V], const FixedBlock& block, const char* a,
                                                      std::int64_t a_stride, int j) {
  const std::int64_t pairs = kPairs<C> * block.count;
  const std::int16_t* from = block.copy + 2 * j;
  for (std::int64_t i = 0; i < pairs; ++i) {
    __m256i codes[V];
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) codes[v] = load_line(from + 2 * v * kWidth);
    add_pair(sums, codes, a, a_stride);
    from += 2 * kPanel;
    a += 4;
  }
}

// The same with codes in the panel's layout. For each word it prefetches kLines cache lines from `ahead` on.
template <Code C, int M, int V, int Lines>
inline __attribute__((always_inline)) void add_words(IntVec (&sums)[M][V], const FixedBlock& block, const char* a,
                                                     std::int64_t a_stride, int j, const char* ahead) {
  const std::int64_t count = block.count;
  const char* words = block.words + 4 * j;
  for (std::int64_t i = 0; i < count; ++i) {
#pragma GCC unroll 4
    for (int line = 0; line < Lines; ++line) __builtin_prefetch(ahead + line * kLine_bytes, 0, 2);
    ahead += kWord_bytes;
    if constexpr (M == 1) {  // one feature vector at a time, so that all pairs of the row stay in registers
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) {
        const __m256i of_feature = load_line(words + 4 * v * kWidth);
        for_pairs<C>([&]<int P>() __attribute__((always_inline)) {
          sums[0][v].v = add_product(sums[0][v].v, pair_of<C, P>(of_feature), broadcast_pair(a + 4 * P));
        });
      }
    } else {
      __m256i all[V];
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) all[v] = load_line(words + 4 * v * kWidth);
      for_pairs<C>([&]<int P>() __attribute__((always_inline)) {
        __m256i codes[V];
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) codes[v] = pair_of<C, P>(all[v]);
        add_pair(sums, codes, a + 4 * P, a_stride);
      });
    }
    words += kWord_bytes;
    a += 2 * kWordK<C>;
  }
}

// Computes the sums of rows [0, M) over a block, for V vectors of features from j on. Lines is 0 for a block with
// unpacked codes.
template <Code C, int M, int V, int Lines>
inline __attribute__((always_inline)) void sum_block(const FixedBlock& block, const char* a, std::int64_t a_stride,
                                                     int j, const char* ahead, IntVec (&out)[M][V]) {
  const auto with = [&](const auto& add) __attribute__((always_inline)) {
    IntVec sums[M][V];  // local copy, because `out` is in memory
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) sums[m][v] = set1(0);
    }
    add(sums);
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) out[m][v] = sums[m][v];
    }
  };
  if constexpr (Lines == 0) {
    if (block.copy != nullptr) {
      return with([&](auto& sums) __attribute__((always_inline)) { add_copied<C>(sums, block, a, a_stride, j); });
    }
  }
  with([&](auto& sums)
           __attribute__((always_inline)) { add_words<C, M, V, Lines>(sums, block, a, a_stride, j, ahead); });
}

// Stores a vector of numbers, 16 bits each.
template <int>
inline IntVec store_numbers(char* to, Vec x) {
  const __m256i number = _mm256_cvtps_epi32(x.v);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to),
                   _mm_packs_epi32(_mm256_castsi256_si128(number), _mm256_extracti128_si256(number, 1)));
  return {number};
}
inline std::int32_t sum_of(IntVec x) {
  std::int32_t lanes[kWidth], sum = 0;
  store(lanes, x);
  for (const auto lane : lanes) sum += lane;
  return sum;
}

}  // namespace
}  // namespace charonia::ops::cpu::CHARONIA_ISA
