#include "grammar/expression.h"

#include <grammar_functor.h>

#include <algorithm>
#include <cctype>
#include <cstdint>
#include <unordered_set>
#include <utility>
#include <vector>

#include "base/text.h"
#include "charonia/error.h"
#include "grammar/xgrammar_messages.h"
#include "text/utf8.h"

namespace charonia::grammar {
namespace {

constexpr int kMaxBrackets = 64;
constexpr std::int64_t kMaxRepeats = 100'000;  // of everything inside one another: {100}{100} are 10,000

// The largest number of a repetition that begins with the brace, or 0 where it is none.
std::int64_t repeats_at(std::string_view text, std::size_t brace) {
  std::int64_t most = 0, number = 0;
  bool any = false;
  for (std::size_t i = brace + 1; i < text.size(); ++i) {
    const char c = text[i];
    if (std::isdigit(static_cast<unsigned char>(c)) != 0) {
      number = std::min<std::int64_t>(number * 10 + (c - '0'), kMaxRepeats + 1);
      any = true;
    } else if (c == ',' || c == '}') {
      most = std::max(most, number);
      number = 0;
      if (c == '}') return any ? most : 0;
    } else if (c != ' ') {
      return 0;
    }
  }
  return 0;
}

int hex_digit(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  return c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1;
}

// The last byte of the escape that begins at the backslash. Throws where it is the number of no character.
std::size_t end_of_escape(std::string_view text, std::size_t at, Syntax syntax, std::string_view what) {
  constexpr std::int64_t kLast = 0x10ffff;
  const char kind = at + 1 < text.size() ? text[at + 1] : '\0';
  const std::size_t digits = kind == 'x' ? 2 : kind == 'u' ? 4 : kind == 'U' ? 8 : 0;
  if (digits == 0) return at + 1;
  const bool braces = kind == 'u' && syntax == Syntax::regex && text.substr(at + 2).starts_with('{');
  std::size_t end = at + (braces ? 3 : 2);
  const auto begin = end;
  std::int64_t number = 0;
  for (; end < text.size() && hex_digit(text[end]) >= 0 && (braces || end < begin + digits); ++end) {
    number = std::min(number * 16 + hex_digit(text[end]), kLast + 1);
  }
  // What is no escape after all is an error of the compiler.
  if (braces ? end == begin || end == text.size() || text[end] != '}' : end < begin + digits) return at + 1;
  if (!braces) --end;
  const bool surrogate = number >= 0xd800 && number <= 0xdfff;
  if (surrogate || number > kLast) {
    throw Error(ErrorCode::invalid_argument,
                cat(what, " has ", shortened(text.substr(at, end + 1 - at)), ", which is ",
                    surrogate ? "half a character" : "beyond the last character, U+10FFFF", ", at byte ", at));
  }
  return end;
}

// Where the repetition that begins there ends, and where none begins the same place.
std::size_t end_of_repetition(std::string_view text, std::size_t at) {
  if (at == text.size()) return at;
  if (text[at] == '*' || text[at] == '+' || text[at] == '?') return at + 1;
  if (text[at] != '{') return at;
  auto end = at + 1;
  while (end < text.size() && (std::isdigit(static_cast<unsigned char>(text[end])) != 0 || text[end] == ',')) ++end;
  return end < text.size() && text[end] == '}' && end > at + 1 ? end + 1 : at;
}

// What in a pattern the compiler takes, and ECMA 262, of which patterns of JSON schemas are, does not. Empty: nothing.
std::string problem_of_dialect(std::string_view pattern) {
  for (std::size_t i = 0; i < pattern.size(); ++i) {
    if (pattern[i] == '\\') {
      i = end_of_escape(pattern, i, Syntax::regex, "the pattern");
    } else if (pattern[i] == '[') {
      for (++i; i < pattern.size() && pattern[i] != ']'; ++i) {
        if (pattern[i] == '\\') ++i;
      }
    } else if (pattern.substr(i).starts_with("(?")) {
      const auto kind = pattern.substr(i + 2, 1);
      if (kind != ":" && kind != "<" && kind != "=" && kind != "!") {
        return cat("the group ", shortened(pattern.substr(i, 4)), " at byte ", i, " is none of ECMA 262: write (?:...)");
      }
      ++i;
      continue;
    }
    if (i + 1 >= pattern.size()) break;
    auto end = end_of_repetition(pattern, i + 1);
    if (end == i + 1) {
      if (pattern[end] != '{' || repeats_at(pattern, end) == 0) continue;
      return cat("the repetition at byte ", end, " has a space in it, and is plain text in ECMA 262: leave the space out");
    }
    if (end < pattern.size() && pattern[end] == '?') ++end;  // as few as possible, which changes no match of the whole
    if (end_of_repetition(pattern, end) != end) {
      return cat("what is repeated at byte ", end, " is a repetition: put it into brackets");
    }
    i = end - 1;
  }
  return {};
}

}  // namespace

std::string shortened(std::string_view text, std::size_t most) {
  auto out = text::to_valid_utf8(text.substr(0, most));
  std::ranges::replace_if(out, [](unsigned char c) { return c < 0x20 || c == 0x7f; }, '?');
  return text.size() > most ? out + "..." : out;
}

void check_expression(std::string_view text, Syntax syntax, std::string_view what) {
  int depth = 0;
  std::vector<std::int64_t> inside{1};  // by depth: the largest product of repetitions in the brackets
  std::int64_t closed = 1;              // of the brackets that have just been closed
  bool quoted = false, in_class = false;  // of a grammar
  for (std::size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (syntax == Syntax::ebnf) {
      if (c == '#' && !quoted && !in_class) {
        i = std::min(text.find('\n', i), text.size());
        continue;
      }
      if (c == '"' && !in_class) quoted = !quoted;
      if ((c == '[' || c == ']') && !quoted) in_class = c == '[';
    }
    if (c == '\\') {
      i = end_of_escape(text, i, syntax, what);
      closed = 1;
    } else if (c == '[' && syntax == Syntax::regex) {
      for (++i; i < text.size() && text[i] != ']'; ++i) {
        if (text[i] == '\\') i = end_of_escape(text, i, syntax, what);
      }
      closed = 1;
    } else if (c == '(' || c == '[') {
      if (++depth > kMaxBrackets) {
        throw Error(ErrorCode::invalid_argument,
                    cat(what, " has brackets nested more than ", kMaxBrackets, " deep, at byte ", i));
      }
      inside.push_back(1);
    } else if ((c == ')' || c == ']') && depth > 0) {
      --depth;
      closed = inside.back();
      inside.pop_back();
      inside.back() = std::max(inside.back(), closed);
    } else if (const auto repeats = c == '{' ? repeats_at(text, i) : 0; repeats > 0) {
      closed *= repeats;
      if (closed > kMaxRepeats) {
        throw Error(ErrorCode::invalid_argument, cat(what, " repeats something more than ", kMaxRepeats,
                                                     " times, at byte ", i, ": lower the numbers in braces"));
      }
      inside.back() = std::max(inside.back(), closed);
      i = text.find('}', i);
    } else {
      closed = 1;
    }
  }
}

Repetition largest_repetition(std::string_view text) {
  Repetition out;
  for (auto brace = text.find('{'); brace != std::string_view::npos; brace = text.find('{', brace + 1)) {
    if (const auto count = repeats_at(text, brace); count > out.count) out = {count, brace};
  }
  return out;
}

std::string problem_of_string_pattern(const std::string& pattern) {
  const Messages messages;
  const auto other = std::ranges::find_if(pattern, [](unsigned char c) { return c < 0x20 || c > 0x7e; });
  if (other != pattern.end()) {
    return cat("the character at byte ", other - pattern.begin(), " is not printable ASCII");
  }
  auto automaton = xgrammar::GrammarFSMBuilder::Regex(pattern, true);
  if (automaton.IsErr()) return shortened(std::move(automaton).UnwrapErr().what());
  if (!messages.warning().empty()) return shortened(messages.warning());
  if (auto problem = problem_of_dialect(pattern); !problem.empty()) return problem;
  const auto fsm = std::move(automaton).Unwrap();
  std::unordered_set<int> reachable;
  fsm.GetReachableStates(&reachable);
  if (std::ranges::any_of(reachable, [&](int state) { return fsm.IsEndState(state); })) return {};
  return "it needs a quote, a backslash or a control character, which are not supported in the text that it matches";
}

std::string ebnf_literal(std::string_view text) {
  constexpr std::string_view kDigits = "0123456789abcdef";
  std::string out = "\"";
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (byte < 0x20 || byte == 0x7f) {
      out += cat("\\u00", kDigits[byte / 16], kDigits[byte % 16]);
    } else {
      out += c;
    }
  }
  return out + '"';
}

}  // namespace charonia::grammar
