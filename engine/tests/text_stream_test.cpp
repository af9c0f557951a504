#include "text/text_stream.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <optional>
#include <random>

#include "charonia/error.h"

namespace charonia::text {
namespace {

// The definition: Unicode's table of well-formed sequences (table 3-7). The rest of a sequence is 0x80 .. 0xBF.
struct Sequence {
  int first, last, second_first, second_last;
  std::size_t size;
};
constexpr Sequence kWellFormed[] = {
    {0x00, 0x7F, 0x80, 0xBF, 1}, {0xC2, 0xDF, 0x80, 0xBF, 2}, {0xE0, 0xE0, 0xA0, 0xBF, 3},
    {0xE1, 0xEC, 0x80, 0xBF, 3}, {0xED, 0xED, 0x80, 0x9F, 3}, {0xEE, 0xEF, 0x80, 0xBF, 3},
    {0xF0, 0xF0, 0x90, 0xBF, 4}, {0xF1, 0xF3, 0x80, 0xBF, 4}, {0xF4, 0xF4, 0x80, 0x8F, 4}};

// Replaces every longest beginning of a sequence, and every other byte, by U+FFFD. `decodable`: the number of bytes
// whose decoding does not depend on later bytes.
std::string decoded(std::string_view bytes, std::size_t& decodable) {
  std::string out;
  for (std::size_t at = decodable = 0; at < bytes.size();) {
    const auto byte = [&](std::size_t i) { return int{static_cast<unsigned char>(bytes[at + i])}; };
    const auto* const row = std::ranges::find_if(
        kWellFormed, [&](const Sequence& one) { return byte(0) >= one.first && byte(0) <= one.last; });
    std::size_t size = 1;
    while (row != std::end(kWellFormed) && size < row->size && at + size < bytes.size() &&
           byte(size) >= (size == 1 ? row->second_first : 0x80) &&
           byte(size) <= (size == 1 ? row->second_last : 0xBF)) {
      ++size;
    }
    const bool is_whole = row != std::end(kWellFormed) && size == row->size;
    out += is_whole ? bytes.substr(at, size) : "\xEF\xBF\xBD";
    at += size;
    if (is_whole || row == std::end(kWellFormed) || at < bytes.size()) decodable = at;
  }
  return out;
}

// Length of the longest prefix of `bytes` whose decoding no later byte can change.
std::size_t decodable_prefix(std::string_view bytes) {
  Utf8State state;
  std::size_t end = 0;
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    // A byte that cuts off a character fixes the decoding of the bytes before it.
    if (state.push(static_cast<unsigned char>(bytes[i]))) end = i;
    if (state.between_characters()) end = i + 1;
  }
  return end;
}

// Bytes at the edges of UTF-8's ranges, and a few ASCII bytes.
constexpr std::string_view kEdges =
    "ab \x7F\x80\x8F\x90\x9F\xA0\xBF\xC0\xC1\xC2\xDF\xE0\xE1\xEC\xED\xEE\xEF\xF0\xF1\xF3\xF4\xF5\xFF";

class Random {
 public:
  explicit Random(std::uint64_t seed) : engine_(seed) {}
  int below(int n) { return std::uniform_int_distribution<int>(0, n - 1)(engine_); }
  std::string bytes(std::string_view alphabet, int most) {
    std::string out(static_cast<std::size_t>(below(most + 1)), ' ');
    for (auto& byte : out) byte = alphabet[static_cast<std::size_t>(below(static_cast<int>(alphabet.size())))];
    return out;
  }

 private:
  std::mt19937_64 engine_;
};

TEST(Utf8, EveryTextOfEdgesIsDecodedByTheTable) {
  for (std::size_t length = 0; length <= 4; ++length) {
    std::string bytes(length, kEdges[0]);
    std::vector<std::size_t> digits(length, 0);
    for (bool more = true; more;) {
      std::size_t decodable = 0;
      ASSERT_EQ(to_valid_utf8(bytes), decoded(bytes, decodable)) << testing::PrintToString(bytes);
      ASSERT_EQ(decodable_prefix(bytes), decodable) << testing::PrintToString(bytes);
      more = false;
      for (std::size_t i = 0; i < length && !more; ++i) {
        digits[i] = (digits[i] + 1) % kEdges.size();
        bytes[i] = kEdges[digits[i]];
        more = digits[i] != 0;
      }
    }
  }
}

// A table in which token i has the bytes tokens[i]; the last one is special.
TokenTable table_of(std::vector<std::string> tokens, bool strip = false) {
  tokens.emplace_back("<special>");
  std::vector<std::uint8_t> special(tokens.size(), 0);
  special.back() = 1;
  return {std::move(tokens), std::move(special), strip};
}

std::shared_ptr<const StopWords> stops(std::vector<std::string> words) {
  return std::make_shared<const StopWords>(std::move(words));
}

// Pushes tokens 0, 1, 2, ... of `tokens` and takes after each; "|" separates the chunks, "$" marks a stop.
std::string stream(const std::vector<std::string>& tokens, const std::vector<std::string>& stop_words,
                   bool strip = false) {
  const auto table = table_of(tokens, strip);
  TextStream stream(table, stops(stop_words), strip);
  std::string out;
  int taken = 0;
  for (int i = 0; i < static_cast<int>(tokens.size()); ++i) {
    if (stream.push(i, true)) {
      const auto chunk = stream.finish();
      EXPECT_EQ(taken + chunk.num_tokens, i + 1);
      return out + chunk.text + "$";
    }
    const auto chunk = stream.take();
    taken += chunk.num_tokens;
    EXPECT_LE(taken, i + 1);
    if (chunk.num_tokens > 0) out += chunk.text + "|";
  }
  const auto last = stream.finish();
  EXPECT_EQ(taken + last.num_tokens, static_cast<int>(tokens.size()));
  return out + last.text;
}

// Beside the property tests below: what the reader of a stream sees.
TEST(TextStream, CharactersAreSentWholeAndStopWordsAreCut) {
  struct Example {
    std::vector<std::string> tokens, stop_words;
    std::string sent;
    bool strip = false;
  };
  for (const auto& [tokens, stop_words, sent, strip] :
       std::vector<Example>{{{"Hello", ",", " world"}, {}, "Hello|,| world|"},
                            {{"a", "\xE4", "\xBD", "\xA0", "b"}, {}, "a|\xE4\xBD\xA0|b|"},
                            {{"\xFF", "\xE4", "!"}, {}, "\xEF\xBF\xBD|\xEF\xBF\xBD!|"},
                            {{"a", "\xE4\xBD"}, {}, "a|\xEF\xBF\xBD"},
                            {{"one", " two END three"}, {"END"}, "one| two $"},
                            {{"one ", "E", "N", "Dx", "y"}, {"END"}, "one |$"},
                            {{"E", "N", "G", "L"}, {"END"}, "ENG|L|"},
                            {{"E", "N"}, {"END"}, "EN"},
                            {{"x", "y", "x", "y", "z"}, {"xyxz"}, "xy|xyz|"},
                            {{"a", "b", "c"}, {"bc", "abc", "c"}, "$"},
                            {{"a", "b", "c"}, {"ab", "abc"}, "$"},
                            {{"x\xE5\xA5", "\xBD\xE4\xBD", "\xA0y"}, {"\xE4\xBD\xA0"}, "x\xE5\xA5\xBD$"},
                            {{"x\xE4", "\xBD", "\xA0"}, {"\xBD"}, "x\xEF\xBF\xBD$"},
                            {{" ", " a", " b"}, {}, "| a| b|", true},
                            {{" a"}, {" a"}, "a|", true},  // the space must not count for the stop word
                            {{" a"}, {"a"}, "$", true}}) {
    EXPECT_EQ(stream(tokens, stop_words, strip), sent) << testing::PrintToString(tokens);
  }
}

TEST(TextStream, TokensAfterAStopWordHaveNoPartInTheText) {
  const auto table = table_of({"a.", "b"});
  TextStream stream(table, stops({"."}), false);
  EXPECT_TRUE(stream.push(0, true));
  EXPECT_FALSE(stream.push(1, true));
  EXPECT_EQ(stream.take().num_tokens, 0);
  const auto chunk = stream.finish();
  EXPECT_EQ(chunk.text, "a");
  EXPECT_EQ(chunk.num_tokens, 2);
}

TEST(TextStream, StreamsThatShareStopWordsDoNotDisturbEachOther) {
  const auto table = table_of({"a", "b", "x"});
  const auto shared = stops({"ab"});
  TextStream one(table, shared, false), other(table, shared, false);
  EXPECT_FALSE(one.push(0, true));
  EXPECT_FALSE(other.push(1, true)) << "streams must not share their state";
  EXPECT_FALSE(other.push(2, true));
  EXPECT_EQ(other.take().text, "bx");
  EXPECT_EQ(one.take().num_tokens, 0);
  EXPECT_TRUE(one.push(1, true));
}

TEST(TextStream, AnEmptyStopWordIsRefused) { EXPECT_THROW(StopWords({"a", ""}), Error); }

TEST(TextStream, HeldTokensAreNotExaminedRepeatedly) {
  const auto table = table_of({"a", "b"});
  constexpr int kTokens = 100'000;
  std::string word(kTokens, 'a');
  word.push_back('c');
  TextStream stream(table, stops({word}), false);
  for (int i = 0; i < kTokens; ++i) {
    stream.push(0, true);
    EXPECT_EQ(stream.take().num_tokens, 0);
  }
  stream.push(1, true);
  EXPECT_EQ(stream.take().num_tokens, kTokens + 1);
}

// Property test.

// The definition of TextStream, which examines the whole text every time.
struct Reference {
  std::vector<std::string> stop_words;
  std::string text;                 // all text bytes so far, with a dropped space
  std::size_t begin = 0;            // 1: a space is dropped
  std::vector<std::size_t> ends;    // of the tokens
  std::optional<std::size_t> stop;  // end of the text

  bool first_space_is_text = true;
  void push(std::string_view bytes, bool match_stop) {
    const auto old = text.size();
    if (text.empty() && bytes.starts_with(' ') && !first_space_is_text) begin = 1;
    text += bytes;
    ends.push_back(text.size());
    if (stop || !match_stop) return;
    for (auto end = old + 1; end <= text.size() && !stop; ++end) {
      for (const auto& word : stop_words) {
        if (end < begin + word.size() || text.compare(end - word.size(), word.size(), word) != 0) continue;
        stop = std::min(stop.value_or(end), end - word.size());
      }
    }
  }

  // The number of tokens that can be sent.
  std::size_t settled() const {
    auto limit = stop.value_or(text.size());
    for (const auto& word : stop_words) {
      for (std::size_t length = 1; !stop && length < word.size() && begin + length <= text.size(); ++length) {
        if (text.ends_with(word.substr(0, length))) limit = std::min(limit, text.size() - length);
      }
    }
    std::size_t count = 0;
    for (std::size_t i = 0; i < ends.size(); ++i) {
      const auto bytes = std::string_view(text).substr(0, ends[i]);
      if (ends[i] <= limit && decodable_prefix(bytes) == bytes.size()) count = i + 1;
    }
    return count;
  }

  std::string whole() const {
    const auto end = stop.value_or(text.size());
    return to_valid_utf8(std::string_view(text).substr(begin, end - begin));
  }
};

// The text up to a stop word, with marks that end the search for stop words.
std::string until(const std::vector<std::string>& tokens, const std::vector<std::string>& marks,
                  bool special_first = false, const std::vector<std::string>& words = {"x"}) {
  const auto table = table_of(tokens);
  TextStream stream(table, stops(words), false, stops(marks));
  std::string out;
  int held = 0;
  if (special_first) {
    EXPECT_FALSE(stream.push(static_cast<int>(tokens.size()), true));
    ++held;
  }
  for (int i = 0; i < static_cast<int>(tokens.size()); ++i) {
    if (stream.push(i, true)) return out + stream.finish().text + "$";
    const auto chunk = stream.take();
    held += 1 - chunk.num_tokens;
    out += chunk.text;
  }
  // A word of one byte cannot be partly matched.
  if (std::ranges::all_of(words, [](const auto& word) { return word.size() == 1; })) {
    EXPECT_EQ(held > 0, stream.holds_stop());
  }
  return out + stream.finish().text;
}

TEST(TextStream, StopWordsCountOnlyBeforeAMark) {
  EXPECT_EQ(until({"a", "<c", "all>", "x", "x"}, {"<call>", "{"}), "a<call>xx");
  EXPECT_EQ(until({"a", "x<call>"}, {"<call>"}), "a$") << "the stop word is in the mark's token, before the mark";
  EXPECT_EQ(until({"a", "x"}, {"<special>"}, true), "ax") << "the mark is a special token";
  EXPECT_EQ(until({"a", "x"}, {"<special>", "q"}), "a$");
  const auto within = [](const std::vector<std::string>& words, const std::vector<std::string>& tokens) {
    return until(tokens, {"<call>", "<c|"}, false, words);
  };
  EXPECT_EQ(within({"|"}, {"<", "c", "|", "|"}), "<c||") << "the stop word is the mark's last byte";
  EXPECT_EQ(within({"<"}, {"a<", "b"}), "a$") << "no mark";
  EXPECT_EQ(within({"al", "x"}, {"a<cal", "x"}), "a<c$") << "the stop word that ends first counts";
  EXPECT_EQ(within({"a<"}, {"a<", "call>"}), "$") << "the stop word begins before the mark";
  EXPECT_EQ(within({"<"}, {"a<", "ca"}), "a") << "the answer ends within the mark";
}

TEST(TextStream, AStopWordWithinAMarkOfSpecialTokens) {
  const auto table = table_of({"a", " ", "b"});
  constexpr int kSpecial = 3;
  for (const bool is_mark : {true, false}) {
    TextStream stream(table, stops({" "}), false, stops({"<special> <special>"}));
    for (const int token : {0, kSpecial, 1}) EXPECT_FALSE(stream.push(token, true));
    EXPECT_TRUE(stream.holds_stop());
    EXPECT_EQ(stream.take().text, "a");
    EXPECT_EQ(stream.push(is_mark ? kSpecial : 2, true), !is_mark);
    EXPECT_EQ(stream.push(1, true), false);
    EXPECT_EQ(stream.finish().text, is_mark ? "  " : "");
  }
  TextStream stream(table, stops({" "}), false, stops({" b"}));
  for (const int token : {0, 1}) EXPECT_FALSE(stream.push(token, true));
  stream.push_silent(kSpecial);
  EXPECT_EQ(stream.finish().text, "a") << "the answer has ended";
}

// Examines the whole text for each byte.
std::string until_reference(const std::string& text, const std::vector<std::string>& marks,
                            const std::vector<std::string>& words) {
  std::optional<std::size_t> waiting;
  for (std::size_t end = 1; end <= text.size(); ++end) {
    const auto so_far = text.substr(0, end);
    auto mark = end, word = end;  // their beginnings
    bool whole = false;
    for (const auto& one : marks) {
      whole |= so_far.ends_with(one);
      for (std::size_t length = 1; length <= std::min(one.size(), end); ++length) {
        if (so_far.ends_with(one.substr(0, length))) mark = std::min(mark, end - length);
      }
    }
    for (const auto& one : words) {
      if (so_far.ends_with(one)) word = std::min(word, end - one.size());
    }
    if (waiting && *waiting < mark) return text.substr(0, *waiting) + "$";
    if (word < mark) return text.substr(0, word) + "$";
    if (whole) return text;
    if (word < end && !waiting) waiting = word;
  }
  return text.substr(0, waiting.value_or(text.size()));
}

TEST(TextStream, StopWordsAndMarksOverRandomTokens) {
  Random random(1);
  int stopped = 0, waited = 0;
  for (int round = 0; round < 20'000; ++round) {
    const auto some = [&](int count, int most) {
      std::vector<std::string> out;
      while (std::ssize(out) < count) {
        if (auto one = random.bytes("abc", most); !one.empty()) out.push_back(std::move(one));
      }
      return out;
    };
    // Skips marks within other marks: the shorter mark ends the search that the longer one still waits for.
    const auto marks = some(1, 5), words = some(1 + random.below(2), 3), tokens = some(random.below(8), 3);
    std::string text;
    for (const auto& token : tokens) text += token;
    const auto expected = until_reference(text, marks, words);
    ASSERT_EQ(until(tokens, marks, false, words), expected) << text << " with the mark " << marks[0];
    stopped += expected.ends_with('$');
    waited += !expected.ends_with('$') && expected != text;
  }
  EXPECT_GT(stopped, 2000);
  EXPECT_GT(waited, 200);
}

TEST(TextStream, NothingIsHeldBackAfterStopWordsAreDisabled) {
  const auto table = table_of({"ab", "<c>", "ab"});
  TextStream stream(table, stops({"abc"}), false, stops({"<c>"}));
  EXPECT_FALSE(stream.push(0, true));
  EXPECT_EQ(stream.take().num_tokens, 0);
  EXPECT_FALSE(stream.push(1, true));
  EXPECT_EQ(stream.take().text, "ab<c>");
  EXPECT_FALSE(stream.push(2, true));
  EXPECT_EQ(stream.take().text, "ab");
}

class RandomStreams : public testing::TestWithParam<std::uint64_t> {};

TEST_P(RandomStreams, ChunksJoinToTheTextAndNothingIsHeldBackWithoutNeed) {
  Random random(GetParam());
  int stopped = 0, held = 0;
  for (int round = 0; round < 4000; ++round) {
    // Few different bytes give many near misses of stop words; otherwise characters in several scripts, split anywhere.
    const bool few = random.below(2) == 0;
    const std::string alphabet = few ? "ab " : "ab \xE4\xBD\xA0\xF0\x9F\x98\x80\xC3\xA9\xED";
    const std::string text = "ab 你好é😀 a你 bé\xED\xA0";
    const auto any_bytes = [&](int most) {
      if (few || random.below(3) == 0) return random.bytes(alphabet, most);
      const auto begin = static_cast<std::size_t>(random.below(static_cast<int>(text.size())));
      return text.substr(begin, static_cast<std::size_t>(random.below(most + 1)));
    };
    std::vector<std::string> tokens;
    for (int i = 0, n = 1 + random.below(8); i < n; ++i) tokens.push_back(any_bytes(4));
    std::vector<std::string> stop_words;
    for (int i = 0, n = random.below(4); i < n; ++i) {
      auto word = any_bytes(6);
      if (!word.empty()) stop_words.push_back(std::move(word));
    }
    const bool strip = random.below(2) == 0;
    const auto table = table_of(tokens, random.below(4) != 0);
    TextStream stream(table, stops(stop_words), strip);
    Reference reference;
    reference.stop_words = stop_words;
    reference.first_space_is_text = !(strip && table.strip_leading_space());

    std::string joined;
    std::size_t sent_tokens = 0, sent_bytes = 0;
    const auto check = [&](const TextChunk& chunk) {
      const auto begin = sent_bytes;
      sent_tokens += static_cast<std::size_t>(chunk.num_tokens);
      ASSERT_LE(sent_tokens, reference.ends.size());
      const auto end = sent_tokens == 0 ? 0 : reference.ends[sent_tokens - 1];
      sent_bytes = end;
      ASSERT_LE(0, chunk.text_begin);
      ASSERT_LE(chunk.text_begin, chunk.text_end);
      ASSERT_LE(static_cast<std::size_t>(chunk.text_end), end - begin);
      // The span of the tokens' bytes is the text, for callers that have only the tokens.
      const auto bytes = std::string_view(reference.text).substr(begin, end - begin);
      const auto span = bytes.substr(static_cast<std::size_t>(chunk.text_begin),
                                     static_cast<std::size_t>(chunk.text_end - chunk.text_begin));
      ASSERT_EQ(to_valid_utf8(span), chunk.text);
      joined += chunk.text;
    };

    const int length = random.below(40), min_tokens = random.below(3) == 0 ? random.below(20) : 0;
    for (int i = 0; i < length; ++i) {
      const int token = random.below(table.size() + 1);
      const bool match_stop = i + 1 >= min_tokens;
      const bool stop = stream.push(token, match_stop);
      reference.push(table.text_bytes(token), match_stop);
      ASSERT_EQ(stop, reference.stop.has_value());
      if (random.below(3) != 0) {
        check(stream.take());
        ASSERT_EQ(sent_tokens, std::max(sent_tokens, reference.settled()));
        held += sent_tokens < reference.ends.size();
      }
      if (stop) break;
    }
    stopped += reference.stop.has_value();
    if (!reference.stop && random.below(2) == 0) {
      reference.stop = reference.text.size();
      stream.push_silent(0);
      reference.text += table.text_bytes(0);
      reference.ends.push_back(reference.text.size());
    }
    check(stream.finish());
    ASSERT_EQ(sent_tokens, reference.ends.size());
    ASSERT_EQ(joined, reference.whole());
  }
  EXPECT_GT(stopped, 500);
  EXPECT_GT(held, 5000);
}

INSTANTIATE_TEST_SUITE_P(Seeds, RandomStreams, testing::Range<std::uint64_t>(1, 7));

}  // namespace
}  // namespace charonia::text
