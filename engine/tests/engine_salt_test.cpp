// cache_salt: a request with another salt finds no earlier blocks, and gets the same tokens.
#include <deque>

#include "base/text.h"
#include "engine_fixture.h"
#include "runtime/cache_salts.h"

namespace charonia {
namespace {

using testing::Collector;
using testing::request;

TEST(CacheSaltsTest, ANumberBelongsToOneSaltAndOneClass) {
  runtime::CacheSalts salts;
  EXPECT_EQ(salts.number("", 0), 0U);
  EXPECT_EQ(salts.number("", 7), 7U) << "without a salt the number must be the class";
  std::vector<std::uint64_t> numbers;
  for (const auto* const salt : {"a", "b", "1/a", "/a", "0"}) {
    for (const std::uint64_t one : {0U, 1U, 10U}) {
      numbers.push_back(salts.number(salt, one));
      EXPECT_EQ(salts.number(salt, one), numbers.back());
      EXPECT_GE(numbers.back(), std::uint64_t{1} << 32) << "the number must not be a class";
    }
  }
  std::ranges::sort(numbers);
  EXPECT_TRUE(std::ranges::adjacent_find(numbers) == numbers.end());
  using namespace std::string_literals;
  EXPECT_NE(salts.number("a\0b"s, 0), salts.number("a\0c"s, 0)) << "a salt may have any bytes";
}

TEST(CacheSaltsTest, TheLeastRecentlyUsedSaltIsForgottenAndNumbersAreNotReused) {
  runtime::CacheSalts salts(3);
  const auto a = salts.number("a", 0), b = salts.number("b", 0), c = salts.number("c", 0);
  EXPECT_EQ(salts.number("a", 0), a);
  const auto d = salts.number("d", 0);  // replaces b
  EXPECT_EQ(salts.number("a", 0), a);
  EXPECT_EQ(salts.number("c", 0), c);
  EXPECT_EQ(salts.number("d", 0), d);
  const auto again = salts.number("b", 0);
  EXPECT_GT(again, d);
  EXPECT_NE(again, b);
  EXPECT_GT(salts.number("a", 0), again) << "a must be the next salt to be dropped";
}

class EngineSaltTest : public testing::EngineFixture {
 protected:
  static Request salted(std::string salt, int max_tokens = 4) {
    auto out = request(std::vector<TokenId>(41, 3), max_tokens);
    out.cache_salt = std::move(salt);
    return out;
  }
  static Result run(Engine& engine, Request one) {
    Collector out(engine, std::move(one));
    auto last = out.last();
    last.token_ids = out.tokens();
    engine.check_integrity();
    return last;
  }
};
INSTANTIATE_TEST_SUITE_P(Device, EngineSaltTest, testing::kDevices, testing::device_name);

TEST_P(EngineSaltTest, OnlyBlocksOfTheSameSaltAreFoundAndTokensAreTheSame) {
  const auto one = engine({{"cache_block_seq_len", "4"}});
  const auto expected = alone(salted(""));
  for (const int cached : {0, 40}) {  // the first time, and after all of them
    for (const auto* const salt : {"", "alice", "bob", "alice/"}) {
      const auto result = run(*one, salted(salt));
      EXPECT_EQ(result.num_cached_tokens, cached) << salt;
      EXPECT_EQ(result.token_ids, expected) << salt;
    }
  }
}

TEST_P(EngineSaltTest, ChildrenOfAPromptShareItUnderItsSalt) {
  const auto one = engine({{"cache_block_seq_len", "4"}});
  run(*one, salted(""));
  for (const int cached : {0, 40}) {
    auto several = salted("alice");
    several.sampling.n = 3;
    Collector all(*one, several);
    all.wait();
    EXPECT_EQ(all.last(0).num_cached_tokens, cached);
    for (const int i : {1, 2}) EXPECT_EQ(all.last(i).num_cached_tokens, 40);
    for (int i = 0; i < 3; ++i) EXPECT_EQ(all.tokens(i), alone(salted("")));
    one->check_integrity();
  }
}

TEST_P(EngineSaltTest, SequencesOfManySaltsArePreemptedAndGoOn) {
  const auto few = engine({{"cache_block_seq_len", "4"}, {"cache_max_entry_count", "30"}});
  const auto expected = alone(salted("", 40));
  std::deque<Collector> all;
  for (int i = 0; i < 8; ++i) all.emplace_back(*few, salted(i % 2 == 0 ? "" : cat("salt ", i % 3), 40));
  for (auto& one : all) EXPECT_EQ(one.tokens(), expected);
  EXPECT_GT(few->stats().num_preemptions, 0);
  few->check_integrity();
}

TEST_P(EngineSaltTest, ASessionKeepsItsHistoryUnderEverySalt) {
  const auto one = engine({{"cache_block_seq_len", "4"}});
  std::vector<TokenId> history;
  std::string before = "none";
  for (const std::string salt : {"alice", "alice", "bob", "", "alice"}) {
    auto turn = request({}, 12);
    turn.session_id = "s";
    turn.cache_salt = salt;
    turn.continuation_ids = std::vector<TokenId>(20, 5);
    const auto known = static_cast<int>(history.size());
    history.insert(history.end(), 20, 5);
    const auto result = run(*one, turn);
    EXPECT_EQ(result.num_session_tokens, known);
    if (salt == before) {
      EXPECT_EQ(result.num_cached_tokens, (known - 1) / 4 * 4);
    } else if (salt != "alice") {
      EXPECT_EQ(result.num_cached_tokens, 0) << salt;
    }
    EXPECT_EQ(result.token_ids, alone(request(history, 12)));
    history.insert(history.end(), result.token_ids.begin(), result.token_ids.end());
    before = salt;
  }
}

TEST_P(EngineSaltTest, ASaltIsBounded) {
  const auto one = engine();
  EXPECT_EQ(run(*one, salted(std::string(256, 's'))).finish_reason, FinishReason::length);
  expect_error(ErrorCode::invalid_argument, {"cache_salt has 257 bytes and must have at most 256"},
               [&] { one->submit(salted(std::string(257, 's')), {}); });
}

}  // namespace
}  // namespace charonia
