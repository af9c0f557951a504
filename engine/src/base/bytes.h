// Amounts of memory as users write and read them.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace charonia {

// "8GiB", "500MB", "1.5 TB", "1000000": a number with or without a unit. kB, MB, GB, TB are powers of 1000; KiB, MiB,
// GiB, TiB of 1024; upper and lower case are the same. Nothing for what is none, or less than a byte.
std::optional<std::int64_t> parse_bytes(std::string_view text);

// "7.25 GiB", "512 B": three digits or so, in units of 1024.
std::string bytes_text(std::int64_t bytes);

}  // namespace charonia
