// What of JSON Schema the grammars enforce. A schema is checked before it becomes a grammar: what they would ignore is
// an error, so that a text that has ended is always valid. docs/structured_output.md is the list for users.
#pragma once

#include <string>
#include <string_view>

namespace charonia::grammar {

// A JSON text is read only when its brackets are nested no deeper. Throws Error(invalid_argument).
inline constexpr int kMaxNesting = 64;
void check_nesting(std::string_view json, std::string_view what);

// The schema as the compiler takes it: objects with `properties` have no others, lengths of strings are patterns, and
// oneOf is anyOf. Throws Error(invalid_argument) that names the place as a JSON pointer. without: ASCII characters that
// strings of a length do not hold.
std::string checked_schema(std::string_view schema, std::string_view without = {});

}  // namespace charonia::grammar
