// Schemas that combine others, written as one: allOf, and what stands beside allOf, anyOf, oneOf and $ref.
#pragma once

#include <map>
#include <string>

#include "base/json.h"

namespace charonia::grammar {

struct Merged {
  bool changed = false;
  std::map<std::string, std::string> problems;  // by the place in the result: why a schema stays as it is
};

// Rewrites the schemas in `root` whose values are those of one schema, or of a list of them under anyOf or oneOf, without
// other keywords beside the list. Values that are valid under the result are valid under `root`. Objects with properties
// count as having no others. What it cannot write in this way stays as it is.
Merged merge_schemas(nlohmann::ordered_json& root);

}  // namespace charonia::grammar
