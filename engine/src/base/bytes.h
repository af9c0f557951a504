// Amounts of memory as users write and read them.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace charonia {

// Parses "8GiB", "500MB", "1.5 TB" or "1000000": a number with or without a unit. kB, MB, GB, TB are powers of 1000;
// KiB, MiB, GiB, TiB are powers of 1024. Case does not matter. Empty if the text is not an amount, or less than one
// byte.
std::optional<std::int64_t> parse_bytes(std::string_view text);

// "7.25 GiB", "512 B": about three digits, in units of 1024.
std::string bytes_text(std::int64_t bytes);

}  // namespace charonia
