// Prepares q and k before attention, and stores k and v in the cache.
//
//   qkv      [rows, (heads + 2 kv_heads) * head_dim], rows `stride` apart: q heads, k heads, v heads
//   cos_sin  [table rows, rotary_dim] f32: cosines in the first half of a row, sines in the second
//   cache    [block][k, v][kv head][slot][head_dim], or quantised (CacheLayer)
// For a head of q or k: x = x / sqrt(mean(x^2) + eps) * weight, if there are weights; the pairs (d, d + rotary_dim / 2)
// are rotated, elements from rotary_dim on do not change; q is multiplied by its position's scale, if there are scales.
// Variants (RotaryParams): the pairs are (2 d, 2 d + 1); the norm comes after the rotation; the mean of the squares is
// over all heads of the row (its sums come from qk_squares()), and every head has its own weights; heads of v have
// a norm without weights; v is read from the elements of k.
//
// Memory bound: qkv is read once, q is written back, k and v are written to the cache (k and v in qkv do not change).
// Cosines and sines are 4 * rotary_dim bytes per row and stay in L1, and so do weights and data that a norm reads
// again. A thread takes kVector elements of the first half of the rotated elements and their kVector partners (or as
// many of each half of the other elements), so that all accesses have 16 bytes if shapes allow it. With a norm, a power
// of two of lanes of one warp processes a head and sums its squares by shuffles. With one row the launch determines the
// time.
//
// For a quantised cache, a warp stores a head. Each lane has elements i and i + head_dim / 2 for every 32nd i, which
// share a byte with 4 bits. The first pass finds the smallest and the largest element of the head, the second stores
// it; the second read comes from L1. An element takes about 40 instructions, half of them for the exact division: 8192
// rows of 16 such heads of 128 take 50 microseconds on an H200, 1 % of the time of such a layer's GEMMs. FP8 needs only
// the second pass.
#include <algorithm>
#include <bit>
#include <type_traits>

#include "base/text.h"
#include "charonia/error.h"
#include "ops/cuda/device/portable.h"
#include "ops/cuda/kernels/element_types.h"
#include "ops/cuda/kernels/rows.h"

namespace charonia::cuda {
namespace {

constexpr int kThreads = 256;

struct RotaryStore {
  void* qkv = nullptr;
  std::int64_t stride = 0;
  const float* cos_sin = nullptr;
  int rotary_dim = 0;  // 0: no rotation
  bool interleaved = false;
  const float* q_norm = nullptr;
  const float* k_norm = nullptr;
  float norm_eps = 0;
  bool norm_after = false;
  bool v_norm = false, v_from_k = false;
  const float* squares = nullptr;  // null: the mean of the squares is over a head
  float q_count = 0, k_count = 0;
  const float* q_scale = nullptr;
  const float* k_scales = nullptr;  // of an FP8 cache; null: 1
  const float* v_scales = nullptr;
  CacheLayer cache;
  int heads = 0;
  int lanes = 0;     // per head
  int q_blocks = 0;  // blocks per row for q, if the cache is quantised
  const std::int32_t* positions = nullptr;
  const std::int32_t* rotary_rows = nullptr;
  const std::int32_t* kv_slots = nullptr;
};

// kVector elements that are loaded and stored together.
template <class T, int kVector>
struct alignas(sizeof(T) * kVector) Vector {
  T at[kVector];
};

template <int kVector>
CHARONIA_DEVICE void load_floats(float (&x)[kVector], const float* from) {
  if constexpr (kVector % 4 == 0) {
    CHARONIA_UNROLL
    for (int i = 0; i < kVector; i += 4) {
      const float4 four = load_readonly(reinterpret_cast<const float4*>(from + i));
      x[i] = four.x, x[i + 1] = four.y, x[i + 2] = four.z, x[i + 3] = four.w;
    }
  } else {
    CHARONIA_UNROLL
    for (int i = 0; i < kVector; ++i) x[i] = load_readonly(from + i);
  }
}

template <class To, int kVector>
CHARONIA_DEVICE void store(To* to, const float (&x)[kVector]) {
  Vector<To, kVector> out;
  CHARONIA_UNROLL
  for (int i = 0; i < kVector; ++i) out.at[i] = from_float<To>(x[i]);
  *reinterpret_cast<Vector<To, kVector>*>(to) = out;
}

// The offsets of two corresponding vectors of a head, and of their first cosine.
struct Halves {
  int first, second, angle;
  bool rotated;
};
template <int kVector>
CHARONIA_DEVICE Halves halves_of(const RotaryStore& p, int vector) {
  const int half = p.rotary_dim / 2, kept = (p.cache.head_dim - p.rotary_dim) / 2;
  const int d = vector * kVector;
  if (d >= half) return {d + half, d + half + kept, 0, false};
  if (p.interleaved) return {2 * d, 2 * d + kVector, d, true};
  return {d, d + half, d, true};
}

template <class T, int kVector>
CHARONIA_DEVICE void load(float (&x)[kVector], const T* from) {
  const auto raw = *reinterpret_cast<const Vector<T, kVector>*>(from);
  CHARONIA_UNROLL
  for (int i = 0; i < kVector; ++i) x[i] = to_float(raw.at[i]);
}

// x = x * factor * weight
template <int kVector>
CHARONIA_DEVICE void normalise(float (&x)[kVector], float factor, const float* weight) {
  float w[kVector];
  load_floats(w, weight);
  CHARONIA_UNROLL
  for (int i = 0; i < kVector; ++i) x[i] = x[i] * factor * w[i];
}

// Multiplies both vectors.
template <int kVector>
CHARONIA_DEVICE void scale_both(float (&a)[kVector], float (&b)[kVector], float factor) {
  CHARONIA_UNROLL
  for (int i = 0; i < kVector; ++i) {
    a[i] *= factor;
    b[i] *= factor;
  }
}

template <int kVector>
CHARONIA_DEVICE void turn_pairs(float (&a)[kVector], float (&b)[kVector], const float (&cosines)[kVector],
                                const float (&sines)[kVector]) {
  CHARONIA_UNROLL
  for (int i = 0; i < kVector; ++i) {
    const float x = a[i], y = b[i];
    a[i] = fmaf(x, cosines[i], -(y * sines[i]));
    b[i] = fmaf(y, cosines[i], x * sines[i]);
  }
}

// Sets element i of the concatenation of a and b. (GCC's undefined-behaviour sanitizer writes to a copy in `(i <
// kVector ? a : b)[...] = x`.)
template <int kVector>
CHARONIA_DEVICE void set_element(float (&a)[kVector], float (&b)[kVector], int i, float x) {
  if (i < kVector) {
    a[i] = x;
  } else {
    b[i - kVector] = x;
  }
}

// Rotates the two vectors of a head.
template <int kVector>
CHARONIA_DEVICE void rotate_vectors(const RotaryStore& p, std::int64_t row, const Halves& at, float (&a)[kVector],
                                    float (&b)[kVector]) {
  const float* const angles =
      p.cos_sin + static_cast<std::int64_t>(load_readonly(p.rotary_rows + row)) * p.rotary_dim + at.angle;
  float cosines[kVector], sines[kVector];
  load_floats(cosines, angles);
  load_floats(sines, angles + p.rotary_dim / 2);
  if (!p.interleaved) return turn_pairs(a, b, cosines, sines);
  float x[kVector], y[kVector];
  CHARONIA_UNROLL
  for (int i = 0; i < kVector; ++i) {
    x[i] = 2 * i < kVector ? a[2 * i % kVector] : b[2 * i % kVector];
    y[i] = 2 * i + 1 < kVector ? a[(2 * i + 1) % kVector] : b[(2 * i + 1) % kVector];
  }
  turn_pairs(x, y, cosines, sines);
  CHARONIA_UNROLL
  for (int i = 0; i < kVector; ++i) {
    set_element(a, b, 2 * i, x[i]);
    set_element(a, b, 2 * i + 1, y[i]);
  }
}

// The factor of the elements of q or k of a row, from the squares of all heads.
CHARONIA_DEVICE float factor_of_row(const RotaryStore& p, std::int64_t row, bool is_q) {
  const float mean = p.squares[2 * row + (is_q ? 0 : 1)] / (is_q ? p.q_count : p.k_count);
  return reciprocal_sqrt(mean + p.norm_eps);
}

// The weights of a head of q or k.
CHARONIA_DEVICE const float* norm_of(const RotaryStore& p, int head) {
  const bool is_q = head < p.heads;
  const float* const weight = is_q ? p.q_norm : p.k_norm;
  return p.squares == nullptr ? weight
                              : weight + static_cast<std::int64_t>(is_q ? head : head - p.heads) * p.cache.head_dim;
}

// stores: processes k and v as well as q; otherwise only q.
template <class T, int kVector, bool normed, bool stores>
CHARONIA_DEVICE void rotate_row(const RotaryStore& p) {
  const int dim = p.cache.head_dim, vectors = dim / 2 / kVector;  // of half a head
  const int unit = static_cast<int>(blockIdx.y) * kThreads + static_cast<int>(threadIdx.x);
  const int head = unit / p.lanes, lane = unit % p.lanes;
  const auto row = static_cast<std::int64_t>(blockIdx.x);
  const bool is_q = head < p.heads, is_v = head >= p.heads + p.cache.kv_heads;
  const int slot = load_readonly(p.kv_slots + row);
  const bool mine = is_q || (stores && p.cache.stores && head < p.heads + 2 * p.cache.kv_heads && slot >= 0);
  const int source = is_v && p.v_from_k ? head - p.cache.kv_heads : head;
  T* const from = static_cast<T*>(p.qkv) + row * p.stride + static_cast<std::int64_t>(source) * dim;
  float factor = 1;
  if constexpr (normed) {  // all lanes of a warp arrive here
    float sum = 0;
    for (int v = lane; mine && (is_v ? p.v_norm : p.squares == nullptr) && v < vectors; v += p.lanes) {
      const auto at = halves_of<kVector>(p, v);
      float a[kVector], b[kVector];
      load(a, from + at.first);
      load(b, from + at.second);
      if (p.norm_after && at.rotated && !is_v) rotate_vectors(p, row, at, a, b);
      CHARONIA_UNROLL
      for (int i = 0; i < kVector; ++i) sum = fmaf(b[i], b[i], fmaf(a[i], a[i], sum));
    }
    for (int mask = kWarp / 2; mask > 0; mask /= 2) {
      const float other = shuffle_xor(sum, mask);
      if (mask < p.lanes) sum += other;
    }
    factor = p.squares != nullptr && !is_v ? factor_of_row(p, row, is_q)
                                           : reciprocal_sqrt(sum / static_cast<float>(dim) + p.norm_eps);
  }
  if (!mine) return;

  for (int v = lane; v < vectors; v += p.lanes) {
    const auto at = halves_of<kVector>(p, v);
    float a[kVector], b[kVector];
    load(a, from + at.first);
    load(b, from + at.second);
    const auto normalise_both = [&](bool now) {
      if constexpr (normed) {
        if (!now) return;
        if (is_v) {
          if (p.v_norm) scale_both(a, b, factor);
          return;
        }
        const float* const weight = norm_of(p, head);
        normalise(a, factor, weight + at.first);
        normalise(b, factor, weight + at.second);
      }
    };
    normalise_both(!p.norm_after);
    if (!is_v && at.rotated) rotate_vectors(p, row, at, a, b);
    normalise_both(p.norm_after);
    if (is_q) {
      if (p.q_scale != nullptr) scale_both(a, b, load_readonly(p.q_scale + load_readonly(p.positions + row)));
      if constexpr (!stores) {
        if (p.k_scales != nullptr) {
          scale_both(a, b, load_readonly(p.k_scales + head / (p.heads / p.cache.kv_heads)));
        }
      }
      store<T>(from + at.first, a);
      store<T>(from + at.second, b);
    } else if constexpr (stores) {
      const int kv_head = head - p.heads;  // in the cache, v heads follow k heads too
      T* const to =
          static_cast<T*>(p.cache.data) + p.cache.k_at(slot / p.cache.block_len, kv_head, slot % p.cache.block_len);
      store<T>(to + at.first, a);
      store<T>(to + at.second, b);
    }
  }
}

template <class T, int kVector, bool normed>
CHARONIA_KERNEL(kThreads, 4)
void rotary_kernel(const RotaryStore p) {
  dependency_trigger();
  dependency_wait();
  rotate_row<T, kVector, normed, true>(p);
}

// Stores a head of 2 * half elements as integers, their scale and their zero; called by a warp. value(d): an element.
template <class Value>
CHARONIA_DEVICE void store_integers(unsigned char* to, f16* scale_zero, int half, int bits, Value value) {
  float minimum = __builtin_inff(), maximum = -__builtin_inff();
  for (int i = lane_id(); i < half; i += kWarp) {
    const float x = value(i), y = value(i + half);
    minimum = ops::kv_lesser(minimum, ops::kv_lesser(x, y));
    maximum = ops::kv_greater(maximum, ops::kv_greater(x, y));
  }
  CHARONIA_UNROLL
  for (int mask = kWarp / 2; mask > 0; mask /= 2) {
    minimum = ops::kv_lesser(minimum, shuffle_xor(minimum, mask));
    maximum = ops::kv_greater(maximum, shuffle_xor(maximum, mask));
  }
  const auto range = ops::kv_range(minimum, maximum, bits);
  const f16 scale_as_stored = from_float<f16>(range.scale), zero_as_stored = from_float<f16>(range.zero);
  const float scale = to_float(scale_as_stored), zero = to_float(zero_as_stored);

  for (int i = lane_id(); i < half; i += kWarp) {
    const auto x = ops::kv_quantise(value(i), scale, zero, bits),
               y = ops::kv_quantise(value(i + half), scale, zero, bits);
    if (bits == 8) {
      to[i] = x;
      to[i + half] = y;
    } else {
      to[i] = ops::kv_pack(x, y);
    }
  }
  if (lane_id() < 2) {
    scale_zero[lane_id()] = lane_id() == 0 ? scale_as_stored : zero_as_stored;
  }
}

// Stores one head of k or v of a row; called by a warp. kv_head: v heads follow k heads.
template <class T>
CHARONIA_DEVICE void quantise_head(const RotaryStore& p, std::int64_t row, int kv_head) {
  const int slot = load_readonly(p.kv_slots + row);
  if (slot < 0) return;
  const int dim = p.cache.head_dim, rotary_half = p.rotary_dim / 2;
  const bool is_k = kv_head < p.cache.kv_heads;
  const int source = !is_k && p.v_from_k ? kv_head - p.cache.kv_heads : kv_head;
  const T* const from =
      static_cast<const T*>(p.qkv) + row * p.stride + static_cast<std::int64_t>(p.heads + source) * dim;
  const float* const weight = is_k && p.k_norm != nullptr ? norm_of(p, p.heads + kv_head) : nullptr;
  const float* const cosines =
      is_k && rotary_half > 0 ? p.cos_sin + static_cast<std::int64_t>(load_readonly(p.rotary_rows + row)) * p.rotary_dim
                              : nullptr;
  float factor = 1;
  const auto element = [&](int d) {
    const float x = to_float(from[d]);
    if (!is_k) return x * factor;
    return weight == nullptr || p.norm_after ? x : x * factor * load_readonly(weight + d);
  };
  const auto rotated = [&](int d) {
    if (cosines == nullptr || d >= 2 * rotary_half) return element(d);
    const int i = p.interleaved ? d / 2 : d < rotary_half ? d : d - rotary_half;
    const bool first = p.interleaved ? d % 2 == 0 : d < rotary_half;
    const float x = element(p.interleaved ? 2 * i : i), y = element(p.interleaved ? 2 * i + 1 : i + rotary_half);
    const float cosine = load_readonly(cosines + i), sine = load_readonly(cosines + rotary_half + i);
    return first ? fmaf(x, cosine, -(y * sine)) : fmaf(y, cosine, x * sine);
  };
  if (weight != nullptr && p.squares != nullptr) {
    factor = factor_of_row(p, row, false);
  } else if (weight != nullptr || (!is_k && p.v_norm)) {
    float sum = 0;
    for (int d = lane_id(); d < dim; d += kWarp) {
      const float x = is_k && p.norm_after ? rotated(d) : to_float(from[d]);
      sum = fmaf(x, x, sum);
    }
    factor = reciprocal_sqrt(warp_sum(sum) / static_cast<float>(dim) + p.norm_eps);
  }
  const auto value = [&](int d) {
    const float x = rotated(d);
    return weight == nullptr || !p.norm_after ? x : x * factor * load_readonly(weight + d);
  };

  const int block = slot / p.cache.block_len, at = kv_head * p.cache.block_len + slot % p.cache.block_len;
  auto* const cache = static_cast<unsigned char*>(p.cache.data);
  unsigned char* const to = cache + p.cache.integers_at(block, at);
  if (!ops::kv_holds_integers(p.cache.quant_bits)) {
    const float* const scales = is_k ? p.k_scales : p.v_scales;
    const float scale = scales == nullptr ? 1.0F : load_readonly(scales + kv_head % p.cache.kv_heads);
    for (int d = lane_id(); d < dim; d += kWarp) to[d] = e4m3_from_float(value(d) / scale);
    return;
  }
  auto* const scale_zero = reinterpret_cast<f16*>(cache + p.cache.scale_at(block, at));
  store_integers(to, scale_zero, dim / 2, p.cache.quant_bits, value);
}

// The first thread blocks of a row rotate q, the others store k and v.
template <class T, int kVector>
CHARONIA_KERNEL(kThreads, 4)
void rotary_quant_kernel(const RotaryStore p) {
  dependency_trigger();
  dependency_wait();
  if (static_cast<int>(blockIdx.y) < p.q_blocks) {
    if (p.q_norm != nullptr) {
      rotate_row<T, kVector, true, false>(p);
    } else {
      rotate_row<T, kVector, false, false>(p);
    }
    return;
  }
  const int kv_head = (static_cast<int>(blockIdx.y) - p.q_blocks) * (kThreads / kWarp) + warp_id();
  if (kv_head < 2 * p.cache.kv_heads) quantise_head<T>(p, static_cast<std::int64_t>(blockIdx.x), kv_head);
}

int lanes_of(const RotaryStore& params, int vector) {
  const int vectors = params.cache.head_dim / 2 / vector;
  if (params.q_norm == nullptr) return vectors;
  return std::min(static_cast<int>(std::bit_ceil(static_cast<unsigned>(vectors))), kWarp);
}

template <class T, int kVector>
void start_quantised(Stream& stream, std::int64_t rows, RotaryStore params) {
  params.lanes = lanes_of(params, kVector);
  params.q_blocks = static_cast<int>(divide_up(std::int64_t{params.heads} * params.lanes, kThreads));
  const auto kv_blocks = params.cache.stores ? divide_up(2 * params.cache.kv_heads, kThreads / kWarp) : 0;
  launch(stream, "rotary_store",
         {.grid_x = static_cast<unsigned>(rows),
          .grid_y = static_cast<unsigned>(params.q_blocks + kv_blocks),
          .threads = kThreads},
         rotary_quant_kernel<T, kVector>, params);
}

template <class T, int kVector>
void start(Stream& stream, std::int64_t rows, RotaryStore params) {
  const bool normed = params.q_norm != nullptr;
  params.lanes = lanes_of(params, kVector);
  const int kv_heads = params.cache.stores ? 2 * params.cache.kv_heads : 0;
  const auto units = std::int64_t{params.heads + kv_heads} * params.lanes;
  launch(stream, "rotary_store",
         {.grid_x = static_cast<unsigned>(rows),
          .grid_y = static_cast<unsigned>(divide_up(units, kThreads)),
          .threads = kThreads},
         normed ? rotary_kernel<T, kVector, true> : rotary_kernel<T, kVector, false>, params);
}

// Elements that are loaded together if shapes allow it.
template <class T>
constexpr int vector_of() {
  return static_cast<int>(16 / sizeof(T));
}
template <class T>
bool vectors_fit(const Tensor& qkv, const RotaryStore& params) {
  constexpr int kVector = vector_of<T>();
  const auto aligned = [](const void* p) { return reinterpret_cast<std::uintptr_t>(p) % 16 == 0; };
  return params.cache.head_dim % (2 * kVector) == 0 && params.rotary_dim % (2 * kVector) == 0 &&
         qkv.stride % kVector == 0 && aligned(qkv.data) && aligned(params.cos_sin) && aligned(params.q_norm) &&
         aligned(params.k_norm) && aligned(params.cache.data);
}

// Calls f with the width of vectors as a constant.
template <class T, class F>
void with_vector(const Tensor& qkv, const RotaryStore& params, F f) {
  if (vectors_fit<T>(qkv, params)) {
    f(std::integral_constant<int, vector_of<T>()>{});
  } else {
    f(std::integral_constant<int, 1>{});
  }
}

template <class T>
void start(Stream& stream, const Tensor& qkv, const RotaryStore& params) {
  with_vector<T>(qkv, params, [&](auto vector) {
    if (params.cache.quant_bits != 0) {
      start_quantised<T, vector()>(stream, qkv.rows, params);
    } else {
      start<T, vector()>(stream, qkv.rows, params);
    }
  });
}

}  // namespace

void rotary_store(Stream& stream, const Tensor& qkv, const ops::RotaryParams& how, const CacheLayer& cache, int heads,
                  const std::int32_t* positions, const std::int32_t* rotary_rows, const std::int32_t* kv_slots) {
  const RotaryStore params{.qkv = qkv.data,
                           .stride = qkv.stride,
                           .cos_sin = how.cos_sin,
                           .rotary_dim = how.cos_sin == nullptr ? 0 : how.rotary_dim,
                           .interleaved = how.interleaved,
                           .q_norm = how.q_norm,
                           .k_norm = how.k_norm,
                           .norm_eps = how.norm_eps,
                           .norm_after = how.norm_after,
                           .v_norm = how.v_norm,
                           .v_from_k = how.v_from_k,
                           .squares = how.squares,
                           .q_count = static_cast<float>(how.q_count),
                           .k_count = static_cast<float>(how.k_count),
                           .q_scale = how.q_scale,
                           .k_scales = cache.quant_bits == ops::kKvFp8 ? how.k_scales : nullptr,
                           .v_scales = how.v_scales,
                           .cache = cache,
                           .heads = heads,
                           .positions = positions,
                           .rotary_rows = rotary_rows,
                           .kv_slots = kv_slots};
  if (cache.dtype != qkv.dtype) {
    throw Error(ErrorCode::internal, cat("rotary_store: qkv is ", to_string(qkv.dtype), " and its cache is of ",
                                         to_string(cache.dtype), "; both must be of one type"));
  }
  with_type(qkv.dtype, [&]<class T>(T) { start<T>(stream, qkv, params); });
}

}  // namespace charonia::cuda
