// The bytes of every token, written at conversion (token_table.safetensors), and what the tokenizer's decoder does to
// the beginning of a text.
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
  // File: tensors `offsets` i64 [vocab + 1], `bytes` u8 [total], `special` u8 [vocab]; metadata
  // `strip_leading_space` "0" | "1". A special token's bytes are kept in the table but are no part of a text.
  // Throws Error(invalid_argument), naming the file and what is wrong, for any other file.
  static TokenTable load(const std::filesystem::path& file);
  // special: one entry per token, not 0 for special ones.
  TokenTable(std::vector<std::string> tokens, std::vector<std::uint8_t> special, bool strip_leading_space);

  int size() const;
  // The token's part of a text: empty for special tokens and for ids past the table (padding of the vocabulary).
  std::string_view text_bytes(std::int32_t id) const;
  std::string_view raw_bytes(std::int32_t id) const;  // special tokens' too
  bool is_special(std::int32_t id) const;
  bool strip_leading_space() const;

 private:
  TokenTable() = default;

  std::vector<std::int64_t> offsets_;  // [size + 1]: where each token's bytes begin in bytes_
  std::string bytes_;
  std::vector<std::uint8_t> special_;
  bool strip_leading_space_ = false;
};

}  // namespace charonia::text
