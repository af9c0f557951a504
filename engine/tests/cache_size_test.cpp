#include "runtime/cache_size.h"

#include <gtest/gtest.h>

#include <string>

#include "charonia/error.h"

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
  return blocks_that_fit(config, {kBlock, free, ranks});
}

std::string refusal(const EngineConfig& config, std::size_t free, int ranks = 1) {
  try {
    blocks(config, free, ranks);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::resource_exhausted);
    return error.what();
  }
  ADD_FAILURE() << "nothing was thrown";
  return "";
}

void expect_named(const std::string& message, std::initializer_list<const char*> parts) {
  for (const auto* part : parts) EXPECT_NE(message.find(part), std::string::npos) << part << ": " << message;
}

TEST(CacheSize, AShareIsOfTheFreeMemoryAndLimitedToAllSequences) {
  auto one = config();
  one.cache_max_entry_count = 0.5;
  EXPECT_EQ(blocks(one, 41 * kBlock), 20);
  one.max_batch_size = 1;
  EXPECT_EQ(blocks(one, 41 * kBlock), 10);
  expect_named(refusal(one, 1500),
               {"cache_max_entry_count = 0.5", "0.98 KiB", "1.46 KiB", "cache_block_seq_len (now 10)"});
}

TEST(CacheSize, AWholeNumberIsThatManyBlocks) {
  auto one = config();
  one.cache_max_entry_count = 7;
  EXPECT_EQ(blocks(one, 7 * kBlock), 7);
  expect_named(refusal(one, 7 * kBlock - 1),
               {"cache_max_entry_count = 7", "7 blocks", "hold 6", "Lower cache_max_entry_count"});
}

TEST(CacheSize, BytesWinOverTheShareAndAreOfAllRanks) {
  auto one = config();
  one.cache_max_entry_count = 3;
  one.cache_size = "10kB";
  EXPECT_EQ(blocks(one, 100 * kBlock), 10);
  EXPECT_EQ(blocks(one, 100 * kBlock, 2), 5);
  expect_named(refusal(one, 9 * kBlock), {"cache_size = 10kB", "10 blocks", "hold 9", "Lower cache_size"});
  one.cache_size = "999";
  expect_named(refusal(one, 9 * kBlock), {"cache_size = 999", "no block", "Raise cache_size"});
}

TEST(CacheSize, UsersWinOverAllAndTheirTokensAreRoundedUpToBlocks) {
  auto one = config();
  one.cache_size = "10kB";
  one.cache_users = 3;
  EXPECT_EQ(blocks(one, 100 * kBlock), 30);
  one.cache_user_tokens = 11;
  EXPECT_EQ(blocks(one, 100 * kBlock), 6);
  expect_named(refusal(one, 5 * kBlock),
               {"cache_users = 3 with 11 tokens each", "6 blocks", "hold 5", "Lower cache_users or cache_user_tokens"});
}

TEST(CacheSize, ChunksAreANumberAllOrTheSquareRoot) {
  EXPECT_EQ(blocks_per_chunk(-1, 50), 50);
  EXPECT_EQ(blocks_per_chunk(8, 50), 8);
  EXPECT_EQ(blocks_per_chunk(80, 50), 50);
  EXPECT_EQ(blocks_per_chunk(0, 50), 8);
  EXPECT_EQ(blocks_per_chunk(0, 49), 7);
  EXPECT_EQ(blocks_per_chunk(0, 1), 1);
}

TEST(CacheSize, AModelThatDoesNotFitIsNamedWithItsNumbers) {
  EXPECT_NO_THROW(check_model_fits(config(), {"cpu", 2048, 1024, 512, 3584}));
  try {
    check_model_fits(config(), {"cpu", 2048, 1024, 512, 3583});
    ADD_FAILURE() << "nothing was thrown";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::resource_exhausted);
    expect_named(error.what(), {"2.00 KiB", "1.00 KiB", "512 B", "3.50 KiB", "cpu", "token_budget"});
  }
}

}  // namespace
}  // namespace charonia::runtime
