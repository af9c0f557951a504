// KV in files: requests get the same bits as without, in the same engine and in a later one.
#include <fstream>
#include <numeric>
#include <thread>

#include "adapter_folder.h"
#include "base/bytes.h"
#include "base/text.h"
#include "engine_fixture.h"
#include "ops/cpu/free_memory.h"

namespace charonia {
namespace {

using testing::Collector;
using testing::request;

class OffloadFixture : public testing::EngineFixtureBase {
 protected:
  std::filesystem::path folder() const { return dir_ / "kv"; }
  Settings settings(Settings more = {}) const {
    more.insert({{"cache_block_seq_len", "4"}, {"kv_offload_path", folder().string()}});
    return more;
  }
  std::vector<std::filesystem::path> files() const {
    std::vector<std::filesystem::path> out;
    for (const auto& entry : std::filesystem::directory_iterator(folder())) {
      if (entry.path().extension() == ".kv") out.push_back(entry.path());
    }
    return out;
  }
  // 41 tokens, so 10 blocks are looked up. With the response of 8 tokens, 12 blocks are computed.
  static Request prompt(int first, std::string salt = "", int length = 41) {
    std::vector<TokenId> ids(static_cast<std::size_t>(length));
    std::iota(ids.begin(), ids.end(), first);
    for (auto& id : ids) id = id % (testing::kVocab - 1) + 1;
    auto out = request(ids, 8);
    out.cache_salt = std::move(salt);
    out.sampling.logprobs = 0;
    return out;
  }
  struct Response {
    std::vector<TokenId> tokens;
    std::vector<float> logprobs;
    int num_cached = 0;
  };
  static Response run(Engine& engine, const Request& one) {
    Collector out(engine, one);
    const int cached = out.last().num_cached_tokens;
    engine.check_integrity();
    return {out.tokens(), out.logprobs(), cached};
  }
  static void expect_same(const Response& found, const Response& expected, int num_cached) {
    EXPECT_EQ(found.tokens, expected.tokens);
    EXPECT_EQ(found.logprobs, expected.logprobs) << "the bits must be the same";
    EXPECT_EQ(found.num_cached, num_cached);
  }
  // Each round runs several requests at the same time.
  static void expect_same_bits(Engine& small, Engine& plain, int rounds) {
    for (int round = 0; round < rounds; ++round) {
      std::vector<Request> requests;
      for (const int first : {0, 5, 11, 17, 0, 23}) requests.push_back(prompt(first, "", 30 + first + round));
      std::vector<std::unique_ptr<Collector>> got;
      for (const auto& one : requests) got.push_back(std::make_unique<Collector>(small, one));
      for (std::size_t i = 0; i < requests.size(); ++i) {
        const auto expected = run(plain, requests[i]);
        EXPECT_EQ(got[i]->tokens(), expected.tokens) << "round " << round << ", request " << i;
        EXPECT_EQ(got[i]->logprobs(), expected.logprobs) << "round " << round << ", request " << i;
      }
      small.check_integrity();
    }
    EXPECT_GT(small.stats().offload_hit_tokens, 0);
  }
};

// Parameter: whether the device computes asynchronously.
class EngineOffloadTest : public OffloadFixture, public ::testing::WithParamInterface<bool> {
 protected:
  void SetUp() override {
    EngineFixtureBase::SetUp();
    wrap_devices(GetParam());
    testing::write_tiny_workspace(weights());
  }
};
INSTANTIATE_TEST_SUITE_P(Device, EngineOffloadTest, testing::kDevices, testing::device_name);

TEST_P(EngineOffloadTest, ShutdownStoresThePromptAndTheResponse) {
  const auto expected = run(*engine(), prompt(0));
  const auto one = engine(settings());
  expect_same(run(*one, prompt(0)), expected, 0);
  one->shutdown(0);
  EXPECT_EQ(files().size(), 12U);
  EXPECT_EQ(one->stats().offload_queries_tokens, 40);
  const auto next = engine(settings({{"kv_offload_size", "1GiB"}, {"cache_max_entry_count", "30"}}));
  EXPECT_EQ(next->stats().offload_bytes, 0) << "another engine holds the folder";
}

TEST_P(EngineOffloadTest, AMeanStoresNothing) {
  for (const auto& [pooling, stored] : {std::pair{"mean", 0U}, std::pair{"last", 10U}}) {
    testing::TinyModel model;
    model.more = std::string("model_task = embed\npooling = ") + pooling + "\n";
    write_tiny_workspace(weights(), model);
    auto input = prompt(0);
    input.pooling = "embed";
    input.sampling.logprobs = -1;
    const auto one = engine(settings());
    EXPECT_FALSE(Collector(*one, input).last().pooled.empty());
    one->shutdown(0);
    EXPECT_EQ(files().size(), stored) << pooling;
  }
}

TEST_P(EngineOffloadTest, ARestartGivesTheSameBits) {
  const auto expected = run(*engine(), prompt(0));
  auto longer = prompt(0);
  longer.input_ids.insert(longer.input_ids.end(), expected.tokens.begin(), expected.tokens.end());
  const auto of_longer = run(*engine(), longer);
  expect_same(run(*engine(settings()), prompt(0)), expected, 0);
  // Threads, the size of the cache and the parts of prefill do not change bits.
  auto again = engine(settings({{"threads", "1"}, {"cache_max_entry_count", "30"}, {"token_budget", "16"}}));
  expect_same(run(*again, prompt(0)), expected, 40);
  EXPECT_EQ(again->stats().offload_hit_tokens, 40);
  EXPECT_GT(again->stats().offload_bytes, 0);
  again.reset();  // it holds the folder
  expect_same(run(*engine(settings()), longer), of_longer, 48);
  auto several = prompt(0);
  several.sampling.n = 3;
  const auto third = engine(settings());
  Collector all(*third, several);
  all.wait();
  for (int i = 0; i < 3; ++i) EXPECT_EQ(all.tokens(i), expected.tokens);
}

TEST_P(EngineOffloadTest, SaltsStayApart) {
  const auto expected = run(*engine(), prompt(0));
  run(*engine(settings()), prompt(0, "alice"));
  for (const auto* const salt : {"", "bob", "0/alice"}) {
    expect_same(run(*engine(settings()), prompt(0, salt)), expected, 0);
  }
  expect_same(run(*engine(settings()), prompt(0, "alice")), expected, 40);
}

// Blocks are evicted, stored, loaded and preempted all the time, while other sequences decode.
TEST_P(EngineOffloadTest, ManyRequestsInASmallCacheGetTheSameBits) {
  run(*engine(settings()), prompt(0, "", 30));  // the first request loads its KV
  const auto small = engine(settings({{"cache_max_entry_count", "26"}}));
  expect_same_bits(*small, *engine(), 3);
}

TEST_P(EngineOffloadTest, CancelledAndFailedRequestsDoNotStopOthers) {
  const auto expected = run(*engine(settings()), prompt(0));
  const auto one = engine(settings());
  for (int i = 0; i < 20; ++i) {
    Collector out;
    const auto handle = one->submit(prompt(0, "", 41 + i), out.callback());
    one->cancel(handle);
    out.wait();
    one->check_integrity();
  }
  EXPECT_EQ(run(*one, prompt(0)).tokens, expected.tokens);
  faults_->launch_in = 0;
  Collector fails(*one, prompt(7));
  EXPECT_EQ(fails.last().finish_reason, FinishReason::error);
}

TEST_P(EngineOffloadTest, DamagedAndMissingFilesAreComputedAndStoredAgain) {
  const auto expected = run(*engine(settings()), prompt(0));
  const auto all = files();
  ASSERT_EQ(all.size(), 12U);
  for (const auto& file : all) std::filesystem::resize_file(file, std::filesystem::file_size(file) / 2);
  expect_same(run(*engine(settings()), prompt(0)), expected, 0);
  expect_same(run(*engine(settings()), prompt(0)), expected, 40);
  for (const auto& file : all) {
    std::fstream stream(file, std::ios::in | std::ios::out | std::ios::binary);
    stream.seekp(-20, std::ios::end);
    stream.write("damaged", 7);
  }
  expect_same(run(*engine(settings()), prompt(0)), expected, 0);
  std::filesystem::remove_all(folder());
  expect_same(run(*engine(settings()), prompt(0)), expected, 0);
}

TEST_P(EngineOffloadTest, SettingsAndWeightsThatChangeTheKvFindNothing) {
  run(*engine(settings()), prompt(0));
  const std::vector<Settings> others = {
      {{"quant_policy", "8"}}, {{"quant_policy", "4"}}, {{"quant_policy", "16"}}, {{"quantization", "w8a16"}}};
  for (const auto& other : others) {
    EXPECT_EQ(run(*engine(settings(other)), prompt(0)).num_cached, 0);
  }
  testing::TinyModel model;
  model.change = [](const std::string&, float value) { return value * 1.5F; };
  std::filesystem::remove_all(weights());
  testing::write_tiny_workspace(weights(), model);
  EXPECT_EQ(run(*engine(settings()), prompt(0)).num_cached, 0);
}

TEST_P(EngineOffloadTest, QuantisedKvGivesTheSameBits) {
  for (const auto* const bits : {"8", "4", "16"}) {
    const Settings quantised{{"quant_policy", bits}};
    const auto expected = run(*engine(quantised), prompt(0));
    expect_same(run(*engine(settings(quantised)), prompt(0)), expected, 0);
    expect_same(run(*engine(settings(quantised)), prompt(0)), expected, 40);
  }
}

TEST_P(EngineOffloadTest, SessionsLoadTheirHistoryAfterARestart) {
  const auto with_sessions = settings({{"session_dir", (dir_ / "sessions").string()}, {"session_ttl_s", "1e10"}});
  auto turn = prompt(0);
  turn.session_id = "s";
  const auto first = run(*engine(with_sessions), turn);
  auto whole = turn.input_ids;
  whole.insert(whole.end(), first.tokens.begin(), first.tokens.end());
  whole.insert(whole.end(), {5, 6, 7});
  turn.input_ids.clear();
  turn.continuation_ids = {5, 6, 7};
  const auto second = run(*engine(with_sessions), turn);
  EXPECT_EQ(second.num_cached, 48);
  EXPECT_EQ(second.tokens, alone(request(whole, 8)));
}

TEST_P(EngineOffloadTest, ModelsAndSettingsThatStoreNothingAreRejectedByName) {
  expect_error(ErrorCode::unsupported, {"kv_offload_path", "enable_prefix_caching = true"},
               [this] { engine(settings({{"enable_prefix_caching", "false"}})); });
  expect_error(ErrorCode::invalid_argument, {"kv_offload_size is empty", "8GiB"},
               [this] { engine(settings({{"kv_offload_size", ""}})); });
}

TEST_P(EngineOffloadTest, ASizeBelowOneContextIsReportedWithTheSizeThatIsNeeded) {
  const auto warnings = [this](const std::string& size) {
    const auto one = engine(settings({{"kv_offload_size", size}, {"session_len", "64"}}));
    std::string out;
    for (const auto& warning : one->info().warnings) out += warning + "\n";
    return out;
  };
  // 16 blocks, each in a file of one page.
  EXPECT_EQ(warnings("64KiB").find("kv_offload_size"), std::string::npos);
  const auto text = warnings("63KiB");
  EXPECT_NE(text.find("kv_offload_size = 63KiB is less than"), std::string::npos) << text;
  EXPECT_NE(text.find("session_len = 64 tokens, 64.0 KiB: "), std::string::npos) << text;
}

TEST_P(EngineOffloadTest, RanksLoadTheirShares) {
  testing::TinyModel model;
  model.ranks = 2;
  std::filesystem::remove_all(weights());
  testing::write_tiny_workspace(weights(), model);
  const Settings two{{"tensor_para_size", "2"}, {"threads", "2"}};
  const auto expected = run(*engine(settings(two)), prompt(0));
  expect_same(run(*engine(settings(two)), prompt(0)), expected, 40);
}

TEST_P(EngineOffloadTest, HostMemoryKeepsTheKvThatTheCacheHasEvicted) {
  const Settings in_memory{
      {"cache_block_seq_len", "4"}, {"cache_max_entry_count", "13"}, {"kv_offload_memory", "1MiB"}};
  const auto expected = run(*engine(), prompt(0));
  auto one = engine(in_memory);
  EXPECT_NE(std::ranges::find_if(one->info().warnings, [](const auto& text) {
              return text.find("kv_offload_memory = 1MiB has little use with device = cpu") != std::string::npos;
            }),
            one->info().warnings.end());
  expect_same(run(*one, prompt(0)), expected, 0);
  while (one->stats().offload_bytes < 12 * 4096) std::this_thread::yield();
  run(*one, prompt(17));
  expect_same(run(*one, prompt(0)), expected, 40);
  EXPECT_EQ(one->stats().offload_hit_tokens, 36) << "the other request left one block in the cache";
  one = engine(in_memory);
  expect_same(run(*one, prompt(0)), expected, 0);
  expect_error(ErrorCode::invalid_argument, {"kv_offload_memory is set too"},
               [this] { engine(settings({{"kv_offload_memory", "1MiB"}})); });
  expect_error(ErrorCode::resource_exhausted, {"kv_offload_memory = 999TiB", "of host memory are free"},
               [this] { engine({{"kv_offload_memory", "999TiB"}}); });
}

TEST_P(EngineOffloadTest, ThePlanCountsHostMemory) {
  const std::int64_t memory = 40 << 20;
  const auto plan = [&](const std::string& size, const std::string& device = "cpu") {
    return plan_memory(weights(), {{"device", device}, {"kv_offload_memory", size}, {"cache_size", "30MiB"}}, memory);
  };
  const auto fits = plan("1MiB"), too_large = plan("20MiB");
  EXPECT_EQ(fits.offload_bytes, 1 << 20);
  EXPECT_GT(fits.num_blocks, 0);
  EXPECT_NE(fits.warnings.back().find("has little use with device = cpu"), std::string::npos);
  EXPECT_EQ(too_large.num_blocks, 0);
  EXPECT_NE(too_large.warnings.back().find("of host memory are free beside the KV cache"), std::string::npos);
  const auto elsewhere = plan("999TiB", "cuda");
  EXPECT_EQ(elsewhere.offload_bytes, std::int64_t{999} << 40) << "the host of that GPU is not known";
  expect_error(ErrorCode::invalid_argument, {"kv_offload_memory is set too"}, [&] {
    plan_memory(weights(), {{"kv_offload_memory", "1MiB"}, {"kv_offload_path", "x"}}, memory);
  });
}

// Its pages count as free until they are written.
TEST_P(EngineOffloadTest, HostMemoryMustBeFreeBesideTheCacheOfACpu) {
  const auto most = std::to_string(ops::cpu::free_memory() / 10 * 6);
  const Settings large{{"cache_block_seq_len", "4096"}, {"cache_size", most}};
  EXPECT_NO_THROW(engine(large));
  expect_error(ErrorCode::resource_exhausted, {"kv_offload_memory = " + most, "beside the KV cache"}, [&] {
    auto both = large;
    both.insert({"kv_offload_memory", most});
    engine(both);
  });
}

TEST_P(EngineOffloadTest, KvOfAnAdapterBelongsToItsFiles) {
  for (const auto seed : {1U, 2U}) {
    testing::TinyAdapter(weights(), seed).write(dir_ / std::to_string(seed));
  }
  const auto of = [&](const std::string& name, const std::string& salt = "") {
    auto one = prompt(0, salt);
    one.lora_name = name;
    return one;
  };
  if (GetParam()) {
    wrap_devices(false);  // adapters need a device that is not asynchronous
  }
  const auto with = [&](const std::string& list, bool stores = true) {
    return engine(stores ? settings({{"lora_adapters", list}}) : Settings{{"lora_adapters", list}});
  };
  const auto one = cat("a=", (dir_ / "1").string()), two = cat("a=", (dir_ / "2").string());
  const auto expected = run(*with(one, false), of("a")), expected_two = run(*with(two, false), of("a"));
  const auto plain = run(*engine(), prompt(0));
  EXPECT_NE(expected.logprobs, plain.logprobs);
  EXPECT_NE(expected.logprobs, expected_two.logprobs);
  expect_same(run(*with(one), of("a")), expected, 0);
  expect_same(run(*with(two), of("a")), expected_two, 0);  // other files with the same name
  expect_same(run(*with(two), prompt(0)), plain, 0);
  expect_same(run(*with(one), of("a", "alice")), expected, 0);
  const auto renamed = cat("b=", (dir_ / "1").string());
  expect_same(run(*with(renamed), of("b")), expected, 40);
  expect_same(run(*with(two), of("a")), expected_two, 40);
  expect_same(run(*engine(settings()), prompt(0)), plain, 40);
}

// Models with several kinds of cache. Parameters: the windows of the layers (-1: a short convolution, -2: a gated delta
// net), quant_policy, and whether the device computes asynchronously.
class EngineOffloadKindsTest
    : public OffloadFixture,
      public ::testing::WithParamInterface<std::tuple<std::vector<int>, std::string, bool>> {
 protected:
  void SetUp() override {
    EngineFixtureBase::SetUp();
    wrap_devices(std::get<2>(GetParam()));
    write();
  }
  void write(int ranks = 1) const {
    testing::TinyModel model;
    model.layers = 3;
    model.ranks = ranks;
    model.windows = std::get<0>(GetParam());
    model.mixers.clear();
    for (const int window : model.windows) {
      model.mixers.emplace_back(window == -2 ? "delta_net" : window == -1 ? "short_conv" : "attention");
    }
    write_tiny_workspace(weights(), model);
  }
  std::unique_ptr<Engine> start(Settings more = {}, bool stores = true) const {
    more.insert({"quant_policy", std::get<1>(GetParam())});
    return engine(stores ? settings(std::move(more)) : more);
  }
  bool has_states() const { return std::ranges::min(std::get<0>(GetParam())) < 0; }
};
INSTANTIATE_TEST_SUITE_P(Models, EngineOffloadKindsTest,
                         ::testing::Combine(::testing::Values(std::vector{8, 0}, std::vector{8}, std::vector{0, 5, 1},
                                                              std::vector{-1, 0}, std::vector{-2, 8, 0}),
                                            ::testing::Values("0", "8", "16"), ::testing::Bool()));

TEST_P(EngineOffloadKindsTest, ARestartGivesTheSameBits) {
  const auto expected = run(*start({}, false), prompt(0));
  auto longer = prompt(0);
  longer.input_ids.insert(longer.input_ids.end(), expected.tokens.begin(), expected.tokens.end());
  longer.input_ids.insert(longer.input_ids.end(), {3, 1, 4, 1, 5});
  const auto of_longer = run(*start({}, false), longer);
  expect_same(run(*start(), prompt(0)), expected, 0);
  auto again = start({{"threads", "1"}, {"token_budget", "16"}});
  expect_same(run(*again, prompt(0)), expected, 40);
  EXPECT_EQ(again->stats().offload_hit_tokens, 40);
  again.reset();  // it holds the folder
  expect_same(run(*start(), longer), of_longer, 48);
  expect_same(run(*start(), longer), of_longer, 52);
  const auto salted = start();
  expect_same(run(*salted, prompt(0, "alice")), expected, 0);
  auto several = prompt(0);
  several.sampling.n = 3;
  Collector all(*salted, several);
  all.wait();
  for (int i = 0; i < 3; ++i) EXPECT_EQ(all.tokens(i), expected.tokens);
}

// The third prompt begins where the first two are equal: at a place that the second lookup has found.
TEST_P(EngineOffloadKindsTest, ABranchIsStoredWhenItIsFoundAgain) {
  const auto question = [&](int last) {
    auto out = prompt(0, "", 60);
    for (int i = 33; i < 60; ++i) out.input_ids[static_cast<std::size_t>(i)] = (i * 7 + last) % 39 + 1;
    return out;
  };
  std::vector<Response> expected;
  for (const int last : {1, 2, 3}) expected.push_back(run(*start({}, false), question(last)));
  expect_same(run(*start(), question(1)), expected[0], 0);
  const auto second = run(*start(), question(2));
  expect_same(second, expected[1], second.num_cached);
  EXPECT_LT(second.num_cached, 32);
  expect_same(run(*start(), question(3)), expected[2], 32);
}

TEST_P(EngineOffloadKindsTest, ManyRequestsInASmallCacheGetTheSameBits) {
  run(*start(), prompt(0, "", 30));  // the first request loads its KV
  const auto small = start({{"cache_max_entry_count", "30"},
                            {"cache_user_tokens", "64"},
                            {"token_budget", "16"},
                            {"max_batch_size", "6"},
                            {"session_len", "100"}});
  expect_same_bits(*small, *start({}, false), 4);
}

// Each file in turn is damaged or missing. Only a few of them belong to the end of the prompt.
TEST_P(EngineOffloadKindsTest, DamagedAndMissingFilesAreComputed) {
  const auto expected = run(*start(), prompt(0));
  const auto all = files();
  ASSERT_GT(all.size(), 12U);
  int computed = 0;
  for (std::size_t i = 0; i < all.size(); ++i) {
    if (i % 2 == 0) {
      std::filesystem::remove(all[i]);
    } else {
      std::fstream stream(all[i], std::ios::in | std::ios::out | std::ios::binary);
      stream.seekp(-20, std::ios::end);
      stream.write("damaged", 7);
    }
    const auto found = run(*start(), prompt(0));
    expect_same(found, expected, found.num_cached);
    computed += found.num_cached < 40;
    expect_same(run(*start(), prompt(0)), expected, 40);
  }
  EXPECT_GE(computed, 10 + has_states());
}

TEST_P(EngineOffloadKindsTest, AWindowThatHasPassedIsNotStored) {
  const auto& windows = std::get<0>(GetParam());
  run(*start(), prompt(0, "", 200));
  std::size_t units = 0;
  // At the end of the prompt and of the response: the state, or the units of the widest window.
  if (std::ranges::max(windows) == 8) units += std::size_t{2} * 2;
  if (std::ranges::max(windows) == 5) units += std::size_t{2} * 1;
  if (has_states()) units += 2;
  EXPECT_EQ(files().size(), 51 + units);
}

TEST_P(EngineOffloadKindsTest, ASizeBelowThePlacesOfOneContextIsReported) {
  const auto& windows = std::get<0>(GetParam());
  int units = has_states() ? 1 : 0;
  if (std::ranges::max(windows) == 8) units += 2;
  if (std::ranges::max(windows) == 5) units += 1;
  const auto warnings = [this](int kib) {
    const auto one = start({{"kv_offload_size", cat(kib, "KiB")}, {"session_len", "64"}});
    std::string out;
    for (const auto& warning : one->info().warnings) out += warning + "\n";
    return out;
  };
  // 16 blocks, and units at three places, each in a file of one page.
  const auto least = (16 + 3 * units) * 4;
  EXPECT_EQ(warnings(least).find("kv_offload_size"), std::string::npos);
  const auto text = warnings(least - 1);
  EXPECT_NE(text.find(cat("session_len = 64 tokens, ", bytes_text(least * 1024), ": ")), std::string::npos) << text;
}

TEST_P(EngineOffloadKindsTest, RanksLoadTheirShares) {
  write(2);
  const Settings two{{"tensor_para_size", "2"}, {"threads", "2"}};
  const auto expected = run(*start(two), prompt(0));
  expect_same(run(*start(two), prompt(0)), expected, 40);
}

}  // namespace
}  // namespace charonia
