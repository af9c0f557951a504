// Vectors of 32-bit integers, and dot products of bytes, with the width of vec.h's vectors. Everything is in an unnamed
// namespace, for the reason in vec.h.
//
// An IntVec has kWidth integers, which wrap. A multiplication method (PlainDot, VnniDot) adds to each integer the dot
// product of 4 codes of a weight, which are contiguous in memory, with the same 4 codes of activations:
//   kFlip                 xor mask for the bytes of activations: 0x80 makes them code + 128
//   Weights load(p)       4 * kWidth bytes
//   Codes broadcast(p)    4 bytes
//   add(sums, codes, weights)
#pragma once

#include "ops/cpu/kernels/vec.h"

namespace charonia::ops::cpu::CHARONIA_ISA {
namespace {

#if defined(__AVX512F__)

struct IntVec {
  __m512i v;
};
inline IntVec load(const std::int32_t* p) { return {_mm512_loadu_si512(p)}; }
inline void store(std::int32_t* p, IntVec x) { _mm512_storeu_si512(p, x.v); }
inline IntVec set1(std::int32_t x) { return {_mm512_set1_epi32(x)}; }
inline IntVec add(IntVec a, IntVec b) { return {_mm512_add_epi32(a.v, b.v)}; }
inline IntVec sub(IntVec a, IntVec b) { return {_mm512_sub_epi32(a.v, b.v)}; }
inline IntVec mul(IntVec a, IntVec b) { return {_mm512_mullo_epi32(a.v, b.v)}; }
inline Vec floats_of(IntVec x) { return {_mm512_cvtepi32_ps(x.v)}; }
// Stores floats in [-127, 127], rounded to nearest even.
inline void store_codes(std::int8_t* p, Vec x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(x.v)));
}

struct Codes {
  __m512i v;
};
inline Codes broadcast_word(const std::uint8_t* p) {
  int word;
  __builtin_memcpy(&word, p, sizeof word);
  return {_mm512_set1_epi32(word)};
}

// weight| times the activation with the weight's sign: the sum of two such products fits 16 bits, 2 * 128 * 127 < 2^15.
struct PlainDot {
  static constexpr std::uint8_t kFlip = 0;
  struct Weights {
    __m512i magnitude;
    __mmask64 negative;
  };
  static Weights load(const std::int8_t* p) {
    const __m512i w = _mm512_loadu_si512(p);
    return {_mm512_abs_epi8(w), _mm512_movepi8_mask(w)};
  }
  static Codes broadcast(const std::uint8_t* p) { return broadcast_word(p); }
  static IntVec add(IntVec sums, Codes codes, Weights w) {
    const __m512i x = _mm512_mask_sub_epi8(codes.v, w.negative, _mm512_setzero_si512(), codes.v);
    const __m512i pairs = _mm512_maddubs_epi16(w.magnitude, x);
    return {_mm512_add_epi32(sums.v, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)))};
  }
};

// In assembly, because only some processors of this instruction set have the instruction.
struct VnniDot {
  static constexpr std::uint8_t kFlip = 0x80;
  struct Weights {
    __m512i v;
  };
  static Weights load(const std::int8_t* p) { return {_mm512_loadu_si512(p)}; }
  static Codes broadcast(const std::uint8_t* p) { return broadcast_word(p); }
  static IntVec add(IntVec sums, Codes codes, Weights w) {
    asm("vpdpbusd %2, %1, %0" : "+v"(sums.v) : "v"(codes.v), "v"(w.v));
    return sums;
  }
};

#elif defined(__AVX2__)

struct IntVec {
  __m256i v;
};
inline IntVec load(const std::int32_t* p) { return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))}; }
inline void store(std::int32_t* p, IntVec x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x.v); }
inline IntVec set1(std::int32_t x) { return {_mm256_set1_epi32(x)}; }
inline IntVec add(IntVec a, IntVec b) { return {_mm256_add_epi32(a.v, b.v)}; }
inline IntVec sub(IntVec a, IntVec b) { return {_mm256_sub_epi32(a.v, b.v)}; }
inline IntVec mul(IntVec a, IntVec b) { return {_mm256_mullo_epi32(a.v, b.v)}; }
inline Vec floats_of(IntVec x) { return {_mm256_cvtepi32_ps(x.v)}; }
inline void store_codes(std::int8_t* p, Vec x) {
  const __m256i words = _mm256_cvtps_epi32(x.v);
  const __m128i halves = _mm_packs_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packs_epi16(halves, halves));
}

struct Codes {
  __m256i v;
};
inline Codes broadcast_word(const std::uint8_t* p) {
  int word;
  __builtin_memcpy(&word, p, sizeof word);
  return {_mm256_set1_epi32(word)};
}

// The same method as for AVX-512.
struct PlainDot {
  static constexpr std::uint8_t kFlip = 0;
  struct Weights {
    __m256i v, magnitude;
  };
  static Weights load(const std::int8_t* p) {
    const __m256i w = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return {w, _mm256_abs_epi8(w)};
  }
  static Codes broadcast(const std::uint8_t* p) { return broadcast_word(p); }
  static IntVec add(IntVec sums, Codes codes, Weights w) {
    const __m256i pairs = _mm256_maddubs_epi16(w.magnitude, _mm256_sign_epi8(codes.v, w.v));
    return {_mm256_add_epi32(sums.v, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)))};
  }
};

struct VnniDot {
  static constexpr std::uint8_t kFlip = 0x80;
  struct Weights {
    __m256i v;
  };
  static Weights load(const std::int8_t* p) { return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))}; }
  static Codes broadcast(const std::uint8_t* p) { return broadcast_word(p); }
  static IntVec add(IntVec sums, Codes codes, Weights w) {
    asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sums.v) : "x"(codes.v), "x"(w.v));
    return sums;
  }
};

#else

typedef std::int16_t Short8 __attribute__((vector_size(16)));

struct IntVec {
  Uint4 v;  // unsigned, so that they wrap
};
inline IntVec load(const std::int32_t* p) {
  IntVec out;
  __builtin_memcpy(&out.v, p, sizeof out.v);
  return out;
}
inline void store(std::int32_t* p, IntVec x) { __builtin_memcpy(p, &x.v, sizeof x.v); }
inline IntVec set1(std::int32_t x) { return {Uint4{} + static_cast<std::uint32_t>(x)}; }
inline IntVec sub(IntVec a, IntVec b) { return {a.v - b.v}; }
inline IntVec mul(IntVec a, IntVec b) { return {a.v * b.v}; }
inline Vec floats_of(IntVec x) { return {__builtin_convertvector(bits_as<Int4>(x.v), Float4)}; }
inline void store_codes(std::int8_t* p, Vec x) {
  const Int4 integers = __builtin_convertvector(round(x).v, Int4);
  for (int i = 0; i < kWidth; ++i) p[i] = static_cast<std::int8_t>(integers[i]);
}

// Bytes 0 and 2, and bytes 1 and 3 of a word, as neighbouring 16-bit integers.
struct Codes {
  Short8 even, odd;
};

// The sum of two products fits 16 bits, 2 * 128 * 127 < 2^15.
struct PlainDot {
  static constexpr std::uint8_t kFlip = 0;
  using Weights = Codes;
  static Weights load(const std::int8_t* p) {
    Uint4 words;
    __builtin_memcpy(&words, p, sizeof words);
    return split(words);
  }
  static Codes broadcast(const std::uint8_t* p) {
    std::uint32_t word;
    __builtin_memcpy(&word, p, sizeof word);
    return split(Uint4{} + word);
  }
  static IntVec add(IntVec sums, Codes codes, Weights w) {
    const Int4 pairs = bits_as<Int4>(codes.even * w.even + codes.odd * w.odd);
    const Int4 low = bits_as<Int4>(bits_as<Uint4>(pairs) << 16) >> 16;
    return {sums.v + bits_as<Uint4>(low) + bits_as<Uint4>(pairs >> 16)};
  }

 private:
  static Codes split(Uint4 words) {
    typedef std::uint16_t Ushort8 __attribute__((vector_size(16)));
    const auto halves = bits_as<Ushort8>(words);
    return {bits_as<Short8>(static_cast<Ushort8>(halves << 8)) >> 8, bits_as<Short8>(halves) >> 8};
  }
};

#endif

}  // namespace
}  // namespace charonia::ops::cpu::CHARONIA_ISA
