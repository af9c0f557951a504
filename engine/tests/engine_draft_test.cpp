// The draft model: its proposals are its own next tokens, whatever it has computed, dropped or found before.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "charonia/engine.h"
#include "engine_fixture.h"
#include "model_variants.h"
#include "runtime/draft_model.h"
#include "runtime/settings.h"

namespace charonia {
namespace {

using runtime::DraftModel;
using testing::request;
using testing::TinyModel;
using testing::write_tiny_workspace;
using Tokens = std::vector<TokenId>;

class DraftModelTest : public testing::EngineFixtureBase {
 protected:
  EngineConfig config(int block_len = 4, int session_len = 100) const {
    EngineConfig out;
    out.device = "cpu";
    out.threads = 1;
    out.session_len = session_len;
    out.cache_block_seq_len = block_len;
    out.speculative_method = "draft_model";
    out.speculative_model = weights().string();
    runtime::resolve_step_sizes(out, {.device = "cpu"});
    return out;
  }
  DraftModel draft_model(const EngineConfig& engine, int blocks, int vocab = testing::kVocab) const {
    const model::Manifest manifest(weights(), 1);
    const auto model = runtime::read_settings(weights(), {}).model;
    auto plan = runtime::plan_draft(engine, model, manifest, std::size_t{1} << 30);
    plan->config.cache_max_entry_count = blocks;
    return {*plan, vocab};
  }
  Settings settings(const std::filesystem::path& draft) const {
    return {{"speculative_method", "draft_model"}, {"speculative_model", draft.string()}};
  }
};

// Adds a sequence, unless it cannot have proposals.
void want(std::vector<DraftModel::Wanted>& all, DraftModel& drafts, std::uint64_t id, const Tokens& tokens, int count,
          float temperature = 0) {
  if (!drafts.set_tokens(id, tokens, id % 2)) return;
  all.push_back({.id = id, .count = count, .row = [=](auto before) {
                   EXPECT_TRUE(std::ranges::equal(before.first(tokens.size()), tokens));
                   ops::SampleRow row;
                   row.temperature = temperature;
                   row.seed = id;
                   row.position = std::ssize(before);
                   return row;
                 }});
}

// The reference is an engine that has only this model. Sequences come, grow by proposals and other tokens, and end.
TEST_F(DraftModelTest, ProposesItsNextTokensAfterAnyHistory) {
  TinyModel windows;
  windows.windows = {6, 0};
  for (const auto& model : {TinyModel{}, windows}) {
    for (const bool prefixes : {true, false}) {
      write_tiny_workspace(weights(), model);
      auto engine_config = config();
      engine_config.enable_prefix_caching = prefixes;
      auto drafts = draft_model(engine_config, 30);
      const auto alone = engine({{"threads", "1"}});
      std::mt19937 random(7);
      const auto below = [&](int n) { return std::uniform_int_distribution<int>(0, n - 1)(random); };
      std::map<std::uint64_t, Tokens> sequences;
      std::uint64_t next_id = 1;
      int proposed = 0, waited = 0;
      for (int step = 0; step < 120; ++step) {
        while (sequences.size() < 5) {
          Tokens prompt(static_cast<std::size_t>(1 + below(40)), 1);
          for (int i = below(6); i > 0; --i) prompt.push_back(below(testing::kVocab));
          sequences[next_id++] = prompt;
        }
        std::vector<DraftModel::Wanted> all;
        for (const auto& [id, tokens] : sequences) {
          if (below(3) > 0) want(all, drafts, id, tokens, 1 + below(4), id % 3 == 0 ? 1.5F : 0);
        }
        runtime::SpeculationPolicy policy;
        drafts.propose(all, 12, policy);
        drafts.check_integrity(sequences.size());
        for (const auto& one : all) {
          auto& tokens = sequences.at(one.id);
          if (one.sampled) {
            auto next = request(tokens, one.count);
            next.sampling.temperature = one.id % 3 == 0 ? 1.5F : 0;
            next.sampling.seed = one.id;
            ASSERT_EQ(one.proposals, testing::tokens_of(*alone, next)) << "step " << step << ", sequence " << one.id;
            ++proposed;
          } else {
            ASSERT_TRUE(one.proposals.empty());
            ++waited;
          }
          const auto accepted = below(static_cast<int>(one.proposals.size()) + 1);
          tokens.insert(tokens.end(), one.proposals.begin(), one.proposals.begin() + accepted);
          tokens.push_back(below(testing::kVocab));
          if (tokens.size() < 90 && below(12) > 0) continue;
          drafts.forget(one.id);
          sequences.erase(one.id);
        }
      }
      EXPECT_GT(proposed, 50);
      EXPECT_GT(waited, 50);
    }
  }
}

TEST_F(DraftModelTest, ASequenceWithoutProposalsForLongestLosesItsBlocks) {
  write_tiny_workspace(weights());
  auto drafts = draft_model(config(), 5);
  runtime::SpeculationPolicy policy;
  const Tokens first = {1, 2, 3, 4, 5, 6}, second = {7, 8, 9, 10, 11, 12};
  const auto propose = [&](int count_of_first, int count_of_second) {
    std::vector<DraftModel::Wanted> all;
    if (count_of_first > 0) want(all, drafts, 1, first, count_of_first);
    if (count_of_second > 0) want(all, drafts, 2, second, count_of_second);
    drafts.propose(all, 64, policy);
    drafts.check_integrity(3);
    return all;
  };
  EXPECT_TRUE(propose(2, 0)[0].sampled);
  EXPECT_EQ(drafts.set_tokens(1, first, 1), 1);
  EXPECT_TRUE(propose(0, 4)[0].sampled);
  EXPECT_EQ(drafts.set_tokens(2, second, 0), 1);
  EXPECT_TRUE(propose(3, 0)[0].sampled);
  EXPECT_EQ(drafts.set_tokens(2, second, 0), 2) << "its first block is still in the prefix index";
  const auto both = propose(6, 6);
  EXPECT_TRUE(both[0].sampled);
  EXPECT_FALSE(both[1].sampled) << "no blocks are left for it";
  EXPECT_EQ(drafts.set_tokens(2, second, 0), std::nullopt) << "it is not counted on for a while";
  EXPECT_EQ(drafts.set_tokens(3, Tokens(20, 3), 1), std::nullopt) << "it needs 6 blocks";
}

TEST_F(DraftModelTest, SequencesBeyondItsLimitsHaveNoProposals) {
  write_tiny_workspace(weights());
  auto drafts = draft_model(config(4, 8), 30, testing::kVocab + 8);
  EXPECT_EQ(drafts.set_tokens(1, Tokens{1, 2, testing::kVocab - 1}, 0), 3);
  EXPECT_EQ(drafts.set_tokens(3, Tokens{1, 2, testing::kVocab}, 0), std::nullopt) << "only the engine's model has it";
  EXPECT_EQ(drafts.missing(3, 4), std::nullopt) << "no step waits for its drafts";
  drafts.forget(3);
  EXPECT_EQ(drafts.set_tokens(1, Tokens(8, 1), 0), std::nullopt) << "session_len is 8";
  runtime::SpeculationPolicy policy;
  std::vector<DraftModel::Wanted> all;
  want(all, drafts, 2, Tokens(7, 1), 5);
  drafts.propose(all, 64, policy);
  EXPECT_EQ(all[0].proposals.size(), 1U);
  drafts.forget(2);
  drafts.check_integrity(0);
}

// Padding of the vocabularies may differ.
TEST_F(DraftModelTest, ATokenThatTheEnginesModelLacksEndsTheProposals) {
  write_tiny_workspace(weights());
  const Tokens tokens = {1, 2, 3};
  const auto proposals = [&](int vocab) {
    auto drafts = draft_model(config(), 30, vocab);
    runtime::SpeculationPolicy policy;
    std::vector<DraftModel::Wanted> all;
    want(all, drafts, 1, tokens, 16);
    drafts.propose(all, 64, policy);
    return all[0].proposals;
  };
  const auto all = proposals(testing::kVocab);
  const auto largest = std::ranges::max_element(all);
  EXPECT_EQ(proposals(*largest), Tokens(all.begin(), largest));
}

// The pair before the first proposal is not in the prompt, so there is no n-gram match.
TEST_F(DraftModelTest, DraftsOfTheSameModelAreAcceptedAtAnyTemperature) {
  write_tiny_workspace(weights());
  for (std::uint64_t seed = 0; seed < 8; ++seed) {
    const auto one = engine(settings(weights()));
    EXPECT_EQ(one->info().draft_model, one->info().model.model_name);
    auto next = request({1, 2, 3}, 4);
    next.sampling.temperature = seed % 2 == 0 ? 0 : 1.5F;
    next.sampling.seed = seed;
    next.sampling.presence_penalty = 1;
    EXPECT_EQ(testing::tokens_of(*one, next), testing::tokens_of(*engine(), next));
    const auto stats = one->stats();
    EXPECT_EQ(stats.proposed_tokens, 2) << "the first decode has proposals, and its last token is none";
    EXPECT_EQ(stats.accepted_tokens, 2);
  }
}

// The draft model has not computed the prompt yet, so the weak match of the last two tokens is used.
TEST_F(DraftModelTest, KnownTokensRemainWhereThereAreNoDraftsYet) {
  write_tiny_workspace(weights());
  auto more = settings(weights());
  more["session_len"] = "400";
  const auto one = engine(more);
  Tokens prompt;
  for (int i = 0; i < 300; ++i) prompt.push_back(i % 4);
  prompt.insert(prompt.end(), {9, 5, 5, 7, 8, 5});
  auto next = request(prompt, 3);
  next.sampling.logit_bias = {{5, 100.0F}};
  EXPECT_EQ(testing::tokens_of(*one, next), Tokens(3, 5));
  EXPECT_EQ(one->stats().proposed_tokens, 1);
}

TEST_F(DraftModelTest, AnUnsuitableModelIsRejectedByName) {
  write_tiny_workspace(weights());
  const auto expect_refused = [&](const TinyModel& model, ErrorCode code, const std::string& why) {
    const auto draft = dir_ / "draft";
    std::filesystem::remove_all(draft);
    write_tiny_workspace(draft, model);
    expect_error(code, {"speculative_model = " + draft.string(), why}, [&] { engine(settings(draft)); });
  };
  const auto variants = testing::model_variants();
  const auto states =
      *std::ranges::find_if(variants, [](const auto& one) { return one.mixers.front() != "attention"; });
  TinyModel larger, other_end, embeds, ranks;
  larger.vocab = testing::kVocab + 1;
  other_end.end_id = 3;
  embeds.more = "model_task = embed\n";
  ranks.ranks = 2;
  expect_refused(states, ErrorCode::unsupported, "recurrent layers");
  expect_refused(larger, ErrorCode::invalid_argument, "token 40 is");
  expect_refused(other_end, ErrorCode::invalid_argument, "token 0 is 'a', and special token");
  expect_refused(embeds, ErrorCode::unsupported, "task = embed");
  expect_refused(ranks, ErrorCode::invalid_argument, "converted for tensor_para_size = 2");
  for (const auto& missing : {dir_ / "missing", dir_ / std::string(300, 'a')}) {
    expect_error(ErrorCode::invalid_argument, {"speculative_model = " + missing.string()},
                 [&] { engine(settings(missing)); });
  }
  expect_error(ErrorCode::invalid_argument, {"needs speculative_model"},
               [&] { engine({{"speculative_method", "draft_model"}}); });
}

TEST_F(DraftModelTest, ASettingWithoutEffectIsNamedInAWarning) {
  write_tiny_workspace(weights());
  const std::pair<Settings, std::string_view> unused[] = {
      {{{"speculative_model", "x"}}, "speculative_model = x has no effect: speculative_method = off"},
      {{{"speculative_tokens", "4"}}, "speculative_tokens = 4 has no effect"},
      {{{"speculative_method", "ngram"}, {"jump_forward", "true"}}, "ngram has no effect on structured output"}};
  for (const auto& [given, expected] : unused) {
    const auto warnings = runtime::read_settings(weights(), given).warnings;
    EXPECT_TRUE(std::ranges::any_of(warnings, [&](const auto& text) {
      return text.find(expected) != std::string::npos;
    })) << expected;
  }
}

// A workspace is found by its folder too.
TEST_F(DraftModelTest, ThePlanCountsItsMemory) {
  write_tiny_workspace(weights());
  write_tiny_workspace(dir_ / "draft" / "triton_models" / "weights");
  const Settings cpu = {{"device", "cpu"}, {"cache_max_entry_count", "0.5"}, {"max_batch_size", "1000"}};
  auto drafts = settings(dir_ / "draft");
  drafts.insert(cpu.begin(), cpu.end());
  const std::int64_t memory = 40 << 20;
  const auto without = plan_memory(weights(), cpu, memory), with = plan_memory(weights(), drafts, memory);
  EXPECT_EQ(without.speculative_bytes, 0);
  EXPECT_GT(with.speculative_bytes, without.weight_bytes);
  EXPECT_EQ(with.free_bytes, memory);
  EXPECT_EQ(with.weight_bytes, without.weight_bytes);
  EXPECT_LT(with.num_blocks, without.num_blocks);
  TinyModel embeds;
  embeds.more = "model_task = embed\n";
  write_tiny_workspace(dir_ / "embeds", embeds);
  const auto unused = plan_memory(dir_ / "embeds", drafts, memory);
  EXPECT_EQ(unused.speculative_bytes, 0);
  const std::string why =
      "speculative_method = draft_model has no effect: the model is for task = embed and generates no text: serve a "
      "model that does";
  EXPECT_NE(std::ranges::find(unused.warnings, why), unused.warnings.end());
  const auto none = plan_memory(weights(), drafts, 1 << 16);
  EXPECT_EQ(none.num_blocks, 0);
  EXPECT_TRUE(std::ranges::any_of(none.warnings, [](const auto& text) {
    return text.starts_with("speculative_model = ") && text.find("does not fit") != std::string::npos;
  }));
}

// The plan needs no GPU.
TEST_F(DraftModelTest, ThePlanCountsItsMemoryOnTheFirstGpu) {
  TinyModel two;
  two.ranks = 2;
  for (const auto& model : {TinyModel{}, two}) {
    write_tiny_workspace(weights(), model);
    write_tiny_workspace(dir_ / "draft");
    const Settings cuda = {{"device", "cuda"}, {"max_batch_size", "4000"}, {"session_len", "2000"}};
    auto drafts = settings(dir_ / "draft");
    drafts.insert(cuda.begin(), cuda.end());
    const std::int64_t memory = std::int64_t{1} << 30;
    const auto without = plan_memory(weights(), cuda, memory), with = plan_memory(weights(), drafts, memory);
    EXPECT_GT(with.speculative_bytes, std::int64_t{128} << 20) << "with the memory of a GPU's steps";
    EXPECT_LT(with.num_blocks, without.num_blocks);
    // Each rank has as many blocks as the first one.
    const auto left = memory - with.speculative_bytes - (with.weight_bytes + with.activation_bytes) / model.ranks;
    EXPECT_LE(with.num_blocks * with.kv_block_bytes / model.ranks, left);
    EXPECT_GT(with.num_blocks * with.kv_block_bytes / model.ranks, left / 2);
    const auto none = plan_memory(weights(), drafts, 300 << 20);
    EXPECT_EQ(none.num_blocks, 0);
    EXPECT_TRUE(std::ranges::any_of(none.warnings, [](const auto& text) {
      return text.starts_with("speculative_model = ") && text.find("are free on the device (cuda)") != std::string::npos;
    })) << ::testing::PrintToString(none.warnings);
  }
}

TEST_F(DraftModelTest, ItsCacheLeavesRoomForTheModel) {
  write_tiny_workspace(weights());
  auto all = settings(weights());
  all.insert({{"device", "cpu"}, {"cache_max_entry_count", "1"}});
  std::int64_t too_small = 1 << 16, enough = 40 << 20;
  while (enough - too_small > 1) {
    const auto middle = (too_small + enough) / 2;
    (plan_memory(weights(), all, middle).num_blocks > 0 ? enough : too_small) = middle;
  }
  auto least = runtime::read_settings(weights(), all);
  runtime::resolve_step_sizes(least.config, {.device = "cpu"});
  const model::Manifest manifest(weights(), 1);
  const auto plan = runtime::plan_draft(least.config, least.model, manifest, static_cast<std::size_t>(enough));
  EXPECT_LE(plan->config.cache_max_entry_count, 2) << "blocks";
  const auto refused = plan_memory(weights(), all, too_small).warnings;
  EXPECT_TRUE(std::ranges::any_of(refused, [](const auto& text) {
    return text.find("for speculative_method = draft_model") != std::string::npos;
  })) << ::testing::PrintToString(refused);
}

}  // namespace
}  // namespace charonia
