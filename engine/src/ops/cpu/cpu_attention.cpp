// Rotation, KV store, attention and block copies: distributes the rows of a step over threads.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <span>

#include "base/text.h"
#include "charonia/error.h"
#include "ops/check_step.h"
#include "ops/cpu/cpu_kv_cache.h"
#include "ops/cpu/cpu_ops.h"

namespace charonia::ops::cpu {
namespace {

constexpr std::int64_t kSmallAttention = 65536;  // multiplications
constexpr std::int64_t kSmallRotation = 8192;    // elements

// Checks that begin_step() could not make without the cache. All layers of a kind have the same tables, so whole tables
// are checked only in the first layer of a kind.
void check_tables(const AttentionBatch& batch, const KvCache& cache, int layer, std::string_view op, bool latent) {
  require(layer >= 0 && layer < std::ssize(cache.layout().layers), op, "no such layer");
  const auto& how = cache.layout().layers[static_cast<std::size_t>(layer)];
  require(latent ? how.v_dim == 0 : how.k_dim == how.v_dim, op,
          [&] { return cat("heads of k have ", how.k_dim, " elements, heads of v ", how.v_dim); });
  const int block_len = cache.layout().block_len, num_blocks = cache.num_blocks()[how.kind];
  const auto tables = batch.block_tables[how.kind];
  require(!tables.empty() || batch.positions.empty(), op, "the step has no block tables for this kind of cache");
  const auto earlier = std::span(cache.layout().layers).first(static_cast<std::size_t>(layer));
  const bool first_of_kind = std::ranges::find(earlier, how.kind, &KvLayer::kind) == earlier.end();
  for (std::size_t s = 0; s + 1 < batch.query_start.size(); ++s) {
    const auto begin = batch.query_start[s], end = batch.query_start[s + 1];
    if (begin == end) continue;
    const auto last = batch.positions[static_cast<std::size_t>(end) - 1];
    require(last / block_len < batch.table_stride, op, "a block table is too short for its sequence");
    const auto* table = tables.data() + static_cast<std::int64_t>(s) * batch.table_stride;
    for (int b = first_of_kind ? 0 : last / block_len; b <= last / block_len; ++b) {
      require(table[b] >= 0 && table[b] < num_blocks, op, [&] { return cat("the cache has no block ", table[b]); });
    }
  }
}

// Returns n floats of `memory`, aligned to a cache line, with undefined contents. Grows the memory if necessary.
float* aligned_floats(std::vector<float>& memory, std::int64_t n) {
  constexpr std::size_t kLine = 64;
  const auto needed = static_cast<std::size_t>(n) + kLine / sizeof(float);
  if (memory.size() < needed) memory.resize(needed);
  void* data = memory.data();
  std::size_t space = memory.size() * sizeof(float);
  return static_cast<float*>(std::align(kLine, static_cast<std::size_t>(n) * sizeof(float), data, space));
}

float* scratch_floats(std::int64_t n) {
  thread_local std::vector<float> memory;
  return aligned_floats(memory, n);
}

// Stores one row's k and v of one head in slot `slot` of a block; `kv` points to that head's k.
template <class T>
void store_kv(T* kv, int slot, int block_len, int head_dim, const T* k, const T* v) {
  for (int d = 0; d < head_dim; ++d) kv[static_cast<std::int64_t>(d) * block_len + slot] = k[d];
  std::copy_n(v, head_dim,
              kv + static_cast<std::int64_t>(head_dim) * block_len + static_cast<std::int64_t>(slot) * head_dim);
}

// The same for bf16, in pairs of rows (cpu_kv_cache.h). Rows of a step share pairs of v, and several threads may store
// them: each thread writes only its own elements.
void store_pairs(Bf16* kv, int slot, int block_len, int head_dim, const Bf16* k, const Bf16* v) {
  for (int d = 0; d < head_dim; d += 2) {
    std::copy_n(k + d, 2, kv + static_cast<std::int64_t>(d) * block_len + std::int64_t{2} * slot);
  }
  Bf16* const values = kv + static_cast<std::int64_t>(head_dim) * block_len;
  const bool paired = (slot | 1) < block_len;
  Bf16* const row = values + static_cast<std::int64_t>(paired ? slot & ~1 : slot) * head_dim;
  if (!paired) {
    std::copy_n(v, head_dim, row);
    return;
  }
  for (int d = 0; d < head_dim; ++d) row[2 * d + slot % 2] = v[d];
}

// The same in the layout's type.
void store_floats(const Kernels& kernels, std::byte* kv, int slot, const KvLayout& layout, int dim, const float* k,
                  const float* v) {
  const int block_len = layout.block_len;
  if (layout.dtype == DType::f32) {
    store_kv(reinterpret_cast<float*>(kv), slot, block_len, dim, k, v);
  } else if (layout.dtype == DType::bf16) {
    auto* const halves = reinterpret_cast<Bf16*>(scratch_floats(dim));
    kernels.bf16_from_f32(halves, k, dim);
    kernels.bf16_from_f32(halves + dim, v, dim);
    store_pairs(reinterpret_cast<Bf16*>(kv), slot, block_len, dim, halves, halves + dim);
  } else {
    auto* const halves = reinterpret_cast<F16*>(scratch_floats(dim));
    kernels.f16_from_f32(halves, k, dim);
    kernels.f16_from_f32(halves + dim, v, dim);
    store_kv(reinterpret_cast<F16*>(kv), slot, block_len, dim, halves, halves + dim);
  }
}

// The same in FP8.
void store_fp8(std::byte* kv, int slot, int block_len, int head_dim, const float* k, const float* v, float k_scale,
               float v_scale) {
  auto* const codes = reinterpret_cast<std::uint8_t*>(scratch_floats(head_dim));  // [2][head_dim]
  for (int d = 0; d < head_dim; ++d) codes[d] = float_to_e4m3(k[d] / k_scale);
  for (int d = 0; d < head_dim; ++d) codes[head_dim + d] = float_to_e4m3(v[d] / v_scale);
  store_kv(reinterpret_cast<std::uint8_t*>(kv), slot, block_len, head_dim, codes, codes + head_dim);
}

// The same as integers; `kv` points to the head's k in the block that holds `slot`.
void store_integers(const Kernels& kernels, std::byte* kv, int slot, const KvLayout& layout, int dim, const float* k,
                    const float* v) {
  const int bits = layout.quant_bits, half = dim / 2;
  const std::int64_t block_len = layout.block_len;
  const auto row_bytes = static_cast<std::int64_t>(kv_quant_row_bytes(dim, bits));
  auto* const integers = reinterpret_cast<std::uint8_t*>(kv);
  auto* const scales = reinterpret_cast<F16*>(kv + 2 * row_bytes * block_len);
  thread_local std::vector<std::uint8_t> memory;
  if (memory.size() < static_cast<std::size_t>(dim)) memory.resize(static_cast<std::size_t>(dim));
  auto* const row = memory.data();
  const auto quantise = [&](const float* x, F16* scale_at, F16* zero_at) {
    float lo = 0, hi = 0;
    kernels.min_and_max(x, dim, &lo, &hi);
    const auto range = kv_range(lo, hi, bits);
    scale_at->bits = float_to_f16(range.scale);
    zero_at->bits = float_to_f16(range.zero);
    kernels.quantise(row, x, f16_to_float(scale_at->bits), f16_to_float(zero_at->bits), kv_quant_max(bits), dim);
    if (bits == 4) {
      for (int i = 0; i < half; ++i) row[i] = kv_pack(row[i], row[half + i]);
    }
  };
  quantise(k, scales + slot, scales + block_len + slot);
  for (std::int64_t i = 0; i < row_bytes; ++i) integers[i * block_len + slot] = row[i];
  quantise(v, scales + 2 * block_len + slot, scales + 3 * block_len + slot);
  std::copy_n(row, row_bytes, integers + row_bytes * (block_len + slot));
}

struct AttentionKernels {
  void (*whole)(const AttentionArgs&);
  void (*split)(const AttentionArgs&, int split, float* state);
};
AttentionKernels kernels_for(const Kernels& kernels, const KvLayout& layout) {
  if (layout.quant_bits == kKvFp8) return {kernels.attention_f8, kernels.attention_split_f8};
  if (layout.quant_bits == 8) return {kernels.attention_q8, kernels.attention_split_q8};
  if (layout.quant_bits == 4) return {kernels.attention_q4, kernels.attention_split_q4};
  switch (layout.dtype) {
    case DType::bf16:
      return {kernels.attention_bf16, kernels.attention_split_bf16};
    case DType::f16:
      return {kernels.attention_f16, kernels.attention_split_f16};
    default:
      return {kernels.attention_f32, kernels.attention_split_f32};
  }
}

}  // namespace

void CpuOps::copy_blocks(KvCache& cache, std::span<const BlockCopy> copies) {
  const auto& kv = static_cast<const CpuKvCache&>(cache);
  for (const auto& [from, to, kind] : copies) {
    const int num_blocks = cache.num_blocks()[kind];
    if (num_blocks == 0) continue;
    require(from >= 0 && from < num_blocks && to >= 0 && to < num_blocks, "copy_blocks",
            [&] { return cat("cannot copy block ", from, " to ", to, ": the cache has ", num_blocks, " blocks"); });
  }
  pool_.parallel_for(std::ssize(kv.layout().layers), 1, [&](std::int64_t begin, std::int64_t end) {
    for (auto i = begin; i < end; ++i) {
      const auto& layer = kv.layer(static_cast<int>(i));
      if (!layer.stores) continue;
      const auto bytes = layer.block_bytes;
      for (const auto& [from, to, kind] : copies) {
        if (kind != layer.kind || from == to) continue;
        std::memcpy(layer.data + bytes * static_cast<std::size_t>(to),
                    layer.data + bytes * static_cast<std::size_t>(from), bytes);
      }
    }
  });
}

void CpuOps::rotary_store(const Tensor& qkv, const RotaryParams& how, KvCache& cache, int layer, int heads) {
  const auto& batch = input_.attention;
  const auto& kv = static_cast<const CpuKvCache&>(cache);
  const auto& layout = kv.layout();
  check_tables(batch, cache, layer, "rotary_store", false);
  const auto& of_layer = kv.layer(layer);
  const int dim = of_layer.k_dim, kv_heads = of_layer.stores ? of_layer.kv_heads : 0, block_len = layout.block_len;
  require(qkv.dtype == DType::f32 && qkv.cols == static_cast<std::int64_t>(heads + 2 * kv_heads) * dim &&
              qkv.rows == static_cast<std::int64_t>(batch.positions.size()),
          "rotary_store",
          "qkv must be f32 [rows, (heads + 2 * kv_heads) * head_dim], without k and v if the layer shares its storage");
  check_rotation(how, dim);

  const auto tables = batch.block_tables[of_layer.kind];
  const bool norm_heads = how.q_norm != nullptr && how.squares == nullptr;
  const bool scaled = layout.quant_bits == kKvFp8 && how.k_scales != nullptr;
  const std::int64_t group_size = std::int64_t{heads} / of_layer.kv_heads * dim;
  const auto rotate = how.interleaved ? kernels_.rotate_interleaved : kernels_.rotate;
  const auto prepare_values = [&](float* k) {
    const auto kv_size = std::int64_t{kv_heads} * dim;
    if (how.v_from_k) std::copy_n(k, kv_size, k + kv_size);
    for (auto* v = k + kv_size; how.v_norm && v < k + 2 * kv_size; v += dim) {
      const float mean = kernels_.sum_of_squares(v, dim) / static_cast<float>(dim);
      kernels_.scale(v, 1.0F / std::sqrt(mean + how.norm_eps), dim);
    }
  };
  const auto store_row = [&](std::int64_t row) {
    auto* const q = static_cast<float*>(qkv.data) + row * qkv.stride;
    const int position = batch.positions[static_cast<std::size_t>(row)];
    if (how.squares != nullptr) {
      const auto normalise = [&](float* x, const float* weight, float squares, std::int64_t count, std::int64_t n) {
        const float mean = squares / static_cast<float>(count);
        kernels_.normalise(x, 1.0F / std::sqrt(mean + how.norm_eps), weight, n);
      };
      const float* const squares = how.squares + 2 * row;
      normalise(q, how.q_norm, squares[0], how.q_count, std::int64_t{heads} * dim);
      normalise(q + std::int64_t{heads} * dim, how.k_norm, squares[1], how.k_count, std::int64_t{kv_heads} * dim);
    }
    prepare_values(q + std::int64_t{heads} * dim);
    for (int h = 0; h < heads + kv_heads; ++h) {
      auto* const head = q + static_cast<std::int64_t>(h) * dim;
      const NormParams norm{.weight = h < heads ? how.q_norm : how.k_norm, .eps = how.norm_eps};
      if (norm_heads && !how.norm_after) kernels_.rms_norm_f32(head, head, nullptr, norm, dim);
      if (how.cos_sin != nullptr) {
        const auto table_row = batch.rotary_rows.empty() ? position : batch.rotary_rows[static_cast<std::size_t>(row)];
        rotate(head, how.cos_sin + std::int64_t{table_row} * how.rotary_dim, how.rotary_dim);
      }
      if (norm_heads && how.norm_after) kernels_.rms_norm_f32(head, head, nullptr, norm, dim);
    }
    if (how.q_scale != nullptr) kernels_.scale(q, how.q_scale[position], std::int64_t{heads} * dim);
    for (int h = 0; scaled && h < of_layer.kv_heads; ++h) {
      kernels_.scale(q + h * group_size, how.k_scales[h], group_size);
    }
    if (!of_layer.stores) return;
    const auto sequence = sequence_of_row_[static_cast<std::size_t>(row)];
    const auto table_entry = sequence * batch.table_stride + position / block_len;
    const auto block = static_cast<std::size_t>(tables[static_cast<std::size_t>(table_entry)]) * of_layer.block_bytes;
    const int slot = position % block_len;
    for (int h = 0; h < kv_heads; ++h) {
      const float* const k = q + static_cast<std::int64_t>(heads + h) * dim;
      const float* const v = k + static_cast<std::int64_t>(kv_heads) * dim;
      auto* const at = of_layer.head(h) + block;
      if (kv_holds_integers(layout.quant_bits)) {
        store_integers(kernels_, at, slot, layout, dim, k, v);
      } else if (layout.quant_bits == kKvFp8) {
        store_fp8(at, slot, block_len, dim, k, v, scaled ? how.k_scales[h] : 1, scaled ? how.v_scales[h] : 1);
      } else {
        store_floats(kernels_, at, slot, layout, dim, k, v);
      }
    }
  };
  const auto grain = std::max<std::int64_t>(1, kSmallRotation / qkv.cols);
  pool_.parallel_for(qkv.rows, grain, [&](std::int64_t begin, std::int64_t end) {
    for (auto row = begin; row < end; ++row) store_row(row);
  });
}

void CpuOps::latent_store(const Tensor& queries, const Tensor& plain, const Tensor& q, const Tensor& latent,
                          const LatentParams& how, KvCache& cache, int layer, int heads) {
  const auto& batch = input_.attention;
  const auto& kv = static_cast<const CpuKvCache&>(cache);
  const int block_len = kv.layout().block_len;
  check_tables(batch, cache, layer, "latent_store", true);
  const auto& of_layer = kv.layer(layer);
  const int dim = of_layer.k_dim, rotated = how.rotary_dim, values = dim - rotated;
  const auto plain_dim = plain.cols / heads, head = plain_dim + rotated;
  require(how.norm != nullptr && how.cos_sin != nullptr && rotated >= 2 && rotated % 2 == 0 && values >= 1,
          "latent_store", "needs a norm, a table, and an even rotary_dim in [2, k_dim)");
  require(latent.cols == dim && queries.cols == std::int64_t{heads} * dim && q.cols == heads * head &&
              latent.dtype == DType::f32 && queries.dtype == DType::f32 && q.dtype == DType::f32 &&
              latent.rows == static_cast<std::int64_t>(batch.positions.size()),
          "latent_store", "latent [rows, k_dim], queries and q must be f32 and fit together");
  const auto tables = batch.block_tables[of_layer.kind];
  const auto rotate = how.interleaved ? kernels_.rotate_interleaved : kernels_.rotate;
  const auto to_cache = [&](std::byte* at, int slot, const float* row) {
    const auto store = [&](auto* k, const auto* from, int step) {
      for (int d = 0; d < dim; d += step) {
        std::copy_n(from + d, step, k + static_cast<std::int64_t>(d) * block_len + step * slot);
      }
    };
    if (kv.layout().dtype == DType::f32) return store(reinterpret_cast<float*>(at), row, 1);
    if (kv.layout().dtype == DType::bf16) {
      auto* const halves = reinterpret_cast<Bf16*>(scratch_floats(dim));
      kernels_.bf16_from_f32(halves, row, dim);
      return store(reinterpret_cast<Bf16*>(at), halves, 2);  // in pairs of rows (cpu_kv_cache.h)
    }
    auto* const halves = reinterpret_cast<F16*>(scratch_floats(dim));
    kernels_.f16_from_f32(halves, row, dim);
    store(reinterpret_cast<F16*>(at), halves, 1);
  };
  for_rows(latent.rows, queries.cols, [&](std::int64_t row) {
    const int position = batch.positions[static_cast<std::size_t>(row)];
    const auto table_row = batch.rotary_rows.empty() ? position : batch.rotary_rows[static_cast<std::size_t>(row)];
    const float* const angles = how.cos_sin + std::int64_t{table_row} * rotated;
    auto* const k = reinterpret_cast<float*>(row_at(latent, row));
    kernels_.rms_norm_f32(k, k, nullptr, {.weight = how.norm, .eps = how.norm_eps}, values);
    rotate(k + values, angles, rotated);
    const auto sequence = sequence_of_row_[static_cast<std::size_t>(row)];
    const auto block = tables[static_cast<std::size_t>(sequence * batch.table_stride + position / block_len)];
    to_cache(of_layer.head(0) + static_cast<std::size_t>(block) * of_layer.block_bytes, position % block_len, k);

    auto* from = reinterpret_cast<float*>(row_at(q, row));
    auto* to = reinterpret_cast<float*>(row_at(queries, row));
    auto* unrotated = row_at(plain, row);
    if (how.q_scale != nullptr) kernels_.scale(from, how.q_scale[position], q.cols);
    for (int h = 0; h < heads; ++h, from += head, to += dim) {
      rotate(from + plain_dim, angles, rotated);
      std::copy_n(from + plain_dim, rotated, to + values);
      if (plain.dtype == DType::bf16) {
        kernels_.bf16_from_f32(reinterpret_cast<Bf16*>(unrotated), from, plain_dim);
      } else {
        std::copy_n(from, plain_dim, reinterpret_cast<float*>(unrotated));
      }
      unrotated += static_cast<std::size_t>(plain_dim) * size_of(plain.dtype);
    }
  });
}

void CpuOps::heads_linear(const Tensor& out, const Tensor& in, std::span<const std::unique_ptr<Linear>> heads) {
  const auto count = std::ssize(heads);
  require(in.rows == out.rows && in.cols % count == 0 && out.cols % count == 0, "heads_linear",
          "the columns of in and out must be divisible by the number of heads");
  if (in.rows == 0) return;
  auto to = out;
  if (out.dtype != DType::f32) {
    const auto bytes = static_cast<std::size_t>(out.rows * out.cols) * sizeof(float);
    if (heads_out_ == nullptr || heads_out_->bytes() < bytes) heads_out_ = std::make_unique<HugeMemory>(bytes);
    to = {heads_out_->data(), DType::f32, out.rows, out.cols, out.cols};
  }
  const auto out_step = out.cols / count, in_step = in.cols / count;
  for (std::int64_t h = 0; h < count; ++h) {
    const auto& w = static_cast<const CpuLinear&>(*heads[static_cast<std::size_t>(h)]);
    require(in.dtype == precision(w.type()).activation && in_step == w.in_features() && out_step >= w.out_features(),
            "heads_linear", [&] {
              return cat("a weight [", w.out_features(), ", ", w.in_features(), "] does not fit heads of ", in_step,
                         " and ", out_step, " columns");
            });
    add_expert_gemm(columns_of(to, h * out_step, w.out_features()), columns_of(in, h * in_step, in_step), w);
  }
  multiply_experts(plain_gemms_);
  multiply_experts(prepared_gemms_);
  if (out.dtype == DType::f32) return;
  for_rows(out.rows, out.cols, [&](std::int64_t row) {
    kernels_.bf16_from_f32(reinterpret_cast<Bf16*>(row_at(out, row)), reinterpret_cast<float*>(row_at(to, row)),
                           out.cols);
  });
}

static void check_attention(const AttentionParams& how, int heads, int kv_heads) {
  require(how.window >= 0 && how.soft_cap >= 0, "attention", "window and soft_cap must not be negative");
  require(how.scale > 0, "attention", "scale must be positive");
  require(heads % kv_heads == 0, "attention", "heads must be a multiple of kv_heads");
}

void CpuOps::attention(const Tensor& out, const Tensor& qkv, const KvCache& cache, int layer, int heads,
                       const AttentionParams& how) {
  const auto& batch = input_.attention;
  const auto& layout = cache.layout();
  const auto& of_layer = static_cast<const CpuKvCache&>(cache).layer(layer);
  const bool latent = of_layer.v_dim == 0;
  check_tables(batch, cache, layer, "attention", latent);
  const int dim = of_layer.k_dim, kv_heads = of_layer.kv_heads, group = heads / kv_heads;
  check_attention(how, heads, kv_heads);
  const int value_dim = latent ? static_cast<int>(out.cols / heads) : dim;
  require(value_dim >= 1 && value_dim <= dim, "attention", "a row of the cache has fewer elements than a head of out");
  require(out.cols == static_cast<std::int64_t>(heads) * value_dim && out.rows == qkv.rows && qkv.dtype == DType::f32 &&
              qkv.rows == static_cast<std::int64_t>(batch.positions.size()),
          "attention", "out must be [rows, heads * head_dim], qkv f32 as in rotary_store or latent_store");
  const auto kernels = kernels_for(kernels_, layout);

  tiles_.clear();
  std::int64_t work = 0;
  const int split = attention_split(layout.block_len);
  for (std::size_t s = 0; s + 1 < batch.query_start.size(); ++s) {
    const auto first = batch.query_start[s], n = batch.query_start[s + 1] - first;
    if (n == 0) continue;
    const auto first_position = batch.positions[static_cast<std::size_t>(first)];
    work += std::int64_t{2} * n * heads * dim * (first_position + n - attention_first(first_position, how.window));
    for (int head = 0; head < kv_heads; ++head) {
      for (int begin = 0; begin < n * group; begin += kAttentionTile) {
        const int end = std::min(begin + kAttentionTile, n * group);
        const int first_split = attention_first(first_position + begin / group, how.window) / split;
        const int splits = (first_position + (end - 1) / group) / split - first_split + 1;
        tiles_.push_back({static_cast<std::int32_t>(s), head, begin, end, first_split, splits, -1});
      }
    }
  }
  const bool small = work < kSmallAttention, scaled = layout.quant_bits == kKvFp8 && how.v_scales != nullptr;
  auto* const states = share_tiles(small, attention_state(dim));
  const auto scratch = attention_scratch(dim, layout.block_len, latent ? value_dim : 0);
  const auto args_of = [&](const AttentionTile& tile) -> AttentionArgs {
    const auto first = batch.query_start[static_cast<std::size_t>(tile.sequence)];
    const auto first_head = static_cast<std::int64_t>(tile.kv_head) * group;
    return {.q = static_cast<const float*>(qkv.data) + first * qkv.stride + first_head * dim,
            .q_stride = qkv.stride,
            .group = group,
            .head_dim = dim,
            .latent_dim = latent ? value_dim : 0,
            .begin = tile.begin,
            .end = tile.end,
            .first_position = batch.positions[static_cast<std::size_t>(first)],
            .kv = of_layer.head(tile.kv_head),
            .block_stride = static_cast<std::int64_t>(of_layer.block_bytes),
            .blocks = batch.block_tables[of_layer.kind].data() + tile.sequence * batch.table_stride,
            .block_len = layout.block_len,
            .scale = how.scale,
            .window = how.window,
            .soft_cap = how.soft_cap,
            .slopes = how.alibi == nullptr ? nullptr : how.alibi + first_head,
            .sinks = how.sinks == nullptr ? nullptr : how.sinks + first_head,
            .value_scale = scaled ? how.v_scales[tile.kv_head] : 1,
            .out = static_cast<std::byte*>(out.data) +
                   static_cast<std::size_t>(first * out.stride + first_head * value_dim) * size_of(out.dtype),
            .out_stride = out.stride,
            .out_dtype = out.dtype,
            .scratch = scratch_floats(scratch)};
  };
  const auto count = static_cast<std::int64_t>(items_.size());
  pool_.parallel_for(count, small ? count : 1, [&](std::int64_t begin, std::int64_t end) {
    for (auto i = begin; i < end; ++i) {
      const auto& item = items_[static_cast<std::size_t>(i)];
      const auto& tile = tiles_[static_cast<std::size_t>(item.tile)];
      if (item.split < 0) {
        kernels.whole(args_of(tile));
      } else {
        const auto state = tile.states + item.split * (tile.end - tile.begin) * attention_state(dim);
        kernels.split(args_of(tile), tile.first_split + item.split, states + state);
      }
    }
  });
  for (const auto& tile : tiles_) {
    if (tile.states >= 0) kernels_.attention_merge(args_of(tile), states + tile.states, tile.splits);
  }
}

// Fills items_ with whole tiles. If there are too few tiles for the threads, splits the tiles that have several splits.
// Returns the memory for the states of these splits.
float* CpuOps::share_tiles(bool small, std::int64_t state_floats) {
  constexpr std::size_t kEnough = 4;  // tiles per thread for a balanced load
  items_.clear();
  const bool split = !small && pool_.size() > 1 && tiles_.size() < kEnough * static_cast<std::size_t>(pool_.size());
  std::int64_t states = 0;
  for (std::size_t t = 0; t < tiles_.size(); ++t) {
    auto& tile = tiles_[t];
    const auto index = static_cast<std::int32_t>(t);
    if (!split || tile.splits == 1) {
      items_.push_back({index, -1});
      continue;
    }
    tile.states = states;
    states += tile.splits * (tile.end - tile.begin) * state_floats;
    for (std::int32_t p = 0; p < tile.splits; ++p) items_.push_back({index, p});
  }
  return states == 0 ? nullptr : aligned_floats(states_, states);
}

}  // namespace charonia::ops::cpu
