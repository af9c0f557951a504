#include "model/layers.h"

#include <algorithm>
#include <string>
#include <utility>

#include "base/text.h"
#include "charonia/error.h"
#include "model/rope.h"
#include "model/shard.h"
#include "ops/operations.h"

namespace charonia::model {
namespace {

constexpr auto kInvalid = ErrorCode::invalid_argument, kUnsupported = ErrorCode::unsupported;

template <class... What>
void refuse_if(bool wrong, ErrorCode code, const What&... what) {
  if (wrong) throw Error(code, cat(what..., "; charonia convert writes the attributes of the model and its layers"));
}

void check_rotation(const ModelConfig& config) {
  constexpr int kMost = 65536;
  const int dim = config.rotary_embedding, local = config.rope_local_embedding;
  refuse_if(dim > kMost || local > kMost || local % 2 != 0, kInvalid, "rotary_embedding = ", dim,
            " and rope_local_embedding = ", local, " must be even numbers up to ", kMost);
  refuse_if(config.alibi && dim != 0, kInvalid, "alibi = 1 with rotary_embedding = ", dim, ": ALiBi has no rotation");
  refuse_if(config.rotary_interleaved && dim == 0, kInvalid, "rotary_interleaved = 1 with rotary_embedding = 0");
  const auto& kind = config.rope_scaling_type;
  if (dim == 0 || kind == "default" || kind == "linear") return;
  if (kind == "proportional") {
    const int turned = config.rope_turned;
    refuse_if(turned < 0 || turned > dim || turned % 2 != 0, kInvalid, "rope_turned = ", turned,
              " must be an even number up to rotary_embedding = ", dim);
    return;
  }
  refuse_if((kind == "dynamic" || kind == "qwen") && dim < 4, kUnsupported, "rope_scaling_type = ", kind,
            " needs rotary_embedding >= 4, and it is ", dim);
  const int original = config.rope_original_max_position_embeddings;
  refuse_if((kind == "llama3" || kind == "yarn" || kind == "longrope") && original < 1, kInvalid,
            "rope_scaling_type = ", kind, " needs rope_original_max_position_embeddings, and it is ", original);
  if (kind != "longrope") return;
  const auto half = static_cast<std::size_t>(dim / 2);
  const auto short_factors = config.rope_short_factors.size(), long_factors = config.rope_long_factors.size();
  refuse_if(short_factors != half || long_factors != half, kInvalid, "rope_short_factors and rope_long_factors hold ",
            short_factors, " and ", long_factors, " numbers, and must hold ", half, " (rotary_embedding / 2) each");
}

void check_norms(const ModelConfig& config) {
  refuse_if(config.qk_norm_rows && !config.qk_norm, kInvalid, "qk_norm_rows = 1 needs qk_norm = 1");
  refuse_if(config.qk_norm_after_rotary && !config.qk_norm, kInvalid, "qk_norm_after_rotary = 1 needs qk_norm = 1");
  refuse_if(config.v_norm && !config.qk_norm, kInvalid, "v_norm = 1 needs qk_norm = 1");
  refuse_if(config.qk_norm_rows && config.qk_norm_after_rotary, kUnsupported,
            "qk_norm_rows = 1 with qk_norm_after_rotary = 1");
  refuse_if(!config.pre_norms && !config.post_norms, kInvalid, "pre_norms = 0 needs post_norms = 1");
  refuse_if(config.layer_norm && config.post_norms, kUnsupported, "layer_norm = 1 with post_norms = 1");
  refuse_if(config.layer_norm && config.qk_norm, kUnsupported, "layer_norm = 1 with qk_norm = 1");
  refuse_if(config.parallel_block && config.layer_scalars, kUnsupported, "parallel_block = 1 with layer_scalars = 1");
  refuse_if(config.parallel_block && config.post_norms, kUnsupported, "parallel_block = 1 with post_norms = 1");
}

void check_latent(const ModelConfig& config) {
  const int size = config.latent_size, values = config.value_size_per_head, rotated = config.rotary_embedding;
  if (size == 0) {
    refuse_if(config.q_latent_size != 0 || values != 0, kInvalid, "q_latent_size = ", config.q_latent_size,
              " and value_size_per_head = ", values, " need latent_size above 0, and it is 0");
    return;
  }
  refuse_if(size % 2 != 0 || values < 1 || rotated < 2 || rotated >= config.size_per_head, kUnsupported,
            "latent_size = ", size, " with value_size_per_head = ", values, ", rotary_embedding = ", rotated,
            " and size_per_head = ", config.size_per_head,
            ": latent_size must be even, and a head must have values, rotated elements and others");
  const std::pair<const char*, bool> without[] = {{"attn_bias", config.attn_bias},
                                                  {"attn_output_bias", config.attn_output_bias},
                                                  {"qk_norm", config.qk_norm},
                                                  {"attention_sinks", config.attention_sinks},
                                                  {"attention_gate", config.attention_gate},
                                                  {"alibi", config.alibi},
                                                  {"parallel_block", config.parallel_block}};
  for (const auto& [what, holds] : without) refuse_if(holds, kUnsupported, what, " = 1 with latent_size");
  refuse_if(config.attention_soft_cap > 0 || config.rope_local_theta > 0 || config.norm_unit_offset, kUnsupported,
            "attention_soft_cap, rope_local_theta or norm_unit_offset with latent_size");
}

void check_head(const ModelConfig& config) {
  const bool simple = config.num_layer == 1 && config.latent_size == 0 && config.num_experts == 0 &&
                      config.pre_norms && !config.post_norms && !config.parallel_block && !config.layer_norm &&
                      config.model_task == "generate" && !config.attention_gate && config.per_layer_embedding == 0;
  refuse_if(!simple, kUnsupported, "target_hidden_units = ", config.target_hidden_units,
            ": an EAGLE-3 head must have one layer of attention and a dense feed-forward, as in Llama");
  const auto layers = config.target_layers.size();
  refuse_if(layers != 0 && layers != kHeadLayers, kUnsupported, "target_layers has ", layers, " layers, and must have ",
            kHeadLayers, " or none");
  refuse_if(config.hidden_units == kHeadLayers * config.target_hidden_units, kUnsupported, "hidden_units = ",
            config.hidden_units, " is ", kHeadLayers, " times target_hidden_units");
  refuse_if(config.draft_vocab_size < 1 || config.draft_vocab_size > config.vocab_size, kInvalid,
            "draft_vocab_size = ", config.draft_vocab_size, " must be 1 to vocab_size = ", config.vocab_size);
}

void check_experts(const ModelConfig& config) {
  const int count = config.num_experts, groups = config.router_groups;
  if (count == 0) {
    const std::pair<const char*, bool> without[] = {
        {"router_bias = 1", config.router_bias},
        {"expert_bias = 1", config.expert_bias},
        {"router_groups is not 0", groups != 0},
        {"expert_norms = 1", config.expert_norms},
        {"expert_scales = 1", config.expert_scales},
        {"shared_expert_inter_size is not 0", config.shared_expert_inter_size != 0}};
    for (const auto& [what, holds] : without) refuse_if(holds, kInvalid, what, ", and num_experts is 0");
    return;
  }
  refuse_if(config.experts_per_token < 1 || config.experts_per_token > count || config.expert_inter_size < 1, kInvalid,
            "num_experts = ", count, " with experts_per_token = ", config.experts_per_token,
            " (1 to num_experts) and expert_inter_size = ", config.expert_inter_size, " (>= 1)");
  const ops::RouterParams how{
      .top_k = config.experts_per_token, .groups = groups, .top_groups = config.router_top_groups};
  refuse_if(!how.fits(count) || (groups == 0 && config.router_top_groups != 0), kInvalid, "router_groups = ", groups,
            " with router_top_groups = ", config.router_top_groups, " and experts_per_token = ", how.top_k,
            ": num_experts = ", count, " experts must be in up to ", ops::RouterParams::kMaxGroups,
            " groups of one size, 2 or more, and the top groups must have enough of them");
  refuse_if(config.router_norm_min * static_cast<float>(count) >= 1, kInvalid,
            "router_norm_min = ", config.router_norm_min, " must be less than 1 / num_experts, and num_experts is ",
            count);
  refuse_if(config.router_logit_bias && !config.router_bias, kInvalid, "router_logit_bias = 1 needs router_bias = 1");
  refuse_if(config.shared_expert_gate && config.shared_expert_inter_size == 0, kInvalid,
            "shared_expert_gate = 1, and shared_expert_inter_size is 0");
  refuse_if(config.expert_norms && config.shared_expert_inter_size == 0, kInvalid,
            "expert_norms = 1, and shared_expert_inter_size is 0");
  refuse_if(config.expert_norms && (config.shared_expert_gate || config.router_fp32 || config.parallel_block),
            kUnsupported, "expert_norms = 1 with shared_expert_gate = 1, router_fp32 = 1 or parallel_block = 1");
}

}  // namespace

void check_model(const ModelConfig& config) {
  refuse_if(config.kv_head_num < 1 || config.head_num % config.kv_head_num != 0, kInvalid,
            "head_num = ", config.head_num, " is not a multiple of kv_head_num = ", config.kv_head_num);
  check_rotation(config);
  check_norms(config);
  check_latent(config);
  refuse_if(config.q_scale_beta > 0 && config.q_scale_length == 0, kInvalid, "q_scale_beta = ", config.q_scale_beta,
            " needs q_scale_length above 0, and it is 0");
  check_experts(config);
  if (is_head(config)) check_head(config);
  refuse_if(!is_head(config) && (config.norm_output || config.fused_norm != "none"), kInvalid,
            "norm_output = ", config.norm_output, " and fused_norm = ", config.fused_norm,
            " need target_hidden_units above 0, and it is 0");
  const bool scores = config.model_task == "score";
  refuse_if(scores ? config.score_labels != 1 && config.score_labels != 2 : config.score_labels != 0, kInvalid,
            "model_task = ", config.model_task, " with score_labels = ", config.score_labels,
            ": it must be 1 or 2 for score, and 0 for other tasks");
  if (config.per_layer_embedding == 0) return;
  refuse_if(!config.post_norms, kInvalid, "per_layer_embedding = ", config.per_layer_embedding,
            " needs post_norms = 1");
  refuse_if(config.per_layer_vocab_size < config.vocab_size, kInvalid, "per_layer_vocab_size = ",
            config.per_layer_vocab_size, " must be at least vocab_size = ", config.vocab_size);
}

void check_layers(const ModelConfig& config, std::span<const LayerAttributes> layers) {
  refuse_if(std::ssize(layers) != config.num_layer, kInvalid, "manifest.json has ", layers.size(),
            " layers for num_layer = ", config.num_layer);
  refuse_if(std::ranges::find(layers, "attention", &LayerAttributes::mixer) == layers.end(), kUnsupported,
            "no layer has mixer = attention");
  const ops::DeltaNetParams delta{.k_heads = config.delta_k_heads,
                                  .v_heads = config.delta_v_heads,
                                  .k_dim = config.delta_k_dim,
                                  .v_dim = config.delta_v_dim};
  for (std::size_t i = 0; i < layers.size(); ++i) {
    const auto& layer = layers[i];
    const auto &rotation = layer.rotation, &ffn = layer.ffn;
    const int size = head_size_of(config, layer), heads = kv_heads_of(config, layer);
    refuse_if(size % 2 != 0, kUnsupported, "layer ", i, " has heads of ", size, " elements, which is not even");
    const int dim = rotation == "none" ? 0 : rotation == "local" ? local_rotary_dim(config) : config.rotary_embedding;
    refuse_if(dim % 2 != 0 || dim > size, kUnsupported, "layer ", i, " rotates ", dim,
              " elements per head, which must be an even number up to the ", size, " of a head");
    refuse_if(config.head_num % heads != 0, kInvalid, "layer ", i, ": head_num = ", config.head_num,
              " is not a multiple of its ", heads, " KV heads");
    const int source = layer.kv_source;
    if (source > 0) {
      const auto from = i - static_cast<std::size_t>(source);
      refuse_if(from >= i || layers[from].kv_source > 0 || layers[from].window != layer.window ||
                    layers[from].mixer != "attention" || layer.mixer != "attention" ||
                    head_size_of(config, layers[from]) != size || kv_heads_of(config, layers[from]) != heads,
                kInvalid, "layer ", i, " has kv_source = ", source,
                ", which must name an earlier layer with the same window and heads, and with its own keys and values");
      refuse_if(config.attn_bias || config.qk_norm_rows, kUnsupported, "layer ", i,
                " has kv_source above 0, with attn_bias = 1 or qk_norm_rows = 1");
    }
    refuse_if(layer.values == "keys" && (config.attn_bias || config.qk_norm_rows), kUnsupported, "layer ", i,
              " has values = keys, with attn_bias = 1 or qk_norm_rows = 1");
    refuse_if(layer.values == "keys" && config.attention_gate, kUnsupported, "layer ", i,
              " has values = keys, with attention_gate = 1");
    const auto& mixer = layer.mixer;
    const bool own_heads = layer.head_size > 0 || layer.kv_heads > 0 || source > 0 || layer.values != "projected";
    refuse_if(own_heads && (config.latent_size > 0 || mixer != "attention"), kUnsupported, "layer ", i,
              " has head_size = ", layer.head_size, ", kv_heads = ", layer.kv_heads, ", kv_source = ", source,
              " and values = ", layer.values, ", which only attention without latents can have");
    refuse_if(rotation != "none" && config.rotary_embedding == 0, kInvalid, "layer ", i, " has rotation = ", rotation,
              ", and rotary_embedding is 0");
    refuse_if(rotation == "local" && config.rope_local_theta == 0, kInvalid, "layer ", i,
              " has rotation = local, and rope_local_theta is 0");
    refuse_if(mixer != "attention" && config.conv_kernel < 2, kInvalid, "layer ", i, " has mixer = ", mixer,
              ", and conv_kernel is ", config.conv_kernel);
    refuse_if(mixer == "delta_net" && !delta.fits(), kInvalid, "layer ", i, " has mixer = delta_net with ",
              delta.k_heads, " k heads of ", delta.k_dim, " and ", delta.v_heads, " v heads of ", delta.v_dim,
              " elements: v heads must be a multiple of k heads, and delta_k_dim at most ", delta.kMaxKDim);
    refuse_if(mixer == "delta_net" && config.conv_bias, kUnsupported, "conv_bias = 1 with mixer = delta_net in layer ",
              i);
    refuse_if(mixer != "attention" && (layer.window != 0 || rotation != "none"), kInvalid, "layer ", i,
              " has mixer = ", mixer, " with window = ", layer.window, " and rotation = ", rotation);
    refuse_if(config.latent_size > 0 && (layer.window > 0 || rotation != "global"), kUnsupported, "layer ", i,
              " has window = ", layer.window, " and rotation = ", rotation, ", and the model has latents");
    refuse_if(layer.inter_size > 0 && ffn == "experts", kInvalid, "layer ", i, " has inter_size = ", layer.inter_size,
              " with ffn = experts");
    refuse_if(ffn == "experts" && config.num_experts == 0, kInvalid, "layer ", i,
              " has ffn = experts, and num_experts is 0");
  }
}

std::int64_t output_columns(const ModelConfig& config) {
  if (config.model_task == "embed") return config.hidden_units;
  return config.model_task == "score" ? config.score_labels : config.vocab_size;
}

DType data_type(const ModelConfig& config) {
  if (!config.data_type.empty()) return weight_dtype(config.data_type);
  const auto& type = config.weight_type;
  refuse_if(type != "bf16" && type != "fp16" && type != "fp32", kUnsupported, "weight_type = ", type,
            " needs data_type = bf16, fp16 or fp32, and it is empty");
  return weight_dtype(type);
}

ops::Activation activation_of(const ModelConfig& config) {
  if (config.activation == "clamped_swiglu") {
    return {ops::Activation::clamped_swiglu, config.swiglu_limit, config.swiglu_alpha};
  }
  return config.activation == "gelu_tanh" ? ops::Activation::gelu_tanh : ops::Activation::silu;
}

std::int64_t router_columns(const ModelConfig& config) {
  return std::int64_t{config.num_experts} * (config.router_fp32 ? 2 : 1) + (config.shared_expert_gate ? 1 : 0);
}

}  // namespace charonia::model
