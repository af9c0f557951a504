// The bytes of every token (token_table.safetensors, written at conversion), and whether the tokenizer's decoder strips
// the leading space of a text.
#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace charonia::text {

class TokenTable {
 public:
  // File: tensors `offsets` i64 [vocab + 1], `bytes` u8 [total], `special` u8 [vocab]; metadata `strip_leading_space`
  // "0" | "1". The table has the bytes of special tokens, but they are not part of a text. Throws
  // Error(invalid_argument) with the file and the fault for any other file.
  static TokenTable load(const std::filesystem::path& file);
  // special: one entry per token, not 0 for special tokens.
  TokenTable(std::vector<std::string> tokens, std::vector<std::uint8_t> special, bool strip_leading_space);

  int size() const { return static_cast<int>(special_.size()); }
  // The bytes that the token adds to a text: empty for special tokens and for ids beyond the table (padding of the
  // vocabulary).
  std::string_view text_bytes(std::int32_t id) const;
  std::string_view raw_bytes(std::int32_t id) const;  // with the bytes of special tokens
  bool is_special(std::int32_t id) const;
  bool strip_leading_space() const { return strip_leading_space_; }

 private:
  TokenTable() = default;

  std::vector<std::int64_t> offsets_;  // [size + 1]: offset of each token's bytes in bytes_
  std::string bytes_;
  std::vector<std::uint8_t> special_;
  bool strip_leading_space_ = false;
};

}  // namespace charonia::text
