// SHA-256 (FIPS 180-4).
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

namespace charonia {

// The digest as four numbers; its first byte is the highest byte of the first number.
std::array<std::uint64_t, 4> sha256(std::string_view bytes);
std::string sha256_hex(std::string_view bytes);  // 64 digits

}  // namespace charonia
