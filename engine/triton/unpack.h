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

// Returns the elements of a BYTES tensor, at most `most`. Each element is its length in 4 bytes, little-endian, then
// its bytes.
std::vector<std::string> unpack_strings(std::string_view name, std::string_view bytes, std::size_t most);

// Reads bad_words_ids [2, n], at most kMaxBadWords sequences. Row 0 has the ids of all sequences, row 1 the end offset
// of each sequence, padded with -1.
std::vector<std::vector<TokenId>> unpack_bad_words(std::span<const std::int32_t> ids,
                                                   std::span<const std::int32_t> ends);

// Checks that the echo has at most 64 MiB in total. It is sent with the first response of each of `sequences`. The
// engine checks the number of sequences.
void check_echo(std::string_view echo, int sequences);

}  // namespace charonia::triton
