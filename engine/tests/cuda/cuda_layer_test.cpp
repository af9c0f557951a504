// MTP layers and EAGLE-3 heads on a CUDA device: their logits equal those of the CPU.
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <tuple>
#include <vector>

#include "engine_fixture.h"
#include "model_variants.h"
#include "runtime/draft_logits.h"

namespace charonia {
namespace {

using testing::TinyModel;
using testing::write_tiny_workspace;

// Parameter: speculative_method.
class CudaLayerTest : public testing::EngineFixtureBase, public ::testing::WithParamInterface<std::string> {};

TEST_P(CudaLayerTest, LogitsEqualThoseOfTheCpu) {
  TinyModel experts, norms, tied;
  experts.experts = 5;
  norms.qk_norm = norms.biases = norms.post_norms = true;
  tied.tied = true;
  for (auto model : {experts, norms, tied}) {
    model.mtp = GetParam() == "mtp";
    write_tiny_workspace(weights(), model);
    write_tiny_workspace(dir_ / "head", testing::tiny_head(model));
    Settings settings = {{"speculative_method", GetParam()}};
    if (!model.mtp) settings.insert({"speculative_model", (dir_ / "head").string()});
    const std::vector<TokenId> tokens = {3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5}, drafted = {8, 9, 7};
    settings["device"] = "cpu";
    const auto expected = runtime::draft_logits(weights(), tokens, drafted, settings);
    settings["device"] = "cuda";
    for (const auto* reproducible : {"False", "True"}) {
      settings["reproducible"] = reproducible;
      const auto found = runtime::draft_logits(weights(), tokens, drafted, settings);
      ASSERT_EQ(found.size(), expected.size());
      for (std::size_t row = 0; row < found.size(); ++row) {
        ASSERT_EQ(found[row].size(), expected[row].size());
        for (std::size_t i = 0; i < found[row].size(); ++i) {
          const auto near = 1e-4F * std::max(1.0F, std::abs(expected[row][i]));
          ASSERT_NEAR(found[row][i], expected[row][i], near) << row << " " << i;
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Methods, CudaLayerTest, ::testing::Values("mtp", "eagle3"),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace charonia
