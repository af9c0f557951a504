// Routers and shared experts in the whole decoder: rejected configurations, and a router that stays fp32 in a 16-bit
// model.
#include <gtest/gtest.h>

#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "charonia/error.h"
#include "engine_support.h"
#include "errors.h"
#include "model/layers.h"
#include "test_folder.h"
#include "tiny_workspace.h"

namespace charonia {
namespace {

using testing::TinyModel;

ModelConfig with_experts() {
  ModelConfig config;
  config.head_num = config.kv_head_num = 4;
  config.size_per_head = 8, config.num_layer = 2;
  config.num_experts = 8, config.experts_per_token = 3, config.expert_inter_size = 16;
  return config;
}

void expect_refused(const std::function<void(ModelConfig&)>& change, const std::string& what) {
  auto config = with_experts();
  change(config);
  expect_error({what}, [&] { model::check_model(config); });
}

TEST(DecoderExperts, InconsistentAttributesAreRejectedWithKeyAndValue) {
  auto config = with_experts();
  config.router_groups = 4, config.router_top_groups = 2, config.router_norm_min = 0.1F;
  config.shared_expert_inter_size = 8, config.shared_expert_gate = true;
  EXPECT_NO_THROW(model::check_model(config));
  expect_refused([](auto& c) { c.router_groups = 3, c.router_top_groups = 2; }, "router_groups = 3");
  expect_refused([](auto& c) { c.router_groups = 8, c.router_top_groups = 4; }, "router_groups = 8");
  expect_refused([](auto& c) { c.router_groups = 4, c.router_top_groups = 1; }, "router_top_groups = 1");
  expect_refused([](auto& c) { c.router_groups = 4, c.router_top_groups = 5; }, "router_top_groups = 5");
  expect_refused([](auto& c) { c.router_top_groups = 1; }, "router_top_groups = 1");
  expect_refused([](auto& c) { c.num_experts = 80, c.router_groups = c.router_top_groups = 40; }, "up to 32 groups");
  expect_refused([](auto& c) { c.router_norm_min = 0.125F; }, "router_norm_min = 0.125");
  expect_refused([](auto& c) { c.shared_expert_gate = true; }, "shared_expert_gate = 1");
  const auto dense = [](auto& c) { c.num_experts = c.experts_per_token = c.expert_inter_size = 0; };
  expect_refused([&](auto& c) { dense(c), c.router_bias = true; }, "router_bias = 1");
  expect_refused([&](auto& c) { dense(c), c.router_groups = 2; }, "router_groups");
  expect_refused([&](auto& c) { dense(c), c.shared_expert_inter_size = 8; }, "shared_expert_inter_size");
}

class DecoderRouter : public ::testing::Test {
 protected:
  void SetUp() override { dir_ = testing::test_folder(); }
  void TearDown() override { std::filesystem::remove_all(dir_); }

  // Log probabilities of a response of a bf16 model; `change` modifies the router's weights.
  std::vector<float> logprobs(bool fp32, const std::function<float(float)>& change) const {
    std::filesystem::remove_all(dir_);
    TinyModel model;
    model.experts = 6, model.router_bias = true;
    model.more = std::string("data_type = bf16\nrouter_fp32 = ") + (fp32 ? "1\n" : "0\n");
    model.change = [&](const std::string& name, float value) {
      return name.ends_with("feed_forward.gate.weight") ? change(value) : value;
    };
    testing::write_tiny_workspace(dir_, model);
    Engine engine(dir_);
    testing::Collector out;
    auto request = testing::request({5, 6, 7}, 24);
    request.sampling.logprobs = 0;
    engine.submit(std::move(request), out.callback());
    return out.logprobs();
  }

  std::filesystem::path dir_;
};

TEST_F(DecoderRouter, StaysFp32InA16BitModelIfItsAttributesSaySo) {
  const auto bf16 = [](float value) { return bf16_to_float(float_to_bf16(value)); };
  const auto halves = [&](float value) { return bf16(value) + bf16(value - bf16(value)); };
  const auto as_it_is = [](float value) { return value; };
  const auto wide = logprobs(true, as_it_is);
  ASSERT_EQ(wide.size(), 24U);
  EXPECT_EQ(wide, logprobs(true, halves)) << "16 bits of a value count";
  EXPECT_NE(wide, logprobs(true, bf16));
  EXPECT_EQ(logprobs(false, as_it_is), logprobs(true, bf16));
}

}  // namespace
}  // namespace charonia
