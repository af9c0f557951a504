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

}  // namespace

void check_expression(std::string_view text, Syntax syntax, std::string_view what) {
  int depth = 0;
  std::vector<std::int64_t> inside{1};  // by depth: the largest product of repetitions in the brackets
  std::int64_t closed = 1;              // of the brackets that have just been closed
  for (std::size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (c == '\\') {
      ++i;
      closed = 1;
    } else if (c == '[' && syntax == Syntax::regex) {
      for (++i; i < text.size() && text[i] != ']'; ++i) {
        if (text[i] == '\\') ++i;
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

bool is_string_pattern(const std::string& pattern) {
  const Messages messages;
  if (!std::ranges::all_of(pattern, [](unsigned char c) { return c >= 0x20 && c <= 0x7e; })) return false;
  auto automaton = xgrammar::GrammarFSMBuilder::Regex(pattern, true);
  if (automaton.IsErr() || !messages.warning().empty()) return false;
  const auto fsm = std::move(automaton).Unwrap();
  std::unordered_set<int> reachable;
  fsm.GetReachableStates(&reachable);
  return std::ranges::any_of(reachable, [&](int state) { return fsm.IsEndState(state); });
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
      out += cat("\\x", kDigits[byte / 16], kDigits[byte % 16]);
    } else {
      out += c;
    }
  }
  return out + '"';
}

}  // namespace charonia::grammar
