// Vec for AVX2 with FMA and F16C: 8 floats. Included by vec.h, inside its namespaces.

struct Vec {
  __m256 v;
};
constexpr int kWidth = 8;

inline Vec zero() { return {_mm256_setzero_ps()}; }
inline Vec set1(float x) { return {_mm256_set1_ps(x)}; }
inline Vec add(Vec a, Vec b) { return {_mm256_add_ps(a.v, b.v)}; }
inline Vec sub(Vec a, Vec b) { return {_mm256_sub_ps(a.v, b.v)}; }
inline Vec mul(Vec a, Vec b) { return {_mm256_mul_ps(a.v, b.v)}; }
inline Vec div(Vec a, Vec b) { return {_mm256_div_ps(a.v, b.v)}; }
inline Vec fma(Vec a, Vec b, Vec c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
inline Vec max(Vec a, Vec b) { return {_mm256_max_ps(a.v, b.v)}; }
inline Vec min(Vec a, Vec b) { return {_mm256_min_ps(a.v, b.v)}; }
inline Vec round(Vec a) { return {_mm256_round_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
inline Vec zero_where_less(Vec x, Vec a, Vec b) { return {_mm256_and_ps(_mm256_cmp_ps(a.v, b.v, _CMP_NLT_UQ), x.v)}; }
inline Vec times_power_of_two(Vec x, Vec n) {
  const __m256i exponent = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n.v), _mm256_set1_epi32(127)), 23);
  return {_mm256_mul_ps(x.v, _mm256_castsi256_ps(exponent))};
}
inline bool any_nan(Vec a) { return _mm256_movemask_ps(_mm256_cmp_ps(a.v, a.v, _CMP_UNORD_Q)) != 0; }

inline Vec from_bf16(__m128i bits) { return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16))}; }
inline Vec load(const float* p) { return {_mm256_loadu_ps(p)}; }
inline Vec load(const Bf16* p) { return from_bf16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
inline Vec load(const F16* p) { return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))}; }
// The bits below the sign are fp16 bits of a number 2^8 too small, seven places higher. All bits set is NaN.
inline Vec load(const F8* p) {
  const __m128i signs = _mm_cvtepi8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  const __m128i all = _mm_set1_epi16(0x7f);
  const __m128i halves = _mm_and_si128(_mm_slli_epi16(signs, 7), _mm_set1_epi16(static_cast<short>(0xbf80)));
  const __m128i nan = _mm_cmpeq_epi16(_mm_and_si128(signs, all), all);
  return {_mm256_mul_ps(_mm256_cvtph_ps(_mm_or_si128(halves, nan)), _mm256_set1_ps(256))};
}

inline __m128i to_bf16(Vec x) {
  const __m256i bits = _mm256_castps_si256(x.v);
  const __m256i lowest = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), lowest);
  const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x.v, x.v, _CMP_UNORD_Q));
  const __m256i halves = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, nan), 16);
  return _mm_packus_epi32(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1));
}
inline void store(float* p, Vec x) { _mm256_storeu_ps(p, x.v); }
inline void store(Bf16* p, Vec x) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), to_bf16(x)); }
inline void store(F16* p, Vec x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

// Bytes, one per float.
struct ByteVec {
  __m256i v;
};
inline ByteVec load_bytes(const std::uint8_t* p) {
  return {_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)))};
}
inline Vec floats_of(ByteVec b) { return {_mm256_cvtepi32_ps(b.v)}; }
// The low and the high nibbles.
inline Vec low_halves(ByteVec b) { return {_mm256_cvtepi32_ps(_mm256_and_si256(b.v, _mm256_set1_epi32(15)))}; }
inline Vec high_halves(ByteVec b) { return {_mm256_cvtepi32_ps(_mm256_srli_epi32(b.v, 4))}; }

// Pairs of bf16, one pair per float: the first of each pair, the second of each pair.
struct PairVec {
  __m256i v;
};
inline PairVec load_pairs(const Bf16* p) { return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))}; }
inline Vec first_of(PairVec p) { return {_mm256_castsi256_ps(_mm256_slli_epi32(p.v, 16))}; }
inline Vec second_of(PairVec p) {
  return {_mm256_castsi256_ps(_mm256_and_si256(p.v, _mm256_set1_epi32(static_cast<int>(0xffff0000U))))};
}
