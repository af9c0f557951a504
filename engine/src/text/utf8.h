// Decodes UTF-8 one byte at a time (table 3-7 of the Unicode standard); accepts invalid bytes.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace charonia::text {

// The state of a decoder: between characters, or inside a character that may still become valid.
class Utf8State {
 public:
  bool between_characters() const { return remaining_ == 0; }

  // Adds one byte. Returns true if the byte does not continue the current character: that character stays unfinished
  // (its bytes are one maximal invalid subpart), and the byte is the first of the next character.
  bool push(unsigned char byte);
  // After push(): the byte cannot be part of a character at this position.
  bool is_invalid_byte() const { return invalid_; }

 private:
  std::uint8_t remaining_ = 0;             // bytes that the character still needs
  std::uint8_t low_ = 0x80, high_ = 0xBF;  // valid range of the next byte
  bool invalid_ = false;
};

// Replaces every maximal invalid subpart by U+FFFD, like Python's bytes.decode("utf-8", "replace").
std::string to_valid_utf8(std::string_view bytes);

}  // namespace charonia::text
