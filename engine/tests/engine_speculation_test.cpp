// The engine with speculation, compared with the engine without it: all results are the same, bit by bit. On CUDA with
// `reproducible`.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <functional>
#include <limits>
#include <memory>
#include <numeric>
#include <span>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "adapter_folder.h"
#include "base/thread_time.h"
#include "charonia/engine.h"
#include "charonia/metrics.h"
#include "charonia/token_mask.h"
#include "engine_fixture.h"
#include "errors.h"
#include "mixed_requests.h"
#include "model_variants.h"
#include "ops_support.h"
#include "runtime/proposals.h"

namespace charonia {
namespace {

using testing::Collector;
using testing::request;
using testing::TinyModel;
using testing::write_tiny_workspace;

const Settings kOff = {{"speculative_method", "off"}};

// Allows every token, and proposes what a function returns.
class Proposes : public TokenMaskProvider {
 public:
  using Function = std::function<std::vector<TokenId>()>;
  explicit Proposes(Function function) : function_(std::move(function)) {}
  void fill(std::span<const TokenId>, std::span<std::uint32_t> mask) override { std::ranges::fill(mask, ~0U); }
  std::unique_ptr<TokenMaskProvider> clone() const override { return std::make_unique<Proposes>(function_); }
  std::vector<TokenId> propose(std::span<const TokenId>, std::span<const TokenId>, int) override { return function_(); }

 private:
  Function function_;
};

class StepSeconds : public MetricsSink {
 public:
  void add(Metric, double, int) override {}
  void set(Metric, double) override {}
  void observe(Metric metric, double value) override {
    if (metric == Metric::engine_step_seconds) sum_s += value;  // by the engine thread
  }
  double sum_s = 0;
};

// Proposals by the label `source`.
class ProposedTokens : public MetricsSink {
 public:
  void add(Metric metric, double value, int label) override {
    if (metric == Metric::spec_decode_num_draft_tokens) by_source.at(static_cast<std::size_t>(label)) += value;
  }
  void set(Metric, double) override {}
  void observe(Metric, double) override {}
  std::array<double, 3> by_source{};  // by the engine thread
};

// Prompts that repeat, so that there are proposals from the first token on.
std::vector<Request> repeating_requests(int count) {
  auto out = testing::mixed_requests(count);
  for (std::size_t i = 0; i < out.size(); ++i) {
    auto& ids = out[i].input_ids;
    const auto once = ids;
    ids.insert(ids.end(), once.begin(), once.end());
    // More of the proposals are accepted.
    if (i % 2 == 0) out[i].sampling.temperature = 0.3F;
    if (i % 3 == 1) out[i].sampling.logit_bias = {{7, 9.0F}, {8, 9.0F}};
  }
  return out;
}

// One token repeated, so that proposals are accepted.
Request one_token_repeated(int max_tokens) {
  auto one = request({5, 5, 5}, max_tokens);
  one.sampling.logit_bias = {{5, 100.0F}};
  return one;
}

// One prompt that repeats, with different seeds.
std::vector<Request> repeating_samples(std::uint64_t count) {
  std::vector<Request> out;
  for (std::uint64_t seed = 0; seed < count; ++seed) {
    auto& one = out.emplace_back(request({7, 7, 8, 8, 7, 8, 7, 7, 8, 8, 7, 8}, 40));
    one.sampling.temperature = 0.7F;
    one.sampling.seed = seed;
    one.sampling.logit_bias = {{7, 9.0F}, {8, 9.0F}};
  }
  return out;
}

// Parameter: speculative_method; with _asynchronous: on a device that computes while the next step is planned; with
// cuda_: there. The draft model is another model than the engine's, so it has other tokens at times.
// The MTP layer and the EAGLE-3 head have random weights.
class SpeculationTest : public testing::EngineFixtureBase, public ::testing::WithParamInterface<std::string> {
 protected:
  void SetUp() override {
    EngineFixtureBase::SetUp();
    if (GetParam().ends_with(kAsynchronous)) wrap_devices(true);
    write_draft({});
  }
  static constexpr std::string_view kOnCuda = "cuda_", kAsynchronous = "_asynchronous";
  bool on_cuda() const { return GetParam().starts_with(kOnCuda); }
  bool asynchronous() const { return on_cuda() || GetParam().ends_with(kAsynchronous); }
  std::string method() const {
    const auto begin = on_cuda() ? kOnCuda.size() : 0;
    return GetParam().substr(begin, GetParam().find(kAsynchronous) - begin);
  }
  // A CPU that computes asynchronously takes no adapters.
  bool takes_adapters() const { return on_cuda() || !asynchronous(); }
  // The emulated device is slow, and the same tests with n-grams cover everything but the drafts.
  bool brief() const { return on_cuda() && method() != "ngram"; }
  int some(int count) const {
    if (brief()) return count / 25;
    return asynchronous() && GetParam() != "ngram_asynchronous" ? count / 10 : count;
  }

  std::unique_ptr<Engine> engine(Settings settings = {}, std::shared_ptr<MetricsSink> sink = nullptr) const {
    if (on_cuda() && settings.emplace("device", "cuda").first->second == "cuda") {
      settings.insert(
          {{"reproducible", "True"}, {"max_batch_size", "8"}, {"device_ids", ranks_ == 1 ? "0" : "0,0"}});
    }
    return std::make_unique<Engine>(weights(), settings, std::move(sink));
  }

  // With an MTP layer or a head if the method needs one.
  void write_model(TinyModel model = {}) {
    model.mtp = method() == "mtp";
    ranks_ = model.ranks;
    write_tiny_workspace(weights(), model);
    if (method() == "eagle3") write_tiny_workspace(dir_ / "draft", testing::tiny_head(model));
  }

  void write_draft(TinyModel draft) {
    if (method() == "eagle3") return;
    draft.hidden = 16, draft.inter = 32, draft.layers = 1, draft.heads = 2, draft.kv_heads = 1;
    write_tiny_workspace(dir_ / "draft", draft);
  }

  Settings on(Settings more = {}) const {
    more.insert({"speculative_method", method()});
    if (method() == "draft_model" || method() == "eagle3") more.insert({"speculative_model", (dir_ / "draft").string()});
    return more;
  }

  std::vector<testing::Outcome> with(Settings settings, const Settings& more, const std::vector<Request>& all,
                                     EngineStats* stats = nullptr) {
    settings.insert(more.begin(), more.end());
    const auto one = engine(settings);
    auto out = testing::outcomes(*one, all);
    if (stats != nullptr) *stats = one->stats();
    return out;
  }

  void expect_same(std::vector<Request> all, const Settings& settings) {
    all.insert(all.begin(), one_token_repeated(20));
    const auto expected = with(kOff, settings, all);
    std::int64_t accepted = 0;
    for (const auto* tokens : on_cuda() ? std::vector{"4"} : std::vector{"1", "4", "16"}) {
      SCOPED_TRACE(std::string("speculative_tokens ") + tokens);
      EngineStats stats;
      const auto got = with(on({{"speculative_tokens", tokens}}), settings, all, &stats);
      for (std::size_t i = 0; i < all.size(); ++i) ASSERT_EQ(got[i], expected[i]) << "request " << i;
      EXPECT_GT(stats.proposed_tokens, 0);
      accepted += stats.accepted_tokens;
    }
    EXPECT_GT(accepted, 0);
  }

  testing::AllProposals all_proposals_;
  int ranks_ = 1;
};

TEST_P(SpeculationTest, EveryKindOfRequestGetsTheSameResults) {
  TinyModel model;
  model.special = testing::kHeaderMarks;
  write_model(model);
  write_draft(model);
  const auto all = repeating_requests(some(150));
  for (const auto& [blocks, budget] : {std::pair{"2000", "200"}, {"30", "16"}}) {
    for (const auto* batch : {"1", "16"}) {
      if (brief() && (budget != std::string("16") || batch != std::string("16"))) continue;
      SCOPED_TRACE(std::string(blocks) + " blocks, batch " + batch);
      expect_same(all, {{"cache_max_entry_count", blocks},
                        {"cache_block_seq_len", "8"},
                        {"token_budget", budget},
                        {"session_len", "160"},
                        {"max_batch_size", batch}});
    }
  }
}

// Which steps have proposals depends on measured times here.
TEST_P(SpeculationTest, StepsThatAreChosenByTheirTimesGiveTheSameResults) {
  runtime::SpeculationPolicy::choose_all_for_tests(false);
  write_model();
  const auto all = repeating_requests(some(60));
  EXPECT_EQ(with(on(), {}, all), with(kOff, {}, all));
}

// Each feature alone, so that none of them is only tested without proposals.
TEST_P(SpeculationTest, EverySamplingFeatureGetsTheSameResults) {
  write_model();
  testing::TinyAdapter(weights(), 1).write(dir_ / "a");
  Settings settings = {{"cuda_graphs", "False"}};
  if (takes_adapters()) settings["lora_adapters"] = "a=" + (dir_ / "a").string();
  using Change = std::function<void(Request&)>;
  const auto sampling = [](const std::function<void(SamplingParams&)>& change) {
    return Change([change](Request& one) { change(one.sampling); });
  };
  const std::vector<std::pair<std::string, Change>> features = {
      {"greedy", sampling([](auto& s) { s.temperature = 0; })},
      {"temperature", sampling([](auto& s) { s.temperature = 1.5F; })},
      {"top_k", sampling([](auto& s) { s.top_k = 3; })},
      {"top_p", sampling([](auto& s) { s.top_p = 0.6F; })},
      {"min_p", sampling([](auto& s) { s.min_p = 0.1F; })},
      {"repetition_penalty", sampling([](auto& s) { s.repetition_penalty = 1.1F; })},
      {"presence_penalty", sampling([](auto& s) { s.presence_penalty = 0.5F; })},
      {"frequency_penalty", sampling([](auto& s) { s.frequency_penalty = 0.05F; })},
      {"logit_bias", sampling([](auto& s) { s.logit_bias.emplace_back(9, 8.0F); })},
      {"bad_words", sampling([](auto& s) { s.bad_words = {{8}, {7, 7, 7, 7}}; })},
      {"stop_words", sampling([](auto& s) { s.stop_words = {"hhiihh", "iiii"}; })},
      {"end_ids", sampling([](auto& s) { s.ignore_eos = false, s.end_ids = {9, 11}, s.logit_bias.emplace_back(9, 6.F); })},
      {"min_tokens", sampling([](auto& s) { s.ignore_eos = false, s.end_ids = {8}, s.min_tokens = 20; })},
      {"max_tokens", sampling([](auto& s) { s.max_tokens = 7; })},
      {"logprobs", sampling([](auto& s) { s.logprobs = 3; })},
      {"prompt_logprobs", sampling([](auto& s) { s.prompt_logprobs = 2; })},
      {"n", sampling([](auto& s) { s.n = 3; })},
      {"best_of", [](Request& one) { one.sampling.best_of = 3, one.stream = false; }},
      {"thinking_budget", sampling([](auto& s) { s.thinking_budget = 9, s.thinking_end_ids = {7, 3}; })},
      {"several blocks of thinking", sampling([](auto& s) {
         s.thinking_budget = 6, s.thinking_begun = true, s.thinking_begin_ids = {7}, s.thinking_end_ids = {8};
       })},
      {"thinking after calls", sampling([](auto& s) {
         s.thinking_budget = 2, s.thinking_begin_ids = {7}, s.thinking_end_ids = {3}, s.thinking_call_ids = {{8}, {7}};
       })},
      {"mask", [](Request& one) {
         one.mask = std::make_shared<testing::MaskOf>(
             testing::kVocab, [](TokenId token, auto output) { return token != 7 || output.size() % 4 != 1; });
       }},
      {"guide", [](Request& one) {
         one.sampling.ignore_eos = false;
         one.guide = Guide{GuideType::regex, "(h{1,3}|i)*j"};
       }},
      {"cache_salt", [](Request& one) { one.cache_salt = "s"; }},
      {"lora_name", [](Request& one) { one.lora_name = "a"; }},
      {"resumed", [](Request& one) { one.resumed = {std::vector<TokenId>{7, 7, 8, 7, 7}}; }},
  };
  // All drafts are sampled and checked by the same code. Only a layer reads the hidden states that adapters change, and
  // that completions lack if the model has found their tokens in its cache.
  std::vector<std::string> brief_features = {"temperature", "n", "lora_name"};
  if (method() == "draft_model") brief_features.insert(brief_features.end(), {"frequency_penalty", "logprobs", "guide"});
  std::int64_t accepted = 0;
  for (const auto& [name, change] : features) {
    auto all = repeating_samples(4);
    if (name == "lora_name" && !takes_adapters()) continue;
    if (brief() && std::ranges::find(brief_features, name) == brief_features.end()) continue;
    for (auto& one : all) change(one);
    EngineStats stats;
    EXPECT_EQ(with(on(), settings, all, &stats), with(kOff, settings, all)) << name;
    EXPECT_GT(stats.proposed_tokens, 0) << name;
    accepted += stats.accepted_tokens;
  }
  EXPECT_GT(accepted, 0);
}

// The second requests continue the responses, so they read the KV of tokens that were accepted.
TEST_P(SpeculationTest, KvInFilesGivesTheSameResults) {
  write_model();
  testing::TinyAdapter(weights(), 1).write(dir_ / "a");
  Settings settings = {{"cache_block_seq_len", "4"}};
  if (takes_adapters()) settings["lora_adapters"] = "a=" + (dir_ / "a").string();
  auto stored = settings;
  stored["kv_offload_path"] = (dir_ / "kv").string();
  auto all = repeating_samples(brief() ? 2 : 8);
  all.insert(all.begin(), one_token_repeated(40));
  for (std::size_t i = 0; i < all.size(); ++i) {
    all[i].sampling.logprobs = 0;
    all[i].cache_salt = std::to_string(i);
    if (i % 2 == 1 && takes_adapters()) all[i].lora_name = "a";
  }
  auto expected = with(kOff, settings, all);
  EngineStats stats;
  EXPECT_EQ(with(on(), stored, all, &stats), expected);
  EXPECT_GT(stats.accepted_tokens, 0);
  EXPECT_GT(stats.proposed_tokens, stats.accepted_tokens);
  for (std::size_t i = 0; i < all.size(); ++i) {
    const auto& output = expected[i].tokens.front();
    all[i].input_ids.insert(all[i].input_ids.end(), output.begin(), output.end());
  }
  expected = with(kOff, settings, all);
  for (const auto& method : {kOff, on()}) {
    EXPECT_EQ(with(method, stored, all, &stats), expected);
    EXPECT_GT(stats.offload_hit_tokens, 0);
  }
}

TEST_P(SpeculationTest, EveryKindOfModelGetsTheSameResults) {
  const auto all = repeating_requests(some(25));
  TinyModel windows, ranks;
  windows.windows = {9, 0};
  ranks.ranks = 2;
  auto models = testing::model_variants();
  models.insert(models.end(), {windows, ranks});
  for (std::size_t i = 0; i < models.size(); ++i) {
    const bool other = i != 1 && i != 4 && i != 17 && models[i].ranks == 1;  // windows, experts, states
    if (brief() && other) continue;
    SCOPED_TRACE("model " + std::to_string(i));
    write_model(models[i]);
    const auto& mixers = models[i].mixers;
    const bool has_states = mixers != std::vector<std::string>{"attention"};
    const bool ends_with_state = mixers[static_cast<std::size_t>(models[i].layers - 1) % mixers.size()] != "attention";
    // No model with one of these has an MTP layer.
    const bool of_others =
        ends_with_state || models[i].ranks > 1 || models[i].per_layer > 0 || models[i].kv_sources.back() > 0;
    if (method() == "mtp" && of_others) continue;
    if (method() == "eagle3" && models[i].ranks > 1) continue;
    for (const auto* prefixes : {"1", "0"}) {
      if ((!has_states || on_cuda()) && prefixes == std::string("0")) continue;
      expect_same(all, {{"cache_block_seq_len", "8"}, {"token_budget", "64"}, {"enable_prefix_caching", prefixes}});
    }
  }
}

TEST_P(SpeculationTest, AQuantisedCacheGivesTheSameResults) {
  write_model();
  for (const auto* policy : {"8", "4", "16"}) {
    expect_same(repeating_requests(some(40)), {{"quant_policy", policy}, {"cache_block_seq_len", "8"}});
  }
}

// Grammars whose texts repeat, with and without an end.
TEST_P(SpeculationTest, GuidesGetTheSameTexts) {
  write_model();
  std::vector<Request> all;
  for (std::uint64_t seed = 0; seed < (brief() ? 4 : on_cuda() ? 10 : 24); ++seed) {
    auto& one = all.emplace_back(request({1, 2, 3, 1, 2, 3}, 40));
    auto& sampling = one.sampling;
    sampling.ignore_eos = false;
    sampling.seed = seed;
    sampling.temperature = static_cast<float>(seed % 3) / 2;
    if (seed % 4 == 1) sampling.logprobs = 2;
    if (seed % 4 == 2) sampling.n = 2;
    if (seed % 4 == 3) sampling.bad_words = {{1}, {2, 3}};
    if (seed % 5 == 1) sampling.thinking_budget = 4, sampling.thinking_end_ids = {1, 1};
    one.guide = seed % 2 == 0 ? Guide{GuideType::regex, "(abc|[k-z]{2}d?){4,12}e"}
                              : Guide{GuideType::ebnf_grammar, "start: x+\nx: \"ab\" x \"cd\" | /[a-m]/"};
  }
  for (const auto* blocks : {"2000", "20"}) {
    if (brief() && blocks == std::string("2000")) continue;
    expect_same(all, {{"cache_max_entry_count", blocks}, {"cache_block_seq_len", "8"}, {"session_len", "60"}});
  }
}

TEST_P(SpeculationTest, TurnsOfASessionContinueAfterAcceptedProposals) {
  write_model();
  const auto run = [&](const Settings& settings) {
    const auto one = engine(settings);
    std::vector<testing::Outcome> out;
    for (int turn = 0; turn < 6; ++turn) {
      auto next = request({1, 2, 3, 1, 2, 3, 1, 2, 3 + turn}, 15);
      next.session_id = "a";
      next.continuation_ids = {4, 5, 4, 5, 4 + turn};
      next.sampling.ignore_eos = false;
      next.sampling.end_ids = {7 + turn};
      Collector collector(*one, next);
      out.push_back(testing::outcome(collector, next));
      out.back().prompt_logprobs.push_back(static_cast<float>(collector.last().num_input_tokens));
    }
    one->check_integrity();
    return out;
  };
  EXPECT_EQ(run(on({{"cache_block_seq_len", "4"}})), run({{"cache_block_seq_len", "4"}}));
}

// Each step gives several tokens.
TEST_P(SpeculationTest, RepeatedTextTakesFewerSteps) {
  write_model();
  const auto one = engine(on());
  Collector out(*one, one_token_repeated(200));
  EXPECT_EQ(out.tokens(), std::vector<TokenId>(200, 5));
  one->check_integrity();  // after the last step, whose tokens are counted then
  const auto stats = one->stats();
  EXPECT_GT(stats.accepted_tokens, 0);
  EXPECT_EQ(stats.num_steps + stats.accepted_tokens, stats.generation_tokens);
  EXPECT_EQ(out.last().num_accepted_tokens, stats.accepted_tokens);
  EXPECT_EQ(out.last().num_proposed_tokens, stats.proposed_tokens);
}

TEST_P(SpeculationTest, ProposalsAreCountedByTheirSource) {
  write_model();
  const auto sink = std::make_shared<ProposedTokens>();
  const auto one = engine(on(), sink);
  auto certain = request({1, 2, 3}, 20);
  certain.mask = std::make_shared<Proposes>([] { return std::vector<TokenId>{4, 6}; });
  for (const auto& next : {certain, one_token_repeated(20)}) Collector(*one, next).tokens();
  one->check_integrity();  // on the engine thread
  const auto [ngram, grammar, draft] = sink->by_source;
  EXPECT_EQ(ngram + grammar + draft, static_cast<double>(one->stats().proposed_tokens));
  EXPECT_GT(grammar, 0);
  EXPECT_GT(ngram + draft, 0);
  EXPECT_EQ(draft > 0, method() != "ngram");
  for (const auto metric : {Metric::spec_decode_num_draft_tokens, Metric::spec_decode_num_accepted_tokens}) {
    const auto names = metric_catalogue()[static_cast<std::size_t>(metric)].label_values;
    EXPECT_TRUE(std::ranges::equal(names, std::array<std::string_view, 3>{"ngram", "grammar", "draft"}));
  }
}

TEST_P(SpeculationTest, ASettingWithoutEffectIsNamedInAWarning) {
  TinyModel embeds;
  embeds.more = "model_task = embed\n";
  const std::tuple<TinyModel, const char*, const char*> cases[] = {
      {{}, "null", "the device is null"}, {embeds, on_cuda() ? "cuda" : "cpu", "generates no text"}};
  for (const auto& [model, device, why] : cases) {
    write_model(model);
    if (method() == "mtp" || method() == "eagle3") {
      expect_error(ErrorCode::unsupported, {"speculative_method = " + method() + ": "},
                   [&] { engine(on({{"device", device}})); });
      continue;
    }
    const auto one = engine(on({{"device", device}}));
    const auto names = [&](const std::string& warning) {
      return warning.find("speculative_method = " + method()) != std::string::npos &&
             warning.find(why) != std::string::npos;
    };
    EXPECT_TRUE(std::ranges::any_of(one->info().warnings, names)) << device;
    EXPECT_EQ(one->info().config.speculative_method, "off") << device;
    EXPECT_TRUE(std::ranges::none_of(engine({{"device", device}})->info().warnings, names));
  }
}

// The text waits while it can be a stop word, and its last two tokens always can. No second response is due.
TEST_P(SpeculationTest, AResponseHasAllAcceptedTokensOfItsStep) {
  write_model();
  const auto one = engine(on({{"speculative_tokens", "4"},
                              {"stream_interval_ms", "1000000"},
                              {"stream_interval_max_ms", "1000000"}}));
  auto next = request({5, 5, 5, 5}, 20);
  next.stream = true;
  next.sampling.logit_bias = {{5, 100.0F}};
  next.sampling.stop_words = {"ff~"};
  Collector out(*one, next);
  EXPECT_EQ(out.tokens(), std::vector<TokenId>(20, 5));
  ASSERT_EQ(out.wait().size(), 2U);
  EXPECT_EQ(out.wait()[0].num_accepted_tokens, 4);
  // The last two tokens wait, because they may begin a stop word. An asynchronous device has computed one more step.
  EXPECT_EQ(out.wait()[0].token_ids.size(), asynchronous() ? 5U : 4U);
}

// The sequence with the proposal is computed again. Token 39 is never sampled, and its embedding is infinite.
TEST_P(SpeculationTest, AProposalWithInfiniteKvBreaksNoOtherToken) {
  TinyModel model;
  model.head_dim = 32;  // CUDA's tensor cores compute such heads in bf16
  model.weight_type = "bf16";
  model.change = [i = 0](const std::string& name, float value) mutable {
    return name == "tok_embeddings.weight" && i++ / 32 == 39 ? std::numeric_limits<float>::infinity() : value;
  };
  write_model(model);
  auto next = request({1, 2, 3, 4, 5}, 12);
  next.sampling.logit_bias = {{39, -100.0F}};
  int calls = 0;
  next.mask = std::make_shared<Proposes>([&calls] { return std::vector<TokenId>(++calls < 4 ? 0 : 2, 39); });
  const Settings small_blocks = {{"cache_block_seq_len", "4"}};
  auto off = small_blocks;
  off.merge(Settings(kOff));
  const auto plain = engine(off), one = engine(on(small_blocks));
  Collector expected(*plain, next);
  for (const bool again : {false, true}) {  // with a prefix hit
    calls = 0;
    Collector out(*one, next);
    EXPECT_EQ(out.last().error, "");
    EXPECT_EQ(out.tokens(), expected.tokens());
    EXPECT_GT(out.last().num_proposed_tokens, 0);
    EXPECT_EQ(out.last().num_cached_tokens, again ? 4 : 0);
    one->check_integrity();
  }
}

// Nothing else can run while the host looks for proposals.
TEST_P(SpeculationTest, TheTimeOfAStepIncludesTheSearchForProposals) {
  using std::chrono_literals::operator""ms;
  write_model();
  const auto seconds = std::make_shared<StepSeconds>();
  int calls = 0;
  {
    const auto one = engine(on(), seconds);
    auto next = request({1, 2, 3, 4, 5}, 10);
    next.mask = std::make_shared<Proposes>([&] {
      ++calls;
      std::this_thread::sleep_for(2ms);
      return std::vector<TokenId>{};
    });
    Collector out(*one, next);
    EXPECT_EQ(out.tokens().size(), 10U);
  }
  EXPECT_GT(calls, 5);
  EXPECT_GE(seconds->sum_s, 0.002 * calls);
}

// Each search takes longer than all of a step may, so a step has one. The sequence that had it may have drafts, which are
// checked too.
TEST_P(SpeculationTest, TheMasksOfAStepShareTheTimeForProposals) {
  write_model();
  const auto one = engine(on());
  std::array<int, 4> calls{};
  std::vector<std::unique_ptr<Collector>> all;
  for (auto& of_one : calls) {
    auto next = request({1, 2, 3, 4, 5}, 16);
    next.mask = std::make_shared<Proposes>([&of_one] {
      ++of_one;
      for (const auto end = thread_seconds() + 0.006; thread_seconds() < end;) continue;
      return std::vector<TokenId>{};
    });
    all.push_back(std::make_unique<Collector>(*one, next));
  }
  for (const auto& out : all) EXPECT_EQ(out->tokens().size(), 16U);
  one->check_integrity();
  EXPECT_LE(std::accumulate(calls.begin(), calls.end(), 0), (method() == "ngram" ? 1 : 2) * one->stats().num_steps);
  EXPECT_GT(std::ranges::min(calls), 0) << "each has its turn";
}

// A request that ends, is cancelled, or comes while steps with proposals run.
TEST_P(SpeculationTest, RequestsComeAndGoBetweenSteps) {
  write_model();
  const auto one = engine(on());
  auto all = repeating_samples(6);
  const auto expected = with(kOff, {}, all);
  for (int round = 0; round < 3; ++round) {
    Collector cancelled;
    auto endless = all.front();
    endless.sampling.max_tokens = 200;
    const auto handle = one->submit(endless, cancelled.callback());
    cancelled.wait_for(1 + 3 * round);
    EXPECT_EQ(testing::outcomes_beside(*one, all), expected);
    one->cancel(handle);
    cancelled.wait();
  }
  one->check_integrity();
  EXPECT_EQ(one->stats().blocks_active, 0);
}

std::vector<std::string> methods() {
  if (ops::device_names().front().starts_with("cuda")) {
    return {"cuda_ngram", "cuda_draft_model", "cuda_mtp", "cuda_eagle3"};
  }
  return {"ngram", "draft_model", "mtp", "eagle3", "ngram_asynchronous", "draft_model_asynchronous", "mtp_asynchronous",
          "eagle3_asynchronous"};
}

INSTANTIATE_TEST_SUITE_P(Methods, SpeculationTest, ::testing::ValuesIn(methods()),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace charonia
