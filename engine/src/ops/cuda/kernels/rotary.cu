// Rotation of q and k, and the way of k and v into the cache.
//
//   qkv      [rows, (heads + 2 kv_heads) * head_dim], rows `stride` apart: q heads, k heads, v heads
//   cos_sin  [positions, head_dim] f32: cosines in the first half of a row, sines in the second
//   cache    [block][k, v][kv head][slot][head_dim]
//
// Bound by memory: qkv is read once, q written back, k and v written to the cache (k and v in qkv keep what they are);
// cosines and sines are 4 * head_dim bytes a row and stay in L1. A thread takes kVector elements of a head's first half
// and those kVector that are turned with them, so that all accesses have 16 bytes where shapes allow it. At one row it
// is the launch that takes the time.
#include "charonia/error.h"
#include "ops/cuda/device/portable.h"
#include "ops/cuda/kernels/rows.h"

namespace charonia::cuda {
namespace {

constexpr int kThreads = 256;

struct RotaryParams {
  void* qkv = nullptr;
  std::int64_t stride = 0;
  const float* cos_sin = nullptr;
  CacheLayer cache;
  int heads = 0;
  const std::int32_t* positions = nullptr;
  const std::int32_t* kv_slots = nullptr;
};

// kVector elements that are loaded and stored at once.
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

template <class T, class Kv, int kVector>
CHARONIA_KERNEL(kThreads, 4)
void rotary_kernel(const RotaryParams p) {
  const int half = p.cache.head_dim / 2, vectors = half / kVector;  // of a half head
  const int unit = static_cast<int>(blockIdx.y) * kThreads + static_cast<int>(threadIdx.x);
  const int head = unit / vectors, d = unit % vectors * kVector;
  const int row = static_cast<int>(blockIdx.x);
  dependency_trigger();
  dependency_wait();
  if (head >= p.heads + 2 * p.cache.kv_heads) return;
  const bool is_q = head < p.heads, is_v = head >= p.heads + p.cache.kv_heads;
  const int slot = load_readonly(p.kv_slots + row);
  if (!is_q && slot < 0) return;

  T* const from = static_cast<T*>(p.qkv) + row * p.stride + static_cast<std::int64_t>(head) * p.cache.head_dim + d;
  const auto first = *reinterpret_cast<const Vector<T, kVector>*>(from);
  const auto second = *reinterpret_cast<const Vector<T, kVector>*>(from + half);
  float a[kVector], b[kVector];
  CHARONIA_UNROLL
  for (int i = 0; i < kVector; ++i) {
    a[i] = to_float(first.at[i]);
    b[i] = to_float(second.at[i]);
  }
  if (!is_v) {
    const float* const turn = p.cos_sin + static_cast<std::int64_t>(load_readonly(p.positions + row)) * 2 * half + d;
    float cosines[kVector], sines[kVector];
    load_floats(cosines, turn);
    load_floats(sines, turn + half);
    CHARONIA_UNROLL
    for (int i = 0; i < kVector; ++i) {
      const float x = a[i], y = b[i];
      a[i] = fmaf(x, cosines[i], -(y * sines[i]));
      b[i] = fmaf(y, cosines[i], x * sines[i]);
    }
  }
  if (is_q) {
    store<T>(from, a);
    store<T>(from + half, b);
    return;
  }
  const int kv_head = head - p.heads;  // v heads lie behind k heads in the cache as well
  Kv* const to =
      static_cast<Kv*>(p.cache.data) + p.cache.k_at(slot / p.cache.block_len, kv_head, slot % p.cache.block_len) + d;
  store<Kv>(to, a);
  store<Kv>(to + half, b);
}

template <class T, class Kv, int kVector>
void start(Stream& stream, std::int64_t rows, const RotaryParams& params) {
  const auto units = std::int64_t{params.heads + 2 * params.cache.kv_heads} * (params.cache.head_dim / 2 / kVector);
  launch(stream, "rotary_store",
         {.grid_x = static_cast<unsigned>(rows),
          .grid_y = static_cast<unsigned>(divide_up(units, kThreads)),
          .threads = kThreads},
         rotary_kernel<T, Kv, kVector>, params);
}

template <class T, class Kv>
void start(Stream& stream, const Tensor& qkv, const RotaryParams& params) {
  constexpr int kVector = static_cast<int>(16 / sizeof(T));
  const auto aligned = [](const void* p) { return reinterpret_cast<std::uintptr_t>(p) % 16 == 0; };
  if (params.cache.head_dim % (2 * kVector) == 0 && qkv.stride % kVector == 0 && aligned(qkv.data) &&
      aligned(params.cos_sin) && aligned(params.cache.data)) {
    start<T, Kv, kVector>(stream, qkv.rows, params);
  } else {
    start<T, Kv, 1>(stream, qkv.rows, params);
  }
}

template <class T>
void start(Stream& stream, const Tensor& qkv, const RotaryParams& params) {
  switch (params.cache.dtype) {
    case DType::f32:
      return start<T, float>(stream, qkv, params);
    case DType::bf16:
      return start<T, bf16>(stream, qkv, params);
    case DType::f16:
      return start<T, f16>(stream, qkv, params);
    default:
      throw Error(ErrorCode::internal, "rotary_store: a cache of this element type");
  }
}

}  // namespace

void rotary_store(Stream& stream, const Tensor& qkv, const float* cos_sin, const CacheLayer& cache, int heads,
                  const std::int32_t* positions, const std::int32_t* kv_slots) {
  const RotaryParams params{qkv.data, qkv.stride, cos_sin, cache, heads, positions, kv_slots};
  switch (qkv.dtype) {
    case DType::f32:
      return start<float>(stream, qkv, params);
    case DType::bf16:
      return start<bf16>(stream, qkv, params);
    case DType::f16:
      return start<f16>(stream, qkv, params);
    default:
      throw Error(ErrorCode::internal, "rotary_store: qkv of this element type");
  }
}

}  // namespace charonia::cuda
