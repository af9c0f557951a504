// Converts codes of quantised weights from the panels of kernels.h to numbers: vectors of floats, or of pairs of bf16.
// Both represent every number exactly.
//
// A vector of words has kWidth features of a panel; numbers come in ascending k. to_floats() returns them divided by
// kUnit, a power of two, because that is cheaper for some formats.
#pragma once

#include "ops/cpu/kernels/vec.h"

namespace charonia::ops::cpu::CHARONIA_ISA {
namespace {

template <Code C>
constexpr int kCodeBits = C == Code::u4 || C == Code::f4_e2m1 ? 4 : 8;
template <Code C>
constexpr int kWordK = 32 / kCodeBits<C>;  // k per word

// The bit offset of the code of the i-th k in a word: even k are in the low half.
template <Code C>
constexpr int code_shift(int i) {
  return i % 2 * 16 + i / 2 * kCodeBits<C>;
}

// Properties of a floating-point code: number of mantissa bits, and the bias of the exponent.
template <Code C>
constexpr int kMantissa = C == Code::f8_e4m3 ? 3 : 1;
template <Code C>
constexpr int kBias = C == Code::f8_e4m3 ? 7 : 1;

typedef std::uint32_t Words __attribute__((vector_size(4 * kWidth)));
typedef std::int32_t Ints __attribute__((vector_size(4 * kWidth)));
typedef float Floats __attribute__((vector_size(4 * kWidth)));

inline Words load_words(const void* p) {
  Words out;
  __builtin_memcpy(&out, p, sizeof out);
  return out;
}
inline Vec vec_of(Floats x) {
  Vec out;
  static_assert(sizeof out == sizeof x);
  __builtin_memcpy(&out, &x, sizeof out);
  return out;
}

#if defined(__AVX512F__)

template <Code C>
constexpr float kUnit = C == Code::f8_e4m3 ? 256 : 1;

inline __m512i register_of(Words w) { return reinterpret_cast<__m512i>(w); }

// The numbers of 4-bit codes.
template <Code C>
inline __m512 number_table() {
  if constexpr (C == Code::u4) {
    return _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
  } else {
    return _mm512_setr_ps(0, 0.5F, 1, 1.5F, 2, 3, 4, 6, -0.0F, -0.5F, -1, -1.5F, -2, -3, -4, -6);
  }
}

// Converts bytes to floats: a byte in the mantissa of 2^23 or 2^15 adds its value to that number.
inline __m512 byte_as_float(__m512i w, int byte) {
  const __m512i power = byte == 0 ? _mm512_set1_epi32(0x4b000000) : _mm512_set1_epi32(0x47000000);
  const __m512i mask = byte == 0 ? _mm512_set1_epi32(0xff) : _mm512_set1_epi32(0xff00);
  const __m512 base = byte == 0 ? _mm512_set1_ps(0x1p23F + 128) : _mm512_set1_ps(0x1p15F + 128);
  constexpr int kAndOr = 0xea;
  return _mm512_sub_ps(_mm512_castsi512_ps(_mm512_ternarylogic_epi32(w, mask, power, kAndOr)), base);
}

// Converts E4M3 to fp16 [4][kWidth], divided by 2^8: the bits below the sign are fp16 bits, seven places higher. This
// also holds for small numbers, which the conversion to floats handles at full speed.
inline __attribute__((always_inline)) void e4m3_to_halves(__m512i words, __m512i* out) {
  // The lower halves of the words, then the upper halves.
  alignas(64) static constexpr std::uint16_t kHalves[32] = {0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30,
                                                            1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31};
  const __m512i bits = _mm512_set1_epi16(static_cast<short>(0xbf80));
  const __m512i in_order = _mm512_permutexvar_epi16(_mm512_load_si512(kHalves), words);
  out[0] = _mm512_and_si512(_mm512_srai_epi16(_mm512_slli_epi16(in_order, 8), 1), bits);
  out[1] = _mm512_and_si512(_mm512_srai_epi16(in_order, 1), bits);
}
inline __attribute__((always_inline)) Vec half_to_floats(const __m512i* halves, int k) {
  Vec out;
  // In assembly, because the compiler would extract the upper half from a register with a permutation.
  asm("vcvtph2ps %1, %0" : "=v"(out.v) : "m"(reinterpret_cast<const __m256i*>(halves)[k]));
  return out;
}

template <Code C>
inline __attribute__((always_inline)) void to_floats(Words words, Vec (&out)[kWordK<C>]) {
  if constexpr (kCodeBits<C> == 4) {
    const __m512 table = number_table<C>();
#pragma GCC unroll 8
    for (int i = 0; i < kWordK<C>; ++i) {
      out[i] = {_mm512_permutexvar_ps(register_of(words >> code_shift<C>(i)), table)};
    }
  } else if constexpr (C == Code::i8) {
    const __m512i low = register_of(words), high = register_of(words >> 16);
    out[0] = {byte_as_float(low, 0)};
    out[1] = {byte_as_float(high, 0)};
    out[2] = {byte_as_float(low, 1)};
    out[3] = {byte_as_float(high, 1)};
  } else {
    __m512i halves[2];
    e4m3_to_halves(register_of(words), halves);
#pragma GCC unroll 4
    for (int k = 0; k < 4; ++k) out[k] = half_to_floats(halves, k);
  }
}

#else

#if defined(__AVX2__)
template <Code C>
constexpr float kUnit = C == Code::f8_e4m3 ? 256 : 1;

// Converts E4M3 divided by 2^8 through fp16, as with AVX-512.
inline __attribute__((always_inline)) void e4m3_to_floats(Words words, Vec (&out)[4]) {
  // Sorts by k, and within a k by feature: first within halves of the register, then across the whole register.
  const __m256i by_k = _mm256_setr_epi8(0, 4, 8, 12, 2, 6, 10, 14, 1, 5, 9, 13, 3, 7, 11, 15,  //
                                        0, 4, 8, 12, 2, 6, 10, 14, 1, 5, 9, 13, 3, 7, 11, 15);
  const __m256i both = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  const __m256i bytes = _mm256_permutevar8x32_epi32(_mm256_shuffle_epi8(reinterpret_cast<__m256i>(words), by_k), both);
  const __m256i bits = _mm256_set1_epi16(static_cast<short>(0xbf80));
  const auto halves = [&](__m256i upper) { return _mm256_and_si256(_mm256_srai_epi16(upper, 1), bits); };
  const __m256i even = halves(_mm256_unpacklo_epi8(_mm256_setzero_si256(), bytes));
  const __m256i odd = halves(_mm256_unpackhi_epi8(_mm256_setzero_si256(), bytes));
  out[0] = {_mm256_cvtph_ps(_mm256_castsi256_si128(even))};
  out[1] = {_mm256_cvtph_ps(_mm256_castsi256_si128(odd))};
  out[2] = {_mm256_cvtph_ps(_mm256_extracti128_si256(even, 1))};
  out[3] = {_mm256_cvtph_ps(_mm256_extracti128_si256(odd, 1))};
}
#else
template <Code C>
constexpr float kUnit = 1;
#endif

template <Code C>
inline __attribute__((always_inline)) void to_floats(Words words, Vec (&out)[kWordK<C>]) {
#if defined(__AVX2__)
  if constexpr (C == Code::f8_e4m3) return e4m3_to_floats(words, out);
#endif
  constexpr std::uint32_t kMask = (1U << kCodeBits<C>)-1;
#pragma GCC unroll 8
  for (int i = 0; i < kWordK<C>; ++i) {
    const Words code = (words >> code_shift<C>(i)) & kMask;
    if constexpr (C == Code::u4 || C == Code::i8) {
      constexpr int kZero = C == Code::u4 ? 8 : 128;
      out[i] = vec_of(__builtin_convertvector((Ints)code - kZero, Floats));
    } else {
      constexpr std::uint32_t kMagnitude = kMask >> 1;
      constexpr std::uint32_t kFractions = (1U << kMantissa<C>)-1;
      const Words magnitude = code & kMagnitude;
      const Words normal = (magnitude << (23 - kMantissa<C>)) + (static_cast<std::uint32_t>(127 - kBias<C>) << 23);
      // Removes the leading one: 2^(1 - bias) (1 + m) - 2^(1 - bias).
      constexpr float kLeast = C == Code::f8_e4m3 ? 0x1p-6F : 1;
      const Floats small = (Floats)(normal + (1U << 23)) - kLeast;
      const Words is_small = (Words)(magnitude <= kFractions);
      const Words bits = (is_small & (Words)small) | (~is_small & normal);
      out[i] = vec_of((Floats)(bits | ((code & (kMagnitude + 1)) << (32 - kCodeBits<C>))));
    }
  }
}

#endif

#if defined(CHARONIA_NATIVE_PAIRS)

// A table of bf16 for 4-bit codes. It is duplicated, because a permutation of 16-bit words uses five bits of an index.
template <Code C>
inline __m512i pair_table() {
  const __m256i once = _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_castps_si512(number_table<C>()), 16));
  return _mm512_broadcast_i64x4(once);
}

// Converts E4M3 in the upper byte of each 16-bit word. `index` has the lowest three bits of the code in its lowest
// bits; if the exponent is zero, the bits above are zero.
inline __m512i upper_e4m3_as_bf16(__m512i w, __m512i index) {
  constexpr short kSmall[8] = {0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60};  // m * 2^-9
  const __m512i table = _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(kSmall)));
  const __m512i magnitude = _mm512_and_si512(_mm512_srli_epi16(w, 4), _mm512_set1_epi16(0x07f0));
  const __mmask32 small = _mm512_testn_epi16_mask(w, _mm512_set1_epi16(0x7800));
  const __m512i normal = _mm512_add_epi16(magnitude, _mm512_set1_epi16(120 << 7));
  const __m512i all = _mm512_mask_permutexvar_epi16(normal, small, index, table);
  constexpr int kOrAnd = 0xf8;
  return _mm512_ternarylogic_epi32(all, w, _mm512_set1_epi16(static_cast<short>(0x8000)), kOrAnd);
}

#if defined(__AVX512VBMI__)
// The bytes of bf16 for the 128 magnitudes of E4M3: a permutation of two registers uses seven bits of an index.
struct E4m3Tables {
  unsigned char low[128] = {}, high[128] = {};
  constexpr E4m3Tables() {
    for (int magnitude = 0; magnitude < 128; ++magnitude) {
      int bits = (magnitude << 4) + (120 << 7);
      if (magnitude < 8) {  // m * 2^-9, m = 2^i + rest
        bits = 0;
        for (int i = 0; i < 3; ++i) {
          if (magnitude >> i == 1) bits = ((118 + i) << 7) + ((magnitude - (1 << i)) << (7 - i));
        }
      }
      low[magnitude] = static_cast<unsigned char>(bits & 255);
      high[magnitude] = static_cast<unsigned char>(bits >> 8);
    }
  }
};
alignas(64) constexpr E4m3Tables kE4m3;
#endif

// Converts to pairs of neighbouring k.
template <Code C>
inline __attribute__((always_inline)) void to_pairs(Words words, PairVec (&out)[kWordK<C> / 2]) {
  const __m512i w = register_of(words);
  if constexpr (kCodeBits<C> == 4) {
    const __m512i table = pair_table<C>();
    out[0] = {_mm512_permutexvar_epi16(w, table)};
    out[1] = {_mm512_permutexvar_epi16(_mm512_srli_epi16(w, 4), table)};
    out[2] = {_mm512_permutexvar_epi16(_mm512_srli_epi16(w, 8), table)};
    out[3] = {_mm512_permutexvar_epi16(_mm512_srli_epi16(w, 12), table)};
  } else if constexpr (C == Code::i8) {
    const __m512i high = _mm512_srli_epi32(w, 16);
    // The upper half of a float is its bf16: the second of a pair stays in place, the first moves to the lower half.
    constexpr __mmask64 kLower = 0x3333333333333333;
    const __m512i down = _mm512_set4_epi32(0x80800f0e, static_cast<int>(0x80800b0a), static_cast<int>(0x80800706),
                                           static_cast<int>(0x80800302));
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      out[i] = {_mm512_mask_shuffle_epi8(_mm512_castps_si512(byte_as_float(high, i)), kLower,
                                         _mm512_castps_si512(byte_as_float(w, i)), down)};
    }
  } else {
#if defined(__AVX512VBMI__)
    constexpr int kOrAnd = 0xf8, kAndOr = 0xea;
    const __m512i low = _mm512_permutex2var_epi8(_mm512_load_si512(kE4m3.low), w, _mm512_load_si512(kE4m3.low + 64));
    const __m512i magnitude =
        _mm512_permutex2var_epi8(_mm512_load_si512(kE4m3.high), w, _mm512_load_si512(kE4m3.high + 64));
    const __m512i high = _mm512_ternarylogic_epi32(magnitude, w, _mm512_set1_epi8(static_cast<char>(0x80)), kOrAnd);
    out[0] = {_mm512_ternarylogic_epi32(low, _mm512_set1_epi16(0xff), _mm512_slli_epi16(high, 8), kAndOr)};
    out[1] = {_mm512_ternarylogic_epi32(high, _mm512_set1_epi16(static_cast<short>(0xff00)), _mm512_srli_epi16(low, 8),
                                        kAndOr)};
#else
    out[0] = {upper_e4m3_as_bf16(_mm512_slli_epi16(w, 8), w)};
    out[1] = {upper_e4m3_as_bf16(w, _mm512_srli_epi16(w, 8))};
#endif
  }
}

#endif

}  // namespace
}  // namespace charonia::ops::cpu::CHARONIA_ISA
