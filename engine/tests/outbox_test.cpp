// The outbox of a subscription: the encoding of deliveries, the joining of waiting chunks, and flow control.
#include "outbox.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cstring>
#include <fstream>
#include <iterator>
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
  int index = 0, finish_reason = 0, text_begin = 0, text_end = 0, num_output_tokens = 0;
  bool in_reasoning = false;
  std::vector<TokenId> ids{};
  std::vector<std::string> token_bytes{};
  std::vector<float> logprobs{};
  std::vector<TokenId> top_ids{};
  std::vector<float> top_logprobs{};
  std::string text;
  bool operator==(const Chunk&) const = default;
};

struct Delivery {
  std::uint64_t number = 0;
  std::vector<Chunk> chunks;
};

std::uint64_t take_varint(std::string_view& encoded) {
  std::uint64_t value = 0;
  for (int shift = 0;; shift += 7) {
    const auto byte = static_cast<unsigned char>(encoded.at(0));
    encoded.remove_prefix(1);
    value |= static_cast<std::uint64_t>(byte & 0x7f) << shift;
    if (byte < 0x80) return value;
  }
}

std::string_view take_bytes(std::string_view& encoded, std::size_t size) {
  const auto bytes = encoded.substr(0, size);
  EXPECT_EQ(bytes.size(), size);
  encoded.remove_prefix(bytes.size());
  return bytes;
}

// Calls `field` with the number of each field, its value, and its bytes.
template <class Field>
void decode_fields(std::string_view encoded, const Field& field) {
  while (!encoded.empty()) {
    const auto tag = take_varint(encoded);
    if ((tag & 7) == 0) {
      field(tag >> 3, take_varint(encoded), std::string_view());
    } else {
      const auto size = (tag & 7) == 5 ? sizeof(float) : take_varint(encoded);
      field(tag >> 3, std::uint64_t{0}, take_bytes(encoded, size));
    }
  }
}

void append_ints(std::vector<std::int32_t>& values, std::string_view packed) {
  while (!packed.empty()) values.push_back(static_cast<std::int32_t>(take_varint(packed)));
}

void append_floats(std::vector<float>& values, std::string_view packed) {
  for (; !packed.empty(); packed.remove_prefix(sizeof(float))) {
    std::memcpy(&values.emplace_back(), packed.data(), sizeof(float));
  }
}

Chunk decode_chunk(std::string_view encoded) {
  Chunk chunk;
  decode_fields(encoded, [&](std::uint64_t number, std::uint64_t value, std::string_view bytes) {
    const auto integer = static_cast<int>(value);
    switch (number) {
      case 1: chunk.key = value; break;
      case 2: chunk.index = integer; break;
      case 3: chunk.finish_reason = integer; break;
      case 4: chunk.text += bytes; break;
      case 5: append_ints(chunk.ids, bytes); break;
      case 6: chunk.token_bytes.emplace_back(bytes); break;
      case 7: chunk.text_begin = integer; break;
      case 8: chunk.text_end = integer; break;
      case 9: chunk.in_reasoning = value != 0; break;
      case 11: chunk.num_output_tokens = integer; break;
      case 18: append_floats(chunk.logprobs, bytes); break;
      case 19: append_ints(chunk.top_ids, bytes); break;
      case 20: append_floats(chunk.top_logprobs, bytes); break;
      default: break;
    }
  });
  return chunk;
}

Delivery decode(std::string_view encoded) {
  Delivery delivery;
  decode_fields(encoded, [&](std::uint64_t number, std::uint64_t value, std::string_view bytes) {
    if (number == 1) delivery.number = value;
    if (number == 2) delivery.chunks.push_back(decode_chunk(bytes));
  });
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

// Adds log probabilities: -i for token i, and -10 * i - n for its n-th most likely token, whose id is 10 * i + n.
Result scored(Result result, int tops) {
  for (const auto id : result.token_ids) {
    result.logprobs.push_back(static_cast<float>(-id));
    if (tops == 0) continue;
    auto& row = result.top_logprobs.emplace_back();
    for (int n = 0; n < tops; ++n) row.push_back({10 * id + n, static_cast<float>(-10 * id - n)});
  }
  return result;
}

TEST(Outbox, DeliveriesAreNumberedAndHaveTheChunksInTheirOrder) {
  Outbox outbox;
  EXPECT_FALSE(outbox.due());
  EXPECT_EQ(decode(outbox.take()).number, 1U);
  outbox.add(7, result({1, 2}, "ab"), {});
  outbox.add(3, result({4}, "\xc3\xa9", 1, FinishReason::length), {.echo = "prompt "});
  outbox.add_error(5, "[504] late");
  EXPECT_TRUE(outbox.due());
  const auto delivery = decode(outbox.take());
  EXPECT_EQ(delivery.number, 2U);
  const std::vector<Chunk> expected = {
      {.key = 7, .text_end = 2, .ids = {1, 2}, .text = "ab"},
      {.key = 3, .index = 1, .finish_reason = 2, .text_end = 2, .ids = {4}, .text = "prompt \xc3\xa9"},
      {.key = 5, .finish_reason = 4, .ids = {}, .text = "[504] late"}};
  EXPECT_EQ(delivery.chunks, expected);
  EXPECT_FALSE(outbox.due());
  EXPECT_TRUE(outbox.empty());
}

TEST(Outbox, ChunksOfOneSequenceAreJoinedWhileTheyWait) {
  Outbox outbox;
  auto first = result({1, 2}, "b");  // a special token, and " b" without its space
  first.text_begin = 1;
  first.text_end = 2;
  outbox.add(1, first, {});
  outbox.add(1, result({9}, "other", 1), {});
  outbox.add(1, result({3}, "cd"), {});
  auto last = result({4, 5}, "e", 0, FinishReason::stop);  // "e" and a stop word
  last.num_output_tokens = 5;
  outbox.add(1, last, {});
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
  EXPECT_EQ(decode(outbox.take()).chunks, expected);
}

TEST(Outbox, TokenBytesAndTheStateOfThePromptAreJoined) {
  Outbox outbox;
  auto first = result({1, 2}, "b");  // a special token, and " b" without its space
  first.text_begin = 1;
  first.text_end = 2;
  outbox.add(1, first, {.echo = "prompt ", .token_bytes = {"", " b"}, .in_reasoning = true});
  outbox.add(2, result({9}, "other"), {.token_bytes = {"other"}});
  outbox.add(1, result({3, 4}, "cde"), {.token_bytes = {"c", "de"}});
  outbox.add(1, result({5, 6}, "f", 0, FinishReason::stop), {.token_bytes = {"f", "stop"}});
  const std::vector<Chunk> expected = {{.key = 1,
                                        .finish_reason = 1,
                                        .text_begin = 1,
                                        .text_end = 6,
                                        .in_reasoning = true,
                                        .ids = {1, 2, 3, 4, 5, 6},
                                        .token_bytes = {"", " b", "c", "de", "f", "stop"},
                                        .text = "prompt bcdef"},
                                       {.key = 2, .text_end = 5, .ids = {9}, .token_bytes = {"other"}, .text = "other"}};
  EXPECT_EQ(decode(outbox.take()).chunks, expected);
  EXPECT_TRUE(outbox.empty());
}

TEST(Outbox, LogProbabilitiesAreJoinedWithTheirTokens) {
  Outbox outbox;
  outbox.add(1, scored(result({1, 2}, "ab"), 2), {});
  outbox.add(2, scored(result({7}, "x"), 0), {});
  outbox.add(1, scored(result({3}, "c"), 2), {});
  outbox.add(2, scored(result({8}, "y"), 0), {});
  outbox.add(1, scored(result({}, "", 0, FinishReason::cancelled), 2), {});  // no text was held back
  outbox.add(3, scored(result({}, "", 0, FinishReason::cancelled), 2), {});  // before its first token
  const std::vector<Chunk> expected = {
      {.key = 1,
       .finish_reason = 3,
       .text_end = 3,
       .ids = {1, 2, 3},
       .logprobs = {-1, -2, -3},
       .top_ids = {10, 11, 20, 21, 30, 31},
       .top_logprobs = {-10, -11, -20, -21, -30, -31},
       .text = "abc"},
      {.key = 2, .text_end = 2, .ids = {7, 8}, .logprobs = {-7, -8}, .text = "xy"},
      {.key = 3, .finish_reason = 3, .text = ""}};
  EXPECT_EQ(decode(outbox.take()).chunks, expected);
}

TEST(Outbox, ADeliveryEndsWithTheChunkThatReachesTheLimit) {
  const auto one = scored(result(std::vector<TokenId>(10, 1), "a"), 20);
  Outbox alone;
  alone.add(1, one, {});
  const auto size = alone.take().size();
  Outbox outbox({.bytes = 2 * size - 10});
  for (std::uint64_t key = 1; key <= 3; ++key) outbox.add(key, one, {});
  EXPECT_EQ(decode(outbox.take()).chunks.size(), 2U);
  EXPECT_FALSE(outbox.due());
  outbox.acknowledge(1);
  EXPECT_EQ(decode(outbox.take()).chunks.size(), 1U);
  EXPECT_TRUE(outbox.empty());
}

TEST(Outbox, LogProbabilitiesCountAsWaitingBytes) {
  Outbox outbox({.deliveries = 1, .held = 100'000, .overflow_time = seconds(0)});
  outbox.take();
  for (int i = 0; i < 500; ++i) outbox.add(1, scored(result({i}, "a"), 20), {});
  EXPECT_EQ(outbox.overflow({}), nullptr);
  for (int i = 0; i < 500; ++i) outbox.add(1, scored(result({i}, "a"), 20), {});
  EXPECT_STREQ(outbox.overflow({}), "its reader is too far behind");
  outbox.acknowledge(1);
  outbox.take();
  EXPECT_EQ(outbox.overflow({}), nullptr) << "nothing waits";
}

// The file has the bytes of a delivery in hexadecimal. tests/unit/test_delivery.py reads the same file with Python's
// protobuf package.
TEST(Outbox, TheEncodingIsThatOfTheGoldenFile) {
  Outbox outbox;
  auto first = scored(result({1, 300, 70000}, "b\xc3\xa9", 2, FinishReason::length), 1);
  first.top_logprobs[0][0].id = -1;
  first.text_begin = 1;
  first.text_end = 4;
  first.num_input_tokens = 1000;
  first.num_output_tokens = 3;
  first.num_cached_tokens = 512;
  first.num_session_tokens = 20;
  first.timings = {.queue_ms = 0.5, .first_token_ms = 20.25, .total_ms = 1e6};
  first.cumulative_logprob = -70301;
  first.prompt_logprobs = {-1.5F, -2};
  first.prompt_top_logprobs = {{{4, -0.25F}}, {{5, -0.5F}}};
  const std::vector<TokenId> prompt = {7, 8, 9};
  outbox.add(std::uint64_t{1} << 63, first,
             {.echo = "prompt",
              .prompt_ids = prompt,
              .token_bytes = {" b", "", "\xc3\xa9."},
              .name_of = [](TokenId id) { return id == 7 ? TokenName{"<s>", true} : TokenName{id < 0 ? "" : "top"}; },
              .in_reasoning = true});
  outbox.add(5, result({}, ""), {});
  outbox.add_error(6, "[504] late");
  std::string hex;
  for (const unsigned char byte : outbox.take()) hex += {"0123456789abcdef"[byte >> 4], "0123456789abcdef"[byte & 15]};
  std::ifstream file(CHARONIA_GOLDEN_DELIVERY);
  const std::string golden((std::istreambuf_iterator<char>(file)), {});
  EXPECT_EQ(hex + "\n", golden);
}

TEST(Outbox, WhatComesAfterAnEndIsJoinedToNothing) {
  Outbox outbox;
  outbox.add(1, result({1}, "a", 0, FinishReason::stop), {});
  outbox.add(1, result({2}, "b"), {.echo = "prompt "});
  outbox.add(1, result({3}, "c"), {});
  outbox.add_error(1, "[504] late");
  outbox.add(1, result({4}, "d"), {});
  const std::vector<Chunk> expected = {{.key = 1, .finish_reason = 1, .text_end = 1, .ids = {1}, .text = "a"},
                                       {.key = 1, .text_end = 2, .ids = {2, 3}, .text = "prompt bc"},
                                       {.key = 1, .finish_reason = 4, .ids = {}, .text = "[504] late"},
                                       {.key = 1, .text_end = 1, .ids = {4}, .text = "d"}};
  EXPECT_EQ(decode(outbox.take()).chunks, expected);
}

TEST(Outbox, AJoinedTokenCountsAsTheBytesThatItAdds) {
  Outbox outbox({.deliveries = 1, .held = 5000, .overflow_time = seconds(0)});
  outbox.take();
  for (int i = 0; i < 400; ++i) outbox.add(1, result({i}, "abcd"), {});
  EXPECT_EQ(outbox.overflow({}), nullptr);
  for (int i = 0; i < 400; ++i) outbox.add(1, result({i}, "abcd"), {});
  EXPECT_STREQ(outbox.overflow({}), "its reader is too far behind");
}

TEST(Outbox, ASmallChunkCountsAsTheMemoryThatItTakes) {
  Outbox outbox({.deliveries = 1, .held = 100'000, .overflow_time = seconds(0)});
  outbox.take();
  for (std::uint64_t key = 0; key < 500; ++key) outbox.add(key, result({1}, "a"), {});
  EXPECT_STREQ(outbox.overflow({}), "its reader is too far behind");
}

TEST(Outbox, ASpaceThatIsNoTextIsCountedWhereItStands) {
  Outbox outbox;
  outbox.add(1, result({1}, ""), {});  // a special token
  auto space = result({2}, "a");
  space.text_begin = 1;
  space.text_end = 2;
  outbox.add(1, space, {});
  outbox.add(1, result({3}, "b"), {});
  const auto chunk = decode(outbox.take()).chunks.at(0);
  EXPECT_EQ(chunk.text, "ab");
  EXPECT_EQ(chunk.text_begin, 1);
  EXPECT_EQ(chunk.text_end, 3);
}

TEST(Outbox, WhatIsNotReadHoldsBackTheRest) {
  Outbox outbox({.deliveries = 2});
  for (int i = 0; i < 2; ++i) {
    outbox.add(1, result({i}, "x"), {});
    EXPECT_TRUE(outbox.due());
    outbox.take();
  }
  outbox.add(1, result({2}, "y"), {});
  outbox.add(1, result({3}, "z"), {});
  EXPECT_FALSE(outbox.due());
  outbox.acknowledge(0);
  EXPECT_FALSE(outbox.due());
  outbox.acknowledge(1);
  EXPECT_TRUE(outbox.due());
  const auto delivery = decode(outbox.take());
  EXPECT_EQ(delivery.number, 3U);
  EXPECT_EQ(delivery.chunks.at(0).text, "yz");
  outbox.acknowledge(3);
  outbox.acknowledge(2);  // it came late
  expect_error(ErrorCode::invalid_argument, {"subscription_read is 4, and the last delivery has the number 3"},
               [&] { outbox.acknowledge(4); });
}

TEST(Outbox, LargeDeliveriesHoldBackTheRestToo) {
  Outbox outbox({.bytes = 1000});
  outbox.add(1, result({1}, std::string(2000, 'x')), {});
  EXPECT_TRUE(outbox.due());
  outbox.take();
  outbox.add(1, result({1}, "y"), {});
  EXPECT_FALSE(outbox.due());
  outbox.acknowledge(1);
  EXPECT_TRUE(outbox.due());
}

TEST(Outbox, WhatDoesNotFitInADeliveryWaitsForTheReader) {
  Outbox outbox({.bytes = 1000, .held = 1});
  const std::string text(500, 'x');
  for (TokenId id = 1; id <= 5; ++id) outbox.add(static_cast<std::uint64_t>(id), result({id}, text), {});
  const auto first = decode(outbox.take());
  EXPECT_EQ(first.number, 1U);
  EXPECT_EQ(first.chunks,
            (std::vector<Chunk>{{.key = 1, .text_end = 500, .ids = {1}, .text = text},
                                {.key = 2, .text_end = 500, .ids = {2}, .text = text}}));
  EXPECT_FALSE(outbox.due());
  EXPECT_FALSE(outbox.empty());
  outbox.add(1, result({6}, "a"), {});
  outbox.add(3, result({7}, "b"), {});
  outbox.add(1, result({8}, "c"), {});
  outbox.add_error(5, "[504] late");
  outbox.acknowledge(1);
  EXPECT_TRUE(outbox.due());
  const auto second = decode(outbox.take());
  EXPECT_EQ(second.number, 2U);
  EXPECT_EQ(second.chunks,
            (std::vector<Chunk>{{.key = 3, .text_end = 501, .ids = {3, 7}, .text = text + "b"},
                                {.key = 4, .text_end = 500, .ids = {4}, .text = text}}));
  EXPECT_FALSE(outbox.due());
  outbox.set_flow_control(false);
  EXPECT_TRUE(outbox.due());
  outbox.set_flow_control(true);
  outbox.acknowledge(2);
  const auto third = decode(outbox.take());
  EXPECT_EQ(third.number, 3U);
  EXPECT_EQ(third.chunks,
            (std::vector<Chunk>{{.key = 5, .text_end = 500, .ids = {5}, .text = text},
                                {.key = 1, .text_end = 2, .ids = {6, 8}, .text = "ac"},
                                {.key = 5, .finish_reason = 4, .ids = {}, .text = "[504] late"}}));
  EXPECT_TRUE(outbox.empty());
  EXPECT_EQ(outbox.overflow({}), nullptr) << "nothing is held";
}

TEST(Outbox, AReaderThatIsNotHeardCountsNotUntilItIs) {
  Outbox outbox({.deliveries = 1, .held = 10, .stall_time = seconds(0)});
  outbox.take();
  outbox.add(1, result({1}, std::string(20, 'x')), {});
  EXPECT_FALSE(outbox.due());
  outbox.set_flow_control(false);
  EXPECT_TRUE(outbox.due());
  EXPECT_EQ(outbox.overflow({}), nullptr);
  outbox.set_flow_control(true);
  EXPECT_FALSE(outbox.due());
  outbox.acknowledge(1);
  EXPECT_TRUE(outbox.due());
}

TEST(Outbox, AReaderThatStopsIsGivenUpAfterAWhile) {
  Outbox outbox({.deliveries = 1, .stall_time = seconds(60)});
  Outbox::Clock::time_point now{};
  outbox.take();
  EXPECT_EQ(outbox.overflow(now += seconds(100)), nullptr);  // nothing waits
  outbox.add(1, result({1}, "x"), {});
  EXPECT_EQ(outbox.overflow(now += seconds(100)), nullptr);
  EXPECT_EQ(outbox.overflow(now += seconds(59)), nullptr);
  outbox.acknowledge(1);
  outbox.take();
  outbox.add(1, result({1}, "x"), {});
  EXPECT_EQ(outbox.overflow(now += seconds(59)), nullptr);  // it has read something since
  EXPECT_EQ(outbox.overflow(now += seconds(59)), nullptr);
  EXPECT_STREQ(outbox.overflow(now += seconds(2)), "its reader has stopped reading");
}

TEST(Outbox, AReaderThatLetsTooMuchWaitIsGivenUp) {
  Outbox outbox({.deliveries = 1, .held = 1000, .overflow_time = seconds(0)});
  outbox.take();
  outbox.add(1, result({1}, std::string(100, 'x')), {});
  EXPECT_EQ(outbox.overflow({}), nullptr);
  outbox.add(1, result({1}, std::string(900, 'x')), {});
  EXPECT_STREQ(outbox.overflow({}), "its reader is too far behind");
}

TEST(Outbox, AReaderForWhichMuchComesAtOnceIsGivenTimeForIt) {
  constexpr std::uint64_t kAnswers = 40;
  Outbox outbox({.bytes = 1000, .held = 5000, .overflow_time = seconds(5)});
  Outbox::Clock::time_point now{};
  for (std::uint64_t key = 0; key < kAnswers; ++key) outbox.add(key, result({1}, std::string(1000, 'x')), {});
  std::uint64_t number = 0;
  while (outbox.due()) {  // it reads slowly, but does
    outbox.take();
    EXPECT_EQ(outbox.overflow(now += seconds(4)), nullptr) << number;
    outbox.acknowledge(++number);
  }
  EXPECT_EQ(number, kAnswers);

  for (std::uint64_t key = 0; key < kAnswers; ++key) outbox.add(key, result({1}, std::string(1000, 'x')), {});
  outbox.take();
  EXPECT_EQ(outbox.overflow(now), nullptr);
  outbox.add(kAnswers, result({1}, std::string(2000, 'x')), {});
  outbox.acknowledge(++number);
  outbox.take();
  EXPECT_EQ(outbox.overflow(now += seconds(4)), nullptr);
  EXPECT_STREQ(outbox.overflow(now += seconds(1)), "its reader is too far behind") << "there is more than before";
}

}  // namespace
}  // namespace charonia::triton
