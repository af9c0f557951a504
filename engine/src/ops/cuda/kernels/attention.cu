// attention(): selects the kernels of a step's items and divides the workspace.
#include <type_traits>

#include "base/text.h"
#include "charonia/error.h"
#include "ops/cuda/device/portable.h"
#include "ops/cuda/kernels/attention_kernels.h"
#include "ops/cuda/kernels/element_types.h"

namespace charonia::cuda {
namespace {

constexpr std::size_t kAlignment = 256;
constexpr int kNoChunks = 1 << 30;
static_assert((kAttentionChunk & (kAttentionChunk - 1)) == 0);

// The workspace: counters, partial results and, if rows have several chunks, the sums of each thread block.
struct Workspace {
  std::size_t partials = 0, sums = 0, bytes = 0;  // byte offsets; counters come first
  std::int64_t sums_stride = 0;                   // floats
};

Workspace workspace_of(const AttentionShape& shape, std::int64_t partials) {
  const auto counters = partials * shape.kv_heads * divide_up(shape.group(), kDecodeTileRows) * kCombineLevels;
  const auto floats = partials * shape.heads * (shape.head_dim + 4);
  Workspace to;
  to.partials = static_cast<std::size_t>(round_up(counters * 4, kAlignment));
  to.sums = to.partials + static_cast<std::size_t>(round_up(floats * 4, kAlignment));
  if (shape.reproducible) {
    to.sums_stride = attention_sums_stride(shape.head_dim);
  }
  to.bytes = to.sums + static_cast<std::size_t>(to.sums_stride * 4 * shape.sms * kBlocksPerSm);
  return to;
}

bool aligned(const Tensor& tensor) { return cuda::aligned(tensor.data, tensor.stride, tensor.dtype); }

// Whether all rows can be read 16 bytes at a time, for the head sizes that have tiles.
bool aligned(const CacheLayer& cache) {
  return reinterpret_cast<std::uintptr_t>(cache.data) % 16 == 0 && cache.block_bytes() % 16 == 0;
}

// Calls f with the head size as a constant if it is one of `sizes`; returns whether it is.
template <int... sizes, class F>
bool with_head_size(std::integer_sequence<int, sizes...>, int head_dim, F f) {
  return ((head_dim == sizes && (f(std::integral_constant<int, sizes>{}), true)) || ...);
}

template <class T>
void start(Stream& stream, const DeviceInfo& device, const AttentionParams& params, std::int64_t items, bool decode) {
  with_head_size(TiledHeadSizes{}, params.cache.head_dim, [&](auto size) {
    if (decode) {
      start_decode<T, size()>(stream, device, params, items);
    } else {
      start_prefill<T, size()>(stream, params, items);
    }
  });
}

}  // namespace

bool attention_has_tiles(int head_dim) {
  return with_head_size(TiledHeadSizes{}, head_dim, [](auto) {});
}

std::string_view why_no_wgmma(const DeviceInfo& device, const AttentionShape& shape, const CacheLayer& cache) {
  if (!device.wgmma) return "the device or this build has no wgmma";
  if (shape.reproducible) return "reproducible mode needs the sums of the other kernels";
  if (!with_head_size(WgmmaHeadSizes{}, shape.head_dim, [](auto) {})) return "it supports heads of 64, 128 and 256";
  if (cache.dtype == DType::f32) return "it supports 16-bit types";
  if (shape.group() > kWgmmaPrefillRows / 2) return "it supports groups of up to 64 heads";
  if (wgmma_box_positions(shape.block_len) == 0) return "blocks must have a multiple of 64 slots, or 8, 16 or 32";
  return {};
}

std::size_t attention_workspace_bytes(const AttentionShape& shape, const AttentionBounds& bounds) {
  return workspace_of(shape, bounds.partials).bytes;
}

void attention(Stream& stream, const DeviceInfo& device, const Tensor& out, const Tensor& qkv, const CacheLayer& cache,
               const AttentionShape& shape, const ops::AttentionParams& how, const AttentionWork& work) {
  const auto workspace = workspace_of(shape, work.max_partials);
  auto* const base = static_cast<unsigned char*>(work.workspace);
  AttentionParams params;
  params.tables = work.block_tables;
  params.q = qkv.data;
  params.out = out.data;
  params.q_stride = qkv.stride;
  params.out_stride = out.stride;
  params.cache = cache;
  params.heads = shape.heads;
  params.group = shape.group();
  params.max_blocks = shape.sms * kBlocksPerSm;
  params.k_outside = shape.k_outside && has_k_outside(shape, cache);
  params.chunk = shape.reproducible ? kAttentionChunk : kNoChunks;
  params.span = shape.reproducible ? kAttentionSpan : kNoChunks;
  auto& score_mod = params.score_mod;
  score_mod.changes = how.soft_cap != 0 || how.alibi != nullptr;
  if (cache.quant_bits == ops::kKvFp8) params.v_scales = how.v_scales;
  score_mod.any = score_mod.changes || how.window > 0 || how.sinks != nullptr || params.v_scales != nullptr;
  if (how.window > 0) score_mod.window = how.window;
  score_mod.scale = how.scale;
  score_mod.cap = how.soft_cap;
  if (how.soft_cap != 0) score_mod.to_exponent = 2 * kLog2E / how.soft_cap;
  score_mod.slopes = how.alibi;
  score_mod.sinks = how.sinks;
  params.scale = score_mod.changes ? kLog2E : how.scale * kLog2E;
  params.counters = reinterpret_cast<std::int32_t*>(base);
  params.partials = reinterpret_cast<float*>(base + workspace.partials);
  params.sums = reinterpret_cast<float*>(base + workspace.sums);
  params.sums_stride = workspace.sums_stride;

  const bool tiles = attention_has_tiles(shape.head_dim) && cache.dtype != DType::f32 && qkv.dtype == cache.dtype &&
                     out.dtype == cache.dtype && aligned(qkv) && aligned(out) && aligned(cache);
  const auto run = [&](const AttentionItem* items, const std::int32_t* count, std::int64_t max_items, bool decode) {
    if (max_items == 0) return;
    params.items = items;
    params.count = count;
    if (shape.wgmma && !decode) {
      const bool widens = cache.quant_bits != 0;
      const auto why = tiles ? why_no_wgmma(device, shape, cache) : "rows must be aligned to 16 bytes";
      if (!why.empty()) throw Error(ErrorCode::internal, cat("attention of prompts cannot use wgmma: ", why));
      params.max_blocks = shape.prefill_blocks();
      if (widens) {
        if (work.wide_blocks == 0) return;  // there are no prefill items
        dequantise_blocks(stream, cache, work.block_tables + work.wide_at, work.wide_blocks, work.wide);
        params.cache = dequantised(cache, work.wide);
        params.tables = nullptr;
      }
      with_head_size(WgmmaHeadSizes{}, shape.head_dim, [&](auto size) {
        with_half(cache.dtype, [&]<class T>(T) {
          start_wgmma_prefill<T, size()>(stream, params, max_items, qkv.rows,
                                         widens ? work.wide_blocks : work.num_blocks);
        });
      });
    } else if (!tiles) {
      const int rows = decode ? 1 : shape.item_rows();
      attention_plain(stream, device, qkv.dtype, out.dtype, params, max_items, rows);
    } else {
      with_half(cache.dtype, [&]<class T>(T) { start<T>(stream, device, params, max_items, decode); });
    }
  };
  run(work.decode, work.counts, work.max_decode, true);
  run(work.prefill, work.counts + 1, work.max_prefill, false);
}

}  // namespace charonia::cuda
