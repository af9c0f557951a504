// Reads lists from the bytes of tensors. The limits are checked while reading, because a request may claim millions of
// elements. Does not use Triton's API.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/text.h"
#include "charonia/error.h"
#include "charonia/types.h"

namespace charonia::triton {

template <class... Parts>
[[noreturn]] void reject(const Parts&... text) {
  throw Error(ErrorCode::invalid_argument, cat(text...));
}

// Every function throws Error(invalid_argument), which names the input, its value and valid values.

// Returns the elements of a BYTES tensor, at most `most`. Each element is its length in 4 bytes, little-endian, then
// its bytes.
inline std::vector<std::string> unpack_strings(std::string_view name, std::string_view bytes, std::size_t most) {
  std::vector<std::string> values;
  while (!bytes.empty()) {
    if (values.size() == most) reject(name, ": more than ", most, " elements; send at most ", most);
    std::uint32_t length = 0;
    if (bytes.size() < sizeof(length)) reject(name, ": the BYTES tensor ends within an element's length");
    std::memcpy(&length, bytes.data(), sizeof(length));
    bytes.remove_prefix(sizeof(length));
    if (bytes.size() < length) reject(name, ": the BYTES tensor ends within an element");
    values.emplace_back(bytes.substr(0, length));
    bytes.remove_prefix(length);
  }
  return values;
}

// Reads the tensor `name` [2, n], at most `most` lists. Row 0 has the ids of all lists, row 1 the end offset of each
// list, padded with -1.
inline std::vector<std::vector<TokenId>> unpack_token_lists(std::string_view name, std::span<const std::int32_t> ids,
                                                            std::span<const std::int32_t> ends, std::size_t most) {
  std::vector<std::vector<TokenId>> lists;
  std::int32_t begin = 0;
  for (const auto end : ends) {
    if (end == -1) break;
    if (end <= begin || end > std::ssize(ids)) {
      reject(name, ": the end offset ", end, " must be above ", begin, " and at most ", ids.size());
    }
    if (lists.size() == most) reject(name, ": more than ", most, " lists; send at most ", most);
    lists.emplace_back(ids.begin() + begin, ids.begin() + end);
    begin = end;
  }
  return lists;
}

// Checks that the echo has at most 64 MiB in total. It is sent with the first response of each of `sequences`. The
// engine checks the number of sequences.
inline void check_echo(std::string_view echo, int sequences) {
  constexpr std::size_t kMaxEchoBytes = std::size_t{64} << 20;
  const auto times = static_cast<std::size_t>(std::clamp(sequences, 1, SamplingMaximum::n));
  if (echo.size() > kMaxEchoBytes / times) {
    reject("echo: ", echo.size(), " bytes for each of ", times, " sequences are more than ", kMaxEchoBytes,
           " bytes; send a shorter text_input, a smaller num_return_sequences, or exclude_input_in_output = true");
  }
}

}  // namespace charonia::triton
