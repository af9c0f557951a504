// A router that stays fp32 in a 16-bit model.
#include <gtest/gtest.h>

#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "base/text.h"
#include "engine_support.h"
#include "test_folder.h"
#include "tiny_workspace.h"

namespace charonia {
namespace {

using testing::TinyModel;

class DecoderRouter : public ::testing::Test {
 protected:
  void SetUp() override { dir_ = testing::test_folder(); }
  void TearDown() override { std::filesystem::remove_all(dir_); }

  // Log probabilities of a response of a bf16 model; `change` modifies the router's weights.
  std::vector<float> logprobs(bool fp32, const std::function<float(float)>& change) const {
    std::filesystem::remove_all(dir_);
    TinyModel model;
    model.experts = 6, model.router_bias = true;
    model.more = cat("data_type = bf16\nrouter_fp32 = ", fp32 ? 1 : 0, "\n");
    model.change = [&](const std::string& name, float value) {
      return name.ends_with("feed_forward.gate.weight") ? change(value) : value;
    };
    testing::write_tiny_workspace(dir_, model);
    Engine engine(dir_);
    auto request = testing::request({5, 6, 7}, 24);
    request.sampling.logprobs = 0;
    return testing::Collector(engine, request).logprobs();
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
