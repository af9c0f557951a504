#include "model/shard.h"

#include <algorithm>

#include "base/text.h"
#include "model/layers.h"

namespace charonia::model {
namespace {

constexpr std::int64_t kLogitsAlignment = 4;  // alignment of the ranks' shares: 16 bytes

// out: the name of the output projection of a delta net, v_size: its columns. expect: as in Shard::Shard.
template <class Expect>
void share_delta_net(Shard& shard, const ModelConfig& config, const std::string& out, std::int64_t v_size,
                     const Expect& expect) {
  expect(!config.delta_tiled || shard.ranks == 1, out, "one rank with delta_tiled = 1");
  shard.delta_v_heads = config.delta_v_heads / shard.ranks;
  shard.delta_k_heads = config.delta_k_heads / shard.ranks;
  expect(shard.delta_k_heads * shard.ranks == config.delta_k_heads &&
             shard.delta_v_heads * shard.ranks == config.delta_v_heads &&
             v_size == std::int64_t{shard.delta_v_heads} * config.delta_v_dim,
         out, "a share of delta_k_heads = ", config.delta_k_heads, " heads, and of delta_v_heads = ",
         config.delta_v_heads, " heads of delta_v_dim = ", config.delta_v_dim, " columns");
}

// expect: as in Shard::Shard.
template <class Expect>
void share_output(Shard& shard, const ModelConfig& config, const Manifest& manifest, const Expect& expect) {
  const auto output = [](int one) { return cat("output.", one, ".weight"); };
  if (pools(config)) {  // every rank has the whole output
    shard.logits = shard.logits_share = output_columns(config);
    expect(config.model_task == "embed" || manifest.tensor(output(0)).rows == shard.logits, output(0), shard.logits,
           " rows: score_labels");
    return;
  }
  if (shard.is_mtp) {
    shard.logits = shard.logits_share = config.vocab_size;
    return;
  }
  if (is_head(config)) {
    shard.logits = shard.logits_share = config.draft_vocab_size;
    return;
  }
  const int ranks = shard.ranks;
  const auto share = shard.logits_share = manifest.tensor(output(0)).rows;
  expect(ranks == 1 || share % kLogitsAlignment == 0, output(0), "a multiple of ", kLogitsAlignment, " rows");
  const std::int64_t last = config.vocab_size - (ranks - 1) * share;
  for (int one = 0; one < ranks; ++one) {
    const auto rows = one + 1 < ranks ? share : last;
    expect(rows <= share && manifest.tensor(output(one)).rows == rows, output(one), rows,
           " rows, its share of vocab_size = ", config.vocab_size);
  }
  shard.logits = shard.rank + 1 < ranks ? share : last;
}

}  // namespace

Shard::Shard(const ModelConfig& config, const Manifest& manifest, int of) : rank(of), ranks(manifest.ranks()) {
  check_model(config);
  check_layers(config, manifest.layers());
  is_mtp = manifest.is_mtp();
  keeps_hidden = manifest.has_mtp();
  kept_layers = manifest.kept_layers();
  const auto expect = [&](bool fits, const std::string& name, const auto&... what) {
    if (fits) return;
    manifest.refuse(cat("tensor ", name, " of ", ranks, " ranks has shape ", manifest.tensor(name).shape(),
                        ", expected ", what...));
  };
  const auto name = [&](int layer, const char* module) {
    return cat("layers.", layer, ".", module, ".", rank, ".weight");
  };

  const auto& layers = manifest.layers();
  const auto first_with = [&](const char* mixer) {
    return static_cast<int>(std::ranges::find(layers, mixer, &LayerAttributes::mixer) - layers.begin());
  };
  const int conv = first_with("short_conv"), delta = first_with("delta_net");
  const bool latent = config.latent_size > 0;
  heads = config.head_num / ranks;
  for (int layer = 0; layer < config.num_layer; ++layer) {
    const auto& attributes = manifest.layers()[static_cast<std::size_t>(layer)];
    if (attributes.mixer != "attention") continue;
    const auto shape = attention_shape(config, *this, attributes);
    const auto out = name(layer, "attention.wo");
    const int out_dim = latent ? config.value_size_per_head : shape.head_size;
    expect(heads * ranks == config.head_num && manifest.tensor(out).cols == std::int64_t{heads} * out_dim, out,
           "a share of head_num = ", config.head_num, " heads of ", out_dim, " columns");
    if (latent) continue;
    const auto qkv = name(layer, "attention.w_qkv");
    const int all = kv_heads_of(config, attributes), kv = shape.kv_heads;
    expect(manifest.tensor(qkv).rows == shape.projected() && heads % kv == 0 && (kv * ranks) % all == 0, qkv,
           "rows of ", heads, " q heads and of ", shape.stores ? kv : 0,
           shape.values_are_keys ? " k heads" : " k and v heads each", " (of ", all, " KV heads)");
  }

  if (conv < config.num_layer) {
    const auto of_conv = name(conv, "conv.w_out");
    conv_channels = manifest.tensor(of_conv).cols;
    expect(conv_channels * ranks == config.hidden_units, of_conv, "a share of hidden_units = ", config.hidden_units,
           " columns");
  }

  if (delta < config.num_layer) {
    const auto of_delta = name(delta, "delta.w_out");
    share_delta_net(*this, config, of_delta, manifest.tensor(of_delta).cols, expect);
  }

  // The rank's share of a width. The shares of the ranks may differ.
  const auto share = [&](const std::string& module, int all, const char* key) {
    const auto rows = [&](int one) { return manifest.tensor(cat(module, ".", one, ".weight")).rows; };
    std::int64_t sum = 0;
    for (int one = 0; one < ranks; ++one) sum += rows(one);
    expect(sum == all, cat(module, ".", rank, ".weight"), "a share of ", key, " = ", all,
           " rows: the shares of all ranks are ", sum, " rows");
    return rows(rank);
  };
  for (int layer = 0; layer < config.num_layer; ++layer) {
    const auto forward = cat("layers.", layer, ".feed_forward.");
    const auto& attributes = manifest.layers()[static_cast<std::size_t>(layer)];
    const bool experts = has_experts(attributes);
    const int dense = attributes.inter_size > 0 ? attributes.inter_size : config.inter_size;
    inter.push_back(experts ? 0 : share(forward + "w1", dense, "inter_size"));
    if (!experts || expert_inter > 0) continue;
    expert_inter = share(forward + "experts.0.w1", config.expert_inter_size, "expert_inter_size");
    if (config.shared_expert_inter_size == 0) continue;
    shared_inter = share(forward + "shared.w1", config.shared_expert_inter_size, "shared_expert_inter_size");
  }

  share_output(*this, config, manifest, expect);
}

int kv_heads_of(const ModelConfig& config, const LayerAttributes& layer) {
  return layer.kv_heads > 0 ? layer.kv_heads : config.kv_head_num;
}

int head_size_of(const ModelConfig& config, const LayerAttributes& layer) {
  return layer.head_size > 0 ? layer.head_size : config.size_per_head;
}

AttentionShape attention_shape(const ModelConfig& config, const Shard& shard, const LayerAttributes& layer) {
  return {.heads = shard.heads,
          // With more ranks than KV heads, each rank has one head, and several ranks have the same one.
          .kv_heads = std::max(1, kv_heads_of(config, layer) / shard.ranks),
          .head_size = head_size_of(config, layer),
          .stores = layer.kv_source == 0,
          .values_are_keys = layer.values == "keys"};
}

ops::ExpertsShape experts_shape(const ModelConfig& config, const Shard& shard, DType weight) {
  return {.count = config.num_experts,
          .top_k = config.experts_per_token,
          .hidden = config.hidden_units,
          .inter = shard.expert_inter,
          .weight = weight};
}

}  // namespace charonia::model
