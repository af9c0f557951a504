// What a subscription has to send: packed in order, joined while it waits, and bounded by what its reader has read.
#include "outbox.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "engine_support.h"

namespace charonia::triton {
namespace {

using charonia::testing::error_of;
using std::chrono::seconds;

struct Chunk {
  std::uint64_t key = 0;
  std::int32_t index = 0, finish_reason = 0, text_begin = 0, text_end = 0, num_output_tokens = 0;
  std::vector<TokenId> ids;
  std::vector<std::uint32_t> sizes{};
  std::vector<float> logprobs{};
  std::vector<std::pair<TokenId, float>> tops{};  // of all ids, row by row
  std::string text;
  bool operator==(const Chunk&) const = default;
};

struct Delivery {
  std::uint64_t number = 0;
  std::vector<Chunk> chunks;
};

template <class Value>
Value take(std::string_view& packed) {
  Value value{};
  EXPECT_GE(packed.size(), sizeof value);
  std::memcpy(&value, packed.data(), sizeof value);
  packed.remove_prefix(sizeof value);
  return value;
}

// As docs/contracts.md says it, not as the outbox does.
Delivery unpack(std::string_view packed) {
  Delivery delivery;
  delivery.number = take<std::uint64_t>(packed);
  while (!packed.empty()) {
    Chunk chunk;
    chunk.key = take<std::uint64_t>(packed);
    const auto text_bytes = take<std::uint32_t>(packed), num_ids = take<std::uint32_t>(packed);
    chunk.index = take<std::int32_t>(packed);
    chunk.finish_reason = take<std::int32_t>(packed);
    chunk.text_begin = take<std::int32_t>(packed);
    chunk.text_end = take<std::int32_t>(packed);
    take<std::int32_t>(packed);
    chunk.num_output_tokens = take<std::int32_t>(packed);
    packed.remove_prefix(6 * sizeof(std::int32_t));
    for (std::uint32_t i = 0; i < num_ids; ++i) chunk.ids.push_back(take<TokenId>(packed));
    if ((chunk.finish_reason & 16) != 0) {
      for (std::uint32_t i = 0; i < num_ids; ++i) chunk.sizes.push_back(take<std::uint32_t>(packed));
    }
    if ((chunk.finish_reason & 32) != 0) {
      for (std::uint32_t i = 0; i < num_ids; ++i) chunk.logprobs.push_back(take<float>(packed));
      chunk.tops.resize(std::size_t{num_ids} * take<std::uint32_t>(packed));
      for (auto& top : chunk.tops) top.first = take<TokenId>(packed);
      for (auto& top : chunk.tops) top.second = take<float>(packed);
    }
    chunk.text = packed.substr(0, text_bytes);
    packed.remove_prefix(text_bytes);
    delivery.chunks.push_back(chunk);
  }
  return delivery;
}

Result result(std::vector<TokenId> ids, std::string text, int index = 0, FinishReason reason = FinishReason::none) {
  Result result;
  result.text_end = static_cast<int>(text.size());
  result.token_ids = std::move(ids);
  result.text = std::move(text);
  result.index = index;
  result.finish_reason = reason;
  return result;
}

// The same with log probabilities: of token i they are -i, and of its n-th most likely token, 10 * i + n, -10 * i - n.
Result scored(Result result, int tops) {
  for (const auto id : result.token_ids) {
    result.logprobs.push_back(static_cast<float>(-id));
    if (tops == 0) continue;
    auto& row = result.top_logprobs.emplace_back();
    for (int n = 0; n < tops; ++n) row.push_back({10 * id + n, static_cast<float>(-10 * id - n)});
  }
  return result;
}

void add_scored(Outbox& outbox, std::uint64_t key, const Result& result, std::string_view before = {}) {
  outbox.add(key, result, before, nullptr, true);
}

TEST(Outbox, DeliveriesAreNumberedAndHaveTheChunksInTheirOrder) {
  Outbox outbox;
  EXPECT_FALSE(outbox.due());
  EXPECT_EQ(unpack(outbox.take()).number, 1U);
  outbox.add(7, result({1, 2}, "ab"), "");
  outbox.add(3, result({4}, "\xc3\xa9", 1, FinishReason::length), "prompt ");
  outbox.add_error(5, "[504] late");
  EXPECT_TRUE(outbox.due());
  const auto delivery = unpack(outbox.take());
  EXPECT_EQ(delivery.number, 2U);
  const std::vector<Chunk> expected = {
      {.key = 7, .text_end = 2, .ids = {1, 2}, .text = "ab"},
      {.key = 3, .index = 1, .finish_reason = 2, .text_end = 2, .ids = {4}, .text = "prompt \xc3\xa9"},
      {.key = 5, .finish_reason = 4, .ids = {}, .text = "[504] late"}};
  EXPECT_EQ(delivery.chunks, expected);
  EXPECT_FALSE(outbox.due());
  EXPECT_FALSE(outbox.waiting());
}

TEST(Outbox, ChunksOfOneSequenceAreJoinedWhileTheyWait) {
  Outbox outbox;
  auto first = result({1, 2}, "b");  // a special token, and " b" without its space
  first.text_begin = 1;
  first.text_end = 2;
  outbox.add(1, first, "");
  outbox.add(1, result({9}, "other", 1), "");
  outbox.add(1, result({3}, "cd"), "");
  auto last = result({4, 5}, "e", 0, FinishReason::stop);  // "e" and a stop word
  last.num_output_tokens = 5;
  outbox.add(1, last, "");
  outbox.add_error(1, "of another sequence");
  const std::vector<Chunk> expected = {{.key = 1,
                                        .finish_reason = 1,
                                        .text_begin = 1,
                                        .text_end = 5,
                                        .num_output_tokens = 5,
                                        .ids = {1, 2, 3, 4, 5},
                                        .text = "bcde"},
                                       {.key = 1, .index = 1, .text_end = 5, .ids = {9}, .text = "other"},
                                       {.key = 1, .finish_reason = 4, .ids = {}, .text = "of another sequence"}};
  EXPECT_EQ(unpack(outbox.take()).chunks, expected);
}

TEST(Outbox, AnAnswerThatIsReadElsewhereHasItsOptionsFirstAndItsTokensBytes) {
  Outbox outbox;
  outbox.add_options(1, R"({"key": "k"})");
  auto first = result({1, 2}, "b");  // a special token, and " b" without its space
  first.text_begin = 1;
  first.text_end = 2;
  const TokenBytes first_bytes{{0, 2}, " b"}, second_bytes{{1, 2}, "cde"}, last_bytes{{1, 4}, "fstop"};
  outbox.add(1, first, "prompt ", &first_bytes);
  outbox.add(2, result({9}, "other"), "");
  outbox.add(1, result({3, 4}, "cde"), "", &second_bytes);
  outbox.add(1, result({5, 6}, "f", 0, FinishReason::stop), "", &last_bytes);
  outbox.add_options(1, "{}");
  outbox.add_error(1, "[504] late");
  const std::vector<Chunk> expected = {
      {.key = 1, .finish_reason = 5, .ids = {}, .text = R"({"key": "k"})"},
      {.key = 1,
       .finish_reason = 16 + 1,
       .text_begin = 1,
       .text_end = 6,
       .ids = {1, 2, 3, 4, 5, 6},
       .sizes = {0, 2, 1, 2, 1, 4},
       .text = "prompt  bcdefstop"},
      {.key = 2, .text_end = 5, .ids = {9}, .text = "other"},
      {.key = 1, .finish_reason = 5, .ids = {}, .text = "{}"},
      {.key = 1, .finish_reason = 4, .ids = {}, .text = "[504] late"}};
  EXPECT_EQ(unpack(outbox.take()).chunks, expected);
  EXPECT_FALSE(outbox.waiting());
}

TEST(Outbox, TheBytesOfTokensCountInADeliverysSize) {
  Outbox outbox({.bytes = 1000});
  const TokenBytes bytes{std::vector<std::uint32_t>(100, 1), std::string(100, 'x')};
  const auto one = result(std::vector<TokenId>(100, 1), std::string(100, 'x'));
  outbox.add(1, one, "", &bytes);  // 964 bytes
  outbox.add(2, one, "", &bytes);
  outbox.add(3, one, "", &bytes);
  EXPECT_EQ(unpack(outbox.take()).chunks.size(), 2U);
  EXPECT_FALSE(outbox.due());
  outbox.read(1);
  EXPECT_EQ(unpack(outbox.take()).chunks.size(), 1U);
  EXPECT_FALSE(outbox.waiting());
}

TEST(Outbox, LogProbabilitiesAreJoinedWithTheirTokens) {
  Outbox outbox;
  add_scored(outbox, 1, scored(result({1, 2}, "ab"), 2), "prompt ");
  add_scored(outbox, 2, scored(result({7}, "x"), 0));
  add_scored(outbox, 1, scored(result({3}, "c"), 2));
  add_scored(outbox, 2, scored(result({8}, "y"), 0));
  add_scored(outbox, 1, scored(result({}, "", 0, FinishReason::cancelled), 2));  // nothing was held back
  add_scored(outbox, 3, scored(result({}, "", 0, FinishReason::cancelled), 2));  // before its first token
  const std::vector<Chunk> expected = {
      {.key = 1,
       .finish_reason = 32 + 3,
       .text_end = 3,
       .ids = {1, 2, 3},
       .logprobs = {-1, -2, -3},
       .tops = {{10, -10}, {11, -11}, {20, -20}, {21, -21}, {30, -30}, {31, -31}},
       .text = "prompt abc"},
      {.key = 2, .finish_reason = 32, .text_end = 2, .ids = {7, 8}, .logprobs = {-7, -8}, .text = "xy"},
      {.key = 3, .finish_reason = 32 + 3, .ids = {}, .text = ""}};
  EXPECT_EQ(unpack(outbox.take()).chunks, expected);
}

TEST(Outbox, AnAnswerThatIsReadElsewhereHasItsLogProbabilitiesToo) {
  Outbox outbox;
  const TokenBytes first{{1, 0}, "a"}, second{{2}, "bc"};
  outbox.add(1, scored(result({1, 2}, "a"), 1), "", &first, true);
  outbox.add(1, scored(result({3}, "bc", 0, FinishReason::stop), 1), "", &second, true);
  const std::vector<Chunk> expected = {{.key = 1,
                                        .finish_reason = 32 + 16 + 1,
                                        .text_end = 3,
                                        .ids = {1, 2, 3},
                                        .sizes = {1, 0, 2},
                                        .logprobs = {-1, -2, -3},
                                        .tops = {{10, -10}, {20, -20}, {30, -30}},
                                        .text = "abc"}};
  EXPECT_EQ(unpack(outbox.take()).chunks, expected);
}

TEST(Outbox, LogProbabilitiesThatAreNotOfItsTokensAreAnErrorOfTheResult) {
  Outbox outbox;
  add_scored(outbox, 1, scored(result({1}, "a"), 2));
  const auto fails = [&](const Result& result, const std::string& named) {
    expect_error(ErrorCode::internal, {named}, [&] { add_scored(outbox, 1, result); });
  };
  fails(result({2}, "b"), "1 tokens has 0 log probabilities");
  fails(scored(result({2}, "b", 0, FinishReason::stop), 3), "has 3 most likely tokens for each of its own");
  auto uneven = scored(result({2, 3}, "bc"), 2);
  uneven.top_logprobs.back().pop_back();
  fails(uneven, "must be of one length");
  auto few = scored(result({2, 3}, "bc"), 2);
  few.top_logprobs.pop_back();
  fails(few, "and 1 rows");
  outbox.add(2, scored(result({2}, "b"), 2), "");  // of a request that has not asked for them
  add_scored(outbox, 1, scored(result({3}, "c", 0, FinishReason::length), 2));
  const std::vector<Chunk> expected = {{.key = 1,
                                        .finish_reason = 32 + 2,
                                        .text_end = 2,
                                        .ids = {1, 3},
                                        .logprobs = {-1, -3},
                                        .tops = {{10, -10}, {11, -11}, {30, -30}, {31, -31}},
                                        .text = "ac"},
                                       {.key = 2, .text_end = 1, .ids = {2}, .text = "b"}};
  EXPECT_EQ(unpack(outbox.take()).chunks, expected);
  EXPECT_FALSE(outbox.waiting());
}

TEST(Outbox, LogProbabilitiesCountInADeliverysSize) {
  const auto one = scored(result(std::vector<TokenId>(10, 1), "a"), 20);
  Outbox alone;
  add_scored(alone, 1, one);
  const auto size = alone.take().size() - sizeof(std::uint64_t);
  EXPECT_EQ(size, 64U + 10 * 4 + 10 * 4 + 4 + 200 * 8 + 1);
  Outbox outbox({.bytes = 2 * size});
  for (std::uint64_t key = 1; key <= 3; ++key) add_scored(outbox, key, one);
  EXPECT_EQ(unpack(outbox.take()).chunks.size(), 2U);
  EXPECT_FALSE(outbox.due());
  outbox.read(1);
  EXPECT_EQ(unpack(outbox.take()).chunks.size(), 1U);
  EXPECT_FALSE(outbox.waiting());
}

TEST(Outbox, LogProbabilitiesCountAsWhatWaits) {
  Outbox outbox({.deliveries = 1, .held = 100'000, .catching_up = seconds(0)});
  outbox.take();
  for (int i = 0; i < 500; ++i) add_scored(outbox, 1, scored(result({i}, "a"), 20));
  EXPECT_EQ(outbox.hopeless({}), nullptr);  // 84,500 bytes
  for (int i = 0; i < 100; ++i) add_scored(outbox, 1, scored(result({i}, "a"), 20));
  EXPECT_STREQ(outbox.hopeless({}), "its reader is too far behind");
  outbox.read(1);
  outbox.take();
  EXPECT_EQ(outbox.hopeless({}), nullptr) << "nothing is held";
}

TEST(Outbox, WhatComesAfterAnEndIsJoinedToNothing) {
  Outbox outbox;
  outbox.add(1, result({1}, "a", 0, FinishReason::stop), "");
  outbox.add(1, result({2}, "b"), "prompt ");
  outbox.add(1, result({3}, "c"), "");
  outbox.add_error(1, "[504] late");
  outbox.add(1, result({4}, "d"), "");
  const std::vector<Chunk> expected = {{.key = 1, .finish_reason = 1, .text_end = 1, .ids = {1}, .text = "a"},
                                       {.key = 1, .text_end = 2, .ids = {2, 3}, .text = "prompt bc"},
                                       {.key = 1, .finish_reason = 4, .ids = {}, .text = "[504] late"},
                                       {.key = 1, .text_end = 1, .ids = {4}, .text = "d"}};
  EXPECT_EQ(unpack(outbox.take()).chunks, expected);
}

TEST(Outbox, AJoinedTokenCountsAsWhatItAddsToTheDelivery) {
  Outbox outbox({.deliveries = 1, .held = 4000, .catching_up = seconds(0)});
  outbox.take();
  for (int i = 0; i < 400; ++i) outbox.add(1, result({i}, "abcd"), "");
  EXPECT_EQ(outbox.hopeless({}), nullptr);
  for (int i = 0; i < 100; ++i) outbox.add(1, result({i}, "abcd"), "");
  EXPECT_STREQ(outbox.hopeless({}), "its reader is too far behind");
}

TEST(Outbox, ASmallChunkCountsAsTheMemoryThatItTakes) {
  Outbox outbox({.deliveries = 1, .held = 100'000, .catching_up = seconds(0)});
  outbox.take();
  for (std::uint64_t key = 0; key < 400; ++key) outbox.add(key, result({1}, "a"), "");
  EXPECT_STREQ(outbox.hopeless({}), "its reader is too far behind");
}

TEST(Outbox, ASpaceThatIsNoTextIsCountedWhereItStands) {
  Outbox outbox;
  outbox.add(1, result({1}, ""), "");  // a special token
  auto space = result({2}, "a");
  space.text_begin = 1;
  space.text_end = 2;
  outbox.add(1, space, "");
  outbox.add(1, result({3}, "b"), "");
  const auto chunk = unpack(outbox.take()).chunks.at(0);
  EXPECT_EQ(chunk.text, "ab");
  EXPECT_EQ(chunk.text_begin, 1);
  EXPECT_EQ(chunk.text_end, 3);
}

TEST(Outbox, WhatIsNotReadHoldsBackTheRest) {
  Outbox outbox({.deliveries = 2});
  for (int i = 0; i < 2; ++i) {
    outbox.add(1, result({i}, "x"), "");
    EXPECT_TRUE(outbox.due());
    outbox.take();
  }
  outbox.add(1, result({2}, "y"), "");
  outbox.add(1, result({3}, "z"), "");
  EXPECT_FALSE(outbox.due());
  outbox.read(0);
  EXPECT_FALSE(outbox.due());
  outbox.read(1);
  EXPECT_TRUE(outbox.due());
  const auto delivery = unpack(outbox.take());
  EXPECT_EQ(delivery.number, 3U);
  EXPECT_EQ(delivery.chunks.at(0).text, "yz");
  outbox.read(3);
  outbox.read(2);  // it came late
  expect_error(ErrorCode::invalid_argument, {"subscription_read is 4, and the last delivery has the number 3"},
               [&] { outbox.read(4); });
}

TEST(Outbox, LargeDeliveriesHoldBackTheRestToo) {
  Outbox outbox({.bytes = 1000});
  outbox.add(1, result({1}, std::string(2000, 'x')), "");
  EXPECT_TRUE(outbox.due());
  outbox.take();
  outbox.add(1, result({1}, "y"), "");
  EXPECT_FALSE(outbox.due());
  outbox.read(1);
  EXPECT_TRUE(outbox.due());
}

TEST(Outbox, WhatDoesNotFitInADeliveryWaitsForTheReader) {
  Outbox outbox({.bytes = 1000, .held = 1});
  const std::string text(500, 'x');
  for (TokenId id = 1; id <= 5; ++id) outbox.add(static_cast<std::uint64_t>(id), result({id}, text), "");
  const auto first = unpack(outbox.take());
  EXPECT_EQ(first.number, 1U);
  EXPECT_EQ(first.chunks,
            (std::vector<Chunk>{{.key = 1, .text_end = 500, .ids = {1}, .text = text},
                                {.key = 2, .text_end = 500, .ids = {2}, .text = text}}));
  EXPECT_FALSE(outbox.due());
  EXPECT_TRUE(outbox.waiting());
  outbox.add(1, result({6}, "a"), "");
  outbox.add(3, result({7}, "b"), "");
  outbox.add(1, result({8}, "c"), "");
  outbox.add_error(5, "[504] late");
  outbox.read(1);
  EXPECT_TRUE(outbox.due());
  const auto second = unpack(outbox.take());
  EXPECT_EQ(second.number, 2U);
  EXPECT_EQ(second.chunks,
            (std::vector<Chunk>{{.key = 3, .text_end = 501, .ids = {3, 7}, .text = text + "b"},
                                {.key = 4, .text_end = 500, .ids = {4}, .text = text}}));
  EXPECT_FALSE(outbox.due());
  outbox.bind(false);
  EXPECT_TRUE(outbox.due());
  outbox.bind(true);
  outbox.read(2);
  const auto third = unpack(outbox.take());
  EXPECT_EQ(third.number, 3U);
  EXPECT_EQ(third.chunks,
            (std::vector<Chunk>{{.key = 5, .text_end = 500, .ids = {5}, .text = text},
                                {.key = 1, .text_end = 2, .ids = {6, 8}, .text = "ac"},
                                {.key = 5, .finish_reason = 4, .ids = {}, .text = "[504] late"}}));
  EXPECT_FALSE(outbox.waiting());
  EXPECT_EQ(outbox.hopeless({}), nullptr) << "nothing is held";
}

TEST(Outbox, AReaderThatIsNotHeardCountsNotUntilItIs) {
  Outbox outbox({.deliveries = 1, .held = 10, .patience = seconds(0)});
  outbox.take();
  outbox.add(1, result({1}, std::string(20, 'x')), "");
  EXPECT_FALSE(outbox.due());
  outbox.bind(false);
  EXPECT_TRUE(outbox.due());
  EXPECT_EQ(outbox.hopeless({}), nullptr);
  outbox.bind(true);
  EXPECT_FALSE(outbox.due());
  outbox.read(1);
  EXPECT_TRUE(outbox.due());
}

TEST(Outbox, AReaderThatStopsIsGivenUpAfterAWhile) {
  Outbox outbox({.deliveries = 1, .patience = seconds(60)});
  Outbox::Clock::time_point now{};
  outbox.take();
  EXPECT_EQ(outbox.hopeless(now += seconds(100)), nullptr);  // nothing waits
  outbox.add(1, result({1}, "x"), "");
  EXPECT_EQ(outbox.hopeless(now += seconds(100)), nullptr);
  EXPECT_EQ(outbox.hopeless(now += seconds(59)), nullptr);
  outbox.read(1);
  outbox.take();
  outbox.add(1, result({1}, "x"), "");
  EXPECT_EQ(outbox.hopeless(now += seconds(59)), nullptr);  // it has read something since
  EXPECT_EQ(outbox.hopeless(now += seconds(59)), nullptr);
  EXPECT_STREQ(outbox.hopeless(now += seconds(2)), "its reader has stopped reading");
}

TEST(Outbox, AReaderThatLetsTooMuchWaitIsGivenUp) {
  Outbox outbox({.deliveries = 1, .held = 1000, .catching_up = seconds(0)});
  outbox.take();
  outbox.add(1, result({1}, std::string(100, 'x')), "");
  EXPECT_EQ(outbox.hopeless({}), nullptr);
  outbox.add(1, result({1}, std::string(900, 'x')), "");
  EXPECT_STREQ(outbox.hopeless({}), "its reader is too far behind");
}

TEST(Outbox, AReaderForWhichMuchComesAtOnceIsGivenTimeForIt) {
  constexpr std::uint64_t kAnswers = 40;
  Outbox outbox({.bytes = 1000, .held = 5000, .catching_up = seconds(5)});
  Outbox::Clock::time_point now{};
  for (std::uint64_t key = 0; key < kAnswers; ++key) outbox.add(key, result({1}, std::string(1000, 'x')), "");
  std::uint64_t number = 0;
  while (outbox.due()) {  // it reads slowly, but does
    outbox.take();
    EXPECT_EQ(outbox.hopeless(now += seconds(4)), nullptr) << number;
    outbox.read(++number);
  }
  EXPECT_EQ(number, kAnswers);

  for (std::uint64_t key = 0; key < kAnswers; ++key) outbox.add(key, result({1}, std::string(1000, 'x')), "");
  outbox.take();
  EXPECT_EQ(outbox.hopeless(now), nullptr);
  outbox.add(kAnswers, result({1}, std::string(2000, 'x')), "");
  outbox.read(++number);
  outbox.take();
  EXPECT_EQ(outbox.hopeless(now += seconds(4)), nullptr);
  EXPECT_STREQ(outbox.hopeless(now += seconds(1)), "its reader is too far behind") << "there is more than before";
}

}  // namespace
}  // namespace charonia::triton
