// The MTP layer of a model, or its EAGLE-3 head, as the source of proposals (runtime/draft_model.h).
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <numeric>
#include <optional>
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
#include "runtime/proposals.h"
#include "runtime/settings.h"

namespace charonia {
namespace {

using runtime::DraftModel;
using testing::Collector;
using testing::request;
using testing::TinyModel;
using testing::write_tiny_workspace;
using Tokens = std::vector<TokenId>;

constexpr int kBlockLen = 4, kBlocksOfSlot = 32;

TinyModel with_mtp() {
  TinyModel out;
  out.mtp = true;
  return out;
}

// The token after `token` in the text of predictable_model(). The text repeats after kVocab tokens.
TokenId next_of(TokenId token) { return (token + 7) % testing::kVocab; }

// Writes 0 and 1 so that layers change nothing, and the next token is next_of() the last token. `own`: the value of a
// matrix that is not 0, by its name, row and column; empty: it is 0.
using Value = std::function<std::optional<float>(const std::string& name, int row, int column)>;
TinyModel predictable(TinyModel out, int fused, const Value& own) {
  constexpr int kSize = testing::kVocab;
  out.hidden = out.inter = kSize;
  out.end_id = 39;
  const auto places = std::make_shared<std::map<std::string, int>>();
  out.change = [=](const std::string& name, float) -> float {
    const int place = (*places)[name]++;
    if (name.ends_with("norm.weight")) return 1;
    const int columns = name.ends_with("eh_proj.weight") || name == "fc.weight" ? fused : kSize;
    const int row = place / columns, column = place % columns;
    if (const auto value = own(name, row, column)) return *value;
    if (name == "tok_embeddings.weight") return row == column ? 1.0F : 0.0F;
    if (name == "output.weight") return row == next_of(column) ? 5.0F : 0.0F;
    return 0;
  };
  return out;
}

// Its MTP layer is always right, and reads only the hidden state, or only the embedding.
TinyModel predictable_model(bool by_hidden) {
  constexpr int kSize = testing::kVocab;
  return predictable(with_mtp(), 2 * kSize, [=](const auto& name, int row, int column) -> std::optional<float> {
    if (name != "mtp.eh_proj.weight") return {};
    if (by_hidden) return column >= kSize && row == next_of(column - kSize) ? 1.0F : 0.0F;
    return row == column ? 1.0F : 0.0F;
  });
}

// A head that is always right. It reads part `part` of three parts of a hidden state. In its own hidden state, the last
// token is much larger than the others.
TinyModel predictable_head(int part) {
  constexpr int kSize = testing::kVocab;
  TinyModel head;
  head.layers = 1;
  head.target_hidden = kSize;
  head.has_embedding = false;
  head.more = "norm_before_residual = 1\ntarget_layers = 0,1,1\n";
  for (int token = kSize - 1; token >= 0; --token) head.draft_tokens.push_back(token);
  return predictable(head, 3 * kSize, [=](const auto& name, int row, int column) -> std::optional<float> {
    if (name == "output.weight") return kSize - 1 - row == column ? 5.0F : 0.0F;
    if (name == "fc.weight") return column / kSize == part && row == next_of(column % kSize) ? 1.0F : 0.0F;
    if (name.find("feed_forward.w2") != std::string::npos) return row == next_of(column) ? 9.0F : 0.0F;
    if (name.find("feed_forward.w") != std::string::npos) return row == column ? 2.0F : 0.0F;
    return {};
  });
}

Tokens text_from(TokenId first, int size) {
  Tokens out = {first};
  while (std::ssize(out) < size) out.push_back(next_of(out.back()));
  return out;
}

// Parameter: speculative_method.
class LayerTest : public testing::EngineFixtureBase, public ::testing::WithParamInterface<std::string> {
 protected:
  void TearDown() override {
    runtime::SpeculationPolicy::choose_all_for_tests(false);
    EngineFixtureBase::TearDown();
  }
  std::filesystem::path head() const { return dir_ / "head"; }
  bool has_head() const { return GetParam() == "eagle3"; }
  Settings on(Settings more = {}) const {
    more.insert({{"speculative_method", GetParam()}, {"speculative_tokens", "16"}});
    if (has_head()) more.insert({"speculative_model", head().string()});
    return more;
  }

  void write(TinyModel model) {
    model.mtp = !has_head();
    std::filesystem::remove_all(weights());
    write_tiny_workspace(weights(), model);
    if (has_head()) write_tiny_workspace(head(), testing::tiny_head(model));
  }

  // With a layer or head that is always right. way: 0 or 1, how it finds the token.
  void write_predictable(int way) {
    auto model = predictable_model(way == 1);
    model.mtp = !has_head();
    write_tiny_workspace(weights(), model);
    if (has_head()) write_tiny_workspace(head(), predictable_head(2 * way));
  }

  // A model whose steps the tests plan, and its layer. A sequence has the blocks of a slot.
  struct Models {
    Models(const std::filesystem::path& weights, Settings how, int blocks, bool prefixes) {
      how.insert({{"device", "cpu"},
                  {"threads", "1"},
                  {"max_batch_size", "8"},
                  {"token_budget", "128"},
                  {"session_len", "128"},
                  {"enable_prefix_caching", prefixes ? "1" : "0"},
                  {"cache_max_entry_count", "256"}});
      auto settings = runtime::read_settings(weights, how);
      const auto manifest = runtime::manifest_of(weights, settings.config, settings.model);
      auto plan = runtime::plan_draft(settings.config, settings.model, manifest, std::size_t{1} << 30);
      plan->config.cache_max_entry_count = blocks;
      main = std::make_unique<runtime::Executor>(weights, settings.model, settings.config, plan->bytes);
      drafts = std::make_unique<DraftModel>(*plan, testing::kVocab, main.get());
    }

    struct Rows {
      int slot, first;
      Tokens ids;
      std::uint64_t sequence = 0;  // of the layer; 0: none
    };
    // Computes a step, whose hidden states the layer gets.
    void step(const std::vector<Rows>& all) {
      std::vector<std::int32_t> ids, positions, starts = {0}, blocks, hidden;
      for (const auto& one : all) {
        if (one.sequence > 0) drafts->place(one.sequence, one.first, static_cast<std::int32_t>(one.ids.size()), hidden);
        hidden.resize(ids.size() + one.ids.size(), -1);
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
                    .sample = {},
                    .hidden_rows = hidden},
                   {});
      main->collect();
      for (std::size_t i = 0; i < all.size(); ++i) {
        const auto begin = static_cast<std::size_t>(starts[i]);
        if (all[i].sequence == 0) continue;
        drafts->computed(all[i].sequence, all[i].first, std::span(hidden).subspan(begin, all[i].ids.size()));
      }
    }

    std::unique_ptr<runtime::Executor> main;
    std::unique_ptr<DraftModel> drafts;
  };

  // count: 0 if the sequence cannot have proposals.
  static DraftModel::Wanted wanted(Models& models, std::uint64_t id, const Tokens& tokens, std::uint64_t salt,
                                   int count) {
    if (!models.drafts->set_tokens(id, tokens, salt)) count = 0;
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
    models.step({{0, 0, tokens, id}});
    std::vector all = {wanted(models, id, tokens, 0, count)};
    runtime::SpeculationPolicy policy;
    models.drafts->propose(all, 1, policy);
    models.drafts->forget(id);
    return all[0].proposals;
  }

  testing::AllProposals all_proposals_;
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
// and end. The layer falls behind in some of them. The reference computes all tokens in one step.
TEST_P(LayerTest, ProposalsDependOnTheTokensOnly) {
  TinyModel norms, experts;
  norms.qk_norm = norms.biases = norms.post_norms = true;
  experts.experts = 5;
  for (const auto& model : {TinyModel{}, norms, experts}) {
    write(model);
    for (const auto& [blocks, prefixes] : {std::pair{200, true}, {200, false}, {30, true}}) {
      SCOPED_TRACE(blocks);
      Models models(weights(), on(), blocks, prefixes), reference(weights(), on(), 100, false);
      std::mt19937 random(7);
      const auto below = [&](int n) { return std::uniform_int_distribution<int>(0, n - 1)(random); };
      std::map<std::uint64_t, Text> texts;
      std::vector<int> free_slots = {0, 1, 2, 3, 4, 5};
      std::uint64_t next_id = 1;
      int proposed = 0, after_hit = 0, without = 0, preempted = 0, behind = 0;
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
          rows.push_back({text.slot, text.computed, next_rows(text, below), id});
          ids.push_back(id);
        }
        if (rows.empty()) continue;
        models.step(rows);
        std::vector<DraftModel::Wanted> now;
        std::vector<int> counts;
        for (std::size_t i = 0; i < ids.size(); ++i) {
          auto& text = texts.at(ids[i]);
          const auto size = static_cast<int>(rows[i].ids.size());
          counts.push_back(accept(text, size, below) ? below(4) : 0);
          auto one = wanted(models, ids[i], text.tokens, text.salt, counts.back());
          const bool later = counts[i] == 0 && !models.drafts->must_compute(ids[i]) && below(4) > 0;
          behind += later ? 1 : 0;
          if (!later) now.push_back(std::move(one));
        }
        runtime::SpeculationPolicy policy;
        models.drafts->propose(now, 1, policy);
        models.drafts->check_integrity(texts.size(), false);
        for (std::size_t i = 0; i < ids.size(); ++i) {
          auto& text = texts.at(ids[i]);
          const auto found = std::ranges::find(now, ids[i], &DraftModel::Wanted::id);
          text.proposals = found == now.end() ? Tokens{} : found->proposals;
          if (found != now.end() && found->sampled) {
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
      EXPECT_GT(behind, 100);
      if (blocks == 200) {
        EXPECT_EQ(after_hit > 0, prefixes);
      }
    }
  }
}

// Each of these steps adds a token.
TEST_P(LayerTest, HiddenStatesOfRejectedProposalsAreNotKept) {
  write({});
  Models models(weights(), on(), 100, false);
  Tokens tokens = {1, 2, 3};
  for (int added = 0; added < runtime::kKeptHidden; ++added) {
    const auto first = added == 0 ? 0 : static_cast<std::int32_t>(tokens.size()) - 1;
    Tokens rows(tokens.begin() + first, tokens.end());
    rows.resize(rows.size() + (added == 0 ? 0 : 16), 7);
    models.step({{0, first, rows, 1}});
    tokens.push_back(4);
    const auto missing = models.drafts->set_tokens(1, tokens, 0);
    ASSERT_EQ(missing, static_cast<int>(tokens.size()) - 1);
    EXPECT_EQ(models.drafts->must_compute(1), *missing >= runtime::kKeptHidden) << added;
  }
}

// A hidden state or a token of another position would give other proposals. Steps that are chosen by their times are few
// on some machines, so all steps have proposals in the second round.
TEST_P(LayerTest, AllProposalsOfAnExactLayerAreAccepted) {
  for (const auto& [all_steps, way] : {std::pair(false, 0), {false, 1}, {true, 0}, {true, 1}}) {
    runtime::SpeculationPolicy::choose_all_for_tests(all_steps);
    write_predictable(way);
    for (const float temperature : {0.0F, 0.5F}) {
      const auto one = engine(on());
      auto next = request(text_from(3, 3), 25);
      next.sampling.temperature = temperature;
      EXPECT_EQ(testing::tokens_of(*one, next), testing::tokens_of(*engine(), next));
      const auto stats = one->stats();
      EXPECT_GE(stats.proposed_tokens, all_steps ? 8 : 1);
      EXPECT_EQ(stats.accepted_tokens, stats.proposed_tokens);
    }
    const auto several = engine(on());
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

TEST_P(LayerTest, ThereAreProposalsAfterPrefixHitsAndInSessions) {
  write_predictable(1);
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
    const auto same = engine(on()), session = engine(on());
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

TEST_P(LayerTest, AModelThatCannotHaveProposalsIsRejectedByName) {
  const auto expect_refused = [&](const TinyModel& model, const std::string& why, const Settings& settings = {}) {
    std::filesystem::remove_all(weights());
    write_tiny_workspace(weights(), model);
    write_tiny_workspace(head(), testing::tiny_head(model));
    for (const auto& call : std::initializer_list<std::function<void()>>{
             [&] { engine(on(settings)); }, [&] { plan_memory(weights(), on(settings), 0); }}) {
      expect_error(ErrorCode::unsupported, {"speculative_method = " + GetParam() + ": ", why, "or choose another"},
                   call);
    }
  };
  const auto variants = testing::model_variants();
  auto states = *std::ranges::find_if(variants, [](const auto& one) { return one.mixers.front() != "attention"; });
  states.mtp = true;
  TinyModel embeds = with_mtp(), ranks;
  embeds.more = "model_task = embed\n";
  ranks.ranks = 2;
  if (!has_head()) {
    expect_refused({}, "no MTP layer");
    expect_refused({}, "charonia convert MODEL --speculative-method mtp");
    expect_refused(states, "the MTP layer is recurrent");
  }
  expect_refused(embeds, "task = embed");
  expect_refused(ranks, "tensor_para_size is 2");
  expect_refused(with_mtp(), "the device is null", {{"device", "null"}});
}

// A table without a free row: the hidden states of the sequence that was computed least recently are lost.
TEST_P(LayerTest, ASequenceWithoutHiddenStatesHasNoProposals) {
  write({});
  Models models(weights(), on(), 100, false);
  const auto rows = models.main->kept_hidden();
  models.step({{0, 0, Tokens(20, 1), 1}});
  std::vector<std::int32_t> all, more;
  models.drafts->place(2, 0, rows - 20, all);
  EXPECT_TRUE(models.drafts->set_tokens(1, Tokens(20, 1), 0));
  models.drafts->place(3, 0, 20, more);
  EXPECT_EQ(models.drafts->set_tokens(1, Tokens(21, 1), 0), std::nullopt);
  std::ranges::sort(more);
  EXPECT_EQ(std::ranges::adjacent_find(more), more.end());
  EXPECT_GE(more.front(), 0);
  more.clear();
  models.drafts->place(4, 0, 2, more);
  EXPECT_EQ(more, (std::vector<std::int32_t>{-1, -1}));
  models.drafts->computed(4, 0, more);
  EXPECT_EQ(models.drafts->set_tokens(4, Tokens(3, 1), 0), std::nullopt);
  models.drafts->drop(all);
  more.clear();
  models.drafts->place(4, 2, 1, more);
  EXPECT_EQ(more, std::vector<std::int32_t>{-1}) << "its first rows are lost";
  more.clear();
  models.drafts->place(4, 0, 3, more);
  EXPECT_GE(std::ranges::min(more), 0) << "all of it is computed again";
  std::vector<std::int32_t> next;  // a step that is launched before the one before it is collected
  models.drafts->place(4, 3, 1, next);
  models.drafts->computed(4, 0, more);
  models.drafts->computed(4, 3, next);
  EXPECT_EQ(models.drafts->set_tokens(4, Tokens(5, 1), 0), 4);
  models.drafts->check_integrity(4);
}

TEST_P(LayerTest, ThePlanCountsItsMemory) {
  write({});
  const Settings cpu = {{"device", "cpu"}, {"cache_max_entry_count", "0.5"}, {"max_batch_size", "1000"}};
  const std::int64_t memory = 40 << 20;
  const auto without = plan_memory(weights(), cpu, memory), with = plan_memory(weights(), on(cpu), memory);
  EXPECT_EQ(without.speculative_bytes, 0);
  EXPECT_GT(with.speculative_bytes, without.weight_bytes / 3);
  EXPECT_GT(with.activation_bytes, without.activation_bytes) << "hidden states are kept";
  EXPECT_EQ(with.weight_bytes, without.weight_bytes);
  EXPECT_LT(with.num_blocks, without.num_blocks);
  std::filesystem::remove_all(weights());
  write_tiny_workspace(weights());
  EXPECT_EQ(plan_memory(weights(), cpu, memory).weight_bytes, without.weight_bytes) << "the layer is not loaded";
}

INSTANTIATE_TEST_SUITE_P(Methods, LayerTest, ::testing::Values("mtp", "eagle3"),
                         [](const auto& info) { return info.param; });

class HeadTest : public testing::EngineFixtureBase {
 protected:
  Settings with(const std::string& method) const {
    return {{"speculative_method", method}, {"speculative_model", (dir_ / "head").string()}};
  }
};

TEST_F(HeadTest, AHeadThatDoesNotBelongToTheModelIsRejectedByName) {
  write_tiny_workspace(weights());
  const auto expect_refused = [&](const TinyModel& head, const std::string& why, const std::string& method = "eagle3",
                                  ErrorCode code = ErrorCode::unsupported) {
    std::filesystem::remove_all(dir_ / "head");
    write_tiny_workspace(dir_ / "head", head);
    for (const auto& call : std::initializer_list<std::function<void()>>{
             [&] { engine(with(method)); }, [&] { plan_memory(weights(), with(method), 0); }}) {
      expect_error(code, {"speculative_model = " + (dir_ / "head").string(), why}, call);
    }
  };
  const auto good = testing::tiny_head({});
  const auto changed = [&](const std::function<void(TinyModel&)>& change) {
    auto out = good;
    change(out);
    return out;
  };
  expect_refused({}, "no EAGLE-3 head: set speculative_method = draft_model");
  expect_refused(good, "it is an EAGLE-3 head: set speculative_method = eagle3", "draft_model");
  expect_refused(changed([](auto& head) { head.target_hidden = 48; }), "hidden_units = 48, and the model has 32");
  expect_refused(changed([](auto& head) { head.vocab = 60; }), "vocab_size = 60, and the model has 40");
  expect_refused(changed([](auto& head) { head.has_embedding = false; }), "its hidden_units = 16 differ");
  expect_refused(changed([](auto& head) { head.more = "target_layers = 0,1,3\n"; }), "input of layer 3");
  expect_refused(changed([](auto& head) { head.more.clear(); }), "a model of 3 layers or more, not 2");
  expect_refused(changed([](auto& head) { head.more = "target_layers = 0,1\n"; }), "target_layers has 2 layers");
  expect_refused(changed([](auto& head) { head.draft_tokens.resize(41); }), "draft_vocab_size = 41", "eagle3",
                 ErrorCode::invalid_argument);
  write_tiny_workspace(dir_ / "head", changed([](auto& head) { head.draft_tokens.back() = 40; }));
  expect_error(ErrorCode::invalid_argument, {"draft_tokens.safetensors must have", "tokens (draft_vocab_size) below 40"},
               [&] { engine(with("eagle3")); });
}

TEST_F(HeadTest, AHeadWithoutLayersReadsThreeOfTheModel) {
  TinyModel model;
  model.layers = 9;
  write_tiny_workspace(weights(), model);
  auto head = testing::tiny_head(model);
  head.more.clear();
  write_tiny_workspace(dir_ / "head", head);
  const auto settings = runtime::read_settings(weights(), with("eagle3"));
  const auto manifest = runtime::manifest_of(weights(), settings.config, settings.model);
  EXPECT_EQ(manifest.kept_layers(), (std::vector{2, 4, 6}));
}

TEST_F(HeadTest, AHeadIsNotServedAlone) {
  write_tiny_workspace(weights(), testing::tiny_head({}));
  for (const auto& call : std::initializer_list<std::function<void()>>{[&] { engine(); },
                                                                       [&] { plan_memory(weights(), {}, 0); }}) {
    expect_error(ErrorCode::unsupported, {"tiny is an EAGLE-3 head, and no model", "speculative_model"}, call);
  }
}

}  // namespace
}  // namespace charonia
