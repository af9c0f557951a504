// The lists in the bytes of a Triton request.
#include "unpack.h"

#include <gtest/gtest.h>

#include "engine_support.h"

namespace charonia::triton {
namespace {

using charonia::testing::error_of;

std::string element(std::string_view text) {
  const auto length = static_cast<std::uint32_t>(text.size());
  return std::string(reinterpret_cast<const char*>(&length), sizeof length) + std::string(text);
}

void expect_rejected(const std::function<void()>& call, std::string_view part) {
  const auto text = error_of(call, ErrorCode::invalid_argument);
  EXPECT_NE(text.find(part), std::string::npos) << text;
}

TEST(Unpack, StringsAreReadUntilThereAreTooMany) {
  const auto three = element("a") + element("") + element("bc");
  EXPECT_EQ(unpack_strings("stop_words", three, 3), (std::vector<std::string>{"a", "", "bc"}));
  EXPECT_TRUE(unpack_strings("stop_words", "", 0).empty());
  // The third is not read: it would be another error.
  expect_rejected([&] { unpack_strings("stop_words", three.substr(0, three.size() - 1), 2); }, "more than 2");
  expect_rejected([&] { unpack_strings("stop_words", three.substr(0, three.size() - 1), 3); }, "within an element");
  expect_rejected([&] { unpack_strings("stop_words", three + "xyz", 9); }, "within an element's length");
}

TEST(Unpack, TokenListsAreReadUntilThereAreTooMany) {
  using Lists = std::vector<std::vector<TokenId>>;
  const auto unpack = [](const auto& ids, const auto& ends) {
    return unpack_token_lists("bad_words_ids", ids, ends, kMaxBadWords);
  };
  const std::vector<std::int32_t> none;
  const std::vector<std::int32_t> ids = {5, 6, 7}, ends = {1, 3, -1};
  EXPECT_EQ(unpack(ids, ends), (Lists{{5}, {6, 7}}));
  EXPECT_EQ(unpack(none, none), Lists{});
  for (const auto& wrong : std::vector<std::vector<std::int32_t>>{{0, 1, 2}, {2, 2, 3}, {3, 4, -1}, {-2, 1, 2}}) {
    expect_rejected([&] { unpack(ids, wrong); }, "end offset");
  }
  std::vector<std::int32_t> many(kMaxBadWords + 1, 1), last(many.size());
  for (std::size_t i = 0; i < last.size(); ++i) last[i] = static_cast<std::int32_t>(i + 1);
  last[kMaxBadWords] = -1;
  EXPECT_EQ(unpack(many, last).size(), kMaxBadWords);
  last[kMaxBadWords] = static_cast<std::int32_t>(kMaxBadWords + 1);
  expect_rejected([&] { unpack(many, last); }, "more than 4096");
}

TEST(Unpack, AnEchoForManySequencesIsBounded) {
  const std::string megabyte(std::size_t{1} << 20, 'x');
  EXPECT_NO_THROW(check_echo(megabyte, 64));
  EXPECT_NO_THROW(check_echo(megabyte, -3)) << "that is the engine's to reject";
  expect_rejected([&] { check_echo(megabyte, 65); }, "num_return_sequences");
}

}  // namespace
}  // namespace charonia::triton
