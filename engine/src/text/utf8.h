// UTF-8, one byte at a time (table 3-7 of the Unicode standard), with invalid bytes allowed.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace charonia::text {

// Where a decoder stands after some bytes: between characters, or inside of one that may still become valid.
class Utf8State {
 public:
  bool between_characters() const { return remaining_ == 0; }

  // One more byte. Returns true when it does not continue the character that had begun: that one stays unfinished (what
  // there is of it is one maximal invalid subpart) and the byte counts as the first of the next.
  bool push(unsigned char byte);
  // After push(): the byte can be no part of any character where it stands.
  bool is_invalid_byte() const { return invalid_; }

 private:
  std::uint8_t remaining_ = 0;             // bytes that the character still needs
  std::uint8_t low_ = 0x80, high_ = 0xBF;  // range of the next of them
  bool invalid_ = false;
};

// `bytes` with every maximal invalid subpart replaced by U+FFFD, as Python's bytes.decode("utf-8", "replace").
std::string to_valid_utf8(std::string_view bytes);

}  // namespace charonia::text
