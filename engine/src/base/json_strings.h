// Parses JSON lists of strings, for sources that need no other JSON.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace charonia {

// Throws std::exception if the text is not a list of strings.
std::vector<std::string> json_strings(std::string_view text);

}  // namespace charonia
