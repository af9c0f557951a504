// Vec in the compiler's vector types (GCC and Clang): 4 floats, as with SSE2 and NEON. Included by vec.h, inside its
// namespaces.

typedef float Float4 __attribute__((vector_size(16)));
typedef std::int32_t Int4 __attribute__((vector_size(16)));
typedef std::uint32_t Uint4 __attribute__((vector_size(16)));

struct Vec {
  Float4 v;
};
constexpr int kWidth = 4;

template <class To, class From>
inline To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  __builtin_memcpy(&to, &from, sizeof to);
  return to;
}

inline Vec zero() { return {Float4{}}; }
inline Vec set1(float x) { return {Float4{x, x, x, x}}; }
inline Vec add(Vec a, Vec b) { return {a.v + b.v}; }
inline Vec sub(Vec a, Vec b) { return {a.v - b.v}; }
inline Vec mul(Vec a, Vec b) { return {a.v * b.v}; }
inline Vec div(Vec a, Vec b) { return {a.v / b.v}; }
inline Vec fma(Vec a, Vec b, Vec c) { return {a.v * b.v + c.v}; }
inline Float4 select(Int4 mask, Float4 yes, Float4 no) {
  return bits_as<Float4>((mask & bits_as<Int4>(yes)) | (~mask & bits_as<Int4>(no)));
}
// b if one is NaN, like the processors' instructions
inline Vec max(Vec a, Vec b) { return {select(a.v > b.v, a.v, b.v)}; }
inline Vec min(Vec a, Vec b) { return {select(a.v < b.v, a.v, b.v)}; }
// For magnitudes below 2^22: adding 1.5 * 2^23 removes the fraction bits.
inline Vec round(Vec a) {
  const Vec magic = set1(0x1.8p23F);
  return {(a.v + magic.v) - magic.v};
}
inline Vec zero_where_less(Vec x, Vec a, Vec b) { return {bits_as<Float4>(~(a.v < b.v) & bits_as<Int4>(x.v))}; }
inline Vec times_power_of_two(Vec x, Vec n) {
  const Uint4 exponent = bits_as<Uint4>(__builtin_convertvector(n.v, Int4)) + 127U;
  return {x.v * bits_as<Float4>(exponent << 23)};
}
inline bool any_nan(Vec a) {
  const Int4 nan = a.v != a.v;
  return (nan[0] | nan[1] | nan[2] | nan[3]) != 0;
}

inline Float4 float_from_bf16(Uint4 bits) { return bits_as<Float4>(bits << 16); }

// The same as the conversions in base/dtype.h, which are not compiled per instruction set.
inline Float4 float_from_f16(Uint4 bits) {
  const Uint4 magnitude = bits & 0x7fffU;
  const Float4 tiny = __builtin_convertvector(bits_as<Int4>(magnitude), Float4) * 0x1p-24F;
  const Uint4 normal = (magnitude << 13) + (112U << 23);
  const Uint4 special = (magnitude << 13) | 0x7f800000U;
  const Float4 finite = select(bits_as<Int4>(magnitude) < 0x400, tiny, bits_as<Float4>(normal));
  const Float4 all = select(bits_as<Int4>(magnitude) < 0x7c00, finite, bits_as<Float4>(special));
  return bits_as<Float4>(bits_as<Uint4>(all) | ((bits & 0x8000U) << 16));
}

inline Uint4 bf16_from_float(Float4 x) {
  const Uint4 bits = bits_as<Uint4>(x);
  const Uint4 rounded = bits + 0x7fffU + ((bits >> 16) & 1U);
  const Uint4 quiet = bits | 0x400000U;
  return bits_as<Uint4>(select(x != x, bits_as<Float4>(quiet), bits_as<Float4>(rounded))) >> 16;
}

inline Uint4 f16_from_float(Float4 x) {
  const Uint4 bits = bits_as<Uint4>(x);
  const Uint4 magnitude = bits & 0x7fffffffU;
  const Uint4 tiny = bits_as<Uint4>(bits_as<Float4>(magnitude) + 0.5F) - 0x3f000000U;
  const Uint4 normal = (magnitude + 0xfffU + ((magnitude >> 13) & 1U) - (112U << 23)) >> 13;
  const Uint4 nan = 0x7e00U | ((magnitude >> 13) & 0x3ffU);
  const Uint4 infinity = Uint4{} + 0x7c00U;
  const auto pick = [](Int4 mask, Uint4 yes, Uint4 no) {
    return (bits_as<Uint4>(mask) & yes) | (~bits_as<Uint4>(mask) & no);
  };
  Uint4 out = pick(bits_as<Int4>(magnitude) < 0x38800000, tiny, normal);
  out = pick(bits_as<Int4>(magnitude) >= 0x477ff000, infinity, out);
  out = pick(x != x, nan, out);
  return out | ((bits >> 16) & 0x8000U);
}

inline Vec load(const float* p) {
  Vec out;
  __builtin_memcpy(&out.v, p, sizeof out.v);
  return out;
}
template <class Half>
inline Uint4 load_halves(const Half* p) {
  return Uint4{p[0].bits, p[1].bits, p[2].bits, p[3].bits};
}
inline Vec load(const Bf16* p) { return {float_from_bf16(load_halves(p))}; }
inline Vec load(const F16* p) { return {float_from_f16(load_halves(p))}; }
inline Vec load(const F8* p) {
  const Uint4 bits{p[0].bits, p[1].bits, p[2].bits, p[3].bits}, magnitude = bits & 0x7fU;
  const Float4 tiny = __builtin_convertvector(bits_as<Int4>(magnitude), Float4) * 0x1p-9F;
  const Float4 normal = bits_as<Float4>((magnitude << 20) + (120U << 23));
  const Float4 finite = select(bits_as<Int4>(magnitude) < 8, tiny, normal);
  const Uint4 quiet = Uint4{} + 0x7fc00000U;
  const Float4 all = select(bits_as<Int4>(magnitude) < 0x7f, finite, bits_as<Float4>(quiet));
  return {bits_as<Float4>(bits_as<Uint4>(all) | ((bits & 0x80U) << 24))};
}

inline void store(float* p, Vec x) { __builtin_memcpy(p, &x.v, sizeof x.v); }
template <class Half>
inline void store_halves(Half* p, Uint4 bits) {
  for (int i = 0; i < kWidth; ++i) p[i].bits = static_cast<std::uint16_t>(bits[i]);
}
inline void store(Bf16* p, Vec x) { store_halves(p, bf16_from_float(x.v)); }
inline void store(F16* p, Vec x) { store_halves(p, f16_from_float(x.v)); }

// Bytes, one per float.
struct ByteVec {
  Int4 v;
};
inline ByteVec load_bytes(const std::uint8_t* p) { return {Int4{p[0], p[1], p[2], p[3]}}; }
inline Vec floats_of(ByteVec b) { return {__builtin_convertvector(b.v, Float4)}; }
// The low and the high nibbles.
inline Vec low_halves(ByteVec b) { return {__builtin_convertvector(b.v & 15, Float4)}; }
inline Vec high_halves(ByteVec b) { return {__builtin_convertvector(b.v >> 4, Float4)}; }

// Pairs of bf16, one pair per float: the first of each pair, the second of each pair.
struct PairVec {
  Uint4 v;
};
#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "pairs of bf16 are read as little-endian words"
#endif
inline PairVec load_pairs(const Bf16* p) {
  PairVec out;
  __builtin_memcpy(&out.v, p, sizeof out.v);
  return out;
}
inline Vec first_of(PairVec p) { return {bits_as<Float4>(p.v << 16)}; }
inline Vec second_of(PairVec p) { return {bits_as<Float4>(p.v & 0xffff0000U)}; }
