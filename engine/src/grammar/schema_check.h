// Checks JSON schemas before llguidance receives them. llguidance rejects most keywords that it does not enforce; this
// check rejects the others. It also adds the project's own rules: dates exist, and objects have only the properties
// that the schema names.
#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <string_view>

#include "base/json.h"

namespace charonia::grammar {

// White space between the parts of JSON: one space after commas and colons, or one character anywhere.
enum class Space { fixed, free };

// Limit for all regular expressions of a guide. The cost of optional parts in a row grows with the square of their
// number.
constexpr int kMaxRepetitions = 4000;

// Throws Error(invalid_argument) if text is not JSON, or is nested too deeply. what: its name in the error.
nlohmann::ordered_json parse_json(std::string_view text, std::string_view what);

// Returns the schema for llguidance. Throws Error(invalid_argument), whose text has the place as a JSON pointer.
// multiples: the cost of multipleOf in all schemas of a guide, which begins at 0.
nlohmann::ordered_json checked_schema(nlohmann::ordered_json schema, Space space, double& multiples);

// Returns the number of repetitions. Throws Error(invalid_argument) for a regular expression that other engines read in
// another way. schema: the pattern of a JSON schema, which ECMA 262 defines.
int check_pattern(std::string_view pattern, bool schema);

// Returns the pointer of the smallest subschema that has the same error as the whole schema. error: returns the error
// of a schema, or an empty text.
std::string place_of_error(const nlohmann::ordered_json& schema,
                           const std::function<std::string(const nlohmann::ordered_json&)>& error);

}  // namespace charonia::grammar
