// Rotary scaling that depends on the prompt's length, through the whole decoder.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "model/decoder.h"
#include "ops/cpu/make_cpu_ops.h"
#include "runtime/executor.h"
#include "runtime/settings.h"
#include "runtime/memory_plan.h"
#include "test_folder.h"
#include "tiny_workspace.h"

namespace charonia {
namespace {

using testing::TinyModel;

constexpr int kPrompt = 40, kTokens = 60;

class DecoderRope : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    dir_ = testing::test_folder();
    TinyModel model;
    model.positions = 16;
    model.more = std::string(GetParam()) + "session_len = 100\n";
    testing::write_tiny_workspace(dir_, model);
  }
  void TearDown() override { std::filesystem::remove_all(dir_); }

  // Log probabilities of the tokens after a prompt, which is computed `cut` tokens at a time. Every step also has
  // another text with a short prompt. prompt: the prompt length that the steps receive.
  std::vector<float> logprobs(int cut, int prompt = kPrompt) const {
    auto settings = runtime::read_settings(dir_, {{"threads", "1"}});
    runtime::resolve_step_sizes(settings.config, {"cpu"});
    const auto limits = runtime::step_limits(settings.config);
    const auto ops = ops::make_cpu_ops(1);
    model::Decoder decoder(settings.model, model::WeightFiles(dir_, 1), *ops, limits);
    const auto cache = ops->make_kv_cache(decoder.kv_layout(limits.block_len), 50);
    decoder.prepare(*cache);

    constexpr int kStride = 20;
    std::vector<std::int32_t> tables(2 * kStride);
    for (int i = 0; i < 2 * kStride; ++i) tables[static_cast<std::size_t>(i)] = i;
    const auto token = [](int position) { return (position * position + 3) % 40; };
    const std::vector<std::int32_t> prompts{5, prompt};
    std::vector<float> out;
    for (int first = 0, other = 0; first + 1 < kTokens; ++other) {
      const int n = first < kPrompt ? std::min(cut, kPrompt - first) : 1;
      std::vector<std::int32_t> ids{token(other)}, positions{other};
      for (int i = 0; i < n; ++i) {
        ids.push_back(token(first + i));
        positions.push_back(first + i);
      }
      const std::vector<std::int32_t> starts{0, 1, 1 + n}, rows{n};
      std::vector<ops::SampleRow> sample(1);
      sample[0].target = token(first + n);
      sample[0].logprobs = 0;
      decoder.launch({ids, {starts, positions, tables, kStride}, rows, sample, prompts});
      const auto sampled = ops->collect();
      first += n;
      if (first >= kPrompt) out.push_back(sampled.at(0).logprob);
    }
    return out;
  }

  std::filesystem::path dir_;
};

INSTANTIATE_TEST_SUITE_P(Kinds, DecoderRope,
                         ::testing::Values("rope_scaling_type = dynamic\nrope_factor = 2\n",
                                           "rope_scaling_type = dynamic\nsliding_window = 12\nlayer_windows = sf\n"
                                           "rope_local_theta = 100\n",
                                           "rope_scaling_type = qwen\nlogn_length = 16\n",
                                           "rope_scaling_type = longrope\nrope_original_max_position_embeddings = 16\n"
                                           "rope_short_factors = 1,1.5,2,3\nrope_long_factors = 2,8,9,10\n"),
                         [](const auto& info) { return std::to_string(info.index); });

TEST_P(DecoderRope, NothingDependsOnHowThePromptIsCut) {
  const auto whole = logprobs(kPrompt);
  ASSERT_EQ(whole.size(), static_cast<std::size_t>(kTokens - kPrompt));
  for (const int cut : {1, 7, 16, 39}) EXPECT_EQ(logprobs(cut), whole) << cut;
}

TEST_P(DecoderRope, ThePromptsLengthCounts) { EXPECT_NE(logprobs(kPrompt, 10), logprobs(kPrompt)); }

}  // namespace
}  // namespace charonia
