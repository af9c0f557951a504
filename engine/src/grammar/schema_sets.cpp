#include "grammar/schema_sets.h"

#include <algorithm>
#include <cmath>
#include <span>

#include "grammar/compile_step.h"

namespace charonia::grammar {
namespace {

using Json = nlohmann::ordered_json;

constexpr int kMaxReferences = 128;  // of references to references, and of allOf

// Bits of types: a number is an integer, or it is not.
enum Type : unsigned { kNull = 1, kBoolean = 2, kInteger = 4, kFraction = 8, kString = 16, kArray = 32, kObject = 64 };
constexpr unsigned kAll = 127;

unsigned named(const Json& type) {
  if (type == "null") return kNull;
  if (type == "boolean") return kBoolean;
  if (type == "integer") return kInteger;
  if (type == "number") return kInteger | kFraction;
  if (type == "string") return kString;
  if (type == "array") return kArray;
  return type == "object" ? kObject : kAll;
}

unsigned types_of(const Json& schema) {
  if (!schema.contains("type")) return kAll;
  const auto& type = schema["type"];
  if (!type.is_array()) return named(type);
  unsigned out = 0;
  for (const auto& one : type) out |= named(one);
  return out;
}

unsigned type_of(const Json& value) {
  if (value.is_null()) return kNull;
  if (value.is_boolean()) return kBoolean;
  if (value.is_number()) return is_type(value, "integer") ? kInteger : kFraction;
  if (value.is_string()) return kString;
  return value.is_array() ? kArray : kObject;
}

std::size_t size_of(const Json& schema, const char* key) { return schema.contains(key) ? schema[key].size() : 0; }

bool is_object(const Json& schema, const char* key) { return schema.contains(key) && schema[key].is_object(); }

bool is_list(const Json& schema, const char* key) { return schema.contains(key) && schema[key].is_array(); }

// What has properties and no type. All that is no object is valid under it too.
bool implies_object(const Json& schema) {
  return !schema.contains("type") && schema.contains("properties") && !schema.contains("anyOf") &&
         !schema.contains("oneOf") && !schema.contains("allOf");
}

}  // namespace

bool has(std::span<const std::string_view> names, std::string_view name) {
  return std::ranges::find(names, name) != names.end();
}

bool has_values(std::string_view key) {
  return key == "const" || key == "enum" || key == "default" || key == "example" || key == "examples";
}

bool has_names(std::string_view key) {
  return key == "properties" || key == "patternProperties" || key == "$defs" || key == "definitions";
}

std::string pointer_step(std::string_view key) {
  std::string out = "/";
  for (const char c : key) out += c == '~' ? "~0" : c == '/' ? "~1" : std::string(1, c);
  return out;
}

bool is_type(const Json& value, std::string_view type) {
  if (type == "null") return value.is_null();
  if (type == "boolean") return value.is_boolean();
  if (type == "string") return value.is_string();
  if (type == "array") return value.is_array();
  if (type == "object") return value.is_object();
  if (type == "number") return value.is_number();
  return value.is_number_integer() ||
         (value.is_number_float() && std::floor(value.get<double>()) == value.get<double>());
}

bool is_required(const Json& schema, const std::string& name) {
  return schema.contains("required") && schema["required"].is_array() &&
         std::ranges::find(schema["required"], Json(name)) != schema["required"].end();
}

bool Disjoint::look(std::size_t times) {
  constexpr std::size_t kStep = 1 << 12;
  if ((looks_ + times) / kStep > looks_ / kStep) compile_step();
  looks_ += times;
  return looks_ <= kMaxLooks;
}

// All that a schema may have.
struct Disjoint::Values {
  bool known = false;
  std::span<const Json> values;
};

const Json& Disjoint::resolved(const Json& schema) {
  const auto* at = &schema;
  for (int depth = 0; depth < kMaxReferences && at->is_object() && at->contains("$ref") && look(1); ++depth) {
    const auto* const next = target_((*at)["$ref"]);
    if (next == nullptr) break;
    at = next;
  }
  return *at;
}

Disjoint::Values Disjoint::values_of(const Json& schema_in, int depth) {
  const auto& schema = resolved(schema_in);
  if (!schema.is_object() || depth > kMaxReferences || (depth > 0 && !look(1))) return {};
  if (schema.contains("const")) return {true, {&schema["const"], 1}};
  if (is_list(schema, "enum")) return {true, schema["enum"].get_ref<const Json::array_t&>()};
  if (!is_list(schema, "allOf")) return {};
  for (const auto& one : schema["allOf"]) {
    if (const auto values = values_of(one, depth + 1); values.known) return values;
  }
  return {};
}

bool Disjoint::differ(const Values& left, const Values& right) {
  if (!left.known || !right.known || !look(left.values.size() * right.values.size())) return false;
  return std::ranges::none_of(left.values, [&](const Json& value) {
    return std::ranges::find(right.values, value) != right.values.end();
  });
}

// Whether one has no properties but those that are named, and the other one needs another.
bool Disjoint::lacks(const Json& closed, const Json& other) {
  if (!closed.contains("additionalProperties") || closed["additionalProperties"] != Json(false)) return false;
  if (closed.contains("patternProperties") || !is_list(other, "required")) return false;
  if (!look(other["required"].size() * (1 + size_of(closed, "properties")))) return false;
  return std::ranges::any_of(other["required"], [&](const Json& name) {
    return name.is_string() && !(is_object(closed, "properties") && closed["properties"].contains(name.get<std::string>()));
  });
}

bool Disjoint::operator()(const Json& left_in, const Json& right_in) {
  const auto& left = resolved(left_in);
  const auto& right = resolved(right_in);
  if (!left.is_object() || !right.is_object() || !look(1)) return false;
  const auto left_values = values_of(left), right_values = values_of(right);
  if (left_values.known && right_values.known) return differ(left_values, right_values);
  if (left_values.known || right_values.known) {
    const auto values = left_values.known ? left_values.values : right_values.values;
    const auto types = types_of(left_values.known ? right : left);
    return look(values.size()) &&
           std::ranges::none_of(values, [&](const Json& value) { return (type_of(value) & types) != 0; });
  }
  const auto types = [](const Json& schema) { return implies_object(schema) ? kObject : types_of(schema); };
  const bool objects = types(left) == kObject && types(right) == kObject;
  if ((implies_object(left) || implies_object(right)) && !objects) return false;
  if ((types(left) & types(right)) == 0) return true;
  if (!objects) return false;
  if (lacks(left, right) || lacks(right, left)) return true;
  if (!is_object(left, "properties") || !is_object(right, "properties") || !is_list(left, "required")) return false;
  const auto of_both = 1 + size_of(right, "required") + size_of(left, "properties") + size_of(right, "properties");
  if (!look(left["required"].size() * of_both)) return false;
  return std::ranges::any_of(left["required"], [&](const Json& name) {
    if (!name.is_string() || !is_required(right, name.get<std::string>())) return false;
    const auto& mine = left["properties"];
    const auto& others = right["properties"];
    const auto key = name.get<std::string>();
    return mine.contains(key) && others.contains(key) && differ(values_of(mine[key]), values_of(others[key]));
  });
}

}  // namespace charonia::grammar
