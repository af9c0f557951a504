// Regular expressions and EBNF grammars, before they are compiled: bounds, and texts written in them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace charonia::grammar {

enum class Syntax { regex, ebnf };

// Throws Error(invalid_argument) where brackets are nested too deep, something is repeated too often, or an escape is
// of no character; `what` names the text. Brackets and braces in character classes of regular expressions, and no
// others that are plain characters, do not count.
void check_expression(std::string_view text, Syntax syntax, std::string_view what);

// The largest number in braces, and the byte of its brace; count 0: there is none.
struct Repetition {
  std::int64_t count = 0;
  std::size_t at = 0;
};
Repetition largest_repetition(std::string_view text);

// Why the compiler makes no automaton of a regular expression for the content of a JSON string; empty: it does. It
// would take the expression in another way, in which quotes and control characters are not left out.
std::string problem_of_string_pattern(const std::string& pattern);

// The beginning of a user's text, for errors: at most so many bytes, without control characters.
std::string shortened(std::string_view text, std::size_t most = 100);

// A text as a literal of EBNF.
std::string ebnf_literal(std::string_view text);

}  // namespace charonia::grammar
