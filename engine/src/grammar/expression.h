// Regular expressions and EBNF grammars, before they are compiled: bounds, and texts written in them.
#pragma once

#include <string>
#include <string_view>

namespace charonia::grammar {

enum class Syntax { regex, ebnf };

// Throws Error(invalid_argument) where brackets are nested too deep or something is repeated too often; `what` names
// the text. Those in character classes of regular expressions, and no others that are plain characters, do not count.
void check_expression(std::string_view text, Syntax syntax, std::string_view what);

// Whether the compiler makes one automaton of a regular expression for the content of a JSON string. What it cannot, it
// would take in another way, in which quotes and control characters are not left out.
bool is_string_pattern(const std::string& pattern);

// A text as a literal of EBNF.
std::string ebnf_literal(std::string_view text);

}  // namespace charonia::grammar
