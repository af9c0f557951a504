#include "runtime/memory_plan.h"

#include <gtest/gtest.h>

#include <string>
#include <utility>

#include "charonia/error.h"
#include "errors.h"
#include "schedule/scheduler.h"

namespace charonia::runtime {
namespace {

constexpr std::size_t kBlock = 1000;

EngineConfig config(int block_len = 10, int session_len = 100) {
  EngineConfig out;
  out.cache_block_seq_len = block_len;
  out.session_len = session_len;
  out.token_budget = 512;
  out.max_batch_size = 64;
  return out;
}

int blocks(const EngineConfig& config, std::size_t free, int ranks = 1) {
  return blocks_that_fit(config, {{kBlock}, 0, free, ranks});
}

void expect_refused(const EngineConfig& config, std::size_t free, std::initializer_list<std::string_view> parts) {
  expect_error(ErrorCode::resource_exhausted, parts, [&] { blocks(config, free); });
}

TEST(CacheSize, AFractionOfFreeMemoryIsLimitedToWhatAllSequencesNeed) {
  auto one = config();
  one.cache_max_entry_count = 0.5;
  EXPECT_EQ(blocks(one, 41 * kBlock), 20);
  one.max_batch_size = 1;
  EXPECT_EQ(blocks(one, 41 * kBlock), 10);
  expect_refused(one, 1500, {"cache_max_entry_count = 0.5", "0.98 KiB", "1.46 KiB", "cache_block_seq_len (now 10)"});
}

TEST(CacheSize, TheDefaultOnACpuIsTheBlocksOfShortChatsOrOneLongSequence) {
  auto one = config(10, 8192);
  one.device = "cpu";
  EXPECT_EQ(blocks(one, 100'000 * kBlock), 64 * 103);
  EXPECT_EQ(blocks(one, 100 * kBlock), 80);
  one.max_batch_size = 2;
  EXPECT_EQ(blocks(one, 100'000 * kBlock), 820);
  one.session_len = 100;
  EXPECT_EQ(blocks(one, 100'000 * kBlock), 20);
  one.device = "cuda";
  one.session_len = 8192;
  EXPECT_EQ(blocks(one, 100'000 * kBlock), 2 * 820);
  one.device = "cpu";
  one.cache_max_entry_count = 0.8;
  EXPECT_EQ(blocks(one, 100'000 * kBlock), 2 * 820);
}

TEST(CacheSize, AWholeNumberIsANumberOfBlocks) {
  auto one = config();
  one.cache_max_entry_count = 7;
  EXPECT_EQ(blocks(one, 7 * kBlock), 7);
  expect_refused(one, 7 * kBlock - 1,
                 {"cache_max_entry_count = 7", "7 blocks", "hold 6", "Lower cache_max_entry_count"});
}

TEST(CacheSize, BytesOverrideTheFractionAndCountAllRanks) {
  auto one = config();
  one.cache_max_entry_count = 3;
  one.cache_size = "10kB";
  EXPECT_EQ(blocks(one, 100 * kBlock), 10);
  EXPECT_EQ(blocks(one, 100 * kBlock, 2), 5);
  expect_refused(one, 9 * kBlock, {"cache_size = 10kB", "10 blocks", "hold 9", "Lower cache_size"});
  one.cache_size = "999";
  expect_refused(one, 9 * kBlock, {"cache_size = 999", "no block", "Raise cache_size"});
}

TEST(CacheSize, UsersOverrideAllAndTheirTokensAreRoundedUpToBlocks) {
  auto one = config();
  one.cache_size = "10kB";
  one.cache_users = 3;
  EXPECT_EQ(blocks(one, 100 * kBlock), 30);
  one.cache_user_tokens = 11;
  EXPECT_EQ(blocks(one, 100 * kBlock), 6);
  expect_refused(
      one, 5 * kBlock,
      {"cache_users = 3 with 11 tokens each", "6 blocks", "hold 5", "Lower cache_users or cache_user_tokens"});
}

constexpr std::size_t kMiB = std::size_t{1} << 20;

// Gemma 3 27B in bf16: 10 layers read all tokens and 52 the last 1024; a block of 64 tokens takes 512 KiB in each.
CacheMemory gemma(std::size_t free) { return {{5 * kMiB, 26 * kMiB}, 1024, free, 1}; }

TEST(CacheSize, AUserOf32kTokensHasBlocksForItsWindowAndOneStep) {
  auto one = config(64, 32'768);
  one.cache_users = 1;
  const auto full = blocks_that_fit(one, gemma(3236 * kMiB));
  EXPECT_EQ(blocks_by_kind(one, gemma(0), full), (PerKind<int>{512, 17 + 9}));
  expect_error(ErrorCode::resource_exhausted, {"512 blocks of 5.00 MiB and 26 window blocks of 26.0 MiB"},
               [&] { blocks_that_fit(one, gemma(3235 * kMiB)); });
}

TEST(CacheSize, AShareOfTheMemoryIsDividedForSequencesOfFourWindows) {
  auto one = config(64, 131'072);
  one.device = "cuda";
  one.cache_max_entry_count = 0.5;
  const auto blocks = blocks_by_kind(one, gemma(0), blocks_that_fit(one, gemma(40960 * kMiB)));
  EXPECT_NEAR(blocks.window, blocks.full / 64.0 * 17 + 9, 17);
  const auto bytes = static_cast<std::size_t>(blocks.full) * 5 + static_cast<std::size_t>(blocks.window) * 26;
  EXPECT_LE(bytes, 20480U);
  EXPECT_GT(bytes, 20480U - 17 * 26 - 5);
  one.cache_user_tokens = 1000;
  const auto short_chats = blocks_by_kind(one, gemma(0), blocks_that_fit(one, gemma(40960 * kMiB)));
  EXPECT_EQ(short_chats.full, 20480 / 31);
  EXPECT_EQ(short_chats.window, short_chats.full) << "each block is in the window of its sequence";
}

TEST(CacheSize, TheDefaultOnACpuHasWindowBlocksForItsShortChatsOrItsLongSequence) {
  auto one = config(64, 32'768);
  one.device = "cpu";
  const CacheMemory memory{{1}, 512, kMiB, 1};
  EXPECT_EQ(blocks_by_kind(one, memory, blocks_that_fit(one, memory)), (PerKind<int>{1024, 64 * 9 + 9}));
  one.max_batch_size = 4;
  EXPECT_EQ(blocks_by_kind(one, memory, blocks_that_fit(one, memory)), (PerKind<int>{512, 9 + 9}));
}

TEST(CacheSize, StatesOfRunningSequencesAndSnapshotsCountBesideTheBlocks) {
  auto one = config(64, 32'768);
  one.cache_users = 2;
  one.max_batch_size = 16;
  const auto memory = [](std::size_t state, std::size_t free) { return CacheMemory{{kMiB, 0, state}, 0, free, 1}; };
  const auto small = memory(kMiB, (1024 + 16 + 128) * kMiB), large = memory(64 * kMiB, (1024 + 64 * 32) * kMiB);
  EXPECT_EQ(blocks_by_kind(one, small, blocks_that_fit(one, small)), (PerKind<int>{1024, 0, 16 + 128}));
  EXPECT_EQ(blocks_by_kind(one, large, blocks_that_fit(one, large)), (PerKind<int>{1024, 0, 16 + 16}));
  expect_error(ErrorCode::resource_exhausted, {"1024 blocks of 1.00 MiB and 32 states of 64.0 MiB"},
               [&] { blocks_that_fit(one, memory(64 * kMiB, (1024 + 64 * 32) * kMiB - 1)); });
  one.enable_prefix_caching = false;
  EXPECT_EQ(blocks_by_kind(one, small, blocks_that_fit(one, small)), (PerKind<int>{1024, 0, 16 + 1}));
}

TEST(CacheSize, StatesAfterProposalsAreAQuarterOfAllAtMost) {
  EngineConfig one = config(64, 32'768);
  one.max_batch_size = 15;
  one.enable_prefix_caching = false;
  for (const auto& [proposals, states] : {std::pair{0, 16}, {4, 16 + 4}, {16, 16 + 5}}) {
    const CacheMemory memory{{kMiB, 0, kMiB}, 0, 0, 1, proposals};
    EXPECT_EQ(blocks_by_kind(one, memory, 1024), (PerKind<int>{1024, 0, states}));
    EXPECT_LE(states - 16, schedule::most_proposal_states(states)) << "the scheduler uses all of them";
  }
}

TEST(CacheSize, AModelThatGeneratesNoTextHasNoProposals) {
  auto one = config(64, 32'768);
  one.device = "cpu";
  one.speculative_method = "ngram";
  one.speculative_tokens = 3;
  ModelConfig model;
  EXPECT_EQ(most_proposals(one, model), 6);
  model.model_task = "embed";
  EXPECT_EQ(most_proposals(one, model), 0);
}

TEST(CacheSize, LargeStatesLeaveMemoryForTokens) {
  auto one = config(64, 32'768);
  one.max_batch_size = 256;
  // Blocks of 4 MiB and states of 160 MiB: without a bound, 256 states would take more than the whole cache.
  const CacheMemory memory{{4 * kMiB, 0, 160 * kMiB}, 0, 24'000 * kMiB, 1};
  const auto found = blocks_by_kind(one, memory, blocks_that_fit(one, memory));
  EXPECT_GT(found.full, 1000);
  EXPECT_EQ(found.state, 2 * (found.full / 40) + found.full * 4 / 160);
}

TEST(CacheSize, AChunkIsANumberOfBlocksAllOrTheSquareRoot) {
  EXPECT_EQ(blocks_per_chunk(-1, 50), 50);
  EXPECT_EQ(blocks_per_chunk(8, 50), 8);
  EXPECT_EQ(blocks_per_chunk(80, 50), 50);
  EXPECT_EQ(blocks_per_chunk(0, 50), 8);
  EXPECT_EQ(blocks_per_chunk(0, 49), 7);
  EXPECT_EQ(blocks_per_chunk(0, 1), 1);
}

TEST(CacheSize, AModelThatDoesNotFitIsRejectedWithTheNumbers) {
  const RankMemory memory{.weights = 2048, .activations = 512, .loaded_steps = 256, .steps = 256, .kv_block = {512}};
  EXPECT_NO_THROW(check_model_fits(config(), "cpu", memory, 3584));
  expect_error(ErrorCode::resource_exhausted, {"2.00 KiB", "1.00 KiB", "512 B", "3.50 KiB", "cpu", "token_budget"},
               [&] { check_model_fits(config(), "cpu", memory, 3583); });
  auto dequantised = memory;
  dequantised.dequantised = true;
  expect_error(ErrorCode::resource_exhausted, {"Take a file in Q4_0 or Q8_0 (GPUs hold ", "), a smaller"},
               [&] { check_model_fits(config(), "cuda", dequantised, 3583); });
  auto long_context = memory;
  long_context.tables = 1025;
  expect_error(ErrorCode::resource_exhausted, {"most of it for the positions of session_len = 100", "Lower session_len, or"},
               [&] { check_model_fits(config(), "cpu", long_context, 3583); });
}

constexpr std::size_t kGiB = std::size_t{1} << 30;

EngineConfig sizes(const StepDevice& device, int token_budget = 0, int max_batch_size = 0) {
  EngineConfig out;
  out.token_budget = token_budget;
  out.max_batch_size = max_batch_size;
  resolve_step_sizes(out, device);
  return out;
}

void expect_sizes(const StepDevice& device, int token_budget, int max_batch_size) {
  const auto got = sizes(device);
  EXPECT_EQ(got.token_budget, token_budget) << device.sms << ", " << device.free_bytes / kGiB << " GiB";
  EXPECT_EQ(got.max_batch_size, max_batch_size) << device.sms << ", " << device.free_bytes / kGiB << " GiB";
}

TEST(StepSizes, SizesOnAGpuDependOnItsSmsAndFreeMemory) {
  for (const std::size_t gib : {1, 2000}) expect_sizes({"cpu", 0, gib * kGiB}, 512, 64);
  expect_sizes({"cuda", 132, 139 * kGiB}, 2048, 256);  // H200
  expect_sizes({"cuda", 108, 79 * kGiB}, 1536, 192);   // A100
  expect_sizes({"cuda", 58, 22 * kGiB}, 768, 64);      // L4
  expect_sizes({"cuda", 132, 40 * kGiB}, 2048, 128);   // an H100 that is shared
  expect_sizes({"cuda", 132, 10 * kGiB}, 1280, 64);
  expect_sizes({"cuda", 6, 2 * kGiB}, 512, 64);
  expect_sizes({"cuda", 132, 0}, 512, 64);
  expect_sizes({"cuda", 5000, 4000 * kGiB}, 8192, 512);
}

TEST(StepSizes, SizesSetByTheUserAreKept) {
  const StepDevice h200{"cuda", 132, 139 * kGiB};
  EXPECT_EQ(sizes(h200, 7).token_budget, 7);
  EXPECT_EQ(sizes(h200, 7).max_batch_size, 256);
  EXPECT_EQ(sizes(h200, 0, 3).max_batch_size, 3);
  EXPECT_EQ(sizes(h200, 0, 3).token_budget, 2048);
}

TEST(StepSizes, OnTheCpuAStepMayHaveTheRowsOfAllTokensForMeans) {
  EngineConfig config;
  config.token_budget = 512, config.max_batch_size = 64;
  ModelConfig model;
  const auto rows = [&](const char* device) {
    config.device = device;
    return step_limits(config, model).max_logits_rows;
  };
  EXPECT_EQ(rows("cpu"), 64);
  model.pooling = "mean";
  EXPECT_EQ(rows("cpu"), 512);
  EXPECT_EQ(rows("cuda"), 64);
  config.token_budget = 32;
  EXPECT_EQ(rows("cpu"), 64) << "a step has a row of each sequence";
}

TEST(StepSizes, ProposalsHaveRowsOnDevicesThatComputeThem) {
  EngineConfig config;
  config.token_budget = 512, config.max_batch_size = 64, config.speculative_tokens = 8;
  const auto rows = [&](const char* device, const char* method) {
    config.device = device;
    config.speculative_method = method;
    return step_limits(config, {}).max_logits_rows;
  };
  EXPECT_EQ(rows("cuda", "off"), 64);
  for (const auto* const device : {"cpu", "cuda"}) {
    for (const auto* const method : {"ngram", "draft_model"}) EXPECT_EQ(rows(device, method), 64 + 2 * 8);
  }
  EXPECT_EQ(rows("null", "ngram"), 64);
  EXPECT_NE(speculation_warning(config, {}).find("set device = cpu or cuda"), std::string::npos);
}

TEST(StepSizes, UnresolvedSizesAreAnError) {
  const auto refused = [](const auto& use, const EngineConfig& config, const std::string& name) {
    expect_error(ErrorCode::internal, {name + " = 0 was not resolved"}, [&] { use(config); });
  };
  EngineConfig no_budget, no_batch;
  no_budget.max_batch_size = no_batch.token_budget = 1;
  no_budget.session_len = no_batch.session_len = 10;
  for (const auto& [config, name] : {std::pair{no_budget, "token_budget"}, std::pair{no_batch, "max_batch_size"}}) {
    refused([](const EngineConfig& c) { step_limits(c, {}); }, config, name);
    refused([](const EngineConfig& c) { blocks_that_fit(c, {{1000}, 0, 100'000, 1}); }, config, name);
    refused([](const EngineConfig& c) { check_model_fits(c, "cpu", {}, 100); }, config, name);
  }
}

}  // namespace
}  // namespace charonia::runtime
