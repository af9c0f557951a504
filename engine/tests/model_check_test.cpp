// Model attributes that cannot be combined.
#include <gtest/gtest.h>

#include <string_view>
#include <utility>
#include <vector>

#include "base/text.h"
#include "errors.h"
#include "model/layers.h"

namespace charonia::model {
namespace {

// Checks Llama with 2 layers and the given attributes.
void check(const Settings& more) {
  Settings settings = {{"head_num", "4"},    {"kv_head_num", "2"}, {"size_per_head", "8"}, {"hidden_units", "32"},
                       {"inter_size", "48"}, {"num_layer", "2"},   {"vocab_size", "40"},   {"rotary_embedding", "8"}};
  for (const auto& [key, value] : more) settings[key] = value;
  EngineConfig engine;
  ModelConfig model;
  apply_settings(settings, engine, &model);
  check_model(model);
  check_layers(model, std::vector<LayerAttributes>(2));
}

// Checks layers of this model, with a rotation with another base.
void check_layers_of(const std::vector<LayerAttributes>& layers) {
  EngineConfig engine;
  ModelConfig model;
  apply_settings({{"head_num", "4"}, {"kv_head_num", "2"}, {"size_per_head", "8"}, {"hidden_units", "32"},
                  {"inter_size", "48"}, {"num_layer", cat(layers.size())}, {"vocab_size", "40"},
                  {"rotary_embedding", "16"}, {"rope_local_theta", "100"}, {"rope_local_embedding", "8"}},
                 engine, &model);
  check_layers(model, layers);
}

Settings with_experts(const Settings& more) {
  Settings settings = {{"num_experts", "8"}, {"experts_per_token", "3"}, {"expert_inter_size", "16"}};
  for (const auto& [key, value] : more) settings[key] = value;
  return settings;
}

TEST(ModelCheck, ConsistentAttributesAreAccepted) {
  for (const auto& settings :
       std::vector<Settings>{{},
                             {{"q_scale_beta", "0.1"}, {"q_scale_length", "16"}},
                             {{"pre_norms", "0"}, {"post_norms", "1"}, {"qk_norm", "1"}, {"qk_norm_rows", "1"}},
                             {{"qk_norm", "1"}, {"qk_norm_after_rotary", "1"}},
                             {{"latent_size", "8"}, {"value_size_per_head", "3"}, {"rotary_embedding", "4"}},
                             {{"layer_norm", "1"}, {"parallel_block", "1"}, {"rotary_interleaved", "1"}},
                             with_experts({{"router_groups", "4"},
                                           {"router_top_groups", "2"},
                                           {"router_norm_min", "0.1"},
                                           {"shared_expert_inter_size", "8"},
                                           {"shared_expert_gate", "1"}})}) {
    EXPECT_NO_THROW(check(settings));
  }
}

TEST(ModelCheck, InconsistentAttributesAreRejectedByName) {
  const std::vector<std::pair<Settings, std::string_view>> wrong = {
      {{{"rotary_interleaved", "1"}, {"rotary_embedding", "0"}}, "rotary_interleaved = 1"},
      {{{"rotary_embedding", "10"}}, "layer 0 rotates 10 elements per head, which must be an even number up to the 8"},
      {{{"rotary_embedding", "5"}}, "layer 0 rotates 5 elements"},
      {{{"size_per_head", "9"}}, "layer 0 has heads of 9 elements"},
      {{{"rope_scaling_type", "proportional"}, {"rope_turned", "10"}}, "rope_turned = 10"},
      {{{"v_norm", "1"}}, "v_norm = 1 needs qk_norm"},
      {{{"parallel_block", "1"}, {"layer_scalars", "1"}}, "parallel_block = 1 with layer_scalars = 1"},
      {{{"per_layer_embedding", "8"}, {"per_layer_vocab_size", "40"}}, "per_layer_embedding = 8 needs post_norms"},
      {{{"per_layer_embedding", "8"}, {"per_layer_vocab_size", "39"}, {"post_norms", "1"}},
       "per_layer_vocab_size = 39"},
      {with_experts({{"expert_norms", "1"}}), "expert_norms = 1"},
      {{{"expert_scales", "1"}}, "expert_scales = 1"},
      {{{"q_scale_beta", "0.5"}}, "q_scale_beta = 0.5 needs q_scale_length"},
      {{{"qk_norm_rows", "1"}}, "qk_norm_rows = 1 needs qk_norm"},
      {{{"q_latent_size", "8"}}, "q_latent_size = 8"},
      {{{"latent_size", "8"}, {"rotary_embedding", "4"}}, "value_size_per_head = 0"},
      {{{"latent_size", "7"}, {"value_size_per_head", "4"}, {"rotary_embedding", "4"}}, "latent_size = 7"},
      {{{"latent_size", "8"}, {"value_size_per_head", "4"}, {"rotary_embedding", "8"}}, "rotary_embedding = 8"},
      {{{"latent_size", "8"}, {"value_size_per_head", "4"}, {"rotary_embedding", "4"}, {"attention_gate", "1"}},
       "attention_gate = 1 with latent_size"},
      {{{"latent_size", "8"}, {"value_size_per_head", "4"}, {"rotary_embedding", "4"}, {"qk_norm", "1"}},
       "qk_norm = 1 with latent_size"},
      {{{"qk_norm_after_rotary", "1"}}, "qk_norm_after_rotary = 1 needs qk_norm"},
      {{{"qk_norm", "1"}, {"qk_norm_rows", "1"}, {"qk_norm_after_rotary", "1"}},
       "qk_norm_rows = 1 with qk_norm_after_rotary = 1"},
      {{{"pre_norms", "0"}}, "pre_norms = 0 needs post_norms"},
      {{{"layer_norm", "1"}, {"post_norms", "1"}}, "layer_norm = 1 with post_norms = 1"},
      {{{"layer_norm", "1"}, {"qk_norm", "1"}}, "layer_norm = 1 with qk_norm = 1"},
      {{{"parallel_block", "1"}, {"post_norms", "1"}}, "parallel_block = 1 with post_norms = 1"},
      {with_experts({{"router_groups", "3"}, {"router_top_groups", "2"}}), "router_groups = 3"},
      {with_experts({{"router_groups", "8"}, {"router_top_groups", "4"}}), "router_groups = 8"},
      {with_experts({{"router_groups", "4"}, {"router_top_groups", "1"}}), "router_top_groups = 1"},
      {with_experts({{"router_groups", "4"}, {"router_top_groups", "5"}}), "router_top_groups = 5"},
      {with_experts({{"router_top_groups", "1"}}), "router_top_groups = 1"},
      {with_experts({{"num_experts", "80"}, {"router_groups", "40"}, {"router_top_groups", "40"}}), "up to 32 groups"},
      {with_experts({{"router_norm_min", "0.125"}}), "router_norm_min = 0.125"},
      {with_experts({{"shared_expert_gate", "1"}}), "shared_expert_gate = 1"},
      {{{"router_bias", "1"}}, "router_bias = 1"},
      {{{"rope_local_embedding", "65538"}}, "rope_local_embedding = 65538"},
      {{{"rope_local_embedding", "3"}}, "rope_local_embedding = 3"},
      {{{"router_groups", "2"}}, "router_groups"},
      {{{"shared_expert_inter_size", "8"}}, "shared_expert_inter_size"}};
  for (const auto& [settings, named] : wrong) {
    expect_error({named}, [&, &bad = settings] { check(bad); });
  }
}

TEST(ModelCheck, LayersWithOtherHeadsAreAcceptedOrRejectedByName) {
  const LayerAttributes window{.window = 8, .rotation = "local"}, full{.head_size = 16, .kv_heads = 1};
  const auto with_source = [](LayerAttributes layer, int source) {
    layer.kv_source = source;
    return layer;
  };
  EXPECT_NO_THROW(check_layers_of({window, full, with_source(window, 2), with_source(full, 2), with_source(full, 3)}));
  const std::vector<std::pair<std::vector<LayerAttributes>, std::string_view>> wrong = {
      {{window, with_source(window, 2)}, "layer 1 has kv_source = 2"},
      {{window, full, with_source(window, 1)}, "layer 2 has kv_source = 1"},
      {{window, with_source(window, 1), with_source(window, 1)}, "layer 2 has kv_source = 1"},
      {{LayerAttributes{.rotation = "none", .kv_heads = 3}}, "layer 0: head_num = 4"},
      {{LayerAttributes{.head_size = 12}}, "layer 0 rotates 16 elements"},
      {{window, LayerAttributes{.rotation = "none", .kv_heads = 1, .mixer = "short_conv"}},
       "layer 1 has head_size = 0, kv_heads = 1"},
      {{LayerAttributes{.head_size = 16, .inter_size = 8, .ffn = "experts"}},
       "layer 0 has inter_size = 8 with ffn = experts"}};
  for (const auto& [layers, named] : wrong) {
    expect_error({named}, [&, &bad = layers] { check_layers_of(bad); });
  }
}

}  // namespace
}  // namespace charonia::model
