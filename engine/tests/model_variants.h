// Very small models with the extensions of model families.
#pragma once

#include <string>
#include <vector>

#include "tiny_workspace.h"

namespace charonia::testing {

// Each model has some of the extensions.
inline std::vector<TinyModel> model_variants() {
  TinyModel qwen3, gemma, mixtral, mixed, glm, shared, alibi, phi, olmo, granite, hunyuan, cohere, gpt_oss, gemma4,
      gemma4_moe, lfm2, lfm2_moe, qwen3_5;
  qwen3.qk_norm = true;
  gemma.qk_norm = gemma.post_norms = gemma.tied = true;
  gemma.layers = 3;
  gemma.windows = {8, 0}, gemma.rotations = {"local", "global"};
  gemma.more =
      "norm_unit_offset = 1\nactivation = gelu_tanh\nembedding_scale = 5.65\n"
      "rope_local_theta = 100\nattention_soft_cap = 20\nlogit_soft_cap = 15\nattention_scale = 0.3\n"
      "rope_scaling_type = linear\nrope_factor = 4\n";
  // So that 1 + weight is about 1.
  gemma.change = [](const std::string& name, float value) {
    return name.find("norm.weight") == std::string::npos ? value : value - 1;
  };
  mixtral.experts = 6;
  mixed.experts = 5, mixed.experts_per_token = 3, mixed.layers = 3, mixed.layer_experts = "mdm", mixed.biases = true;
  mixed.more = "renormalize_experts = 0\n";
  glm.experts = 8, glm.experts_per_token = 3, glm.shared_inter = 16, glm.router_bias = true, glm.layer_experts = "dm";
  glm.more =
      "router_score = sigmoid\nrouter_groups = 4\nrouter_top_groups = 2\nrouter_scale = 1.7\n"
      "router_norm_min = 1e-20\nrouter_fp32 = 1\n";
  shared.experts = 5, shared.shared_inter = 36, shared.shared_gate = shared.biases = true;
  alibi.kv_heads = 4;
  alibi.rotations = {"none"};
  alibi.more = "alibi = 1\nrotary_embedding = 0\nnormalize_output = 1\n";
  phi.more =
      "rotary_embedding = 4\nrope_scaling_type = longrope\nrope_original_max_position_embeddings = 16\n"
      "rope_short_factors = 1,1.5\nrope_long_factors = 2,8\nlogn_length = 16\n";
  olmo.qk_norm = olmo.qk_norm_rows = olmo.post_norms = true;
  olmo.pre_norms = false;
  olmo.layers = 3;
  olmo.rotations = {"global", "none"};
  granite.more = "residual_multiplier = 0.22\nlogits_scale = 0.125\nrotary_interleaved = 1\n";
  granite.biases = true;  // these are scaled too
  hunyuan.qk_norm = true;
  hunyuan.more = "qk_norm_after_rotary = 1\nq_scale_beta = 0.1\nq_scale_length = 16\n";
  cohere.parallel_block = true;
  cohere.more = "layer_norm = 1\nrotary_interleaved = 1\nlogits_scale = 0.25\n";
  gpt_oss.experts = 5, gpt_oss.biases = gpt_oss.router_bias = gpt_oss.expert_biases = gpt_oss.sinks = true;
  gpt_oss.windows = {8, 0};
  gpt_oss.more = "router_logit_bias = 1\nactivation = clamped_swiglu\nswiglu_limit = 1\n";
  // The layers: with a window, without one and with keys as values; then both kinds with the keys and values of these.
  gemma4.qk_norm = gemma4.post_norms = gemma4.tied = gemma4.layer_scalars = true;
  gemma4.layers = 4, gemma4.per_layer = 8;
  gemma4.windows = {8, 0}, gemma4.rotations = {"local", "global"};
  gemma4.head_dims = {0, 12}, gemma4.kv_counts = {0, 1}, gemma4.keys_as_values = {false, true};
  gemma4.kv_sources = {0, 0, 2, 2}, gemma4.inters = {0, 0, 96, 96};
  gemma4.more =
      "v_norm = 1\nactivation = gelu_tanh\nembedding_scale = 5.65\nattention_scale = 1\nlogit_soft_cap = 15\n"
      "rotary_embedding = 12\nrope_scaling_type = proportional\nrope_turned = 4\nrope_local_theta = 100\n"
      "rope_local_embedding = 8\n";
  gemma4_moe.qk_norm = gemma4_moe.post_norms = gemma4_moe.layer_scalars = true;
  gemma4_moe.experts = 5, gemma4_moe.shared_inter = 48;
  gemma4_moe.expert_norms = gemma4_moe.expert_scales = true;
  gemma4_moe.head_dims = {12, 0}, gemma4_moe.keys_as_values = {true, false};
  gemma4_moe.more = "v_norm = 1\nactivation = gelu_tanh\n";
  lfm2.layers = lfm2_moe.layers = 3;
  lfm2.qk_norm = lfm2.tied = lfm2.biases = lfm2_moe.qk_norm = true;
  lfm2.mixers = {"short_conv", "attention"};
  lfm2_moe.mixers = {"short_conv", "short_conv", "attention"};
  lfm2_moe.experts = 5, lfm2_moe.router_bias = true, lfm2_moe.layer_experts = "dm";
  lfm2_moe.more = "router_score = sigmoid\nrouter_norm_min = 1e-6\n";
  qwen3_5.layers = 4, qwen3_5.k_heads = 4, qwen3_5.v_heads = 8;
  qwen3_5.qk_norm = qwen3_5.biases = qwen3_5.attention_gate = true;
  qwen3_5.mixers = {"delta_net", "attention"};
  qwen3_5.experts = 5, qwen3_5.shared_inter = 36, qwen3_5.shared_gate = true, qwen3_5.layer_experts = "md";
  qwen3_5.more = "rotary_embedding = 2\n";
  return {qwen3,   gemma,  mixtral, mixed,   glm,    shared,     alibi, phi,      olmo,
          granite, hunyuan, cohere, gpt_oss, gemma4, gemma4_moe, lfm2,  lfm2_moe, qwen3_5};
}

}  // namespace charonia::testing
