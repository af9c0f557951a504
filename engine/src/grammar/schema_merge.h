// Schemas that combine others, written as one: allOf, and what stands beside allOf, anyOf, oneOf and $ref.
#pragma once

#include <nlohmann/json.hpp>

namespace charonia::grammar {

// Rewrites the schemas in `root` whose values are those of one schema, or of a list of them under anyOf or oneOf, without
// other keywords beside the list. Values that are valid under the result are valid under `root`. Objects with properties
// count as having no others. What it cannot write in this way stays as it is. True: something has changed.
bool merge_schemas(nlohmann::ordered_json& root);

}  // namespace charonia::grammar
