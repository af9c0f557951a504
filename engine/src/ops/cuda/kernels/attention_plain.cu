// Attention of any shape and element types, in float: for fp32 models, whose attention must be exact, and for head
// sizes without tiles.
//
//   q     [rows, heads, head_dim], rows q_stride apart; out likewise
//   cache [block][k, v][kv head][slot][head_dim], or quantised: elements are then round(integer * scale + zero) to q's
//         type, or FP8 numbers, as in the tensor-core kernels
//
// A warp takes one row and one query head and all its positions in order, 32 at a time: scores with one position per
// lane, a running maximum and sum, then out with columns by lanes. k and v are read again for every row and head, so
// the time depends on the caches' bandwidth and on instructions; nothing is tuned here. Results depend only on the row.
// Positions before a row's window are not read.
//
// Shared memory of a warp: q [head_dim], out [head_dim], p [32], in float, and cache rows [32].
#include <algorithm>

#include "base/text.h"
#include "charonia/error.h"
#include "ops/cuda/device/portable.h"
#include "ops/cuda/kernels/attention_kernels.h"
#include "ops/cuda/kernels/element_types.h"

namespace charonia::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kPlainBlocks = 4;  // per SM

struct PlainParams {
  AttentionParams attention;
  DType q_type = DType::f32, out_type = DType::f32;
  int rows_per_item = 1;
};

std::size_t warp_bytes(int head_dim) { return static_cast<std::size_t>(2 * head_dim + 2 * kWarp) * 4; }

CHARONIA_DEVICE float load(const void* data, DType type, std::int64_t i) {
  if (type == DType::f32) return static_cast<const float*>(data)[i];
  if (type == DType::bf16) return to_float(static_cast<const bf16*>(data)[i]);
  return to_float(static_cast<const f16*>(data)[i]);
}

CHARONIA_DEVICE void store(void* data, DType type, std::int64_t i, float x) {
  if (type == DType::f32) {
    static_cast<float*>(data)[i] = x;
  } else if (type == DType::bf16) {
    static_cast<bf16*>(data)[i] = from_float<bf16>(x);
  } else {
    static_cast<f16*>(data)[i] = from_float<f16>(x);
  }
}

// A row of the cache, counted from the layer's first row.
template <class T>
class CacheVector {
 public:
  CHARONIA_DEVICE CacheVector(const PlainParams& p, std::int64_t row)
      : at_(static_cast<const T*>(p.attention.cache.data) + row * p.attention.cache.head_dim) {}
  CHARONIA_DEVICE float operator[](int d) const { return to_float(at_[d]); }

 private:
  const T* at_;
};

struct Quantised {};
template <>
class CacheVector<Quantised> {
 public:
  CHARONIA_DEVICE CacheVector(const PlainParams& p, std::int64_t row)
      : bits_(p.attention.cache.quant_bits), half_(p.attention.cache.head_dim / 2), type_(p.q_type) {
    const auto& cache = p.attention.cache;
    const auto block = row / (2 * cache.half_rows());
    const int in_block = static_cast<int>(row % (2 * cache.half_rows()));
    const auto* const bytes = static_cast<const unsigned char*>(cache.data);
    integers_ = bytes + cache.integers_at(block, in_block);
    if (!ops::kv_holds_integers(bits_)) return;
    const auto* const scale = reinterpret_cast<const f16*>(bytes + cache.scale_at(block, in_block));
    scale_ = to_float(scale[0]);
    zero_ = to_float(scale[1]);
  }
  CHARONIA_DEVICE float operator[](int d) const {
    if (!ops::kv_holds_integers(bits_)) {
      return to_float(f16{static_cast<std::uint16_t>(f16_from_e4m3(integers_[d], 0, 0))});
    }
    const unsigned q = bits_ == 8 ? integers_[d] : integers_[d % half_] >> (d < half_ ? 0 : 4) & 15U;
    const float x = fmaf(static_cast<float>(q), scale_, zero_);
    return type_ == DType::f32    ? x
           : type_ == DType::bf16 ? to_float(from_float<bf16>(x))
                                  : to_float(from_float<f16>(x));
  }

 private:
  const unsigned char* integers_;
  float scale_ = 0, zero_ = 0;
  int bits_, half_;
  DType type_;
};

template <class T>
CHARONIA_KERNEL(kThreads, 1)
void plain_kernel(const PlainParams params) {
  const auto& p = params.attention;
  const int dim = p.cache.head_dim, lane = lane_id();
  float* const q = reinterpret_cast<float*>(dynamic_shared()) + warp_id() * (2 * dim + 2 * kWarp);
  float* const out = q + dim;
  float* const weights = out + dim;
  int* const cache_rows = reinterpret_cast<int*>(weights + kWarp);

  dependency_trigger();
  dependency_wait();
  const std::int64_t units = static_cast<std::int64_t>(*p.count) * params.rows_per_item * p.heads;
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * (kThreads / kWarp);
  for (std::int64_t index = static_cast<std::int64_t>(blockIdx.x) * (kThreads / kWarp) + warp_id(); index < units;
       index += step) {
    const int head = static_cast<int>(index % p.heads);
    const int of_item = static_cast<int>(index / p.heads % params.rows_per_item);
    const AttentionItem item = p.items[index / p.heads / params.rows_per_item];
    if (item.split != 0 || of_item >= item.num_rows) continue;
    const int row = item.first_row + of_item, positions = item.first_position + of_item + 1;
    const float slope = p.score_mod.slopes == nullptr ? 0.0F : load_readonly(p.score_mod.slopes + head);
    for (int d = lane; d < dim; d += kWarp) {
      q[d] = load(p.q, params.q_type, row * p.q_stride + head * dim + d);
      out[d] = 0;
    }
    __syncwarp();
    float maximum = -__builtin_inff(), sum = 0;
    for (int begin = max(0, positions - p.score_mod.window); begin < positions; begin += kWarp) {
      const int position = begin + lane, here = min(kWarp, positions - begin);
      float score = -__builtin_inff();
      if (lane < here) {
        const int block = load_readonly(p.tables + item.table + position / p.cache.block_len);
        const int cache_row =
            (block * 2 * p.cache.kv_heads + head / p.group) * p.cache.block_len + position % p.cache.block_len;
        const CacheVector<T> k(params, cache_row);
        score = 0;
        for (int d = 0; d < dim; ++d) score = fmaf(q[d], k[d], score);
        if (p.score_mod.changes) {
          score *= p.score_mod.scale;
          if (p.score_mod.cap != 0) score = p.score_mod.cap * tanhf(score / p.score_mod.cap);
          score = fmaf(slope, static_cast<float>(position + 1 - positions), score);
        }
        score *= p.scale;
        cache_rows[lane] = cache_row;
      }
      const float now = fmaxf(maximum, warp_max(score));
      const float weight = lane < here ? exp2f(score - now) : 0.0F, factor = exp2f(maximum - now);
      weights[lane] = weight;
      sum = fmaf(sum, factor, warp_sum(weight));
      maximum = now;
      __syncwarp();
      for (int d = lane; d < dim; d += kWarp) {
        float x = out[d] * factor;
        for (int i = 0; i < here; ++i) {
          const CacheVector<T> v(params, static_cast<std::int64_t>(cache_rows[i]) + p.cache.half_rows());
          x = fmaf(weights[i], v[d], x);
        }
        out[d] = x;
      }
      __syncwarp();
    }
    if (p.score_mod.sinks != nullptr) {
      sum += exp2f(fmaf(load_readonly(p.score_mod.sinks + head), kLog2E, -maximum));
    }
    const float scale = p.v_scales == nullptr ? 1.0F : load_readonly(p.v_scales + head / p.group);
    for (int d = lane; d < dim; d += kWarp) {
      store(p.out, params.out_type, row * p.out_stride + head * dim + d, out[d] / sum * scale);
    }
  }
}

template <class T>
void start(Stream& stream, const DeviceInfo& device, const PlainParams& params, std::int64_t items) {
  constexpr int kWarps = kThreads / kWarp;
  const auto bytes = kWarps * warp_bytes(params.attention.cache.head_dim);
  if (bytes > device.shared_bytes) {
    throw Error(ErrorCode::unsupported, cat("attention over heads of ", params.attention.cache.head_dim, " elements"));
  }
  const auto blocks = std::min<std::int64_t>(divide_up(items * params.rows_per_item * params.attention.heads, kWarps),
                                             std::int64_t{device.sms} * kPlainBlocks);
  launch(stream, "attention (plain)",
         {.grid_x = static_cast<unsigned>(blocks), .threads = kThreads, .dynamic_shared_bytes = bytes}, plain_kernel<T>,
         params);
}

}  // namespace

void attention_plain(Stream& stream, const DeviceInfo& device, DType q_type, DType out_type,
                     const AttentionParams& params, std::int64_t items, int rows_per_item) {
  const PlainParams plain{params, q_type, out_type, rows_per_item};
  if (params.cache.quant_bits != 0) return start<Quantised>(stream, device, plain, items);
  with_type(params.cache.dtype, [&]<class T>(T) { start<T>(stream, device, plain, items); });
}

}  // namespace charonia::cuda
