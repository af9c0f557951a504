// Operations on single rows: embedding, residual add and norm, gated activation, copies of rows.
//
// All are bound by memory, and by latency for few rows. A thread takes one vector of a row (row_vectors.h) at a time.
//
//   embed, gated_activation, sigmoid_gate, logits, copies
//                             grid (rows, vectors of a row / threads), one vector per thread, no shared memory
//   gated_norm                grid (rows, heads / warps), a head per warp
//   rms_norm                  grid (rows); a row's vectors stay in registers between the sum and the scaling, so that
//                             residual and delta are read once. Traffic: residual is read and written, delta read, out
//                             written; weights come from L2. If delta is normalised first, one more sum over the block
// Types are those of the device's precision (CudaOps::precision): the residual is float, all else has the weights'
// type. Other combinations have no kernel.
#include "ops/cuda/kernels/rows.h"

#include <algorithm>
#include <initializer_list>
#include <string_view>

#include "base/text.h"
#include "charonia/error.h"
#include "ops/cuda/device/portable.h"
#include "ops/cuda/kernels/activation.h"
#include "ops/cuda/kernels/element_types.h"
#include "ops/cuda/kernels/gemm.h"
#include "ops/cuda/kernels/row_vectors.h"
#include "ops/cuda/kernels/w8a8_rows.h"

namespace charonia::cuda {
namespace {

constexpr int kThreads = 128;  // of the kernels without a sum

// The token of a row. Ids below 0 refer to the tokens that the previous step sampled.
CHARONIA_DEVICE std::int32_t token_of(std::int32_t id, const std::int32_t* sampled) {
  return id < 0 ? max(sampled[-1 - id], 0) : id;
}

struct EmbedParams {
  void* out = nullptr;
  std::int64_t out_stride = 0;
  TableRows table;
  const std::int32_t* ids = nullptr;
  const std::int32_t* sampled = nullptr;
  float scale = 1;
  int hidden = 0;
  bool aligned = false;
};

template <class Table>
CHARONIA_KERNEL(kThreads, 1)
void embed_kernel(const EmbedParams p) {
  dependency_trigger();
  dependency_wait();
  const auto row = static_cast<std::int64_t>(blockIdx.x);
  const auto id = token_of(p.ids[row], p.sampled);
  const int at = static_cast<int>(blockIdx.y * kThreads + threadIdx.x) * kVector;
  const auto first = p.table.packed ? packed_at(id, at, p.table.stride) : id * p.table.stride + at;
  float x[kVector];
  to_floats(load_raw(static_cast<const Table*>(p.table.data) + first, 0, p.hidden - at, p.aligned), x);
  CHARONIA_UNROLL
  for (int i = 0; i < kVector; ++i) x[i] *= p.scale;
  store_floats(static_cast<float*>(p.out) + row * p.out_stride, at, p.hidden, p.aligned, x);
}

struct EmbeddingSumParams {
  void* x = nullptr;
  std::int64_t stride = 0;
  const void* table = nullptr;
  const std::int32_t* ids = nullptr;
  const std::int32_t* sampled = nullptr;
  ops::EmbeddingSum how;
  int groups = 0;
  bool aligned = false;
};

// A warp computes a group. The table may be in host memory: a group reads it once, in whole vectors.
template <class T>
CHARONIA_KERNEL(kThreads, 1)
void add_embedding_kernel(const EmbeddingSumParams p) {
  dependency_trigger();
  dependency_wait();
  const auto row = static_cast<std::int64_t>(blockIdx.x);
  const int group = static_cast<int>(blockIdx.y) * (kThreads / kWarp) + warp_id(), size = p.how.size;
  if (group >= p.groups) return;
  const auto id = token_of(p.ids[row], p.sampled);
  const auto first = static_cast<std::int64_t>(group) * size;
  T* const x = static_cast<T*>(p.x) + row * p.stride + first;
  const T* const from = static_cast<const T*>(p.table) + static_cast<std::int64_t>(id) * p.groups * size + first;
  float sum = 0;
  for (int at = lane_id() * kVector; at < size; at += kWarp * kVector) {
    float values[kVector];
    to_floats(load_raw(x, at, size, p.aligned), values);
    CHARONIA_UNROLL
    for (int i = 0; i < kVector; ++i) sum = fmaf(values[i], values[i], sum);
  }
  const float factor = reciprocal_sqrt(warp_sum(sum) / static_cast<float>(size) + p.how.eps);
  for (int at = lane_id() * kVector; at < size; at += kWarp * kVector) {
    float values[kVector], weights[kVector], added[kVector];
    to_floats(load_raw(from, at, size, p.aligned), added);
    to_floats(load_raw(x, at, size, p.aligned), values);
    to_floats(load_raw(p.how.weight, at, size, p.aligned), weights);
    CHARONIA_UNROLL
    for (int i = 0; i < kVector; ++i) {
      values[i] = fmaf(added[i], p.how.table_scale, values[i] * factor * weights[i] * p.how.scale);
    }
    store_floats(x, at, size, p.aligned, values);
  }
}

struct NormParams {
  void* out = nullptr;
  std::int64_t out_stride = 0;
  void* residual = nullptr;
  std::int64_t residual_stride = 0;
  const void* delta = nullptr;  // null: no delta
  std::int64_t delta_stride = 0;
  ops::NormParams how;
  int hidden = 0;
  bool aligned = false;
};

// With codes, `out` is not written.
struct NormCodesParams : NormParams {
  RowCodes codes;
};

// Vectors that a thread can hold: up to 16384 elements with 1024 threads.
constexpr int kMaxHeld = 2;
constexpr int kMaxNormThreads = 1024;

// The threads of a row, which depend only on its width. Thread t sums the squares of vectors t, t + threads, .. in this
// order; lanes and warps are summed as in block_sum().
int norm_threads(std::int64_t hidden) {
  return static_cast<int>(std::min<std::int64_t>(round_up(divide_up(hidden, kVector), kWarp), kMaxNormThreads));
}

// x = how.residual_scale * x + how.delta_scale * delta
CHARONIA_DEVICE void add(float (&x)[kVector], const float (&delta)[kVector], const ops::NormParams& how) {
  CHARONIA_UNROLL
  for (int i = 0; i < kVector; ++i) {
    x[i] = fmaf(delta[i], how.delta_scale, how.residual_scale == 0 ? 0.0F : x[i] * how.residual_scale);
  }
}

CHARONIA_DEVICE float sum_of_squares(const float (&x)[kVector], float sum) {
  CHARONIA_UNROLL
  for (int i = 0; i < kVector; ++i) sum = fmaf(x[i], x[i], sum);
  return sum;
}

// The factor of a row of n elements, from the sum of its squares; every thread has a part of the sum.
CHARONIA_DEVICE float norm_factor(float sum, int n, float eps, float* scratch) {
  return reciprocal_sqrt(block_sum(sum, scratch) / static_cast<float>(n) + eps);
}

// x = x * factor * weight
CHARONIA_DEVICE void normalise(float (&x)[kVector], float factor, const Raw<float>& weight) {
  float w[kVector];
  to_floats(weight, w);
  CHARONIA_UNROLL
  for (int i = 0; i < kVector; ++i) x[i] = x[i] * factor * w[i];
}

// x -= mean, except beyond the end of a row of n, where x stays zero. `at`: index of the first element of x in the row.
// Returns `sum` plus the squares of x.
CHARONIA_DEVICE float subtract(float (&x)[kVector], float mean, int at, int n, float sum) {
  CHARONIA_UNROLL
  for (int i = 0; i < kVector; ++i) x[i] = at + i < n ? x[i] - mean : 0;
  return sum_of_squares(x, sum);
}

CHARONIA_DEVICE float sum_of(const float (&x)[kVector], float sum) {
  CHARONIA_UNROLL
  for (int i = 0; i < kVector; ++i) sum += x[i];
  return sum;
}

// Rounds the numbers of a vector to T; returns the maximum of their magnitudes and `greatest`.
template <class T>
CHARONIA_DEVICE float round_vector(float (&x)[kVector], float greatest) {
  CHARONIA_UNROLL
  for (int i = 0; i < kVector; ++i) {
    x[i] = to_float(from_float<T>(x[i]));
    greatest = fmaxf(greatest, magnitude(x[i]));
  }
  return greatest;
}

// Computes and stores the row's scale. Each thread passes the maximum of its part; every thread gets the scale.
CHARONIA_DEVICE float store_scale(const RowCodes& codes, std::int64_t row, float greatest, float* scratch) {
  greatest = block_max(greatest, scratch);
  const float scale =
      codes.fp8 ? scale_of_row<true>(greatest, codes.scale) : scale_of_row<false>(greatest, codes.scale);
  if (threadIdx.x == 0) codes.scales[row] = scale;
  return scale;
}

CHARONIA_DEVICE void store_codes(const RowCodes& codes, std::int64_t at, const float (&x)[kVector], float scale) {
  *reinterpret_cast<uint2*>(codes.codes + at) = codes.fp8 ? codes_of<true>(x, scale) : codes_of<false>(x, scale);
}

// held: vectors per thread that stay in registers; 0: any number, and residual and delta are read again. normed: delta
// is normalised before it is added. codes: writes codes of the outputs instead of the outputs.
template <class T, int held, bool normed, bool codes = false>
CHARONIA_KERNEL(kMaxNormThreads, 1)
void rms_norm_kernel(const std::conditional_t<codes, NormCodesParams, NormParams> p) {
  CHARONIA_SHARED(float, scratch, [32]);
  const auto row = static_cast<std::int64_t>(blockIdx.x);
  const int tid = static_cast<int>(threadIdx.x), step = static_cast<int>(blockDim.x) * kVector;
  auto* const residual = static_cast<float*>(p.residual) + row * p.residual_stride;
  auto* const out = static_cast<T*>(p.out) + (p.out == nullptr ? 0 : row * p.out_stride);
  const auto* const delta = static_cast<const T*>(p.delta) + (p.delta == nullptr ? 0 : row * p.delta_stride);
  dependency_trigger();
  float sum = 0, delta_factor = 0;
  if constexpr (held > 0) {
    Raw<float> weights[held];
    CHARONIA_UNROLL
    for (int v = 0; v < held; ++v) {
      // Without a weight there is no norm, and these numbers are not used.
      weights[v] = load_raw(p.how.weight, tid * kVector + v * step, p.how.weight != nullptr ? p.hidden : 0, p.aligned);
    }
    dependency_wait();
    Raw<float> before[held];
    Raw<T> added[held];
    CHARONIA_UNROLL
    for (int v = 0; v < held; ++v) before[v] = load_raw(residual, tid * kVector + v * step, p.hidden, p.aligned);
    if (p.delta != nullptr) {
      CHARONIA_UNROLL
      for (int v = 0; v < held; ++v) added[v] = load_raw(delta, tid * kVector + v * step, p.hidden, p.aligned);
    }
    if constexpr (normed) {
      float squares = 0;
      CHARONIA_UNROLL
      for (int v = 0; v < held; ++v) {
        float d[kVector];
        to_floats(added[v], d);
        squares = sum_of_squares(d, squares);
      }
      delta_factor = norm_factor(squares, p.hidden, p.how.eps, scratch);
    }
    float x[held][kVector];
    CHARONIA_UNROLL
    for (int v = 0; v < held; ++v) {
      const int at = tid * kVector + v * step;
      to_floats(before[v], x[v]);
      if (p.delta != nullptr) {
        float d[kVector];
        to_floats(added[v], d);
        if constexpr (normed) normalise(d, delta_factor, load_raw(p.how.delta_weight, at, p.hidden, p.aligned));
        add(x[v], d, p.how);
        store_floats(residual, at, p.hidden, p.aligned, x[v]);
      }
      sum = sum_of_squares(x[v], sum);
    }
    if (p.how.subtract_mean) {
      float total = 0;
      CHARONIA_UNROLL
      for (int v = 0; v < held; ++v) total = sum_of(x[v], total);
      const float mean = block_sum(total, scratch) / static_cast<float>(p.hidden);
      sum = 0;
      CHARONIA_UNROLL
      for (int v = 0; v < held; ++v) sum = subtract(x[v], mean, tid * kVector + v * step, p.hidden, sum);
    }
    if (p.how.weight != nullptr) {
      const float factor = norm_factor(sum, p.hidden, p.how.eps, scratch);
      CHARONIA_UNROLL
      for (int v = 0; v < held; ++v) normalise(x[v], factor, weights[v]);
    }
    if constexpr (codes) {
      float greatest = 0;
      CHARONIA_UNROLL
      for (int v = 0; v < held; ++v) {
        if (tid * kVector + v * step < p.hidden) greatest = round_vector<T>(x[v], greatest);
      }
      const float scale = store_scale(p.codes, row, greatest, scratch);
      CHARONIA_UNROLL
      for (int v = 0; v < held; ++v) {
        const int at = tid * kVector + v * step;
        if (at < p.hidden) store_codes(p.codes, row * p.hidden + at, x[v], scale);
      }
    } else if (p.out != nullptr) {
      CHARONIA_UNROLL
      for (int v = 0; v < held; ++v) store_floats(out, tid * kVector + v * step, p.hidden, p.aligned, x[v]);
    }
  } else {
    dependency_wait();
    if constexpr (normed) {
      float squares = 0;
      for (int at = tid * kVector; at < p.hidden; at += step) {
        float d[kVector];
        to_floats(load_raw(delta, at, p.hidden, p.aligned), d);
        squares = sum_of_squares(d, squares);
      }
      delta_factor = norm_factor(squares, p.hidden, p.how.eps, scratch);
    }
    for (int at = tid * kVector; at < p.hidden; at += step) {
      float x[kVector];
      to_floats(load_raw(residual, at, p.hidden, p.aligned), x);
      if (p.delta != nullptr) {
        float d[kVector];
        to_floats(load_raw(delta, at, p.hidden, p.aligned), d);
        if constexpr (normed) normalise(d, delta_factor, load_raw(p.how.delta_weight, at, p.hidden, p.aligned));
        add(x, d, p.how);
        store_floats(residual, at, p.hidden, p.aligned, x);
      }
      sum = sum_of_squares(x, sum);
    }
    if (p.out == nullptr) return;
    float mean = 0;
    if (p.how.subtract_mean) {
      float total = 0;
      for (int at = tid * kVector; at < p.hidden; at += step) {
        float x[kVector];
        to_floats(load_raw(residual, at, p.hidden, p.aligned), x);
        total = sum_of(x, total);
      }
      mean = block_sum(total, scratch) / static_cast<float>(p.hidden);
      sum = 0;
      for (int at = tid * kVector; at < p.hidden; at += step) {
        float x[kVector];
        to_floats(load_raw(residual, at, p.hidden, p.aligned), x);
        sum = subtract(x, mean, at, p.hidden, sum);
      }
    }
    const float factor = p.how.weight == nullptr ? 1.0F : norm_factor(sum, p.hidden, p.how.eps, scratch);
    for (int at = tid * kVector; at < p.hidden; at += step) {
      float x[kVector];
      to_floats(load_raw(residual, at, p.hidden, p.aligned), x);
      if (p.how.subtract_mean) subtract(x, mean, at, p.hidden, 0);
      if (p.how.weight != nullptr) normalise(x, factor, load_raw(p.how.weight, at, p.hidden, p.aligned));
      store_floats(out, at, p.hidden, p.aligned, x);
    }
  }
}

struct SquaresParams {
  float* sums = nullptr;  // [rows, 2]
  const void* qkv = nullptr;
  std::int64_t stride = 0;
  int q_size = 0, k_size = 0;
  bool aligned = false;
};

// One block sums q of a row, another block sums k.
template <class T>
CHARONIA_KERNEL(kMaxNormThreads, 1)
void squares_kernel(const SquaresParams p) {
  CHARONIA_SHARED(float, scratch, [32]);
  dependency_trigger();
  dependency_wait();
  const auto row = static_cast<std::int64_t>(blockIdx.x);
  const bool is_q = blockIdx.y == 0;
  const int n = is_q ? p.q_size : p.k_size, step = static_cast<int>(blockDim.x) * kVector;
  const auto* const from = static_cast<const T*>(p.qkv) + row * p.stride + (is_q ? 0 : p.q_size);
  float sum = 0;
  for (int at = static_cast<int>(threadIdx.x) * kVector; at < n; at += step) {
    float x[kVector];
    to_floats(load_raw(from, at, n, p.aligned), x);
    sum = sum_of_squares(x, sum);
  }
  sum = block_sum(sum, scratch);
  if (threadIdx.x == 0) p.sums[2 * row + (is_q ? 0 : 1)] = sum;
}

struct GateParams {
  void* out = nullptr;
  std::int64_t out_stride = 0;
  const void* gate_up = nullptr;
  std::int64_t gate_up_stride = 0;
  int inter = 0;
  bool aligned = false;
  ops::Activation activation;
};

template <class T, ops::Activation::Kind kind>
CHARONIA_KERNEL(kThreads, 1)
void gate_kernel(const GateParams p) {
  dependency_trigger();
  dependency_wait();
  const auto row = static_cast<std::int64_t>(blockIdx.x);
  const int at = static_cast<int>(blockIdx.y * kThreads + threadIdx.x) * kVector;
  const auto* const in = static_cast<const T*>(p.gate_up) + row * p.gate_up_stride;
  const auto gates = load_raw(in, at, p.inter, p.aligned), ups = load_raw(in + p.inter, at, p.inter, p.aligned);
  float gate[kVector], up[kVector];
  to_floats(gates, gate);
  to_floats(ups, up);
  CHARONIA_UNROLL
  for (int i = 0; i < kVector; ++i) gate[i] = gated<kind>(p.activation, gate[i], up[i]);
  store_floats(static_cast<T*>(p.out) + row * p.out_stride, at, p.inter, p.aligned, gate);
}

// A block takes a row: first for its largest output, then for its codes.
struct GateCodesParams : GateParams {
  RowCodes codes;
};

template <class T, ops::Activation::Kind kind>
CHARONIA_KERNEL(kMaxNormThreads, 1)
void gate_codes_kernel(const GateCodesParams p) {
  CHARONIA_SHARED(float, scratch, [32]);
  dependency_trigger();
  dependency_wait();
  const auto row = static_cast<std::int64_t>(blockIdx.x);
  const auto* const in = static_cast<const T*>(p.gate_up) + row * p.gate_up_stride;
  const int first = static_cast<int>(threadIdx.x) * kVector, step = static_cast<int>(blockDim.x) * kVector;
  using Raw = decltype(load_raw(in, 0, 0, true));
  float greatest = 0;
  const auto compute = [&](const Raw& gates, const Raw& ups, float (&out)[kVector]) {
    float up[kVector];
    to_floats(gates, out);
    to_floats(ups, up);
    CHARONIA_UNROLL
    for (int i = 0; i < kVector; ++i) out[i] = gated<kind>(p.activation, out[i], up[i]);
    greatest = round_vector<T>(out, greatest);
  };
  // A thread keeps its first two vectors, which cover a row of 16384; the others are computed again.
  constexpr int kHeld = 2;
  Raw gates[kHeld], ups[kHeld];
  float held[kHeld][kVector];
  CHARONIA_UNROLL
  for (int i = 0; i < kHeld; ++i) {
    gates[i] = load_raw(in, first + i * step, p.inter, true);
    ups[i] = load_raw(in + p.inter, first + i * step, p.inter, true);
  }
  CHARONIA_UNROLL
  for (int i = 0; i < kHeld; ++i) {
    if (first + i * step < p.inter) compute(gates[i], ups[i], held[i]);
  }
  float other[kVector];
  const auto compute_at = [&](int at) {
    compute(load_raw(in, at, p.inter, true), load_raw(in + p.inter, at, p.inter, true), other);
  };
  for (int at = first + kHeld * step; at < p.inter; at += step) compute_at(at);
  const float scale = store_scale(p.codes, row, greatest, scratch);
  CHARONIA_UNROLL
  for (int i = 0; i < kHeld; ++i) {
    if (const int at = first + i * step; at < p.inter) store_codes(p.codes, row * p.inter + at, held[i], scale);
  }
  for (int at = first + kHeld * step; at < p.inter; at += step) {
    compute_at(at);
    store_codes(p.codes, row * p.inter + at, other, scale);
  }
}

struct SigmoidParams {
  void* x = nullptr;
  std::int64_t x_stride = 0;
  const void* gate = nullptr;
  std::int64_t gate_stride = 0;
  int cols = 0;
  bool aligned = false;
};

template <class T>
CHARONIA_KERNEL(kThreads, 1)
void sigmoid_kernel(const SigmoidParams p) {
  dependency_trigger();
  dependency_wait();
  const auto row = static_cast<std::int64_t>(blockIdx.x);
  const int at = static_cast<int>(blockIdx.y * kThreads + threadIdx.x) * kVector;
  T* const to = static_cast<T*>(p.x) + row * p.x_stride;
  const auto values = load_raw(to, at, p.cols, p.aligned);
  const auto gates = load_raw(static_cast<const T*>(p.gate) + row * p.gate_stride, at, p.cols, p.aligned);
  float x[kVector], gate[kVector];
  to_floats(values, x);
  to_floats(gates, gate);
  CHARONIA_UNROLL
  for (int i = 0; i < kVector; ++i) x[i] *= sigmoid(gate[i]);
  store_floats(to, at, p.cols, p.aligned, x);
}

struct GatedNormParams {
  void* out = nullptr;
  std::int64_t out_stride = 0;
  const void* x = nullptr;
  std::int64_t x_stride = 0;
  const void* gate = nullptr;
  std::int64_t gate_stride = 0;
  const float* weight = nullptr;
  float eps = 0;
  int head_dim = 0, heads = 0;
  bool aligned = false;
};

// A warp takes a head. The second read of x comes from the L1 cache.
template <class T>
CHARONIA_KERNEL(kThreads, 1)
void gated_norm_kernel(const GatedNormParams p) {
  dependency_trigger();
  dependency_wait();
  const auto row = static_cast<std::int64_t>(blockIdx.x);
  const int head = static_cast<int>(blockIdx.y) * (kThreads / kWarp) + warp_id();
  if (head >= p.heads) return;
  const auto first = static_cast<std::int64_t>(head) * p.head_dim;
  const auto* const from = static_cast<const T*>(p.x) + row * p.x_stride + first;
  const auto* const gates = static_cast<const T*>(p.gate) + row * p.gate_stride + first;
  T* const to = static_cast<T*>(p.out) + row * p.out_stride + first;
  float sum = 0;
  for (int at = lane_id() * kVector; at < p.head_dim; at += kWarp * kVector) {
    float x[kVector];
    to_floats(load_raw(from, at, p.head_dim, p.aligned), x);
    sum = sum_of_squares(x, sum);
  }
  const float factor = reciprocal_sqrt(warp_sum(sum) / static_cast<float>(p.head_dim) + p.eps);
  for (int at = lane_id() * kVector; at < p.head_dim; at += kWarp * kVector) {
    float x[kVector], gate[kVector];
    to_floats(load_raw(from, at, p.head_dim, p.aligned), x);
    to_floats(load_raw(gates, at, p.head_dim, p.aligned), gate);
    normalise(x, factor, load_raw(p.weight, at, p.head_dim, p.aligned));
    CHARONIA_UNROLL
    for (int i = 0; i < kVector; ++i) x[i] *= activation<ops::Activation::silu>(gate[i]);
    store_floats(to, at, p.head_dim, p.aligned, x);
  }
}

struct LogitsParams {
  float* logits = nullptr;
  std::int64_t stride = 0;
  int cols = 0;
  bool aligned = false;
  float scale = 1, cap = 0;
};

CHARONIA_KERNEL(kThreads, 1)
void scale_logits_kernel(const LogitsParams p) {
  dependency_trigger();
  dependency_wait();
  float* const row = p.logits + static_cast<std::int64_t>(blockIdx.x) * p.stride;
  const int at = static_cast<int>(blockIdx.y * kThreads + threadIdx.x) * kVector;
  float x[kVector];
  to_floats(load_raw(row, at, p.cols, p.aligned), x);
  CHARONIA_UNROLL
  for (int i = 0; i < kVector; ++i) x[i] *= p.scale;
  if (p.cap > 0) {
    CHARONIA_UNROLL
    for (int i = 0; i < kVector; ++i) x[i] = p.cap * tanhf(x[i] / p.cap);
  }
  store_floats(row, at, p.cols, p.aligned, x);
}

// out[row][shard] = in[shard][rows == null ? row : rows[row]], each `units` long; strides in units.
struct CopyParams {
  void* out = nullptr;
  std::int64_t out_stride = 0, out_shard = 0;
  const void* in = nullptr;
  std::int64_t in_stride = 0, in_shard = 0;
  const std::int32_t* rows = nullptr;      // of `in`; null: the same ones
  const std::int32_t* out_rows = nullptr;  // null: the same ones
  std::int64_t units = 0;
};

template <class Unit>
CHARONIA_KERNEL(kThreads, 1)
void copy_kernel(const CopyParams p) {
  dependency_trigger();
  dependency_wait();
  const auto row = static_cast<std::int64_t>(blockIdx.x), shard = static_cast<std::int64_t>(blockIdx.z);
  const std::int64_t from = p.rows == nullptr ? row : p.rows[row];
  const std::int64_t to = p.out_rows == nullptr ? row : p.out_rows[row];
  if (from < 0 || to < 0) return;
  auto* const out = static_cast<Unit*>(p.out) + to * p.out_stride + shard * p.out_shard;
  const auto* const in = static_cast<const Unit*>(p.in) + from * p.in_stride + shard * p.in_shard;
  const std::int64_t step = std::int64_t{gridDim.y} * kThreads;
  CHARONIA_UNROLL_BY(1)
  for (auto at = std::int64_t{blockIdx.y} * kThreads + threadIdx.x; at < p.units; at += step) out[at] = in[at];
}

struct ScatterParams {
  float* out = nullptr;
  std::int64_t out_stride = 0, cols = 0;
  const float* in = nullptr;
  std::int64_t in_stride = 0;
  const std::int32_t* columns = nullptr;  // [cols]
};

CHARONIA_KERNEL(kThreads, 1)
void scatter_kernel(const ScatterParams p) {
  dependency_trigger();
  dependency_wait();
  const auto row = static_cast<std::int64_t>(blockIdx.x);
  const auto at = static_cast<std::int64_t>(blockIdx.y) * kThreads + threadIdx.x;
  if (at >= p.cols) return;
  const auto from = p.columns[at];
  p.out[row * p.out_stride + at] = from < 0 ? ops::Operations::kNeverSampled : p.in[row * p.in_stride + from];
}

void require_type(const Tensor& tensor, DType type, std::string_view what) {
  if (tensor.dtype == type) return;
  throw Error(ErrorCode::internal, cat(what, " is ", to_string(tensor.dtype), " and must be ", to_string(type)));
}

bool aligned(const Tensor& tensor) { return cuda::aligned(tensor.data, tensor.stride, tensor.dtype); }

Launch over_vectors(std::int64_t rows, std::int64_t vectors) {
  return {.grid_x = static_cast<unsigned>(rows),
          .grid_y = static_cast<unsigned>(divide_up(vectors, kThreads)),
          .threads = kThreads};
}

void copy_rows(Stream& stream, std::string_view what, std::int64_t num_rows, int shards, DType type, CopyParams p) {
  const auto run = [&]<class Unit>(Unit) {
    auto launched = p;
    const auto per_unit = static_cast<std::int64_t>(sizeof(Unit) / size_of(type));
    for (auto* const n :
         {&launched.out_stride, &launched.out_shard, &launched.in_stride, &launched.in_shard, &launched.units}) {
      *n /= per_unit;
    }
    auto shape = over_vectors(num_rows, launched.units);
    shape.grid_y = std::min(shape.grid_y, 65535U);  // the limit of a grid; more units are only in large blocks of KV
    shape.grid_z = static_cast<unsigned>(shards);
    launch(stream, what, shape, copy_kernel<Unit>, launched);
  };
  bool wide = cuda::aligned(p.out, p.out_stride, type) && cuda::aligned(p.in, p.in_stride, type);
  for (const auto n : {p.out_shard, p.in_shard, p.units}) wide = wide && cuda::aligned(nullptr, n, type);
  if (wide) {
    run(uint4{});
  } else if (size_of(type) == sizeof(std::uint32_t)) {
    run(std::uint32_t{});
  } else {
    run(std::uint16_t{});
  }
}

}  // namespace

void embed(Stream& stream, const Tensor& out, const TableRows& table, const std::int32_t* ids,
           const std::int32_t* sampled, float scale) {
  const EmbedParams p{.out = out.data,
                      .out_stride = out.stride,
                      .table = table,
                      .ids = ids,
                      .sampled = sampled,
                      .scale = scale,
                      .hidden = static_cast<int>(out.cols),
                      .aligned = out.cols % kVector == 0 && aligned(out) &&
                                 cuda::aligned(table.data, table.stride, table.type)};
  require_type(out, DType::f32, "embed: out");
  with_type(table.type, [&]<class Table>(Table) {
    launch(stream, "embed", over_vectors(out.rows, divide_up(out.cols, kVector)), embed_kernel<Table>, p);
  });
}

void add_embedding(Stream& stream, const Tensor& x, const void* table, const std::int32_t* ids,
                   const std::int32_t* sampled, const ops::EmbeddingSum& how) {
  const EmbeddingSumParams p{.x = x.data,
                             .stride = x.stride,
                             .table = table,
                             .ids = ids,
                             .sampled = sampled,
                             .how = how,
                             .groups = static_cast<int>(x.cols / how.size),
                             .aligned = how.size % kVector == 0 && aligned(x) &&
                                        cuda::aligned(table, x.cols, x.dtype) &&
                                        cuda::aligned(how.weight, 0, DType::f32)};
  with_type(x.dtype, [&]<class T>(T) {
    launch(stream, "add_embedding",
           {.grid_x = static_cast<unsigned>(x.rows),
            .grid_y = static_cast<unsigned>(divide_up(p.groups, kThreads / kWarp)),
            .threads = kThreads},
           add_embedding_kernel<T>, p);
  });
}

namespace {

NormParams norm_params(const Tensor& out, const Tensor& residual, const Tensor& delta, const ops::NormParams& how) {
  const bool adds = delta.data != nullptr, normed = adds && how.delta_weight != nullptr;
  return {.out = out.data,
          .out_stride = out.stride,
          .residual = residual.data,
          .residual_stride = residual.stride,
          .delta = delta.data,
          .delta_stride = delta.stride,
          .how = how,
          .hidden = static_cast<int>(residual.cols),
          .aligned = residual.cols % kVector == 0 && aligned(out) && aligned(residual) && (!adds || aligned(delta)) &&
                     cuda::aligned(how.weight, 0, DType::f32) &&
                     (!normed || cuda::aligned(how.delta_weight, 0, DType::f32))};
}

}  // namespace

bool rms_norm_codes(Stream& stream, const RowCodes& codes, const Tensor& out, const Tensor& residual,
                    const Tensor& delta, const ops::NormParams& how) {
  const NormCodesParams p{norm_params(out, residual, delta, how), codes};
  const int threads = norm_threads(residual.cols);
  const auto vectors = divide_up(residual.cols, static_cast<std::int64_t>(threads) * kVector);
  if (!p.aligned || vectors > kMaxHeld || size_of(out.dtype) != 2) return false;
  require_type(residual, DType::f32, "rms_norm: residual");
  if (delta.data != nullptr) require_type(delta, out.dtype, "rms_norm: delta");
  with_half(out.dtype, [&]<class T>(T) {
    launch(stream, "rms_norm",
           {.grid_x = static_cast<unsigned>(residual.rows), .threads = static_cast<unsigned>(threads)},
           vectors == 1 ? rms_norm_kernel<T, 1, false, true> : rms_norm_kernel<T, kMaxHeld, false, true>, p);
  });
  return true;
}

void rms_norm(Stream& stream, const Tensor& out, const Tensor& residual, const Tensor& delta,
              const ops::NormParams& how) {
  const bool adds = delta.data != nullptr, normed = adds && how.delta_weight != nullptr;
  const auto p = norm_params(out, residual, delta, how);
  const int threads = norm_threads(residual.cols);
  const auto vectors = divide_up(residual.cols, static_cast<std::int64_t>(threads) * kVector);
  const Launch shape{.grid_x = static_cast<unsigned>(residual.rows), .threads = static_cast<unsigned>(threads)};
  const auto start = [&](auto* kernel) { launch(stream, "rms_norm", shape, kernel, p); };
  require_type(residual, DType::f32, "rms_norm: residual");
  if (adds) require_type(delta, out.dtype, "rms_norm: delta");
  with_type(out.dtype, [&]<class T>(T) {
    if (!normed) {
      start(vectors == 1          ? rms_norm_kernel<T, 1, false>
            : vectors <= kMaxHeld ? rms_norm_kernel<T, kMaxHeld, false>
                                  : rms_norm_kernel<T, 0, false>);
    } else {  // two vectors of both would not fit into a thread's registers
      start(vectors == 1 ? rms_norm_kernel<T, 1, true> : rms_norm_kernel<T, 0, true>);
    }
  });
}

void gated_activation(Stream& stream, const Tensor& out, const Tensor& gate_up, ops::Activation how) {
  const GateParams p{.out = out.data,
                     .out_stride = out.stride,
                     .gate_up = gate_up.data,
                     .gate_up_stride = gate_up.stride,
                     .inter = static_cast<int>(out.cols),
                     .aligned = out.cols % kVector == 0 && aligned(out) && aligned(gate_up),
                     .activation = how};
  require_type(out, gate_up.dtype, "gated_activation: out");
  with_type(out.dtype, [&]<class T>(T) {
    const auto kernel = how.kind == ops::Activation::silu        ? gate_kernel<T, ops::Activation::silu>
                        : how.kind == ops::Activation::gelu_tanh ? gate_kernel<T, ops::Activation::gelu_tanh>
                                                                 : gate_kernel<T, ops::Activation::clamped_swiglu>;
    launch(stream, "gated_activation", over_vectors(out.rows, divide_up(out.cols, kVector)), kernel, p);
  });
}

bool gated_activation_codes(Stream& stream, const RowCodes& codes, const Tensor& out, const Tensor& gate_up,
                            ops::Activation how) {
  const GateCodesParams p{{.gate_up = gate_up.data,
                           .gate_up_stride = gate_up.stride,
                           .inter = static_cast<int>(out.cols),
                           .aligned = out.cols % kVector == 0 && aligned(gate_up),
                           .activation = how},
                          codes};
  if (!p.aligned || size_of(out.dtype) != 2 || how.kind == ops::Activation::clamped_swiglu) return false;
  require_type(out, gate_up.dtype, "gated_activation: out");
  with_half(out.dtype, [&]<class T>(T) {
    launch(stream, "gated_activation",
           {.grid_x = static_cast<unsigned>(out.rows), .threads = static_cast<unsigned>(norm_threads(out.cols))},
           how.kind == ops::Activation::silu ? gate_codes_kernel<T, ops::Activation::silu>
                                              : gate_codes_kernel<T, ops::Activation::gelu_tanh>,
           p);
  });
  return true;
}

void sigmoid_gate(Stream& stream, const Tensor& x, const Tensor& gate) {
  const SigmoidParams p{.x = x.data,
                        .x_stride = x.stride,
                        .gate = gate.data,
                        .gate_stride = gate.stride,
                        .cols = static_cast<int>(x.cols),
                        .aligned = x.cols % kVector == 0 && aligned(x) && aligned(gate)};
  require_type(gate, x.dtype, "sigmoid_gate: gate");
  with_type(x.dtype, [&]<class T>(T) {
    launch(stream, "sigmoid_gate", over_vectors(x.rows, divide_up(x.cols, kVector)), sigmoid_kernel<T>, p);
  });
}

void gated_norm(Stream& stream, const Tensor& out, const Tensor& x, const Tensor& gate, const float* weight, float eps,
                int head_dim) {
  const auto heads = out.cols / head_dim;
  const GatedNormParams p{.out = out.data,
                          .out_stride = out.stride,
                          .x = x.data,
                          .x_stride = x.stride,
                          .gate = gate.data,
                          .gate_stride = gate.stride,
                          .weight = weight,
                          .eps = eps,
                          .head_dim = head_dim,
                          .heads = static_cast<int>(heads),
                          .aligned = head_dim % kVector == 0 && aligned(out) && aligned(x) && aligned(gate) &&
                                     cuda::aligned(weight, 0, DType::f32)};
  require_type(x, out.dtype, "gated_norm: x");
  require_type(gate, out.dtype, "gated_norm: gate");
  const Launch shape{.grid_x = static_cast<unsigned>(out.rows),
                     .grid_y = static_cast<unsigned>(divide_up(heads, kThreads / kWarp)),
                     .threads = kThreads};
  with_type(out.dtype, [&]<class T>(T) { launch(stream, "gated_norm", shape, gated_norm_kernel<T>, p); });
}

void qk_squares(Stream& stream, float* sums, const Tensor& qkv, std::int64_t q_size, std::int64_t k_size) {
  const SquaresParams p{.sums = sums,
                        .qkv = qkv.data,
                        .stride = qkv.stride,
                        .q_size = static_cast<int>(q_size),
                        .k_size = static_cast<int>(k_size),
                        .aligned = q_size % kVector == 0 && k_size % kVector == 0 && aligned(qkv)};
  const Launch shape{.grid_x = static_cast<unsigned>(qkv.rows),
                     .grid_y = 2,
                     .threads = static_cast<unsigned>(norm_threads(std::max(q_size, k_size)))};
  with_type(qkv.dtype, [&]<class T>(T) { launch(stream, "qk_squares", shape, squares_kernel<T>, p); });
}

void scale_logits(Stream& stream, const Tensor& logits, float scale, float cap) {
  const LogitsParams p{.logits = static_cast<float*>(logits.data),
                       .stride = logits.stride,
                       .cols = static_cast<int>(logits.cols),
                       .aligned = logits.cols % kVector == 0 && aligned(logits),
                       .scale = scale,
                       .cap = cap};
  launch(stream, "scale_logits", over_vectors(logits.rows, divide_up(logits.cols, kVector)), scale_logits_kernel, p);
}

void gather_rows(Stream& stream, const Tensor& out, const Tensor& in, const std::int32_t* rows) {
  copy_rows(stream, "gather_rows", out.rows, 1, out.dtype,
            {.out = out.data,
             .out_stride = out.stride,
             .in = in.data,
             .in_stride = in.stride,
             .rows = rows,
             .units = out.cols});
}

void store_rows(Stream& stream, const Tensor& out, const Tensor& in, const std::int32_t* rows) {
  copy_rows(stream, "store_rows", in.rows, 1, in.dtype,
            {.out = out.data,
             .out_stride = out.stride,
             .in = in.data,
             .in_stride = in.stride,
             .out_rows = rows,
             .units = in.cols});
}

void scatter_logits(Stream& stream, const Tensor& out, const Tensor& in, const std::int32_t* columns) {
  const ScatterParams p{.out = static_cast<float*>(out.data),
                        .out_stride = out.stride,
                        .cols = out.cols,
                        .in = static_cast<const float*>(in.data),
                        .in_stride = in.stride,
                        .columns = columns};
  launch(stream, "scatter_logits", over_vectors(out.rows, out.cols), scatter_kernel, p);
}

void side_by_side(Stream& stream, const Tensor& out, const void* shards, int ranks) {
  const auto cols = out.cols / ranks;
  copy_rows(stream, "side_by_side", out.rows, ranks, out.dtype,
            {.out = out.data,
             .out_stride = out.stride,
             .out_shard = cols,
             .in = shards,
             .in_stride = cols,
             .in_shard = out.rows * cols,
             .units = cols});
}

void copy_block(Stream& stream, const CacheLayer& first, int layers, std::size_t layer_bytes, std::int32_t from,
                std::int32_t to) {
  // A block always has an even number of bytes.
  const auto element = static_cast<std::int64_t>(size_of(DType::f16));
  auto* const base = static_cast<std::byte*>(first.data);
  const auto stride = static_cast<std::int64_t>(layer_bytes) / element;
  copy_rows(stream, "copy_blocks", layers, 1, DType::f16,
            {.out = base + to * first.block_bytes(),
             .out_stride = stride,
             .in = base + from * first.block_bytes(),
             .in_stride = stride,
             .units = first.block_bytes() / element});
}

}  // namespace charonia::cuda
