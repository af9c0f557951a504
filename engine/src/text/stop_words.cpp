#include "text/stop_words.h"

#include <utility>

#include "charonia/error.h"

namespace charonia::text {

StopWords::StopWords(std::vector<std::string> words) {
  words_.reserve(words.size());
  for (auto& word : words) {
    if (word.empty()) throw Error(ErrorCode::invalid_argument, "stop_words must not contain an empty word");
    std::vector<std::uint32_t> shorter(word.size() + 1, 0);
    for (std::size_t i = 1; i < word.size(); ++i) {
      auto length = shorter[i];
      while (length > 0 && word[length] != word[i]) length = shorter[length];
      shorter[i + 1] = word[length] == word[i] ? length + 1 : 0;
    }
    words_.push_back({std::move(word), std::move(shorter)});
  }
}

bool StopWords::push(std::size_t word, std::uint32_t& matched, char byte) const {
  const auto& [bytes, shorter] = words_[word];
  while (matched > 0 && bytes[matched] != byte) matched = shorter[matched];
  if (bytes[matched] == byte) ++matched;
  if (matched < bytes.size()) return false;
  matched = shorter[matched];
  return true;
}

}  // namespace charonia::text
