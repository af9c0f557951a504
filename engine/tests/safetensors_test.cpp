#include "base/safetensors.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <functional>
#include <string>

#include "charonia/error.h"
#include "errors.h"
#include "safetensors_writer.h"
#include "test_folder.h"

namespace charonia {
namespace {

// A separate file for each test, removed at its end.
class Safetensors : public ::testing::Test {
 protected:
  ~Safetensors() override { std::filesystem::remove(file_); }

  void write(std::string_view bytes) {
    std::ofstream out(file_, std::ios::binary | std::ios::trunc);
    out.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  }
  static std::string length_of(std::uint64_t length) {
    std::string out(sizeof length, '\0');
    std::memcpy(out.data(), &length, sizeof length);
    return out;
  }
  SafetensorsFile open(const std::string& header, const std::string& data) {
    testing::SafetensorsWriter::write(file_, header, data);
    return SafetensorsFile::open(file_);
  }
  void expect_refused(const std::function<void()>& call, const std::string& why,
                      ErrorCode code = ErrorCode::invalid_argument) {
    expect_error(code, {why, file_.string()}, [&] { call(); });
  }

  std::filesystem::path file_ = testing::test_folder() += ".safetensors";
};

std::string text_of(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

TEST_F(Safetensors, TensorsAndMetadataAreRead) {
  const auto file = open(R"({"__metadata__": {"format": "pt"},
      "b": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [4, 16]},
      "a": {"dtype": "F32", "shape": [], "data_offsets": [0, 4]},
      "none": {"dtype": "U8", "shape": [0, 7], "data_offsets": [16, 16]}})",
                         "0123456789abcdef");
  EXPECT_EQ(file.names(), (std::vector<std::string_view>{"a", "b", "none"}));
  EXPECT_EQ(file.metadata().at("format"), "pt");
  EXPECT_TRUE(file.has("a"));
  EXPECT_FALSE(file.has("c"));
  const auto tensor = file.tensor("b");
  EXPECT_EQ(tensor.dtype, DType::bf16);
  EXPECT_EQ(tensor.shape, (std::vector<std::int64_t>{2, 3}));
  EXPECT_EQ(text_of(tensor.data), "456789abcdef");
  EXPECT_EQ(text_of(file.tensor("a").data), "0123");
  EXPECT_TRUE(file.tensor("a").shape.empty());
  EXPECT_TRUE(file.tensor("none").data.empty());
}

TEST_F(Safetensors, EveryTypeOfTheEngineIsRead) {
  const std::vector<std::pair<std::string, DType>> types = {
      {"F32", DType::f32},           {"F16", DType::f16},        {"BF16", DType::bf16}, {"I32", DType::i32},
      {"I64", DType::i64},           {"U8", DType::u8},          {"I8", DType::i8},     {"F8_E4M3", DType::f8_e4m3},
      {"F8_E4M3FN", DType::f8_e4m3}, {"F8_E8M0", DType::f8_e8m0}};
  for (const auto& [name, type] : types) {
    const auto bytes = std::to_string(3 * size_of(type));
    const auto file = open(R"({"t": {"dtype": ")" + name + R"(", "shape": [3], "data_offsets": [0, )" + bytes + "]}}",
                           std::string(24, 'x'));
    EXPECT_EQ(file.tensor("t").dtype, type);
  }
}

TEST_F(Safetensors, ViewsStayValidWhenTheFileIsMovedAndRemovedFromDisk) {
  auto file = open(R"({"t": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]}})", "abc");
  const auto view = file.tensor("t").data;
  const auto moved = std::move(file);
  std::filesystem::remove(file_);
  EXPECT_EQ(text_of(view), "abc");
  EXPECT_EQ(moved.tensor("t").data.data(), view.data());
}

// Bytes of files that are in this process's memory.
long file_bytes_resident() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.rfind("RssFile:", 0) == 0) return std::stol(line.substr(8)) * 1024;
  }
  return -1;
}

TEST_F(Safetensors, PagesCanBeDroppedFromMemoryAndReadAgain) {
  constexpr long kBytes = 32 << 20;
  const auto file =
      open(R"({"t": {"dtype": "U8", "shape": [33554432], "data_offsets": [0, 33554432]}})", std::string(kBytes, 'x'));
  const auto view = file.tensor("t").data;
  const auto all_x = [&] {
    return std::all_of(view.begin(), view.end(), [](std::byte b) { return b == std::byte{'x'}; });
  };
  EXPECT_TRUE(all_x());
  const long before = file_bytes_resident();
  file.drop_pages();
  if (before >= 0) {
    EXPECT_LT(file_bytes_resident(), before - kBytes / 2);
  }
  EXPECT_TRUE(all_x());
}

TEST_F(Safetensors, AnUnsupportedTypeIsRejectedOnlyWhenItIsRead) {
  const auto file = open(R"({"t": {"dtype": "F64", "shape": [1], "data_offsets": [0, 8]},
                             "u": {"dtype": "I8", "shape": [1], "data_offsets": [8, 9]},
                             "v": {"dtype": "F4_OF_2040", "shape": [3], "data_offsets": [9, 10]}})",
                         "0123456789");
  EXPECT_EQ(text_of(file.tensor("u").data), "8");
  expect_refused([&] { file.tensor("t"); }, "F64", ErrorCode::unsupported);
  expect_refused([&] { file.tensor("t"); }, "F32, F16, BF16, I32, I64, U8, I8", ErrorCode::unsupported);
  expect_refused([&] { file.tensor("v"); }, "F4_OF_2040", ErrorCode::unsupported);
}

TEST_F(Safetensors, TheErrorForAMissingTensorHasTheNearestName) {
  const auto file = open(R"({"model.norm.weight": {"dtype": "I8", "shape": [1], "data_offsets": [0, 1]},
                             "lm_head.weight": {"dtype": "I8", "shape": [1], "data_offsets": [1, 2]}})",
                         "01");
  expect_refused([&] { file.tensor("model.norm.wieght"); }, "nearest name is model.norm.weight");
  expect_refused([&] { file.tensor("something.else.altogether.and.far"); }, "no tensor something.else");
}

TEST_F(Safetensors, BrokenFilesAreRejectedWithTheReason) {
  const auto open_now = [&] { SafetensorsFile::open(file_); };
  expect_refused(open_now, "No such file");
  write("");
  expect_refused(open_now, "truncated: it has 0 bytes");
  write("1234567");
  expect_refused(open_now, "truncated: it has 7 bytes");
  write(length_of(20) + "{}");
  expect_refused(open_now, "truncated: its header needs 28 bytes, but it has 10");
  write(length_of(100'000'001) + "{}");
  expect_refused(open_now, "100000001");
  write(length_of(~0ULL) + "{}");
  expect_refused(open_now, "probably not a safetensors file");

  const std::vector<std::pair<std::string, std::string>> headers = {
      {R"({"t": )", "header is not valid"},
      {R"([1])", "not a JSON object"},
      {"", "header is not valid"},
      {R"({"t": 3})", "header is not valid"},
      {R"({"t": {"dtype": "U8", "shape": [1]}})", "data_offsets"},
      {R"({"t": {"dtype": "U8", "data_offsets": [0, 1]}})", "shape"},
      {R"({"t": {"dtype": 8, "shape": [1], "data_offsets": [0, 1]}})", "header is not valid"},
      {R"({"__metadata__": {"a": 1}})", "header is not valid"},
      {R"({"t": {"dtype": "U8", "shape": [4], "data_offsets": [5, 9]}})", "ends at byte 9 of the data"},
      {R"({"t": {"dtype": "U8", "shape": [4], "data_offsets": [18446744073709551615, 3]}})", "ascending"},
      {R"({"t": {"dtype": "U8", "shape": [4], "data_offsets": [4, 0]}})", "ascending"},
      {R"({"t": {"dtype": "U8", "shape": [4], "data_offsets": [0]}})", "ascending"},
      {R"({"t": {"dtype": "U8", "shape": [4], "data_offsets": [0, -4]}})", "data_offsets = [0,-4]"},
      {R"({"t": {"dtype": "U8", "shape": [-4], "data_offsets": [0, 4]}})", "shape = [-4]"},
      {R"({"t": {"dtype": "U8", "shape": [4.0], "data_offsets": [0, 4]}})", "shape = [4.0]"},
      {R"({"t": {"dtype": "U8", "shape": ["4"], "data_offsets": [0, 4]}})", "shape"},
      {R"({"t": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}})", "has 4 bytes, expected 8"},
      {R"({"t": {"dtype": "F32", "shape": [4294967296, 4294967296], "data_offsets": [0, 4]}})", "expected far more"},
      {R"({"t": {"dtype": "F32", "shape": [9223372036854775807, 2], "data_offsets": [0, 4]}})", "expected far more"},
      {R"({"t": {"dtype": "F32", "shape": [18446744073709551615, 2], "data_offsets": [0, 4]}})", "expected far more"},
      {R"({"t": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]},
           "u": {"dtype": "U8", "shape": [3], "data_offsets": [2, 5]}})",
       "tensors t and u overlap at byte 2"},
  };
  for (const auto& [header, why] : headers) {
    expect_refused([&, &bad = header] { open(bad, "01234567"); }, why);
  }
  const std::string deep = std::string(1'000'000, '[') + std::string(1'000'000, ']');
  expect_refused([&] { open(R"({"t": {"dtype": "U8", "shape": )" + deep + R"(, "data_offsets": [0, 4]}})", ""); },
                 "tensor t has shape = array");
  std::filesystem::remove(file_);
  std::filesystem::create_directory(file_);
  expect_refused(open_now, "not a regular file");
}

}  // namespace
}  // namespace charonia
