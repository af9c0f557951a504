// Lists of strings in JSON, for sources that read nothing else of it.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace charonia {

// Throws std::exception when the text is something else.
std::vector<std::string> json_strings(std::string_view text);

}  // namespace charonia
