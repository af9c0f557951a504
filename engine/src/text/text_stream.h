// Splits a sequence's tokens into responses. A response ends at the end of a character and never inside a possible stop
// word. Finds stop words inside tokens and across tokens.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "text/stop_words.h"
#include "text/token_table.h"
#include "text/utf8.h"

namespace charonia::text {

// A part that can be sent now: the first `num_tokens` tokens that were pushed and not taken, and the range of their
// joined bytes that is text.
struct TextChunk {
  int num_tokens = 0;
  int text_begin = 0;
  int text_end = 0;
  std::string text;  // those bytes as valid UTF-8 (maximal invalid subparts become U+FFFD)
};

class TextStream {
 public:
  // stop_words: may be null. strip_leading_space: drop one leading space of the text, if the token table says that the
  // tokenizer's decoder does this; this space is never part of a stop word. The table must outlive the stream.
  // stop_until: marks that end the search for stop words (text, or special tokens as the vocabulary spells them); may
  // be null. From the first mark on, and within it, stop words do not count. Text that may be the beginning of a mark
  // is held back.
  TextStream(const TokenTable& table, std::shared_ptr<const StopWords> stop_words, bool strip_leading_space,
             std::shared_ptr<const StopWords> stop_until = nullptr);

  // Adds a token. Returns true if the text now contains a stop word: then the text ends before it and the sequence must
  // be finished. The stop word that ends first wins; among those, the one that begins first. While min_tokens applies,
  // the caller passes match_stop = false: a stop word that ends within this token does not count, but one that begins
  // here and ends in a later token does. Tokens after a stop word are not part of the text.
  bool push(std::int32_t token, bool match_stop);

  // Adds a token that is not part of the text, whatever its bytes (an end id). The text ends before it.
  void push_silent(std::int32_t token);

  // Takes the text that can be sent now: up to the last end of a token that later tokens cannot change. May contain no
  // token if everything is held back.
  TextChunk take();
  // Drops the first tokens. Another stream that was given the same tokens has already returned them.
  void skip(int num_tokens) { if (num_tokens > 0) cut(static_cast<std::size_t>(num_tokens), 0); }
  // Takes the rest when the sequence ended for another reason, or when push() returned true.
  TextChunk finish();

  // Whether there is a stop word within a possible mark (stop_until). If nothing follows, the text ends before the stop
  // word.
  bool holds_stop() const { return waiting_.has_value(); }

 private:
  struct Held {
    std::size_t end = 0;             // end of the token's text in pending_
    bool between_characters = true;  // whether a character ends there
  };

  // A stop word that has ended: its beginning in pending_, and the number of bytes from there to now.
  struct Stop {
    std::size_t begin = 0, length = 0;
  };

  // The length of the longest stop word that ends with this byte, or 0.
  std::size_t follow(char byte);
  // Adds one byte of a token, special tokens included. `length` is the length of the stop word that ends with it at
  // `end` in pending_, or 0. Decides whether the stop word ends the text, and whether later stop words count.
  void follow_marks(char byte, std::size_t length, std::size_t end);
  TextChunk cut(std::size_t num_tokens, std::size_t text_end);

  const TokenTable* table_;
  std::shared_ptr<const StopWords> stop_words_;
  // For each stop word, see StopWords::push(). Empty when stop words no longer count.
  std::vector<std::uint32_t> matched_;
  std::shared_ptr<const StopWords> stop_until_;
  std::vector<std::uint32_t> until_matched_;  // the same for each mark
  std::optional<Stop> waiting_;               // a stop word within a possible mark
  Utf8State utf8_;
  std::string pending_;             // joined text bytes of the tokens that were not taken
  std::vector<Held> held_;          // these tokens
  std::size_t settled_ = 0;         // how many of them can be sent
  std::size_t examined_ = 0;        // >= settled_: how many end before every possible stop word
  std::optional<std::size_t> end_;  // the end of the text in pending_, once it is known
  bool strip_ = false;              // a leading space still has to be dropped
  std::size_t dropped_ = 0;         // 1 if pending_ begins with the dropped space
};

}  // namespace charonia::text
