// The outbox of a subscription: the encoding of deliveries, the joining of waiting chunks, and flow control.
#include "outbox.h"

#include <gtest/gtest.h>

#include <chrono>
#include <fstream>
#include <iterator>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "engine_support.h"

namespace charonia::triton {
namespace {

using std::chrono::seconds;

std::uint64_t take_varint(std::string_view& encoded) {
  std::uint64_t value = 0;
  for (int shift = 0;; shift += 7) {
    const auto byte = static_cast<unsigned char>(encoded.at(0));
    encoded.remove_prefix(1);
    value |= static_cast<std::uint64_t>(byte & 0x7f) << shift;
    if (byte < 0x80) return value;
  }
}

// The fields of a chunk by their numbers: the value of a scalar, and the joined bytes of a repeated field.
using Chunk = std::map<std::uint64_t, std::string>;

Chunk decode_chunk(std::string_view encoded) {
  constexpr std::uint64_t kVarint = 0, kFixed32 = 5, kTokenBytes = 6;
  Chunk chunk;
  while (!encoded.empty()) {
    const auto tag = take_varint(encoded), number = tag >> 3, type = tag & 7;
    if (type == kVarint) {
      chunk[number] = std::to_string(take_varint(encoded));
      continue;
    }
    const auto size = type == kFixed32 ? sizeof(float) : take_varint(encoded);
    EXPECT_LE(size, encoded.size());
    if (type == kFixed32) chunk[number].clear();
    if (number == kTokenBytes) chunk[number] += '|';
    chunk[number] += encoded.substr(0, size);
    encoded.remove_prefix(size);
  }
  return chunk;
}

// The chunks of a delivery, which must have this number.
std::vector<Chunk> decode(std::string_view encoded, std::uint64_t number) {
  EXPECT_EQ(take_varint(encoded), 1 << 3);
  EXPECT_EQ(take_varint(encoded), number);
  std::vector<Chunk> chunks;
  while (!encoded.empty()) {
    EXPECT_EQ(take_varint(encoded), 2 << 3 | 2);
    const auto size = take_varint(encoded);
    chunks.push_back(decode_chunk(encoded.substr(0, size)));
    encoded.remove_prefix(size);
  }
  return chunks;
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

// The chunk of a result or of an error that was added alone. EncodingEqualsTheGoldenFile tests all its fields.
Chunk chunk_of(std::uint64_t key, const Result& result, const Extras& extras = {}) {
  Outbox outbox;
  outbox.add(key, result, extras);
  return decode(outbox.take(), 1).at(0);
}
Chunk error_chunk(std::uint64_t key, std::string_view text) {
  Outbox outbox;
  outbox.add_error(key, text);
  return decode(outbox.take(), 1).at(0);
}

// A result whose text begins `begin` bytes after the beginning of its tokens' bytes.
Result after(int begin, Result result) {
  result.text_begin += begin;
  result.text_end += begin;
  return result;
}

TEST(Outbox, ADeliveryCanDescribeTheEngine) {
  const std::string text = "\x08\x01\x1a\x05gpu 1";
  EXPECT_EQ(Outbox().take("gpu 1", true), text + "\x20\x01");
  EXPECT_EQ(Outbox().take("gpu 1", false), text);
}

TEST(Outbox, DeliveriesAreNumberedAndHaveTheChunksInTheirOrder) {
  Outbox outbox;
  EXPECT_FALSE(outbox.due());
  EXPECT_TRUE(decode(outbox.take(), 1).empty());
  const auto other = result({4}, "\xc3\xa9", 1, FinishReason::length);
  outbox.add(7, result({1, 2}, "ab"), {});
  outbox.add(3, other, {.echo = "prompt "});
  outbox.add_error(5, "[504] late");
  EXPECT_TRUE(outbox.due());
  EXPECT_EQ(decode(outbox.take(), 2),
            (std::vector{chunk_of(7, result({1, 2}, "ab")), chunk_of(3, other, {.echo = "prompt "}),
                         error_chunk(5, "[504] late")}));
  EXPECT_FALSE(outbox.due());
  EXPECT_TRUE(outbox.empty());
}

// Joined chunks of a sequence equal one chunk of all its tokens, with the last scalars.
TEST(Outbox, ChunksOfOneSequenceAreJoinedWhileTheyWait) {
  Outbox outbox;
  // A special token, and " b" without its space.
  outbox.add(1, after(1, scored(result({1, 2}, "b"), 2)),
             {.echo = "prompt ", .token_bytes = {"", " b"}, .in_reasoning = true});
  outbox.add(1, result({9}, "other", 1), {.token_bytes = {"other"}});
  outbox.add(1, scored(result({3}, "cd"), 2), {.token_bytes = {"cd"}});
  auto last = scored(result({4, 5}, "e", 0, FinishReason::stop), 2);  // "e" and a stop word
  last.num_output_tokens = 5;
  outbox.add(1, last, {.token_bytes = {"e", "stop"}});
  outbox.add(2, scored(result({7}, "x"), 0), {});
  outbox.add(2, scored(result({8}, "y"), 0), {});
  outbox.add(3, scored(result({}, "", 0, FinishReason::cancelled), 2), {});  // before its first token
  auto whole = after(1, scored(result({1, 2, 3, 4, 5}, "bcde", 0, FinishReason::stop), 2));
  whole.num_output_tokens = 5;
  const Extras all{.echo = "prompt ", .token_bytes = {"", " b", "cd", "e", "stop"}, .in_reasoning = true};
  EXPECT_EQ(decode(outbox.take(), 1),
            (std::vector{chunk_of(1, whole, all), chunk_of(1, result({9}, "other", 1), {.token_bytes = {"other"}}),
                         chunk_of(2, scored(result({7, 8}, "xy"), 0)),
                         chunk_of(3, result({}, "", 0, FinishReason::cancelled))}));
  EXPECT_TRUE(outbox.empty());
}

TEST(Outbox, ADeliveryEndsWithTheChunkThatReachesTheLimit) {
  const auto one = scored(result(std::vector<TokenId>(10, 1), "a"), 20);
  Outbox alone;
  alone.add(1, one, {});
  const auto size = alone.take().size();
  Outbox outbox({.bytes = 2 * size - 10});
  for (std::uint64_t key = 1; key <= 3; ++key) outbox.add(key, one, {});
  EXPECT_EQ(decode(outbox.take(), 1).size(), 2U);
  EXPECT_FALSE(outbox.due());
  outbox.acknowledge(1);
  EXPECT_EQ(decode(outbox.take(), 2).size(), 1U);
  EXPECT_TRUE(outbox.empty());
}

constexpr const char* kTooFar = "its reader is too far behind";

// A result counts as the memory that it takes: alone, joined to others, and with log probabilities.
TEST(Outbox, AReaderThatLetsTooMuchWaitIsGivenUp) {
  struct Case {
    std::size_t held;
    int count;  // half of them are not too much
    bool joined;
    Result one;
  };
  for (const auto& [held, count, joined, one] :
       {Case{1000, 2, true, result({1}, std::string(500, 'x'))}, Case{5000, 800, true, result({1}, "abcd")},
        Case{100'000, 500, false, result({1}, "a")}, Case{100'000, 1000, true, scored(result({1}, "a"), 20)}}) {
    Outbox outbox({.deliveries = 1, .held = held, .overflow_time = seconds(0)});
    outbox.take();
    for (int i = 0; i < count; ++i) {
      if (i == count / 2) {
        EXPECT_EQ(outbox.overflow({}), nullptr) << held;
      }
      outbox.add(joined ? 1 : static_cast<std::uint64_t>(i), one, {});
    }
    EXPECT_STREQ(outbox.overflow({}), kTooFar) << held;
    outbox.acknowledge(1);
    outbox.take();
    EXPECT_EQ(outbox.overflow({}), nullptr) << "nothing waits";
  }
}

// The file has the bytes of a delivery in hexadecimal. tests/unit/test_delivery.py reads the same file with Python's
// protobuf package.
TEST(Outbox, EncodingEqualsTheGoldenFile) {
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
  first.pooled = {0.5F, -2};
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

TEST(Outbox, ChunksAfterAnEndAreNotJoined) {
  Outbox outbox;
  outbox.add(1, result({1}, "a", 0, FinishReason::stop), {});
  outbox.add(1, result({2}, "b"), {.echo = "prompt "});
  outbox.add(1, result({3}, "c"), {});
  outbox.add_error(1, "[504] late");
  outbox.add(1, result({4}, "d"), {});
  EXPECT_EQ(decode(outbox.take(), 1), (std::vector{chunk_of(1, result({1}, "a", 0, FinishReason::stop)),
                                                   chunk_of(1, result({2, 3}, "bc"), {.echo = "prompt "}),
                                                   error_chunk(1, "[504] late"), chunk_of(1, result({4}, "d"))}));
}

TEST(Outbox, RemovedSpaceCountsAtItsPlace) {
  Outbox outbox;
  outbox.add(1, result({1}, ""), {});  // a special token
  outbox.add(1, after(1, result({2}, "a")), {});
  outbox.add(1, result({3}, "b"), {});
  EXPECT_EQ(decode(outbox.take(), 1), std::vector{chunk_of(1, after(1, result({1, 2, 3}, "ab")))});
}

TEST(Outbox, UnreadDeliveriesHoldBackTheRest) {
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
  EXPECT_EQ(decode(outbox.take(), 3), std::vector{chunk_of(1, result({2, 3}, "yz"))});
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

TEST(Outbox, ChunksBeyondADeliveryWaitForTheReader) {
  Outbox outbox({.bytes = 1000, .held = 1});
  const std::string text(500, 'x');
  for (TokenId id = 1; id <= 5; ++id) outbox.add(static_cast<std::uint64_t>(id), result({id}, text), {});
  const auto of = [&](TokenId id) { return chunk_of(static_cast<std::uint64_t>(id), result({id}, text)); };
  EXPECT_EQ(decode(outbox.take(), 1), (std::vector{of(1), of(2)}));
  EXPECT_FALSE(outbox.due());
  EXPECT_FALSE(outbox.empty());
  outbox.add(1, result({6}, "a"), {});
  outbox.add(3, result({7}, "b"), {});
  outbox.add(1, result({8}, "c"), {});
  outbox.add_error(5, "[504] late");
  outbox.acknowledge(1);
  EXPECT_TRUE(outbox.due());
  EXPECT_EQ(decode(outbox.take(), 2), (std::vector{chunk_of(3, result({3, 7}, text + "b")), of(4)}));
  EXPECT_FALSE(outbox.due());
  outbox.set_flow_control(false);
  EXPECT_TRUE(outbox.due());
  outbox.set_flow_control(true);
  outbox.acknowledge(2);
  EXPECT_EQ(decode(outbox.take(), 3),
            (std::vector{of(5), chunk_of(1, result({6, 8}, "ac")), error_chunk(5, "[504] late")}));
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

TEST(Outbox, ReaderThatMakesProgressIsNotOverflowed) {
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
  EXPECT_STREQ(outbox.overflow(now += seconds(1)), kTooFar) << "there is more than before";
}

}  // namespace
}  // namespace charonia::triton
