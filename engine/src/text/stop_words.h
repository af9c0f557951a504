// The stop words of a request, prepared for the search in a byte stream. All sequences of a request share them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace charonia::text {

// The algorithm of Knuth, Morris and Pratt (1977). Takes 5 bytes for each byte of a word.
class StopWords {
 public:
  // Throws Error(invalid_argument) if a word is empty.
  explicit StopWords(std::vector<std::string> words);

  std::size_t size() const { return words_.size(); }
  std::size_t length(std::size_t word) const { return words_[word].bytes.size(); }

  // Adds one byte of the text. `matched` is the length of the longest suffix of the text that is a prefix of the word:
  // 0 at first, < length(word) after each call. Returns true if the word ends with this byte.
  bool push(std::size_t word, std::uint32_t& matched, char byte) const;

 private:
  struct Word {
    std::string bytes;
    // [i]: matched length to continue with if i bytes matched and the next byte does not.
    std::vector<std::uint32_t> shorter;
  };
  std::vector<Word> words_;
};

}  // namespace charonia::text
