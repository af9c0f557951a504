#include "base/json_strings.h"

#include "base/json.h"

namespace charonia {

std::vector<std::string> json_strings(std::string_view text) {
  return nlohmann::json::parse(text).get<std::vector<std::string>>();
}

}  // namespace charonia
