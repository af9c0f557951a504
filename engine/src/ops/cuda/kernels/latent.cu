// The store of latents and attention over them, in float.
//
//   latent   [rows, row_dim], the latent and then the rotated elements of k; q [rows, heads * (plain_dim + rotary_dim)]
//   queries  [rows, heads * row_dim]; out [rows, heads * values]
//   cache    [block][slot][row_dim]
//
// latent_store: a thread block takes a row. It sums the squares of the latent, writes the row of the cache, and divides
// q. Memory bound: every tensor is read or written once.
//
// latent_attention: a thread block takes one row and kHeads query heads, and all positions in order, kTile at a time.
// The latents of a tile are loaded into shared memory once for all its heads, and serve as keys and as values. A warp
// computes one head: scores with one position after another, summed over the lanes, a running maximum and sum, then out
// with columns by lanes. The products use no tensor cores, and a long context is not divided over thread blocks. So
// arithmetic is the bound: about 2 * row_dim * positions multiplications for a row and a head. Not measured.
//
// Shared memory: queries [kHeads][row_dim], out [kHeads][values] and weights [kHeads][kTile] in float, then latents
// [kTile][row_dim].
#include <algorithm>

#include "base/text.h"
#include "charonia/error.h"
#include "ops/cuda/device/portable.h"
#include "ops/cuda/kernels/element_types.h"
#include "ops/cuda/kernels/latent.h"

namespace charonia::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kHeads = kThreads / kWarp;  // of a thread block
constexpr int kTile = 16;                 // positions
constexpr int kLatentBlocks = 2;          // per SM
static_assert(kTile <= kWarp);

struct LatentStore {
  const void* latent = nullptr;
  const void* q = nullptr;
  void* queries = nullptr;
  void* plain = nullptr;
  void* cache = nullptr;
  std::int64_t latent_stride = 0, q_stride = 0, queries_stride = 0, plain_stride = 0;
  int heads = 0, plain_dim = 0, rotary_dim = 0, latent_dim = 0;
  bool interleaved = false;
  const float* norm = nullptr;
  float norm_eps = 0;
  const float* cos_sin = nullptr;
  const float* q_scale = nullptr;
  const std::int32_t* positions = nullptr;
  const std::int32_t* rotary_rows = nullptr;
  const std::int32_t* kv_slots = nullptr;
};

// Element d of `from` [rotary_dim] after the rotation.
template <class T>
CHARONIA_DEVICE float rotated(const LatentStore& p, const float* angles, const T* from, int d) {
  const int half = p.rotary_dim / 2, i = p.interleaved ? d / 2 : d % half;
  const bool first = p.interleaved ? d % 2 == 0 : d < half;
  const float x = to_float(from[p.interleaved ? 2 * i : i]), y = to_float(from[p.interleaved ? 2 * i + 1 : i + half]);
  const float cosine = load_readonly(angles + i), sine = load_readonly(angles + half + i);
  return first ? fmaf(x, cosine, -(y * sine)) : fmaf(y, cosine, x * sine);
}

template <class T>
CHARONIA_KERNEL(kThreads, 1)
void latent_store_kernel(const LatentStore p) {
  CHARONIA_SHARED(float, scratch, [kWarp]);
  dependency_trigger();
  dependency_wait();
  const auto row = static_cast<std::int64_t>(blockIdx.x);
  const int thread = static_cast<int>(threadIdx.x), row_dim = p.latent_dim + p.rotary_dim;
  const float* const angles = p.cos_sin + static_cast<std::int64_t>(load_readonly(p.rotary_rows + row)) * p.rotary_dim;
  const T* const latent = static_cast<const T*>(p.latent) + row * p.latent_stride;
  float sum = 0;
  for (int d = thread; d < p.latent_dim; d += kThreads) {
    const float x = to_float(latent[d]);
    sum = fmaf(x, x, sum);
  }
  const float factor = reciprocal_sqrt(block_sum(sum, scratch) / static_cast<float>(p.latent_dim) + p.norm_eps);
  const int slot = load_readonly(p.kv_slots + row);
  T* const to = static_cast<T*>(p.cache) + static_cast<std::int64_t>(slot) * row_dim;
  for (int d = thread; slot >= 0 && d < row_dim; d += kThreads) {
    to[d] = from_float<T>(d < p.latent_dim ? to_float(latent[d]) * factor * load_readonly(p.norm + d)
                                           : rotated(p, angles, latent + p.latent_dim, d - p.latent_dim));
  }

  const float scale = p.q_scale == nullptr ? 1.0F : load_readonly(p.q_scale + load_readonly(p.positions + row));
  const int head_dim = p.plain_dim + p.rotary_dim;
  const T* const q = static_cast<const T*>(p.q) + row * p.q_stride;
  T* const queries = static_cast<T*>(p.queries) + row * p.queries_stride + p.latent_dim;
  T* const plain = static_cast<T*>(p.plain) + row * p.plain_stride;
  for (int i = thread; i < p.heads * head_dim; i += kThreads) {
    const int head = i / head_dim, d = i % head_dim;
    if (d < p.plain_dim) {
      plain[head * p.plain_dim + d] = from_float<T>(to_float(q[i]) * scale);
    } else {
      const float x = rotated(p, angles, q + head * head_dim + p.plain_dim, d - p.plain_dim);
      queries[head * row_dim + d - p.plain_dim] = from_float<T>(x * scale);
    }
  }
}

struct LatentAttention {
  const AttentionItem* items = nullptr;
  const std::int32_t* count = nullptr;
  const std::int32_t* tables = nullptr;
  const void* q = nullptr;
  void* out = nullptr;
  const void* cache = nullptr;
  std::int64_t q_stride = 0, out_stride = 0;
  int heads = 0, row_dim = 0, values = 0, block_len = 0, rows_per_item = 1;
  float scale = 1;  // includes log2(e)
};

template <class T>
CHARONIA_KERNEL(kThreads, 1)
void latent_attention_kernel(const LatentAttention p) {
  float* const q = reinterpret_cast<float*>(dynamic_shared());
  float* const sums = q + kHeads * p.row_dim;
  float* const weights = sums + kHeads * p.values;
  T* const tile = reinterpret_cast<T*>(weights + kHeads * kTile);
  const int lane = lane_id(), warp = warp_id();
  float* const my_q = q + warp * p.row_dim;
  float* const my_sums = sums + warp * p.values;
  float* const my_weights = weights + warp * kTile;
  dependency_trigger();
  dependency_wait();

  const int groups = (p.heads + kHeads - 1) / kHeads;
  const auto units = static_cast<std::int64_t>(*p.count) * p.rows_per_item * groups;
  for (std::int64_t unit = blockIdx.x; unit < units; unit += gridDim.x) {
    const int head = static_cast<int>(unit % groups) * kHeads + warp;
    const int of_item = static_cast<int>(unit / groups % p.rows_per_item);
    const AttentionItem item = p.items[unit / groups / p.rows_per_item];
    if (item.split != 0 || of_item >= item.num_rows) continue;
    const int row = item.first_row + of_item, positions = item.first_position + of_item + 1;
    const bool mine = head < p.heads;
    const T* const from = static_cast<const T*>(p.q) + row * p.q_stride + static_cast<std::int64_t>(head) * p.row_dim;
    for (int d = lane; d < p.row_dim; d += kWarp) my_q[d] = mine ? to_float(from[d]) : 0.0F;
    for (int d = lane; d < p.values; d += kWarp) my_sums[d] = 0;
    float maximum = -__builtin_inff(), sum = 0;
    for (int begin = 0; begin < positions; begin += kTile) {
      const int here = min(kTile, positions - begin);
      __syncthreads();  // the last tile is no longer read
      for (int i = warp; i < here; i += kThreads / kWarp) {
        const int position = begin + i, block = load_readonly(p.tables + item.table + position / p.block_len);
        const T* const latent = static_cast<const T*>(p.cache) +
                                (static_cast<std::int64_t>(block) * p.block_len + position % p.block_len) * p.row_dim;
        for (int d = lane; d < p.row_dim; d += kWarp) tile[i * p.row_dim + d] = latent[d];
      }
      __syncthreads();
      float score = -__builtin_inff();  // of position `lane` of the tile
      for (int i = 0; i < here; ++i) {
        float product = 0;
        for (int d = lane; d < p.row_dim; d += kWarp) {
          product = fmaf(my_q[d], to_float(tile[i * p.row_dim + d]), product);
        }
        product = warp_sum(product) * p.scale;
        if (lane == i) score = product;
      }
      const float now = fmaxf(maximum, warp_max(score));
      const float weight = lane < here ? exp2f(score - now) : 0.0F, factor = exp2f(maximum - now);
      sum = fmaf(sum, factor, warp_sum(weight));
      maximum = now;
      if (lane < kTile) my_weights[lane] = weight;
      __syncwarp();
      for (int d = lane; d < p.values; d += kWarp) {
        float x = my_sums[d] * factor;
        for (int i = 0; i < here; ++i) x = fmaf(my_weights[i], to_float(tile[i * p.row_dim + d]), x);
        my_sums[d] = x;
      }
    }
    T* const to = static_cast<T*>(p.out) + row * p.out_stride + static_cast<std::int64_t>(head) * p.values;
    for (int d = lane; mine && d < p.values; d += kWarp) to[d] = from_float<T>(my_sums[d] / sum);
  }
}

}  // namespace

void latent_store(Stream& stream, const Tensor& queries, const Tensor& plain, const Tensor& q, const Tensor& latent,
                  const ops::LatentParams& how, const CacheLayer& cache, int heads, const std::int32_t* positions,
                  const std::int32_t* rotary_rows, const std::int32_t* kv_slots) {
  const LatentStore params{.latent = latent.data,
                           .q = q.data,
                           .queries = queries.data,
                           .plain = plain.data,
                           .cache = cache.data,
                           .latent_stride = latent.stride,
                           .q_stride = q.stride,
                           .queries_stride = queries.stride,
                           .plain_stride = plain.stride,
                           .heads = heads,
                           .plain_dim = static_cast<int>(plain.cols) / heads,
                           .rotary_dim = how.rotary_dim,
                           .latent_dim = latent_row(cache) - how.rotary_dim,
                           .interleaved = how.interleaved,
                           .norm = how.norm,
                           .norm_eps = how.norm_eps,
                           .cos_sin = how.cos_sin,
                           .q_scale = how.q_scale,
                           .positions = positions,
                           .rotary_rows = rotary_rows,
                           .kv_slots = kv_slots};
  with_type(cache.dtype, [&]<class T>(T) {
    launch(stream, "latent_store", {.grid_x = static_cast<unsigned>(latent.rows), .threads = kThreads},
           latent_store_kernel<T>, params);
  });
}

void latent_attention(Stream& stream, const DeviceInfo& device, const Tensor& out, const Tensor& queries,
                      const CacheLayer& cache, const AttentionShape& shape, float scale, const AttentionWork& work) {
  LatentAttention params{.tables = work.block_tables,
                         .q = queries.data,
                         .out = out.data,
                         .cache = cache.data,
                         .q_stride = queries.stride,
                         .out_stride = out.stride,
                         .heads = shape.heads,
                         .row_dim = latent_row(cache),
                         .values = static_cast<int>(out.cols) / shape.heads,
                         .block_len = cache.block_len,
                         .scale = scale * kLog2E};
  const auto bytes = static_cast<std::size_t>(kHeads * (params.row_dim + params.values + kTile)) * sizeof(float) +
                     static_cast<std::size_t>(kTile * params.row_dim) * size_of(cache.dtype);
  if (bytes > device.shared_bytes) {
    throw Error(ErrorCode::unsupported, cat("latent attention over latents of ", params.row_dim,
                                            " elements needs more shared memory than this GPU has: set device = cpu"));
  }
  const auto run = [&](const AttentionItem* items, const std::int32_t* count, std::int64_t max_items, int rows) {
    if (max_items == 0) return;
    params.items = items;
    params.count = count;
    params.rows_per_item = rows;
    const auto units = max_items * rows * divide_up(shape.heads, kHeads);
    const auto blocks = std::min<std::int64_t>(units, std::int64_t{device.sms} * kLatentBlocks);
    with_type(cache.dtype, [&]<class T>(T) {
      launch(stream, "latent attention",
             {.grid_x = static_cast<unsigned>(blocks), .threads = kThreads, .dynamic_shared_bytes = bytes},
             latent_attention_kernel<T>, params);
    });
  };
  run(work.decode, work.counts, work.max_decode, 1);
  run(work.prefill, work.counts + 1, work.max_prefill, shape.item_rows());
}

}  // namespace charonia::cuda
