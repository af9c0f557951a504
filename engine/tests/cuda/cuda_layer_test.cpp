// Draft models, MTP layers and EAGLE-3 heads on a CUDA device: their logits and proposals.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <span>
#include <string>
#include <vector>

#include "engine_fixture.h"
#include "model_variants.h"
#include "model/manifest.h"
#include "runtime/draft_logits.h"
#include "runtime/draft_model.h"
#include "runtime/memory_plan.h"
#include "runtime/settings.h"

namespace charonia {
namespace {

using testing::TinyModel;
using testing::write_tiny_workspace;

// Parameter: speculative_method.
class CudaLayerTest : public testing::EngineFixtureBase, public ::testing::WithParamInterface<std::string> {
  testing::AllProposals all_proposals_;
};

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

// Norms write codes for the weights of 8-bit activations, also before a layer whose input a head reads.
TEST_P(CudaLayerTest, EightBitActivationsGiveTheSameTokens) {
  TinyModel model;
  model.hidden = 64, model.inter = 128, model.head_dim = 16;
  model.weight_type = "bf16";
  model.mtp = GetParam() == "mtp";
  write_tiny_workspace(weights(), model);
  write_tiny_workspace(dir_ / "head", testing::tiny_head(model));
  for (const auto* quantization : {"w8a8", "fp8"}) {
    const Settings off = {
        {"device", "cuda"}, {"reproducible", "True"}, {"max_batch_size", "4"}, {"quantization", quantization}};
    auto on = off;
    on["speculative_method"] = GetParam();
    if (!model.mtp) on["speculative_model"] = (dir_ / "head").string();
    const auto with = engine(on), without = engine(off);
    for (TokenId last = 5; last < 8; ++last) {
      const auto one = testing::request({1, 2, 3, 1, 2, 3, last}, 16);
      EXPECT_EQ(testing::tokens_of(*with, one), testing::tokens_of(*without, one)) << quantization;
    }
    EXPECT_GT(with->stats().proposed_tokens, 0);
    const auto is_captured = [&](const std::string& line) {
      return line.starts_with(model.mtp ? "MTP layer of tiny: " : "EAGLE-3 head tiny: ") &&
             line.find("decode steps that read hidden states of the model are captured") != std::string::npos;
    };
    EXPECT_EQ(std::ranges::count_if(with->info().kernel_report, is_captured), 1);
    EXPECT_EQ(with->kernel_report(), with->info().kernel_report);
  }
}

INSTANTIATE_TEST_SUITE_P(Methods, CudaLayerTest, ::testing::Values("mtp", "eagle3"),
                         [](const auto& info) { return info.param; });

class CudaDraftTest : public testing::EngineFixtureBase {
 protected:
  runtime::DraftModel draft_model() const {
    EngineConfig config;
    config.device = "cuda";
    config.reproducible = true;
    config.session_len = 100;
    config.cache_block_seq_len = 4;
    config.max_batch_size = 4;
    config.token_budget = 64;
    config.speculative_method = "draft_model";
    config.speculative_model = weights().string();
    const model::Manifest manifest(weights(), 1);
    const auto model = runtime::read_settings(weights(), {}).model;
    auto plan = runtime::plan_draft(config, model, manifest, std::size_t{1} << 32);
    plan->config.cache_max_entry_count = 60;
    return {*plan, testing::kVocab};
  }
};

// The device keeps counts of a sequence's tokens. The last proposal of each round is rejected.
TEST_F(CudaDraftTest, PenaltiesDoNotCountRejectedProposals) {
  write_tiny_workspace(weights());
  for (const int count : {1, 3}) {
    auto drafts = draft_model();
    std::vector<TokenId> tokens = {1, 2, 3};
    const auto propose = [&](runtime::DraftModel& of) {
      of.set_tokens(1, tokens, 0);
      std::vector<runtime::DraftModel::Wanted> all(1);
      all[0] = {.id = 1, .count = count, .row = [](std::span<const TokenId> before) {
                  ops::SampleRow row;
                  row.presence_penalty = row.frequency_penalty = 5;
                  row.position = std::ssize(before);
                  row.prompt = before.first(3);
                  row.output = before.subspan(3);
                  return row;
                }};
      runtime::SpeculationPolicy policy;
      of.propose(all, 64, policy);
      return all[0].proposals;
    };
    for (int round = 0; round < 8; ++round) {
      const auto proposals = propose(drafts);
      ASSERT_EQ(std::ssize(proposals), count);
      auto fresh = draft_model();
      ASSERT_EQ(proposals, propose(fresh)) << round;
      tokens.insert(tokens.end(), proposals.begin(), proposals.end() - 1);
      tokens.push_back((proposals.back() + 7) % testing::kVocab);
    }
  }
}

}  // namespace
}  // namespace charonia
