#include "text/utf8.h"

namespace charonia::text {

bool Utf8State::push(unsigned char byte) {
  const bool inside = remaining_ > 0;
  invalid_ = false;
  if (inside && byte >= low_ && byte <= high_) {
    --remaining_;
    low_ = 0x80;
    high_ = 0xBF;
    return false;
  }
  remaining_ = 0;
  low_ = 0x80;
  high_ = 0xBF;
  if (byte >= 0xC2 && byte <= 0xDF) {
    remaining_ = 1;
  } else if (byte >= 0xE0 && byte <= 0xEF) {
    remaining_ = 2;
    if (byte == 0xE0) low_ = 0xA0;   // lower values would fit into two bytes
    if (byte == 0xED) high_ = 0x9F;  // higher values are surrogates
  } else if (byte >= 0xF0 && byte <= 0xF4) {
    remaining_ = 3;
    if (byte == 0xF0) low_ = 0x90;   // lower values would fit into three bytes
    if (byte == 0xF4) high_ = 0x8F;  // higher values are beyond U+10FFFF
  } else {
    invalid_ = byte >= 0x80;
  }
  return inside;
}

std::string to_valid_utf8(std::string_view bytes) {
  constexpr std::string_view kReplacement = "\xEF\xBF\xBD";
  std::string out;
  out.reserve(bytes.size());
  Utf8State state;
  std::size_t begin = 0;  // start of the unfinished character
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    if (state.push(static_cast<unsigned char>(bytes[i]))) {
      out += kReplacement;
      begin = i;
    }
    if (!state.between_characters()) continue;
    if (state.is_invalid_byte()) {
      out += kReplacement;
    } else {
      out += bytes.substr(begin, i + 1 - begin);
    }
    begin = i + 1;
  }
  if (!state.between_characters()) out += kReplacement;
  return out;
}

}  // namespace charonia::text
