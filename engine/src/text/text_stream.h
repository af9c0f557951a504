// Cuts a sequence's tokens into responses: at ends of characters, never inside what may become a stop word, and finds
// the stop words, inside and across tokens.
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

// What can be sent now: `num_tokens` tokens of those pushed and not taken, and which part of their joined bytes is
// text.
struct TextChunk {
  int num_tokens = 0;
  int text_begin = 0;
  int text_end = 0;
  std::string text;  // those bytes as valid UTF-8 (maximal invalid subparts become U+FFFD)
};

class TextStream {
 public:
  // stop_words: null: none. strip_leading_space: drop one leading space of the whole text, if the table says that the
  // tokenizer's decoder does so; that space can be no part of a stop word. The table must outlive the stream.
  // stop_until: null: none; from the first of these on, which may be special tokens as the vocabulary spells them, no
  // stop word counts. Nor does one within the first of them: what may be one is waited for.
  TextStream(const TokenTable& table, std::shared_ptr<const StopWords> stop_words, bool strip_leading_space,
             std::shared_ptr<const StopWords> stop_until = nullptr);

  // One more token. Returns true when the text now contains a stop word (the earliest-ending one; among those, the
  // earliest-beginning): the text ends before it and the sequence is to be finished. While min_tokens holds, the
  // caller passes match_stop = false: a stop word that ends within this token does not count (one that began earlier
  // and ends in a later token does). Tokens after a stop word have no part in the text.
  bool push(std::int32_t token, bool match_stop);

  // One more token that has no part in the text, whatever its bytes (an end id). The text ends before it.
  void push_silent(std::int32_t token);

  // Takes what can be sent now: up to the last end of a token before which everything is settled, whatever comes. May
  // have no token (all is held back).
  TextChunk take();
  // Takes the rest when the sequence has ended for another reason, or because push returned true.
  TextChunk finish();

  // Whether there is a stop word within the beginning of one of stop_until. If nothing follows, the text ends before it.
  bool holds_stop() const { return waiting_.has_value(); }

 private:
  struct Held {
    std::size_t end = 0;             // of the token's text in pending_
    bool between_characters = true;  // there
  };

  // A stop word that has ended: where it begins in pending_, and how many bytes there are from there on.
  struct Stop {
    std::size_t begin = 0, length = 0;
  };

  // The length of the longest stop word that ends with this byte, or 0.
  std::size_t follow(char byte);
  // One more byte of a token, special ones' too. length: of the stop word that ends with it, at `end` in pending_; 0:
  // none does. Finds out whether it ends the text, and whether stop words do not count any more.
  void follow_marks(char byte, std::size_t length, std::size_t end);
  TextChunk cut(std::size_t num_tokens, std::size_t text_end);

  const TokenTable* table_;
  std::shared_ptr<const StopWords> stop_words_;
  std::vector<std::uint32_t> matched_;  // of each stop word, see StopWords::push(); empty when none counts any more
  std::shared_ptr<const StopWords> stop_until_;
  std::vector<std::uint32_t> until_matched_;  // of each of those
  std::optional<Stop> waiting_;               // within what may become one of those
  Utf8State utf8_;
  std::string pending_;             // joined text bytes of the tokens not taken
  std::vector<Held> held_;          // those tokens
  std::size_t settled_ = 0;         // how many of them can be sent
  std::size_t examined_ = 0;        // >= settled_: how many end where no stop word can begin any more
  std::optional<std::size_t> end_;  // where the text ends in pending_, once that is known
  bool strip_ = false;              // a leading space is still to be dropped
  std::size_t dropped_ = 0;         // 1: pending_ begins with the space that is no text
};

}  // namespace charonia::text
