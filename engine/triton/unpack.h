// Reads lists from the bytes of tensors. The limits are checked while reading, because a request may claim millions of
// elements. Does not use Triton's API.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "charonia/types.h"

namespace charonia::triton {

// Every function throws Error(invalid_argument), which names the input, its value and valid values.

// The elements of a BYTES tensor: each is its length in 4 bytes, little-endian, and its bytes. At most `most` of them.
std::vector<std::string> unpack_strings(std::string_view name, std::string_view bytes, std::size_t most);

// bad_words_ids [2, n]: row 0 the sequences' ids joined, row 1 their end offsets, padded with -1. At most kMaxBadWords.
std::vector<std::vector<TokenId>> unpack_bad_words(std::span<const std::int32_t> ids,
                                                   std::span<const std::int32_t> ends);

// The echo is sent with the first response of each of `sequences`: at most 64 MiB in all. The engine checks the number
// of sequences.
void check_echo(std::string_view echo, int sequences);

}  // namespace charonia::triton
