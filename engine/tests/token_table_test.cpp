#include "text/token_table.h"

#include <gtest/gtest.h>

#include <cstring>
#include <fstream>

#include "charonia/error.h"
#include "errors.h"
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
  TokenTableFile() {
    file_ = testing::test_folder();
  }
  ~TokenTableFile() override { std::filesystem::remove(file_); }

  void write(const std::vector<std::int64_t>& offsets, const std::string& bytes, const std::string& special,
             const std::string& metadata = R"({"strip_leading_space": "1"})", const std::string& type = "I64") {
    const auto entry = [](const std::string& dtype, std::size_t size, std::size_t begin, std::size_t end) {
      return R"({"dtype": ")" + dtype + R"(", "shape": [)" + std::to_string(size) + R"(], "data_offsets": [)" +
             std::to_string(begin) + ", " + std::to_string(end) + "]}";
    };
    const auto a = offsets.size() * 8, b = a + bytes.size(), c = b + special.size();
    const auto header = R"({"__metadata__": )" + metadata + R"(, "offsets": )" + entry(type, offsets.size(), 0, a) +
                        R"(, "bytes": )" + entry("U8", bytes.size(), a, b) + R"(, "special": )" +
                        entry("U8", special.size(), b, c) + "}";
    const std::uint64_t length = header.size();
    std::ofstream out(file_, std::ios::binary | std::ios::trunc);
    out.write(reinterpret_cast<const char*>(&length), sizeof length);
    out << header;
    out.write(reinterpret_cast<const char*>(offsets.data()), static_cast<std::streamsize>(a));
    out << bytes << special;
  }
  void expect_refused(const std::string& why) {
    expect_error(ErrorCode::invalid_argument, {why}, [&] { TokenTable::load(file_); });
  }

  std::filesystem::path file_;
};

TEST_F(TokenTableFile, IsLoaded) {
  const std::string special("\0\0\0\1", 4);
  write({0, 1, 1, 3, 6}, "a\xE4\xBD<s>", special);
  const auto table = TokenTable::load(file_);
  expect_tokens(table);
  EXPECT_TRUE(table.strip_leading_space());
  write({0, 1, 1, 3, 6}, "a\xE4\xBD<s>", special, R"({"strip_leading_space": "0"})");
  EXPECT_FALSE(TokenTable::load(file_).strip_leading_space());
}

TEST_F(TokenTableFile, AnInvalidFileIsRejectedWithTheReason) {
  const std::string special(2, '\0');
  expect_refused("No such file");
  write({0, 1}, "ab", special);
  expect_refused("one more");
  write({0, 2, 1}, "ab", special);
  expect_refused("not ascending: 1 follows 2");
  write({-1, 1, 2}, "ab", special);
  expect_refused("not ascending: -1 follows 0");
  write({1, 1, 2}, "ab", special);
  expect_refused("go from 1 to 2, but must go from 0 to 2");
  write({0, 1, 3}, "ab", special);
  expect_refused("go from 0 to 3, but must go from 0 to 2");
  write({0, 1, 2}, "ab", special, "{}");
  expect_refused("is missing");
  write({0, 1, 2}, "ab", special, R"({"strip_leading_space": "yes"})");
  expect_refused("'yes'");
  write({0, 1, 2}, "ab", special, R"({"strip_leading_space": "1"})", "U64");
  expect_error(ErrorCode::unsupported, {}, [&] { TokenTable::load(file_); });
}

}  // namespace
}  // namespace charonia::text
