// The MTP layer of a model as the source of proposals (runtime/draft_model.h).
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "charonia/engine.h"
#include "engine_fixture.h"
#include "errors.h"
#include "model/manifest.h"
#include "model_variants.h"
#include "runtime/draft_model.h"
#include "runtime/executor.h"
#include "runtime/memory_plan.h"
#include "runtime/settings.h"

namespace charonia {
namespace {

using runtime::DraftModel;
using testing::Collector;
using testing::request;
using testing::TinyModel;
using testing::write_tiny_workspace;
using Tokens = std::vector<TokenId>;

const Settings kMtp = {{"speculative_method", "mtp"}, {"speculative_tokens", "16"}};
constexpr int kBlockLen = 4, kBlocksOfSlot = 32;

TinyModel with_mtp() {
  TinyModel out;
  out.mtp = true;
  return out;
}

// The token after `token` in the text of predictable_model(). The text repeats after kVocab tokens.
TokenId next_of(TokenId token) { return (token + 7) % testing::kVocab; }

// A model whose next token is next_of() the last token. Its MTP layer is always right, and reads only the hidden state,
// or only the embedding.
TinyModel predictable_model(bool by_hidden) {
  TinyModel out = with_mtp();
  out.hidden = testing::kVocab;
  out.end_id = 39;
  const auto places = std::make_shared<std::map<std::string, int>>();
  out.change = [by_hidden, places](const std::string& name, float) -> float {
    const int place = (*places)[name]++;
    if (name.ends_with("norm.weight")) return 1;
    constexpr int kSize = testing::kVocab;
    if (name == "tok_embeddings.weight") return place / kSize == place % kSize ? 1.0F : 0.0F;
    if (name == "output.weight") return place / kSize == next_of(place % kSize) ? 5.0F : 0.0F;
    if (name != "mtp.eh_proj.weight") return 0;
    const int row = place / (2 * kSize), column = place % (2 * kSize);
    if (by_hidden) return column >= kSize && row == next_of(column - kSize) ? 1.0F : 0.0F;
    return row == column ? 1.0F : 0.0F;
  };
  return out;
}

Tokens text_from(TokenId first, int size) {
  Tokens out = {first};
  while (std::ssize(out) < size) out.push_back(next_of(out.back()));
  return out;
}

class MtpTest : public testing::EngineFixtureBase {
 protected:
  // A model whose steps the tests plan, and its MTP layer. A sequence has the blocks of a slot.
  struct Models {
    Models(const std::filesystem::path& weights, int blocks, bool prefixes) {
      auto settings = runtime::read_settings(weights, {{"speculative_method", "mtp"},
                                                       {"device", "cpu"},
                                                       {"threads", "1"},
                                                       {"max_batch_size", "8"},
                                                       {"token_budget", "128"},
                                                       {"session_len", "128"},
                                                       {"enable_prefix_caching", prefixes ? "1" : "0"},
                                                       {"cache_max_entry_count", "256"}});
      const model::Manifest manifest(weights, 1);
      auto plan = runtime::plan_draft(settings.config, settings.model, manifest, std::size_t{1} << 30);
      plan->config.cache_max_entry_count = blocks;
      main = std::make_unique<runtime::Executor>(weights, settings.model, settings.config, plan->bytes);
      drafts = std::make_unique<DraftModel>(*plan, testing::kVocab, main.get());
    }

    struct Rows {
      int slot, first;
      Tokens ids;
    };
    // Computes a step. Returns the first row of each sequence.
    std::vector<std::int32_t> step(const std::vector<Rows>& all) {
      std::vector<std::int32_t> ids, positions, starts = {0}, blocks;
      for (const auto& one : all) {
        for (std::size_t i = 0; i < one.ids.size(); ++i) positions.push_back(one.first + static_cast<int>(i));
        ids.insert(ids.end(), one.ids.begin(), one.ids.end());
        starts.push_back(static_cast<std::int32_t>(ids.size()));
        for (int block = 0; block < kBlocksOfSlot; ++block) blocks.push_back(one.slot * kBlocksOfSlot + block);
      }
      main->launch({.ids = ids,
                    .attention = {.query_start = starts,
                                  .positions = positions,
                                  .block_tables = {blocks, {}, {}},
                                  .table_stride = kBlocksOfSlot},
                    .logits_rows = {},
                    .sample = {}},
                   {});
      main->collect();
      return starts;
    }

    std::unique_ptr<runtime::Executor> main;
    std::unique_ptr<DraftModel> drafts;
  };

  // count: 0 if the sequence cannot have proposals.
  static DraftModel::Wanted wanted(Models& models, std::uint64_t id, const Tokens& tokens, std::uint64_t salt,
                                   int count) {
    if (!models.drafts->missing(id, tokens, salt)) count = 0;
    return {.id = id, .count = count, .row = [id](auto before) {
              ops::SampleRow row;
              row.temperature = id % 3 == 0 ? 1.5F : 0;
              row.seed = id;
              row.position = std::ssize(before);
              return row;
            }};
  }

  // The proposals after tokens that are all computed in one step.
  static Tokens fresh(Models& models, std::uint64_t id, const Tokens& tokens, int count) {
    models.step({{0, 0, tokens}});
    models.drafts->computed(id, 0, static_cast<std::int32_t>(tokens.size()), 0);
    std::vector all = {wanted(models, id, tokens, 0, count)};
    runtime::SpeculationPolicy policy;
    models.drafts->propose(all, 1, policy);
    models.drafts->forget(id);
    return all[0].proposals;
  }
};

struct Text {
  Tokens tokens;
  int slot = 0, computed = 0;
  std::uint64_t salt = 0;
  bool hit = false;  // began with a prefix hit of the model
  Tokens proposals = {};
};

using Below = std::function<int(int)>;  // a random number from 0 on, below the argument

// The tokens that a step computes: the last one with the proposals, or a chunk.
Tokens next_rows(const Text& text, const Below& below) {
  auto all = text.tokens;
  all.insert(all.end(), text.proposals.begin(), text.proposals.end());
  const bool decodes = text.computed + 1 == std::ssize(text.tokens);
  const int size = decodes ? static_cast<int>(all.size()) - text.computed
                           : std::min(1 + below(9), static_cast<int>(text.tokens.size()) - text.computed);
  const auto begin = all.begin() + text.computed;
  return {begin, begin + size};
}

// Takes some proposals and another token, if the step has computed all tokens. size: the number of computed tokens.
bool accept(Text& text, int size, const Below& below) {
  const auto proposals = std::exchange(text.proposals, {});
  if (text.computed + size < std::ssize(text.tokens)) {
    text.computed += size;
    return false;
  }
  const auto accepted = below(static_cast<int>(proposals.size()) + 1);
  text.tokens.insert(text.tokens.end(), proposals.begin(), proposals.begin() + accepted);
  text.computed = static_cast<int>(text.tokens.size());
  text.tokens.push_back(below(testing::kVocab));
  return true;
}

// A prompt with a random end. The model has computed its beginning.
template <typename Models>
Text new_text(Models& models, const Below& below, int slot) {
  Text text{.tokens = Tokens(static_cast<std::size_t>(9 + below(30)), 1), .slot = slot};
  text.tokens.front() = below(2);  // the others are the same
  for (int i = below(6); i > 0; --i) text.tokens.push_back(below(testing::kVocab));
  text.salt = static_cast<std::uint64_t>(below(2));
  if (below(2) == 0) {
    text.computed = below(static_cast<int>(text.tokens.size()) / kBlockLen) * kBlockLen;
    text.hit = text.computed > 0;
    if (text.hit) models.step({{text.slot, 0, Tokens(text.tokens.begin(), text.tokens.begin() + text.computed)}});
  }
  return text;
}

// Sequences come, some with a prefix hit of the model, are computed in chunks, accept some proposals, are preempted,
// and end. The reference computes all tokens at once.
TEST_F(MtpTest, ProposalsDependOnTheTokensOnly) {
  TinyModel norms = with_mtp(), experts = with_mtp();
  norms.qk_norm = norms.biases = norms.post_norms = true;
  experts.experts = 5;
  for (const auto& model : {with_mtp(), norms, experts}) {
    write_tiny_workspace(weights(), model);
    for (const auto& [blocks, prefixes] : {std::pair{200, true}, {200, false}, {30, true}}) {
      SCOPED_TRACE(blocks);
      Models models(weights(), blocks, prefixes), reference(weights(), 100, false);
      std::mt19937 random(7);
      const auto below = [&](int n) { return std::uniform_int_distribution<int>(0, n - 1)(random); };
      std::map<std::uint64_t, Text> texts;
      std::vector<int> free_slots = {0, 1, 2, 3, 4, 5};
      std::uint64_t next_id = 1;
      int proposed = 0, after_hit = 0, without = 0, preempted = 0;
      for (int round = 0; round < 250; ++round) {
        while (!free_slots.empty()) {
          texts.emplace(next_id++, new_text(models, below, free_slots.back()));
          free_slots.pop_back();
        }
        std::vector<Models::Rows> rows;
        std::vector<std::uint64_t> ids;
        for (auto& [id, text] : texts) {
          if (below(4) == 0) continue;
          if (below(25) == 0) {
            text.computed = 0;
            text.hit = false;
            text.proposals.clear();
            ++preempted;
          }
          rows.push_back({text.slot, text.computed, next_rows(text, below)});
          ids.push_back(id);
        }
        if (rows.empty()) continue;
        const auto starts = models.step(rows);
        std::vector<DraftModel::Wanted> all;
        std::vector<int> counts;
        for (std::size_t i = 0; i < ids.size(); ++i) {
          auto& text = texts.at(ids[i]);
          const auto size = static_cast<int>(rows[i].ids.size());
          models.drafts->computed(ids[i], rows[i].first, size, starts[i]);
          const int count = accept(text, size, below) ? below(4) : 0;
          all.push_back(wanted(models, ids[i], text.tokens, text.salt, count));
          counts.push_back(count);
        }
        runtime::SpeculationPolicy policy;
        models.drafts->propose(all, 1, policy);
        models.drafts->check_integrity(texts.size());
        for (std::size_t i = 0; i < all.size(); ++i) {
          auto& text = texts.at(ids[i]);
          text.proposals = all[i].proposals;
          if (all[i].sampled) {
            ASSERT_EQ(text.proposals, fresh(reference, ids[i], text.tokens, counts[i])) << "round " << round;
            ++proposed;
            after_hit += text.hit ? 1 : 0;
          } else if (counts[i] > 0) {
            ASSERT_TRUE(text.hit || blocks < 100) << "round " << round;
            ++without;
          }
          if (text.tokens.size() < 90 && below(15) > 0) continue;
          models.drafts->forget(ids[i]);
          free_slots.push_back(text.slot);
          texts.erase(ids[i]);
        }
      }
      EXPECT_GT(proposed, 20);
      EXPECT_GT(without, 0);
      EXPECT_GT(preempted, 5);
      if (blocks == 200) {
        EXPECT_EQ(after_hit > 0, prefixes);
      }
    }
  }
}

// A hidden state or a token of another position would give other proposals.
TEST_F(MtpTest, AllProposalsOfAnExactLayerAreAccepted) {
  for (const bool by_hidden : {false, true}) {
    write_tiny_workspace(weights(), predictable_model(by_hidden));
    for (const float temperature : {0.0F, 0.5F}) {
      const auto one = engine(kMtp);
      auto next = request(text_from(3, 3), 25);
      next.sampling.temperature = temperature;
      EXPECT_EQ(testing::tokens_of(*one, next), testing::tokens_of(*engine(), next));
      const auto stats = one->stats();
      EXPECT_GE(stats.proposed_tokens, 8);
      EXPECT_EQ(stats.accepted_tokens, stats.proposed_tokens);
    }
    const auto several = engine(kMtp);
    std::vector<std::unique_ptr<Collector>> all;
    for (int i = 0; i < 8; ++i) {
      all.push_back(std::make_unique<Collector>(*several, request(text_from(i, 5 + 9 * i), 9)));
    }
    for (int i = 0; i < 8; ++i) {
      const auto text = text_from(i, 5 + 9 * i + 9);
      EXPECT_EQ(all[static_cast<std::size_t>(i)]->tokens(), Tokens(text.end() - 9, text.end()));
    }
    EXPECT_GT(several->stats().proposed_tokens, 0);
    EXPECT_EQ(several->stats().accepted_tokens, several->stats().proposed_tokens);
    several->check_integrity();
  }
}

// The first decode of an engine always has proposals, because no time is measured. It comes after the prefix hit.
TEST_F(MtpTest, ThereAreProposalsAfterPrefixHitsAndInSessions) {
  write_tiny_workspace(weights(), predictable_model(true));
  const auto expect_proposals = [](Engine& one, Request second) {
    const auto steps = one.stats().proposed_tokens;
    EXPECT_EQ(steps, 0);
    Collector out(one, std::move(second));
    out.tokens();
    EXPECT_GT(out.last().num_cached_tokens, 20);
    EXPECT_GT(one.stats().proposed_tokens, 0);
    EXPECT_EQ(one.stats().accepted_tokens, one.stats().proposed_tokens);
    one.check_integrity();
  };
  for (const int size : {30, 31, 32, 33}) {
    SCOPED_TRACE(size);
    const auto same = engine(kMtp), session = engine(kMtp);
    testing::tokens_of(*same, request(text_from(2, size), 1));
    expect_proposals(*same, request(text_from(2, size), 6));
    auto turn = request(text_from(2, size), 1);
    turn.session_id = "a";
    testing::tokens_of(*session, turn);
    turn.input_ids = turn.continuation_ids = {9, 16};
    turn.sampling.max_tokens = 6;
    expect_proposals(*session, turn);
  }
}

TEST_F(MtpTest, AModelThatCannotHaveProposalsIsRejectedByName) {
  const auto expect_refused = [&](const TinyModel& model, const std::string& why, Settings settings = {}) {
    std::filesystem::remove_all(weights());
    write_tiny_workspace(weights(), model);
    settings.insert(kMtp.begin(), kMtp.end());
    for (const auto& call : std::initializer_list<std::function<void()>>{
             [&] { engine(settings); }, [&] { plan_memory(weights(), settings, 0); }}) {
      expect_error(ErrorCode::unsupported, {"speculative_method = mtp: ", why, "or choose another"}, call);
    }
  };
  const auto variants = testing::model_variants();
  auto states = *std::ranges::find_if(variants, [](const auto& one) { return one.mixers.front() != "attention"; });
  states.mtp = true;
  TinyModel embeds = with_mtp(), ranks;
  embeds.more = "model_task = embed\n";
  ranks.ranks = 2;
  expect_refused({}, "no MTP layer");
  expect_refused({}, "charonia convert MODEL --speculative-method mtp");
  expect_refused(states, "the MTP layer is recurrent");
  expect_refused(embeds, "task = embed");
  expect_refused(ranks, "tensor_para_size is 2");
  expect_refused(with_mtp(), "the device is null", {{"device", "null"}});
}

TEST_F(MtpTest, ThePlanCountsItsMemory) {
  write_tiny_workspace(weights(), with_mtp());
  const Settings cpu = {{"device", "cpu"}, {"cache_max_entry_count", "0.5"}, {"max_batch_size", "1000"}};
  auto mtp = kMtp;
  mtp.insert(cpu.begin(), cpu.end());
  const std::int64_t memory = 40 << 20;
  const auto without = plan_memory(weights(), cpu, memory), with = plan_memory(weights(), mtp, memory);
  EXPECT_EQ(without.speculative_bytes, 0);
  EXPECT_GT(with.speculative_bytes, without.weight_bytes / 3);
  EXPECT_EQ(with.weight_bytes, without.weight_bytes);
  EXPECT_LT(with.num_blocks, without.num_blocks);
  std::filesystem::remove_all(weights());
  write_tiny_workspace(weights());
  EXPECT_EQ(plan_memory(weights(), cpu, memory).weight_bytes, without.weight_bytes) << "the layer is not loaded";
}

}  // namespace
}  // namespace charonia
