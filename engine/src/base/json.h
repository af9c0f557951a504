// nlohmann's JSON library. Every source that includes it takes a second longer to compile, so only this header includes
// it, and headers that many sources include do not include this one.
#pragma once

#include <algorithm>
#include <nlohmann/json.hpp>
#include <string>

namespace charonia {

// A JSON value for an error message: numbers, words and short lists of these in full, everything else by its type name.
// Printing a nested value takes stack for each level, and a file may have millions of levels.
inline std::string json_text(const nlohmann::json& value) {
  constexpr std::size_t kLongest = 8;
  const bool is_short = value.is_array() && value.size() <= kLongest &&
                        std::ranges::none_of(value, [](const auto& one) { return one.is_structured(); });
  return !value.is_structured() || is_short ? value.dump() : value.type_name();
}

}  // namespace charonia
