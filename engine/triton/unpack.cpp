#include "unpack.h"

#include <algorithm>
#include <cstring>

#include "base/text.h"
#include "charonia/error.h"

namespace charonia::triton {
namespace {

constexpr std::size_t kMaxEchoBytes = std::size_t{64} << 20;

template <class... Parts>
[[noreturn]] void reject_packed(const Parts&... text) {
  throw Error(ErrorCode::invalid_argument, cat(text...));
}

}  // namespace

std::vector<std::string> unpack_strings(std::string_view name, std::string_view bytes, std::size_t most) {
  std::vector<std::string> values;
  while (!bytes.empty()) {
    if (values.size() == most) reject_packed(name, ": more than ", most, " elements; send at most ", most);
    std::uint32_t length = 0;
    if (bytes.size() < sizeof(length)) reject_packed(name, ": the BYTES tensor ends within an element's length");
    std::memcpy(&length, bytes.data(), sizeof(length));
    bytes.remove_prefix(sizeof(length));
    if (bytes.size() < length) reject_packed(name, ": the BYTES tensor ends within an element");
    values.emplace_back(bytes.substr(0, length));
    bytes.remove_prefix(length);
  }
  return values;
}

std::vector<std::vector<TokenId>> unpack_bad_words(std::span<const std::int32_t> ids,
                                                   std::span<const std::int32_t> ends) {
  std::vector<std::vector<TokenId>> words;
  std::int32_t begin = 0;
  for (const auto end : ends) {
    if (end == -1) break;
    if (end <= begin || end > std::ssize(ids)) {
      reject_packed("bad_words_ids: the end offset ", end, " must be above ", begin, " and at most ", ids.size());
    }
    if (words.size() == kMaxBadWords) {
      reject_packed("bad_words_ids: more than ", kMaxBadWords, " words; send at most ", kMaxBadWords);
    }
    words.emplace_back(ids.begin() + begin, ids.begin() + end);
    begin = end;
  }
  return words;
}

void check_echo(std::string_view echo, int sequences) {
  const auto times = static_cast<std::size_t>(std::clamp(sequences, 1, SamplingMaximum::n));
  if (echo.size() > kMaxEchoBytes / times) {
    reject_packed(
        "echo: ", echo.size(), " bytes for each of ", times, " sequences are more than ", kMaxEchoBytes,
        " bytes; send a shorter text_input, a smaller num_return_sequences, or exclude_input_in_output = true");
  }
}

}  // namespace charonia::triton
