// Fixed-point rows (FixedRow in kernels.h) for AVX-512 with VNNI. A number is two signed bytes. The processor's dot
// products of unsigned and signed bytes multiply each byte, 64 products per instruction; the unsigned bytes are codes,
// directly from the panel. That gives 32 products of 16 bits per instruction, as many as with bf16, but at twice the
// rate on processors that multiply pairs of bf16 no faster than floats.
#pragma once

#include "ops/cpu/kernels/fixed_block.h"

namespace charonia::ops::cpu::CHARONIA_ISA {
namespace {

// Rows of a tile, and the vectors of features that it processes together: all of them if there are only few rows.
constexpr int kTileRows = 6;
constexpr int fixed_vectors(int rows, bool only) { return only && rows <= 3 ? 4 : 2; }
constexpr int kCopiedFrom = 0;  // never: codes are multiplied in the panel's layout

// In assembly, because only some processors of this instruction set have the instruction.
inline __attribute__((always_inline)) __m512i add_dot(__m512i sums, __m512i codes, __m512i activations) {
  asm("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(codes), "v"(activations));
  return sums;
}

inline __m512i broadcast(const char* p) {
  int word;
  __builtin_memcpy(&word, p, sizeof word);
  return _mm512_set1_epi32(word);
}

// Converts the low nibbles of bytes (4-bit codes) to factors.
template <Code C>
inline __m512i unsigned_of(__m512i codes) {
  const __m512i nibbles = _mm512_and_si512(codes, _mm512_set1_epi8(15));
  if constexpr (C == Code::u4) return nibbles;
  const __m128i table = _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0);
  return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), nibbles);
}

// Computes the sums of rows [0, M) over a block, for V vectors of features from j on. For each word of the panel it
// prefetches kLines cache lines from `ahead` on.
template <Code C, int M, int V, int Lines>
inline __attribute__((always_inline)) void sum_block(const FixedBlock& block, const char* a, std::int64_t a_stride,
                                                     int j, const char* ahead, IntVec (&sums)[M][V]) {
  __m512i high[M][V], low[M][V];
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) high[m][v] = low[m][v] = _mm512_setzero_si512();
  }
  const char* words = block.words + 4 * j;
  const auto dots = [&](const __m512i(&codes)[V], const char* at) __attribute__((always_inline)) {
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      const __m512i h = broadcast(at + m * a_stride), l = broadcast(at + m * a_stride + 4);
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) {
        high[m][v] = add_dot(high[m][v], codes[v], h);
        low[m][v] = add_dot(low[m][v], codes[v], l);
      }
    }
  };
  const char* at = a;
  for (std::int64_t i = 0; i < block.count; ++i) {
#pragma GCC unroll 4
    for (int line = 0; line < Lines; ++line) __builtin_prefetch(ahead + line * kLine_bytes, 0, 2);
    ahead += kWord_bytes;
    __m512i codes[V];
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) codes[v] = _mm512_loadu_si512(words + v * kLine_bytes);
    if constexpr (C == Code::i8) {
      dots(codes, at);
    } else {
      __m512i lower[V];
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) lower[v] = unsigned_of<C>(codes[v]);
      dots(lower, at);
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) codes[v] = unsigned_of<C>(_mm512_srli_epi32(codes[v], 4));
      dots(codes, at + 8);
    }
    words += kWord_bytes;
    at += 2 * kWordK<C>;
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) sums[m][v] = {_mm512_add_epi32(_mm512_slli_epi32(high[m][v], 8), low[m][v])};
  }
}

// Stores a vector of numbers at digits + 32 * i. The last store may overlap the next data, which is written later.
template <int Bits>
inline IntVec store_numbers(char* to, Vec x) {
  // The four k of a dot product have the order of the codes in a word (kernels.h).
  const __m128i order = Bits == 4 ? _mm_setr_epi8(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15)
                                  : _mm_setr_epi8(0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15);
  const __m512i number = _mm512_cvtps_epi32(x.v);
  const __m512i high = _mm512_srai_epi32(_mm512_add_epi32(number, _mm512_set1_epi32(128)), 8);
  const __m128i h = _mm_shuffle_epi8(_mm512_cvtepi32_epi8(high), order);
  const __m128i l = _mm_shuffle_epi8(_mm512_cvtepi32_epi8(number), order);  // the lowest byte
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm_unpacklo_epi32(h, l));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to) + 1, _mm_unpackhi_epi32(h, l));
  return {number};
}
inline std::int32_t sum_of(IntVec x) { return _mm512_reduce_add_epi32(x.v); }

}  // namespace
}  // namespace charonia::ops::cpu::CHARONIA_ISA
