// The engine with several tensor-parallel ranks on the CPU.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "charonia/engine.h"
#include "engine_fixture.h"
#include "forwarding_ops.h"
#include "model_variants.h"

namespace charonia {
namespace {

using testing::Collector;
using testing::request;
using testing::TinyModel;
using testing::write_tiny_workspace;

class EngineRanksTest : public testing::EngineFixtureBase, public ::testing::WithParamInterface<int> {
 protected:
  // Writes `model` for this number of ranks, and returns its folder.
  std::filesystem::path write(TinyModel model, int ranks) const {
    model.ranks = ranks;
    const auto folder = dir_ / std::to_string(ranks);
    write_tiny_workspace(folder, model);
    return folder;
  }
};
INSTANTIATE_TEST_SUITE_P(Ranks, EngineRanksTest, ::testing::Values(2, 4),
                         [](const auto& info) { return std::to_string(info.param); });

// Prompts of several lengths together, so that steps mix prefill and decode.
std::vector<Request> requests(int vocab, int max_tokens) {
  std::vector<Request> out;
  for (const int length : {1, 3, 17, 40}) {
    std::vector<TokenId> ids;
    for (int i = 0; i < length; ++i) ids.push_back((i * i + 7 * length) % vocab);
    out.push_back(request(ids, max_tokens));
    out.back().sampling.logprobs = 0;
  }
  return out;
}

TEST_P(EngineRanksTest, TokensEqualOneRankAndLogProbabilitiesAreNear) {
  TinyModel grouped, biased, tied, wide;
  biased.biases = true;
  tied.tied = true;
  tied.vocab = 53;  // not a multiple of the ranks
  wide.heads = 8, wide.kv_heads = 8, wide.head_dim = 6, wide.inter = 76, wide.vocab = 131, wide.layers = 3;
  wide.biases = true;
  for (const auto& model : {grouped, biased, tied, wide}) {
    const auto all = requests(model.vocab, 128);
    const Settings settings = {{"token_budget", "24"}};
    const auto expected = testing::completions(write(model, 1), settings, all);
    const auto got = testing::completions(write(model, GetParam()), settings, all);
    SCOPED_TRACE(model.vocab);
    testing::expect_near(got, expected);
  }
}

// Certain tokens reach every rank: several ranks give the tokens that one rank samples one by one.
TEST_P(EngineRanksTest, TokensThatAreTakenTogetherAreThoseThatOneRankSamplesOneByOne) {
  const TinyModel model;
  const Settings settings = {{"token_budget", "24"}};
  const auto runs = [&](bool one_by_one) {
    std::vector<Request> out;
    for (auto& one : requests(model.vocab, 60)) {
      one.sampling.logprobs = -1;
      one.sampling.temperature = 1.0F;
      one.sampling.repetition_penalty = 1.2F;
      one.sampling.seed = out.size();
      out.push_back(testing::with_runs(one, model.vocab, one_by_one));
    }
    return out;
  };
  const auto expected = testing::completions(write(model, 1), settings, runs(true));
  for (const auto* const max_batch : {"8", "2"}) {  // with 2, some of them wait
    auto few = settings;
    few.emplace("max_batch_size", max_batch);
    const auto got = testing::completions(write(model, GetParam()), few, runs(false));
    for (std::size_t i = 0; i < got.size(); ++i) EXPECT_EQ(got[i].tokens, expected[i].tokens) << "request " << i;
  }
  Engine engine(write(model, GetParam()), settings);
  Collector out(engine, runs(false)[1]);
  EXPECT_EQ(out.tokens(), expected[1].tokens);
  EXPECT_EQ(engine.stats().jump_forward_tokens, 33) << "of 60 tokens";
  EXPECT_LT(engine.stats().num_steps, 30);
}

TEST_P(EngineRanksTest, EveryKindOfDecoderIsTheSameOnSeveralRanks) {
  for (const auto& model : testing::model_variants()) {
    const auto all = requests(model.vocab, 32);
    const Settings settings = {{"token_budget", "24"}};
    const auto expected = testing::completions(write(model, 1), settings, all);
    const auto got = testing::completions(write(model, GetParam()), settings, all);
    SCOPED_TRACE(model.more);
    testing::expect_near(got, expected);
  }
}

TEST_P(EngineRanksTest, SamplesDependOnlyOnTheRequest) {
  TinyModel model;
  model.windows = {0, 8};
  const auto folder = write(model, GetParam());
  auto all = requests(model.vocab, 60);
  for (std::size_t i = 0; i < all.size(); ++i) {
    all[i].sampling.temperature = 1;
    all[i].sampling.seed = i;
    all[i].sampling.repetition_penalty = 1.1F;
  }
  std::vector<testing::Completion> alone;
  for (const auto& one : all) alone.push_back(testing::completions(folder, {}, {one})[0]);
  const std::vector<Settings> all_settings = {
      {{"token_budget", "7"}},
      {{"threads", std::to_string(3 * GetParam())}},
      {{"cache_max_entry_count", "36"}},  // of about 65 blocks that they need together
      {{"enable_prefix_caching", "False"}}};
  for (const auto& settings : all_settings) {
    EXPECT_EQ(testing::completions(folder, settings, all), alone);
  }
}

TEST_P(EngineRanksTest, FreedBlocksAndRepeatedPrefixesChangeNothing) {
  for (const auto& windows : {std::vector{0}, std::vector{8, 0}}) {
    TinyModel model;
    model.windows = windows;
    const auto folder = write(model, GetParam());
    Engine engine(folder, {{"cache_max_entry_count", "40"}});
    std::vector<Collector> first(8), again(8);
    const auto prompt = [](int i) { return request({5, 6, 7, 8, 9, 10, 11, 12, 1 + i}, 60); };
    for (int i = 0; i < 8; ++i) engine.submit(prompt(i), first[static_cast<std::size_t>(i)].callback());
    for (auto& one : first) one.wait();
    EXPECT_GT(engine.stats().num_preemptions, 0);
    for (std::size_t i = 0; i < 8; ++i) {
      engine.submit(prompt(static_cast<int>(i)), again[i].callback());
      EXPECT_EQ(again[i].tokens(), first[i].tokens());
    }
    EXPECT_EQ(again[7].wait().back().num_cached_tokens, 8);
    engine.check_integrity();
  }
}

TEST_P(EngineRanksTest, MemoryIsTheSumOfAllRanks) {
  TinyModel model;
  model.kv_heads = 4;
  const Settings settings = {{"cache_max_entry_count", "20"}};
  const Engine one(write(model, 1), settings), several(write(model, GetParam()), settings);
  EXPECT_EQ(several.info().num_blocks, 20);
  EXPECT_EQ(several.info().kv_cache_bytes, one.info().kv_cache_bytes);
  // Every rank has the whole embedding; weights are padded to whole panels.
  EXPECT_GT(several.info().weight_bytes, one.info().weight_bytes);
}

// Fails in the given operation of a step, on one rank, when requested.
enum class Place { none, before_the_first_collective, between_two, after_the_last };
std::atomic<Place> place{Place::none};

class FailingOps : public testing::ForwardingOps {
 public:
  using ForwardingOps::ForwardingOps;
  void embed(const ops::Tensor& out, const ops::Embedding& table, float scale) override {
    fail_at(Place::before_the_first_collective);
    ForwardingOps::embed(out, table, scale);
  }
  void gated_activation(const ops::Tensor& out, const ops::Tensor& gate_up, ops::Activation activation) override {
    fail_at(Place::between_two);
    ForwardingOps::gated_activation(out, gate_up, activation);
  }
  void sample(const ops::Tensor& logits) override {
    fail_at(Place::after_the_last);
    ForwardingOps::sample(logits);
  }

 private:
  void fail_at(Place here) const {
    if (place == here && rank() == 1) throw Error(ErrorCode::internal, "out of luck");
  }
};

TEST_P(EngineRanksTest, AnErrorOfARankEndsTheStepOnAllRanks) {
  runtime::wrap_devices_for_tests(
      [](std::unique_ptr<ops::Ops> device) { return std::make_unique<FailingOps>(std::move(device)); });
  const auto folder = write({}, GetParam());
  for (const auto here : {Place::before_the_first_collective, Place::between_two, Place::after_the_last}) {
    for (int round = 0; round < 5; ++round) {
      place = Place::none;
      Engine engine(folder);
      Collector before, failed;
      engine.submit(request({1, 2, 3}, 5), before.callback());
      EXPECT_EQ(before.tokens().size(), 5U);
      place = here;
      engine.submit(request({1, 2, 3}, 30), failed.callback());
      EXPECT_EQ(failed.wait().back().finish_reason, FinishReason::error);
      EXPECT_TRUE(failed.wait().back().error.ends_with(": rank 1: out of luck")) << failed.wait().back().error;
      engine.check_integrity();
    }
  }
}

// Rank 0 has too little memory to prepare. Rank 1 waits for it in a collective, and fails after the abort.
class UnpreparedOps : public testing::ForwardingOps {
 public:
  UnpreparedOps(std::unique_ptr<ops::Ops> to, std::shared_ptr<std::atomic<bool>> aborted)
      : ForwardingOps(std::move(to)), aborted_(std::move(aborted)) {}
  void prepare(const ops::StepLimits&, const Issue&) override {
    if (rank() == 0) throw Error(ErrorCode::resource_exhausted, "no memory is left");
    aborted_->wait(false);
    throw Error(ErrorCode::internal, "the collective was aborted");
  }
  void abort_collectives(std::string_view why) noexcept override {
    *aborted_ = true;
    aborted_->notify_all();
    ForwardingOps::abort_collectives(why);
  }

 private:
  std::shared_ptr<std::atomic<bool>> aborted_;
};

TEST(EngineRanksLoadTest, ALoadThatFailsReportsTheErrorOfTheFirstRank) {
  const auto dir = testing::test_folder();
  TinyModel model;
  model.ranks = 2;
  write_tiny_workspace(dir, model);
  runtime::wrap_devices_for_tests(
      [aborted = std::make_shared<std::atomic<bool>>(false)](std::unique_ptr<ops::Ops> ops) {
        return std::make_unique<UnpreparedOps>(std::move(ops), aborted);
      });
  EXPECT_EQ(testing::error_of([&] { Engine engine(dir); }, ErrorCode::resource_exhausted), "rank 0: no memory is left");
  runtime::wrap_devices_for_tests(nullptr);
  std::filesystem::remove_all(dir);
}

TEST(EngineRanksRejectionTest, AnotherNumberOfRanksIsRejectedWithTheCommand) {
  const auto dir = testing::test_folder();
  const auto rejection = [&](const TinyModel& model, const Settings& settings) {
    std::filesystem::remove_all(dir);
    write_tiny_workspace(dir, model);
    return testing::error_of([&] { Engine engine(dir, settings); }, std::nullopt);
  };
  const auto other = rejection({}, {{"tensor_para_size", "2"}});
  EXPECT_NE(other.find("charonia convert MODEL --dst-path WORKSPACE --tp 2 --force"), std::string::npos) << other;
  TinyModel three;
  three.ranks = 3;
  const auto impossible = rejection(three, {});
  EXPECT_NE(impossible.find("head_num = 4"), std::string::npos) << impossible;
  std::filesystem::remove_all(dir);
}

}  // namespace
}  // namespace charonia
