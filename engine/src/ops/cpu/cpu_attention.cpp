// Rotation, the k/v store and attention: how a step's rows are spread over threads.
#include <algorithm>
#include <memory>

#include "base/text.h"
#include "charonia/error.h"
#include "ops/cpu/cpu_kv_cache.h"
#include "ops/cpu/cpu_ops.h"

namespace charonia::ops::cpu {
namespace {

constexpr std::int64_t kSmallAttention = 65536;  // multiplications
constexpr std::int64_t kSmallRotation = 8192;    // elements

void require(bool holds, std::string_view op, std::string_view what) {
  if (!holds) throw Error(ErrorCode::internal, cat("ops::", op, ": ", what));
}

// What begin_step() could not check, for want of the cache. Every layer sees the same tables: they are looked through
// once a step.
void check_tables(const AttentionBatch& batch, const KvCache& cache, int layer, std::string_view op) {
  require(layer >= 0 && layer < cache.layout().num_layers, op, "no such layer");
  const int block_len = cache.layout().block_len;
  for (std::size_t s = 0; s + 1 < batch.query_start.size(); ++s) {
    const auto begin = batch.query_start[s], end = batch.query_start[s + 1];
    if (begin == end) continue;
    const auto last = batch.positions[static_cast<std::size_t>(end) - 1];
    require(last / block_len < batch.table_stride, op, "a block table is too short for its sequence");
    const auto* table = batch.block_tables.data() + static_cast<std::int64_t>(s) * batch.table_stride;
    for (int b = layer == 0 ? 0 : last / block_len; b <= last / block_len; ++b) {
      require(table[b] >= 0 && table[b] < cache.num_blocks(), op, cat("no block ", table[b]));
    }
  }
}

// One row's k and v of one head into slot `slot` of a block; `kv` points to that head's k.
template <class T>
void store_kv(T* kv, int slot, int block_len, int head_dim, const T* k, const T* v) {
  for (int d = 0; d < head_dim; ++d) kv[static_cast<std::int64_t>(d) * block_len + slot] = k[d];
  std::copy_n(v, head_dim,
              kv + static_cast<std::int64_t>(head_dim) * block_len + static_cast<std::int64_t>(slot) * head_dim);
}

// Floats of this thread, aligned to a cache line.
float* scratch_floats(std::int64_t n) {
  thread_local std::vector<float> memory;
  constexpr std::size_t kLine = 64;
  const auto needed = static_cast<std::size_t>(n) + kLine / sizeof(float);
  if (memory.size() < needed) memory.resize(needed);
  void* data = memory.data();
  std::size_t space = memory.size() * sizeof(float);
  return static_cast<float*>(std::align(kLine, static_cast<std::size_t>(n) * sizeof(float), data, space));
}

}  // namespace

void CpuOps::rotary_store(const Tensor& qkv, const float* cos_sin, KvCache& cache, int layer, int heads) {
  const auto& batch = input_.attention;
  const auto& kv = static_cast<const CpuKvCache&>(cache);
  const auto& layout = kv.layout();
  const int dim = layout.head_dim, kv_heads = layout.kv_heads, block_len = layout.block_len;
  check_tables(batch, cache, layer, "rotary_store");
  require(qkv.dtype == DType::f32 && qkv.cols == static_cast<std::int64_t>(heads + 2 * kv_heads) * dim &&
              qkv.rows == static_cast<std::int64_t>(batch.positions.size()),
          "rotary_store", "qkv must be f32 [rows, (heads + 2 * kv_heads) * head_dim]");

  const auto store_row = [&](std::int64_t row) {
    auto* const q = static_cast<float*>(qkv.data) + row * qkv.stride;
    const int position = batch.positions[static_cast<std::size_t>(row)];
    const auto* const turn = cos_sin + static_cast<std::int64_t>(position) * dim;
    for (int h = 0; h < heads + kv_heads; ++h) kernels_.rotate(q + static_cast<std::int64_t>(h) * dim, turn, dim);
    const auto sequence = sequence_of_row_[static_cast<std::size_t>(row)];
    const auto table_entry = sequence * batch.table_stride + position / block_len;
    const auto block = batch.block_tables[static_cast<std::size_t>(table_entry)] * kv.block_elements();
    const int slot = position % block_len;
    for (int h = 0; h < kv_heads; ++h) {
      const float* const k = q + static_cast<std::int64_t>(heads + h) * dim;
      const float* const v = k + static_cast<std::int64_t>(kv_heads) * dim;
      auto* const at = kv.head(layer, h);
      if (layout.dtype == DType::f32) {
        store_kv(reinterpret_cast<float*>(at) + block, slot, block_len, dim, k, v);
      } else if (layout.dtype == DType::bf16) {
        auto* const halves = reinterpret_cast<Bf16*>(scratch_floats(dim));
        kernels_.bf16_from_f32(halves, k, dim);
        kernels_.bf16_from_f32(halves + dim, v, dim);
        store_kv(reinterpret_cast<Bf16*>(at) + block, slot, block_len, dim, halves, halves + dim);
      } else {
        auto* const halves = reinterpret_cast<F16*>(scratch_floats(dim));
        kernels_.f16_from_f32(halves, k, dim);
        kernels_.f16_from_f32(halves + dim, v, dim);
        store_kv(reinterpret_cast<F16*>(at) + block, slot, block_len, dim, halves, halves + dim);
      }
    }
  };
  const auto grain = std::max<std::int64_t>(1, kSmallRotation / qkv.cols);
  pool_.parallel_for(qkv.rows, grain, [&](std::int64_t begin, std::int64_t end) {
    for (auto row = begin; row < end; ++row) store_row(row);
  });
}

void CpuOps::attention(const Tensor& out, const Tensor& qkv, const KvCache& cache, int layer, int heads, float scale) {
  const auto& batch = input_.attention;
  const auto& kv = static_cast<const CpuKvCache&>(cache);
  const auto& layout = kv.layout();
  const int dim = layout.head_dim, group = heads / layout.kv_heads;
  check_tables(batch, cache, layer, "attention");
  require(heads % layout.kv_heads == 0, "attention", "heads must be a multiple of kv_heads");
  require(out.cols == static_cast<std::int64_t>(heads) * dim && out.rows == qkv.rows && qkv.dtype == DType::f32 &&
              qkv.rows == static_cast<std::int64_t>(batch.positions.size()),
          "attention", "out must be [rows, heads * head_dim], qkv f32 as in rotary_store");
  const auto kernel = layout.dtype == DType::bf16  ? kernels_.attention_bf16
                      : layout.dtype == DType::f16 ? kernels_.attention_f16
                                                   : kernels_.attention_f32;

  items_.clear();
  std::int64_t work = 0;
  for (std::size_t s = 0; s + 1 < batch.query_start.size(); ++s) {
    const auto first = batch.query_start[s], n = batch.query_start[s + 1] - first;
    if (n == 0) continue;
    const auto context = batch.positions[static_cast<std::size_t>(first + n) - 1] + 1;
    work += std::int64_t{2} * n * heads * dim * context;
    for (int head = 0; head < layout.kv_heads; ++head) {
      for (int begin = 0; begin < n * group; begin += kAttentionTile) {
        items_.push_back({static_cast<std::int32_t>(s), head, begin, std::min(begin + kAttentionTile, n * group)});
      }
    }
  }
  const auto count = static_cast<std::int64_t>(items_.size());
  const auto scratch = attention_scratch(dim, layout.block_len);
  pool_.parallel_for(count, work < kSmallAttention ? count : 1, [&](std::int64_t begin, std::int64_t end) {
    for (auto i = begin; i < end; ++i) {
      const auto& item = items_[static_cast<std::size_t>(i)];
      const auto first = batch.query_start[static_cast<std::size_t>(item.sequence)];
      const auto q_column = static_cast<std::int64_t>(item.kv_head) * group * dim;
      kernel({.q = static_cast<const float*>(qkv.data) + first * qkv.stride + q_column,
              .q_stride = qkv.stride,
              .group = group,
              .head_dim = dim,
              .begin = item.begin,
              .end = item.end,
              .first_position = batch.positions[static_cast<std::size_t>(first)],
              .kv = kv.head(layer, item.kv_head),
              .block_stride = kv.block_elements(),
              .blocks = batch.block_tables.data() + item.sequence * batch.table_stride,
              .block_len = layout.block_len,
              .scale = scale,
              .out = static_cast<std::byte*>(out.data) +
                     static_cast<std::size_t>(first * out.stride + q_column) * size_of(out.dtype),
              .out_stride = out.stride,
              .out_dtype = out.dtype,
              .scratch = scratch_floats(scratch)});
    }
  });
}

}  // namespace charonia::ops::cpu
