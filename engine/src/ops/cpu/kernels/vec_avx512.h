// Vec for AVX-512: 16 floats. Included by vec.h, inside its namespaces.

struct Vec {
  __m512 v;
};
constexpr int kWidth = 16;

inline __mmask16 mask_of(int n) { return static_cast<__mmask16>((1U << n) - 1U); }

inline Vec zero() { return {_mm512_setzero_ps()}; }
inline Vec set1(float x) { return {_mm512_set1_ps(x)}; }
inline Vec add(Vec a, Vec b) { return {_mm512_add_ps(a.v, b.v)}; }
inline Vec sub(Vec a, Vec b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline Vec mul(Vec a, Vec b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline Vec div(Vec a, Vec b) { return {_mm512_div_ps(a.v, b.v)}; }
inline Vec fma(Vec a, Vec b, Vec c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline Vec max(Vec a, Vec b) { return {_mm512_max_ps(a.v, b.v)}; }
inline Vec min(Vec a, Vec b) { return {_mm512_min_ps(a.v, b.v)}; }
inline Vec round(Vec a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
inline Vec zero_where_less(Vec x, Vec a, Vec b) {
  return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_NLT_UQ), x.v)};
}
inline Vec times_power_of_two(Vec x, Vec n) { return {_mm512_scalef_ps(x.v, n.v)}; }
inline bool any_nan(Vec a) { return _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q) != 0; }

inline Vec from_bf16(__m256i bits) { return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16))}; }
inline Vec load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline Vec load(const Bf16* p) { return from_bf16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
inline Vec load(const F16* p) { return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))}; }
// The bits below the sign are fp16 bits of a number 2^8 too small, seven places higher. All bits set is NaN.
inline Vec from_e4m3(__m128i bytes) {
  const __m256i signs = _mm256_cvtepi8_epi16(bytes), all = _mm256_set1_epi16(0x7f);
  const __m256i halves = _mm256_and_si256(_mm256_slli_epi16(signs, 7), _mm256_set1_epi16(static_cast<short>(0xbf80)));
  const __m256i nan = _mm256_cmpeq_epi16(_mm256_and_si256(signs, all), all);
  return {_mm512_mul_ps(_mm512_cvtph_ps(_mm256_or_si256(halves, nan)), _mm512_set1_ps(256))};
}
inline Vec load(const F8* p) { return from_e4m3(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
inline Vec load_n(const F8* p, int n) { return from_e4m3(_mm_maskz_loadu_epi8(mask_of(n), p)); }
inline Vec load_n(const float* p, int n) { return {_mm512_maskz_loadu_ps(mask_of(n), p)}; }
inline Vec load_n(const Bf16* p, int n) { return from_bf16(_mm256_maskz_loadu_epi16(mask_of(n), p)); }
inline Vec load_n(const F16* p, int n) { return {_mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask_of(n), p))}; }

inline __m256i to_bf16(Vec x) {
  const __m512i bits = _mm512_castps_si512(x.v);
  const __m512i lowest = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), lowest);
  const __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
  const __mmask16 nan = _mm512_cmp_ps_mask(x.v, x.v, _CMP_UNORD_Q);
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_mask_mov_epi32(rounded, nan, quiet), 16));
}
inline __m256i to_f16(Vec x) { return _mm512_cvtps_ph(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline void store(float* p, Vec x) { _mm512_storeu_ps(p, x.v); }
inline void store(Bf16* p, Vec x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), to_bf16(x)); }
inline void store(F16* p, Vec x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), to_f16(x)); }
inline void store_n(float* p, Vec x, int n) { _mm512_mask_storeu_ps(p, mask_of(n), x.v); }
inline void store_n(Bf16* p, Vec x, int n) { _mm256_mask_storeu_epi16(p, mask_of(n), to_bf16(x)); }
inline void store_n(F16* p, Vec x, int n) { _mm256_mask_storeu_epi16(p, mask_of(n), to_f16(x)); }

// Bytes, one per float.
struct ByteVec {
  __m512i v;
};
inline ByteVec load_bytes(const std::uint8_t* p) {
  return {_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
inline ByteVec load_bytes_n(const std::uint8_t* p, int n) {
  return {_mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(mask_of(n), p))};
}
inline Vec floats_of(ByteVec b) { return {_mm512_cvtepi32_ps(b.v)}; }
// The low and the high nibbles: a permutation uses four bits of an index, so a table lookup converts them.
inline Vec halves_as_floats(__m512i bits) {
  return {_mm512_permutexvar_ps(bits, _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15))};
}
inline Vec low_halves(ByteVec b) { return halves_as_floats(b.v); }
inline Vec high_halves(ByteVec b) { return halves_as_floats(_mm512_srli_epi32(b.v, 4)); }

// The sum of the lanes, by halves; and the largest lane, which is undefined if a lane is NaN.
inline float sum_of(Vec x) {
  const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(x.v), _mm512_extractf32x8_ps(x.v, 1));
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
inline float max_of(Vec x) {
  const __m256 eight = _mm256_max_ps(_mm512_castps512_ps256(x.v), _mm512_extractf32x8_ps(x.v, 1));
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

// Pairs of bf16, one pair per float: the first of each pair, the second of each pair.
struct PairVec {
  __m512i v;
};
inline PairVec load_pairs(const Bf16* p) { return {_mm512_loadu_si512(p)}; }
inline PairVec load_pairs_n(const Bf16* p, int n) { return {_mm512_maskz_loadu_epi32(mask_of(n), p)}; }
inline Vec first_of(PairVec p) { return {_mm512_castsi512_ps(_mm512_slli_epi32(p.v, 16))}; }
inline Vec second_of(PairVec p) {
  return {_mm512_castsi512_ps(_mm512_and_si512(p.v, _mm512_set1_epi32(static_cast<int>(0xffff0000U))))};
}

// Products of pairs. A pair is broadcast as one 32-bit word.
#if defined(__AVX512BF16__)
#define CHARONIA_NATIVE_PAIRS 1
inline PairVec set1_pair(const Bf16* pair) {
  int word;
  __builtin_memcpy(&word, pair, sizeof word);
  return {_mm512_set1_epi32(word)};
}
inline Vec fma_pairs(PairVec a, PairVec b, Vec c) {
  return {_mm512_dpbf16_ps(c.v, reinterpret_cast<__m512bh>(a.v), reinterpret_cast<__m512bh>(b.v))};
}
// set1_first: broadcasts the pair (x, 0). pairs_of_firsts: floats with zero low halves, as the first of each pair.
inline PairVec set1_first(Bf16 x) { return {_mm512_set1_epi32(x.bits)}; }
inline PairVec pairs_of_firsts(Vec x) { return {_mm512_srli_epi32(_mm512_castps_si512(x.v), 16)}; }
// Rounds 2 * kWidth floats to nearest even, as the elements of kWidth pairs. Magnitudes below 2^-126 become 0.
inline PairVec to_pairs(Vec low, Vec high) {
  return {reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high.v, low.v))};
}
inline void store_pairs(Bf16* p, PairVec x) { _mm512_storeu_si512(p, x.v); }
#endif
