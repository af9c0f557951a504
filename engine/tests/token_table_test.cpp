#include "text/token_table.h"

#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "charonia/error.h"
#include "errors.h"
#include "safetensors_writer.h"
#include "test_folder.h"

namespace charonia::text {
namespace {

void expect_tokens(const TokenTable& table) {
  ASSERT_EQ(table.size(), 4);
  EXPECT_EQ(table.text_bytes(0), "a");
  EXPECT_EQ(table.text_bytes(1), "");
  EXPECT_EQ(table.text_bytes(2), "\xE4\xBD");
  EXPECT_EQ(table.text_bytes(3), "") << "special";
  EXPECT_EQ(table.raw_bytes(3), "<s>");
  EXPECT_FALSE(table.is_special(2));
  EXPECT_TRUE(table.is_special(3));
  for (const int past : {-1, 4, 1 << 30}) {
    EXPECT_EQ(table.text_bytes(past), "");
    EXPECT_EQ(table.raw_bytes(past), "");
    EXPECT_FALSE(table.is_special(past));
  }
}

TEST(TokenTable, TextBytesLeaveSpecialTokensAndPaddingOut) {
  const TokenTable table({"a", "", "\xE4\xBD", "<s>"}, {0, 0, 0, 1}, true);
  expect_tokens(table);
  EXPECT_TRUE(table.strip_leading_space());
  EXPECT_THROW(TokenTable({"a"}, {}, false), Error);
}

class TokenTableFile : public ::testing::Test {
 protected:
  ~TokenTableFile() override { std::filesystem::remove(file_); }

  void write(const std::vector<std::int64_t>& offsets, const std::string& strip = "1", const std::string& type = "I64",
             const std::string& bytes = "ab", const std::string& special = std::string(2, '\0')) {
    testing::SafetensorsWriter table;
    if (!strip.empty()) table.metadata("strip_leading_space", strip);
    table.add("offsets", {std::ssize(offsets)}, type, testing::bytes_of(offsets));
    table.add("bytes", {std::ssize(bytes)}, "U8", bytes);
    table.add("special", {std::ssize(special)}, "U8", special);
    table.write(file_);
  }
  void expect_refused(const std::string& why) {
    expect_error(ErrorCode::invalid_argument, {why}, [&] { TokenTable::load(file_); });
  }

  std::filesystem::path file_ = testing::test_folder();
};

TEST_F(TokenTableFile, IsLoaded) {
  for (const std::string strip : {"0", "1"}) {
    write({0, 1, 1, 3, 6}, strip, "I64", "a\xE4\xBD<s>", std::string("\0\0\0\1", 4));
    const auto table = TokenTable::load(file_);
    expect_tokens(table);
    EXPECT_EQ(table.strip_leading_space(), strip == "1");
  }
}

TEST_F(TokenTableFile, AnInvalidFileIsRejectedWithTheReason) {
  expect_refused("No such file");
  for (const auto& [offsets, why] : std::vector<std::pair<std::vector<std::int64_t>, std::string>>{
           {{0, 1}, "one more"},
           {{0, 2, 1}, "not ascending: 1 follows 2"},
           {{-1, 1, 2}, "not ascending: -1 follows 0"},
           {{1, 1, 2}, "go from 1 to 2, but must go from 0 to 2"},
           {{0, 1, 3}, "go from 0 to 3, but must go from 0 to 2"}}) {
    write(offsets);
    expect_refused(why);
  }
  write({0, 1, 2}, "");
  expect_refused("is missing");
  write({0, 1, 2}, "yes");
  expect_refused("'yes'");
  write({0, 1, 2}, "1", "U64");
  expect_error(ErrorCode::unsupported, {}, [&] { TokenTable::load(file_); });
}

}  // namespace
}  // namespace charonia::text
