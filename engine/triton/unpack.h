// Lists out of tensors' bytes, which are checked while they are read: a request may claim millions of elements. Without
// Triton's API.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "charonia/types.h"

namespace charonia::triton {

// Every function throws Error(invalid_argument) naming the input, what it is and what would be right.

// The elements of a BYTES tensor: each is its length in 4 bytes, little-endian, and its bytes. At most `most` of them.
std::vector<std::string> unpack_strings(std::string_view name, std::string_view bytes, std::size_t most);

// bad_words_ids [2, n]: row 0 the sequences' ids joined, row 1 their end offsets, padded with -1. At most kMaxBadWords.
std::vector<std::vector<TokenId>> unpack_bad_words(std::span<const std::int32_t> ids,
                                                   std::span<const std::int32_t> ends);

// The echo goes out with the first response of each of `sequences` (that their number is in
// range is the engine's to check): at most 64 MiB in all.
void check_echo(std::string_view echo, int sequences);

// They go out with every response: at most 1 MiB.
void check_parsing_options(std::string_view options);

}  // namespace charonia::triton
