// Model attributes that cannot be combined.
#include <gtest/gtest.h>

#include <string_view>
#include <utility>
#include <vector>

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
      {{{"rotary_embedding", "10"}}, "rotary_embedding = 10 must be an even number up to size_per_head = 8"},
      {{{"rotary_embedding", "5"}}, "rotary_embedding = 5 must be"},
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
      {{{"router_groups", "2"}}, "router_groups"},
      {{{"shared_expert_inter_size", "8"}}, "shared_expert_inter_size"}};
  for (const auto& [settings, named] : wrong) {
    expect_error({named}, [&, &bad = settings] { check(bad); });
  }
}

}  // namespace
}  // namespace charonia::model
