// JSON: nlohmann's library, which takes a second to compile wherever it is. So headers that many sources include have none
// of it, and no other file of the engine includes it.
#pragma once

#include <algorithm>
#include <nlohmann/json.hpp>
#include <string>

namespace charonia {

// A value of a file in an error message: a number, a word or a short list of these as it is, of all else the type. To
// print a value takes stack for each level of it, and a file may have millions.
inline std::string json_text(const nlohmann::json& value) {
  constexpr std::size_t kLongest = 8;
  const bool is_short = value.is_array() && value.size() <= kLongest &&
                        std::ranges::none_of(value, [](const auto& one) { return one.is_structured(); });
  return !value.is_structured() || is_short ? value.dump() : value.type_name();
}

}  // namespace charonia
