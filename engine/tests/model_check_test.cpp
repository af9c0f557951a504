// Model attributes that cannot be combined.
#include <gtest/gtest.h>

#include <string>

#include "charonia/error.h"
#include "model/layers.h"

namespace charonia::model {
namespace {

// Llama with 2 layers and the given attributes.
std::string refusal(const Settings& more) {
  Settings settings = {{"head_num", "4"},    {"kv_head_num", "2"}, {"size_per_head", "8"}, {"hidden_units", "32"},
                       {"inter_size", "48"}, {"num_layer", "2"},   {"vocab_size", "40"},   {"rotary_embedding", "8"}};
  for (const auto& [key, value] : more) settings[key] = value;
  EngineConfig engine;
  ModelConfig model;
  apply_settings(settings, engine, &model);
  try {
    check_model(model);
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

void expect_refused(const Settings& more, const std::string& named) {
  const auto message = refusal(more);
  EXPECT_NE(message.find(named), std::string::npos) << named << ": " << message;
}

TEST(ModelCheck, ConsistentAttributesAreAccepted) {
  EXPECT_EQ(refusal({}), "");
  EXPECT_EQ(refusal({{"layer_rotary", "rn"}}), "");
  EXPECT_EQ(refusal({{"q_scale_beta", "0.1"}, {"q_scale_length", "16"}}), "");
  EXPECT_EQ(refusal({{"pre_norms", "0"}, {"post_norms", "1"}, {"qk_norm", "1"}, {"qk_norm_rows", "1"}}), "");
  EXPECT_EQ(refusal({{"qk_norm", "1"}, {"qk_norm_after_rotary", "1"}}), "");
  EXPECT_EQ(refusal({{"layer_norm", "1"}, {"parallel_block", "1"}, {"rotary_interleaved", "1"}}), "");
}

TEST(ModelCheck, InconsistentAttributesAreRejectedByName) {
  expect_refused({{"layer_rotary", "r"}}, "layer_rotary has 1 letters for num_layer = 2");
  expect_refused({{"layer_rotary", "rn"}, {"rotary_embedding", "0"}}, "layer_rotary = rn");
  expect_refused({{"rotary_interleaved", "1"}, {"rotary_embedding", "0"}}, "rotary_interleaved = 1");
  expect_refused({{"q_scale_beta", "0.5"}}, "q_scale_beta = 0.5 needs q_scale_length");
  expect_refused({{"qk_norm_rows", "1"}}, "qk_norm_rows = 1 needs qk_norm");
  expect_refused({{"qk_norm_after_rotary", "1"}}, "qk_norm_after_rotary = 1 needs qk_norm");
  expect_refused({{"qk_norm", "1"}, {"qk_norm_rows", "1"}, {"qk_norm_after_rotary", "1"}},
                 "qk_norm_rows = 1 with qk_norm_after_rotary = 1");
  expect_refused({{"pre_norms", "0"}}, "pre_norms = 0 needs post_norms");
  expect_refused({{"layer_norm", "1"}, {"post_norms", "1"}}, "layer_norm = 1 with post_norms = 1");
  expect_refused({{"layer_norm", "1"}, {"qk_norm", "1"}}, "layer_norm = 1 with qk_norm = 1");
  expect_refused({{"parallel_block", "1"}, {"post_norms", "1"}}, "parallel_block = 1 with post_norms = 1");
}

}  // namespace
}  // namespace charonia::model
