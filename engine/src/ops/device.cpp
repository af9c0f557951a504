#include "ops/device.h"

#include <algorithm>

#include "base/text.h"
#include "charonia/error.h"
#include "ops/operations.h"

namespace charonia::ops {
namespace {

template <class... What>
void refuse_if(bool wrong, const What&... what) {
  if (wrong) throw Error(ErrorCode::invalid_argument, cat("a KV cache ", what...));
}

}  // namespace

void KvLayout::check() const {
  refuse_if(layers.empty(), "of no layers");
  refuse_if(block_len < 1, "of blocks of ", block_len, " tokens: they must have at least 1");
  refuse_if(quant_bits != 0 && !is_kv_quant_bits(quant_bits), "with quant_bits = ", quant_bits,
            ": it must be 8 or 4 for integers, ", kKvFp8, " for FP8, or 0");
  for (std::size_t i = 0; i < layers.size(); ++i) {
    const auto& layer = layers[i];
    if (layer.kind == CacheKind::state) {
      refuse_if(layer.state_floats < 1 || layer.kv_heads != 0 || layer.storage >= 0, "with a state of ",
                layer.state_floats, " numbers and ", layer.kv_heads, " heads in layer ", i,
                ": it must have at least 1 number, no heads, and its own storage");
      continue;
    }
    refuse_if(layer.kv_heads < 1 || layer.k_dim < 2 || layer.k_dim % 2 != 0 || layer.v_dim < 0 || layer.v_dim % 2 != 0,
              "of ", layer.kv_heads, " heads of ", layer.k_dim, " and ", layer.v_dim, " elements (k and v) in layer ",
              i, ": it must have at least 1 head, and even numbers of elements");
    refuse_if(layer.v_dim == 0 && layer.kv_heads != 1, "of ", layer.kv_heads, " latents in layer ", i,
              ": latent attention has one for all heads");
    if (layer.v_dim == 0 && quant_bits != 0) {
      throw Error(ErrorCode::unsupported, "a KV cache of latents (MLA) cannot be quantised: set quant_policy = 0");
    }
    if (layer.storage < 0) continue;
    auto same = layer;
    same.storage = -1;
    refuse_if(static_cast<std::size_t>(layer.storage) >= i || layers[storage_of(i)] != same, "whose layer ", i,
              " uses the storage of layer ", layer.storage,
              ": this must be an earlier layer of the same kind and sizes, with its own storage");
  }
}

std::size_t KvLayout::head_bytes(const KvLayer& layer) const {
  std::size_t out = 0;
  for (const int dim : {layer.k_dim, layer.v_dim}) {
    if (dim == 0) continue;
    out += static_cast<std::size_t>(block_len) * (quant_bits != 0 ? kv_quant_token_bytes(dim, quant_bits)
                                                                  : static_cast<std::size_t>(dim) * size_of(dtype));
  }
  return out;
}

std::size_t KvLayout::layer_bytes(const KvLayer& layer) const {
  constexpr std::size_t kLine = 64;
  if (layer.kind != CacheKind::state) return head_bytes(layer) * static_cast<std::size_t>(layer.kv_heads);
  return (static_cast<std::size_t>(layer.state_floats) * sizeof(float) + kLine - 1) / kLine * kLine;
}

std::size_t KvLayout::block_bytes(CacheKind kind) const {
  std::size_t out = 0;
  for (const auto& layer : layers) {
    if (layer.kind == kind && layer.storage < 0) out += layer_bytes(layer);
  }
  return out;
}

std::size_t KvLayout::bytes(const PerKind<int>& num_blocks) const {
  std::size_t out = 0;
  for (const auto kind : kCacheKinds) out += block_bytes(kind) * static_cast<std::size_t>(num_blocks[kind]);
  return out;
}

KvCache::KvCache(const KvLayout& layout, const PerKind<int>& num_blocks) : layout_(layout) {
  layout.check();
  for (const auto kind : kCacheKinds) {
    if (layout.block_bytes(kind) == 0) continue;
    refuse_if(num_blocks[kind] < 1, "of ", num_blocks[kind], " blocks: it must have at least 1");
    num_blocks_[kind] = num_blocks[kind];
  }
}

void KvCache::check_commit(const PerKind<int>& num_blocks) const {
  for (const auto kind : kCacheKinds) {
    if (num_blocks_[kind] == 0 || (num_blocks[kind] >= 0 && num_blocks[kind] <= num_blocks_[kind])) continue;
    throw Error(ErrorCode::internal,
                cat("ops::commit_blocks: ", num_blocks[kind], " blocks, but the cache has ", num_blocks_[kind]));
  }
}

void Operations::add_low_rank(const Tensor&, const Tensor&, std::span<const LowRankRows>) {
  throw Error(ErrorCode::unsupported, "LoRA adapters are not supported on this device: use device = cpu");
}

void Operations::add_adapters(const Tensor&, const Tensor&, int) {
  throw Error(ErrorCode::internal, "ops::add_adapters: this device has no adapter slots");
}

void Device::make_adapter_slots(const AdapterSlots&) {
  throw Error(ErrorCode::internal, "ops::make_adapter_slots: this device has no adapter slots");
}

void Device::fill_adapter_slot(int, const Buffer&) {
  throw Error(ErrorCode::internal, "ops::fill_adapter_slot: this device has no adapter slots");
}

void Operations::latent_store(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const LatentParams&, KvCache&,
                              int, int) {
  throw Error(ErrorCode::unsupported, "latent attention (MLA) is not supported on this device: set device = cpu");
}

void Operations::heads_linear(const Tensor& out, const Tensor& in, std::span<const std::unique_ptr<Linear>> heads) {
  const auto count = std::ssize(heads);
  for (std::int64_t h = 0; h < count; ++h) {
    const auto& weight = *heads[static_cast<std::size_t>(h)];
    linear(columns_of(out, h * (out.cols / count), weight.out_features()),
           columns_of(in, h * (in.cols / count), weight.in_features()), weight);
  }
}

}  // namespace charonia::ops
