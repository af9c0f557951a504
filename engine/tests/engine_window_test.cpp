// Models whose layers have a window free the KV that no window reads, and models with recurrent layers keep snapshots
// of their states. This changes no token: the reference is an engine with one block per sequence, which frees nothing
// and finds no prefix.
#include "engine_fixture.h"

namespace charonia {
namespace {

using testing::Collector;
using testing::request;
using testing::tokens_of;

// Parameters: the windows of the layers (-1: a short convolution, -2: a gated delta net), quant_policy, and whether the
// device computes asynchronously.
class EngineWindowTest : public testing::EngineFixtureBase,
                         public ::testing::WithParamInterface<std::tuple<std::vector<int>, std::string, bool>> {
 protected:
  void SetUp() override {
    EngineFixtureBase::SetUp();
    wrap_devices(std::get<2>(GetParam()));
    testing::TinyModel model;
    model.layers = 3;
    model.windows = std::get<0>(GetParam());
    model.mixers.clear();
    for (const int window : model.windows) {
      model.mixers.emplace_back(window == -2 ? "delta_net" : window == -1 ? "short_conv" : "attention");
    }
    write_tiny_workspace(weights(), model);
  }
  std::unique_ptr<Engine> reference() const {
    return engine({{"cache_block_seq_len", "256"},
                   {"enable_prefix_caching", "0"},
                   {"session_ttl_s", "0"},
                   {"quant_policy", std::get<1>(GetParam())}});
  }
  // 60 blocks of 4 tokens, and the units of 4 sequences with 64 tokens, 3 each, and of a step, 5.
  std::unique_ptr<Engine> tight() const {
    return engine({{"cache_block_seq_len", "4"},
                   {"cache_max_entry_count", "60"},
                   {"cache_user_tokens", "64"},
                   {"token_budget", "16"},
                   {"max_batch_size", "6"},
                   {"session_len", "128"},
                   {"quant_policy", std::get<1>(GetParam())}});
  }
  static std::vector<TokenId> prompt(int tokens, int seed) {
    std::vector<TokenId> out;
    for (int i = 0; i < tokens; ++i) out.push_back(1 + (i < 20 ? i * i : i * (seed + 3)) % 39);
    return out;
  }
};
INSTANTIATE_TEST_SUITE_P(Models, EngineWindowTest,
                         ::testing::Combine(::testing::Values(std::vector{8, 0}, std::vector{8}, std::vector{0, 5, 8},
                                                              std::vector{-1, 0}, std::vector{-2, 8, 0}),
                                            ::testing::Values("0", "8", "4", "16"), ::testing::Bool()));

TEST_P(EngineWindowTest, ManyRequestsGetTheTokensOfAnEngineThatFreesNothing) {
  const auto expected = reference(), one = tight();
  EXPECT_EQ(one->info().num_blocks, 60);
  const auto& windows = std::get<0>(GetParam());
  const bool has_window = std::ranges::max(windows) > 0, has_state = std::ranges::min(windows) < 0;
  EXPECT_EQ(one->info().num_window_blocks, has_window ? 4 * 3 + 5 : 0);
  EXPECT_EQ(expected->info().num_window_blocks, has_window ? 1 * expected->info().num_blocks : 0);
  EXPECT_EQ(one->info().num_states >= 2, has_state) << one->info().num_states << " states";
  std::vector<Request> requests;
  for (int i = 0; i < 12; ++i) {
    auto& next = requests.emplace_back(request(prompt(12 + 7 * i, i % 5), 20));
    next.sampling.n = i % 3 + 1;
    next.sampling.temperature = 1;
    next.sampling.seed = static_cast<std::uint64_t>(i);
  }
  for (int round = 0; round < 2; ++round) {
    std::vector<std::unique_ptr<Collector>> got;
    for (const auto& each : requests) got.push_back(std::make_unique<Collector>(*one, each));
    for (std::size_t i = 0; i < requests.size(); ++i) {
      Collector alone(*expected, requests[i]);
      for (int choice = 0; choice < requests[i].sampling.n; ++choice) {
        EXPECT_EQ(got[i]->tokens(choice), alone.tokens(choice)) << "request " << i << ", choice " << choice;
      }
    }
    one->check_integrity();
  }
  // Sequences that wait for a state before they are admitted need not be preempted.
  if (!has_state) {
    EXPECT_GT(one->stats().num_preemptions, 0);
  }
  EXPECT_EQ(tokens_of(*one, request(prompt(40, 1), 3)), tokens_of(*expected, request(prompt(40, 1), 3)));
  Collector again(*one, request(prompt(40, 1), 3));
  EXPECT_EQ(again.tokens(), tokens_of(*expected, request(prompt(40, 1), 3)));
  EXPECT_EQ(again.last().num_cached_tokens, 36);
}

TEST_P(EngineWindowTest, ATurnOfASessionFindsItsWindow) {
  const auto expected = reference(), one = tight();
  std::vector<TokenId> history;
  for (int turn = 0; turn < 4; ++turn) {
    auto next = request({}, 10);
    next.session_id = "s";
    next.continuation_ids = prompt(15, turn);
    history.insert(history.end(), next.continuation_ids.begin(), next.continuation_ids.end());
    Collector out(*one, next);
    const auto got = out.tokens();
    EXPECT_EQ(got, tokens_of(*expected, request(history, 10)));
    EXPECT_EQ(out.last().num_cached_tokens > 0, turn > 0);
    history.insert(history.end(), got.begin(), got.end());
    one->check_integrity();
  }
}

}  // namespace
}  // namespace charonia
