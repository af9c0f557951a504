#include "grammar/schema_merge.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/text.h"
#include "grammar/compile_step.h"
#include "grammar/expression.h"
#include "grammar/schema_sets.h"

namespace charonia::grammar {
namespace {

using Json = nlohmann::ordered_json;

// Bounds of the work. Beyond them schemas stay as they are, and are refused.
constexpr int kMaxMerges = 1000;
constexpr int kMaxMergeDepth = 32;        // of references and combinations in one another
constexpr std::size_t kMaxOptions = 64;   // of one schema
constexpr std::size_t kMaxBytes = 1 << 21;  // of all schemas that were merged
constexpr std::size_t kMaxLookups = std::size_t{1} << 23;  // of names of properties, and of values, in schemas that were merged

// Why schemas are not merged.
constexpr const char* kTooMany = "it takes too many steps";
constexpr const char* kTooManyOptions = "more than 64 schemas would come of them";
constexpr const char* kBesideValues = "const or enum is beside other keywords than type";
constexpr const char* kNotApart = "the schemas of oneOf do not exclude one another";

constexpr auto kDescriptive = std::to_array<std::string_view>(
    {"title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly", "$comment",
     "markdownDescription"});
constexpr auto kMergeable = std::to_array<std::string_view>(
    {"allOf", "anyOf", "oneOf", "$ref", "dependencies", "dependentRequired", "dependentSchemas"});
constexpr auto kDepending = std::to_array<const char*>({"dependencies", "dependentRequired", "dependentSchemas"});
// Of the root, or names of places: they are no part of what is valid.
constexpr auto kPlaces = std::to_array<std::string_view>({"$schema", "$id", "id", "$anchor", "$defs", "definitions"});

bool is_descriptive(std::string_view key) { return has(kDescriptive, key) || key.starts_with("x-"); }

bool contains(const Json& list, const Json& value) { return std::ranges::find(list, value) != list.end(); }

Json both(const Json& left, const Json& right) { return left == right ? left : Json{{"allOf", {left, right}}}; }

// What can be said of a schema: it is this one, no value is valid under it, no object is, or it cannot be written.
enum class Outcome { merged, never, no_object, unknown };

// Of two lists of types, or of one where the other is not there.
Outcome merge_types(Json& to, const Json& from) {
  if (!to.contains("type")) {
    to["type"] = from["type"];
    return Outcome::merged;
  }
  const auto listed = [](const Json& type) { return type.is_array() ? type : Json::array({type}); };
  const auto left = listed(to["type"]), right = listed(from["type"]);
  Json common = Json::array();
  for (const auto& type : left) {
    if (contains(right, type) || (type == "integer" && contains(right, "number"))) common.push_back(type);
    if (type == "number" && contains(right, "integer") && !contains(right, "number")) common.push_back("integer");
  }
  if (common.empty()) return Outcome::never;
  to["type"] = common.size() == 1 ? common[0] : common;
  return Outcome::merged;
}

// Keywords of one number, which is the greater or the smaller of both.
bool merge_bound(Json& to, const std::string& key, const Json& value) {
  constexpr auto kLeast = std::to_array<std::string_view>(
      {"minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties"});
  constexpr auto kMost = std::to_array<std::string_view>(
      {"maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties"});
  const bool least = has(kLeast, key);
  if ((!least && !has(kMost, key)) || !value.is_number() || !to[key].is_number()) return false;
  if (least ? value > to[key] : value < to[key]) to[key] = value;
  return true;
}

bool is_object_list(const Json& schema, const char* key) { return schema.contains(key) && schema[key].is_object(); }

// Properties of two objects: those of both names, each under what the other one says of it.
Outcome merge_objects(Json& to, const Json& from) {
  const auto has_patterns = [](const Json& one) { return one.contains("patternProperties"); };
  if (has_patterns(to) || has_patterns(from)) {
    constexpr auto kOther = std::to_array<std::string_view>({"properties", "additionalProperties", "patternProperties"});
    const auto& plain = has_patterns(to) ? from : to;
    if (std::ranges::any_of(kOther, [&](auto key) { return plain.contains(std::string(key)); })) return Outcome::unknown;
    if (has_patterns(from)) {
      for (const auto key : kOther) {
        if (from.contains(std::string(key))) to[std::string(key)] = from[std::string(key)];
      }
    }
    return Outcome::merged;
  }
  const auto others = [](const Json& one) {
    return one.contains("additionalProperties") ? one["additionalProperties"] : Json(true);
  };
  const auto left = others(to), right = others(from);
  Json properties = Json::object();
  bool never = false;
  const auto take = [&](const Json& one, const Json& other, const Json& rest, bool first) {
    if (!is_object_list(one, "properties")) return;
    for (const auto& [name, schema] : one["properties"].items()) {
      if (is_object_list(other, "properties") && other["properties"].contains(name)) {
        if (first) properties[name] = both(schema, other["properties"][name]);
      } else if (rest == Json(false)) {
        never |= is_required(one, name) || is_required(other, name);
      } else {
        properties[name] = rest == Json(true) ? schema : both(schema, rest);
      }
    }
  };
  take(to, from, right, true);
  take(from, to, left, false);
  const auto is_object = [](const Json& one) { return one.contains("type") && one["type"] == "object"; };
  if (never) return is_object(to) || is_object(from) ? Outcome::never : Outcome::no_object;
  if (to.contains("properties") || from.contains("properties")) to["properties"] = std::move(properties);
  if (to.contains("additionalProperties") || from.contains("additionalProperties")) {
    to["additionalProperties"] = left == Json(true)                              ? right
                                 : right == Json(true)                           ? left
                                 : left == Json(false) || right == Json(false) ? Json(false)
                                                                                : both(left, right);
  }
  return Outcome::merged;
}

// Values of a list, those that the other schema allows.
Outcome merge_values(Json& to, const Json& from) {
  const auto values = [](const Json& one) -> std::optional<Json> {
    if (one.contains("const")) return Json::array({one["const"]});
    if (one.contains("enum") && one["enum"].is_array()) return one["enum"];
    return std::nullopt;
  };
  const auto left = values(to), right = values(from);
  if (!left || !right) return Outcome::unknown;
  Json common = Json::array();
  for (const auto& value : *left) {
    if (contains(*right, value)) common.push_back(value);
  }
  if (common.empty()) return Outcome::never;
  to.erase("const");
  to["enum"] = std::move(common);
  return Outcome::merged;
}

Outcome merge_keyword(Json& to, const std::string& key, const Json& value) {
  if (!to.contains(key) || to[key] == value || merge_bound(to, key, value)) {
    if (!to.contains(key)) to[key] = value;
    return Outcome::merged;
  }
  if (is_descriptive(key)) return Outcome::merged;
  if (key == "required" && value.is_array() && to[key].is_array()) {
    for (const auto& name : value) {
      if (!contains(to[key], name)) to[key].push_back(name);
    }
    return Outcome::merged;
  }
  if (key == "items" && !value.is_array() && !to[key].is_array()) {
    to[key] = both(to[key], value);
    return Outcome::merged;
  }
  if (key == "uniqueItems") {
    to[key] = true;
    return Outcome::merged;
  }
  return Outcome::unknown;
}

// Two schemas without combinations: `to` has what is valid under both. keyword: set to the one that is unknown.
Outcome merge(Json& to, const Json& from, std::string& keyword) {
  if (from.is_boolean()) return from.get<bool>() ? Outcome::merged : Outcome::never;
  if (to.is_boolean()) {
    if (!to.get<bool>()) return Outcome::never;
    to = from;
    return Outcome::merged;
  }
  if (!to.is_object() || !from.is_object()) return Outcome::unknown;
  // What the items after some are depends on how many those are, and what is left over on all that was looked at.
  const auto lists = [](const Json& one) { return one.contains("prefixItems") || one.contains("items"); };
  keyword = "prefixItems";
  if ((to.contains("prefixItems") && lists(from)) || (from.contains("prefixItems") && lists(to))) return Outcome::unknown;
  for (const char* const name : {"unevaluatedProperties", "unevaluatedItems"}) {
    keyword = name;
    if (from.contains(name)) return Outcome::unknown;
  }
  const bool values = (to.contains("const") || to.contains("enum")) && (from.contains("const") || from.contains("enum"));
  keyword = "patternProperties";
  auto outcome = merge_objects(to, from);
  if (values && outcome == Outcome::merged) {
    keyword = "enum";
    outcome = merge_values(to, from);
  }
  for (const auto& [key, value] : from.items()) {
    if (outcome != Outcome::merged) return outcome;
    const bool done = key == "properties" || key == "additionalProperties" || key == "patternProperties" ||
                      has(kPlaces, key) || (values && (key == "const" || key == "enum"));
    if (done) continue;
    keyword = key;
    outcome = key == "type" ? merge_types(to, from) : merge_keyword(to, key, value);
  }
  return outcome;
}

// Values beside keywords that they have to fulfil: those that do are known for types alone.
bool takes_values(const Json& schema) {
  if (!schema.contains("const") && !schema.contains("enum")) return true;
  return std::ranges::all_of(schema.items(), [](const auto& item) {
    const std::string& key = item.key();
    return key == "const" || key == "enum" || key == "type" || is_descriptive(key) || has(kPlaces, key);
  });
}

class Merger {
 public:
  explicit Merger(Json& root) : root_(root), original_(root) {}

  Merged run() {
    simplify(root_, "", 0);
    return {changed_, std::move(problems_)};
  }

 private:
  // Which schema of which oneOf.
  using Choice = std::pair<int, int>;
  struct Option {
    Json schema;
    std::vector<Choice> of = {};
    bool lost = false;  // no object is valid under it, others may be: it is there for others of its oneOf alone
  };
  // One of them; none: no value is valid. Of two that are of other schemas of the same oneOf, not both: see is_apart().
  using Options = std::vector<Option>;
  struct Whole {
    std::vector<Json> schemas;
    bool exclusive = false;  // exactly one of them
  };

  void simplify(Json& schema, const std::string& path, int depth);
  void simplify_parts(Json& schema, const std::string& path, int depth);
  // Notes why something is not merged; the first reason counts.
  std::nullopt_t unmerged(const std::string& why) {
    if (problem_.empty()) problem_ = why;
    return std::nullopt;
  }
  static bool combines(const Json& schema);
  std::optional<Whole> whole(const Json& schema);
  std::optional<Options> options_of(const Json& schema, int depth);
  std::optional<Options> cross(const Options& left, const Options& right);
  std::optional<Options> alternatives(const Json& list, bool exclusive, int depth);
  std::optional<Options> dependency(const Json& schema, const std::string& name, const Json& then, int depth);
  static bool is_apart(const Option& one, const Option& other);
  bool is_settled(const Options& options);
  static bool exclude(Options& options);
  static bool leave_out(Json& schema, const std::string& name);
  static bool take_not(Json& schema);
  const Json* target(const Json& uri) const;

  Json& root_;
  const Json original_;
  bool changed_ = false;
  std::string problem_;
  std::map<std::string, std::string> problems_;
  int merges_ = 0;
  std::size_t bytes_ = 0;
  std::size_t lookups_ = 0;
  int num_one_of_ = 0;
  Disjoint disjoint_{[this](const Json& uri) { return target(uri); }};
};

// What a merge looks up.
std::size_t names_of(const Json& schema) {
  std::size_t names = 1;
  for (const char* key : {"properties", "required", "enum"}) {
    if (schema.contains(key)) names += schema[key].size();
  }
  return names;
}

// Whether something beside a combining keyword says what is valid, or allOf has several.
bool Merger::combines(const Json& schema) {
  int combining = 0, other = 0;
  for (const auto& [key, value] : schema.items()) {
    if (has(kMergeable, key)) {
      ++combining;
      other += (key == "allOf" && value.is_array() && value.size() > 1) || key.starts_with("depend") ? 1 : 0;
    } else if (key == "not") {
      combining += schema.contains("properties") ? 1 : 0;
      ++other;
    } else if (!is_descriptive(key) && !has(kPlaces, key)) {
      ++other;
    }
  }
  return combining > 1 || (combining == 1 && other > 0);
}

void Merger::simplify(Json& schema, const std::string& path, int depth) {
  if (!schema.is_object() || depth > 2 * kMaxMergeDepth) return;
  if (combines(schema)) {
    problem_.clear();
    auto options = merges_ < kMaxMerges ? whole(schema) : std::optional<Whole>(unmerged(kTooMany));
    if (!options || options->schemas.empty()) {
      problems_[path] = options ? "no value is valid under all of them" : problem_;
    } else {
      Json out = Json::object();
      for (const auto& [key, value] : schema.items()) {
        if (has(kPlaces, key) || is_descriptive(key)) out[key] = value;
      }
      if (options->schemas.size() == 1) {
        for (const auto& [key, value] : options->schemas[0].items()) out[key] = value;
      } else {
        out[options->exclusive ? "oneOf" : "anyOf"] = std::move(options->schemas);
      }
      bytes_ += out.dump().size();
      if (bytes_ > kMaxBytes) {
        problems_[path] = cat("all that is merged would have more than ", kMaxBytes >> 20, " MiB");
        return;
      }
      changed_ = true;
      schema = std::move(out);
    }
  }
  simplify_parts(schema, path, depth);
}

void Merger::simplify_parts(Json& schema, const std::string& path, int depth) {
  for (auto& [key, value] : schema.items()) {
    const bool named = key == "properties" || key == "patternProperties" || key == "$defs" || key == "definitions";
    const bool listed = key == "anyOf" || key == "oneOf" || key == "allOf" || key == "prefixItems";
    const auto at = cat(path, "/", key);
    if (key == "items" || key == "additionalProperties") simplify(value, at, depth + 1);
    if (named && value.is_object()) {
      for (auto& [name, one] : value.items()) simplify(one, at + pointer_step(name), depth + 1);
    }
    if (listed && value.is_array()) {
      for (std::size_t i = 0; i < value.size(); ++i) simplify(value[i], cat(at, "/", i), depth + 1);
    }
  }
}

const Json* Merger::target(const Json& uri) const {
  if (!uri.is_string()) return nullptr;
  const auto text = uri.get<std::string>();
  if (text == "#") return &original_;
  if (!text.starts_with("#/") || text.find('%') != std::string::npos) return nullptr;
  try {
    const Json::json_pointer pointer(text.substr(1));
    return original_.contains(pointer) ? &original_.at(pointer) : nullptr;
  } catch (const Json::exception&) {
    return nullptr;
  }
}

// Both conditions at once.
std::optional<Merger::Options> Merger::cross(const Options& left, const Options& right) {
  if (left.size() * right.size() > kMaxOptions) return unmerged(kTooManyOptions);
  Options out;
  for (const auto& one : left) {
    for (const auto& other : right) {
      compile_step();
      ++merges_;
      lookups_ += names_of(one.schema) * names_of(other.schema);
      if (merges_ > kMaxMerges || lookups_ > kMaxLookups) return unmerged(kTooMany);
      Option both = one;
      both.of.insert(both.of.end(), other.of.begin(), other.of.end());
      both.lost |= other.lost;
      if (!both.lost) {
        std::string keyword;
        const auto outcome = merge(both.schema, other.schema, keyword);
        if (outcome == Outcome::unknown) return unmerged(keyword + " cannot be merged");
        if (!takes_values(both.schema)) return unmerged(kBesideValues);
        if (outcome == Outcome::never) continue;
        both.lost = outcome == Outcome::no_object;
      }
      out.push_back(std::move(both));
    }
  }
  return out;
}

std::optional<Merger::Options> Merger::alternatives(const Json& list, bool exclusive, int depth) {
  if (!list.is_array() || list.empty()) return unmerged("anyOf or oneOf is no list of schemas");
  if (list.size() == 1) return options_of(list[0], depth + 1);
  const int one_of = num_one_of_++;
  Options out;
  for (std::size_t i = 0; i < list.size(); ++i) {
    auto inner = options_of(list[i], depth + 1);
    if (!inner || out.size() + inner->size() > kMaxOptions) return unmerged(kTooManyOptions);
    for (auto& option : *inner) {
      if (exclusive) option.of.emplace_back(one_of, static_cast<int>(i));
      out.push_back(std::move(option));
    }
  }
  return out;
}

bool Merger::is_apart(const Option& one, const Option& other) {
  return std::ranges::any_of(one.of, [&](const Choice& mine) {
    return std::ranges::any_of(other.of, [&](const Choice& theirs) {
      return mine.first == theirs.first && mine.second != theirs.second;
    });
  });
}

// Whether no two of them have to be told apart: where they are, no value is made under both.
bool Merger::is_settled(const Options& options) {
  for (std::size_t i = 0; i < options.size(); ++i) {
    for (std::size_t j = 0; j < i; ++j) {
      const int lost = (options[i].lost ? 1 : 0) + (options[j].lost ? 1 : 0);
      if (lost == 2 || !is_apart(options[i], options[j])) continue;
      if (lost == 1 || !disjoint_(options[i].schema, options[j].schema)) return false;
    }
  }
  return true;
}

// Objects without the property. False: none is left.
bool Merger::leave_out(Json& schema, const std::string& name) {
  if (is_required(schema, name)) return false;
  if (!is_object_list(schema, "properties")) return true;
  auto& properties = schema["properties"];
  properties.erase(name);
  // An object with properties has no others. One that has none left, and may have others, would have this one again.
  const bool open = schema.contains("additionalProperties") && schema["additionalProperties"] != Json(false);
  if (open && properties.empty()) properties[name] = false;
  return true;
}

// Whether its values are objects that have no others than the properties that are named.
bool names_all(const Json& schema) {
  return is_object_list(schema, "properties") && !schema.contains("patternProperties") && !schema.contains("items") &&
         !schema.contains("prefixItems") && (!schema.contains("type") || schema["type"] == "object");
}

// A `not` that says which properties are not there. False: no value is left. What is another `not` stays.
bool Merger::take_not(Json& schema) {
  if (!schema.contains("not") || !names_all(schema)) return true;
  const auto negated = schema["not"];
  const auto one_name = [](const Json& one) {
    return one.is_object() && one.size() == 1 && one.contains("required") && one["required"].is_array() &&
           one["required"].size() == 1 && one["required"][0].is_string();
  };
  std::vector<std::string> names;
  if (one_name(negated)) {
    names.push_back(negated["required"][0].get<std::string>());
  } else if (negated.is_object() && negated.size() == 1 && negated.contains("anyOf") && negated["anyOf"].is_array() &&
             std::ranges::all_of(negated["anyOf"], one_name)) {
    for (const auto& one : negated["anyOf"]) names.push_back(one["required"][0].get<std::string>());
  } else {
    return true;
  }
  schema.erase("not");
  return std::ranges::all_of(names, [&](const auto& name) { return leave_out(schema, name); });
}

// The property is not there, or it is and the rest is as `then` says.
std::optional<Merger::Options> Merger::dependency(const Json& schema, const std::string& name, const Json& then,
                                                  int depth) {
  if (!names_all(schema)) return unmerged(cat("what depends on ", shortened(name), " is not beside properties of an object"));
  Options out;
  Json without = schema;
  if (leave_out(without, name)) out.push_back({std::move(without)});
  const auto inner = then.is_array() ? std::optional(Options{{Json{{"required", then}}}}) : options_of(then, depth + 1);
  if (!inner) return std::nullopt;
  const auto met = cross({{schema}}, *inner);
  if (!met || !is_settled(*met)) return unmerged(kNotApart);
  for (const auto& one : *met) {
    if (one.lost) continue;
    // A name that was left out before must not come back.
    for (const auto& item : one.schema["properties"].items()) {
      if (!schema["properties"].contains(item.key())) {
        return unmerged(cat("what depends on ", shortened(name), " has the property ", shortened(item.key()),
                            ", which is not in properties"));
      }
    }
    out.push_back({one.schema});
  }
  return out;
}

std::optional<Merger::Options> Merger::options_of(const Json& schema, int depth) {
  if (depth > kMaxMergeDepth || merges_ > kMaxMerges || lookups_ > kMaxLookups) return unmerged(kTooMany);
  if (!schema.is_object()) return Options{{schema}};
  const auto is_here = [&](const char* key) { return schema.contains(key); };
  if (depth > 0 && (is_here("$id") || is_here("id"))) return unmerged("one of them has $id");
  if (depth > 0 && std::ranges::any_of(kDepending, is_here)) {
    return unmerged("dependentRequired, dependentSchemas or dependencies is within one of them");
  }
  Json base = Json::object();
  for (const auto& [key, value] : schema.items()) {
    if (!has(kMergeable, key) && !has(kPlaces, key) && !(depth == 0 && is_descriptive(key))) base[key] = value;
  }
  if (base.contains("unevaluatedProperties") && schema.contains("anyOf")) {
    return unmerged("unevaluatedProperties is beside anyOf");
  }
  if (!takes_values(base)) return unmerged(kBesideValues);
  Options out{{std::move(base)}};
  const auto both = [&](const std::optional<Options>& other) {
    if (!other) return false;
    auto crossed = cross(out, *other);
    if (crossed) out = std::move(*crossed);
    return crossed.has_value();
  };
  if (schema.contains("$ref")) {
    const auto* const found = target(schema["$ref"]);
    if (found == nullptr) return unmerged("there is nothing where $ref leads");
    if (!both(options_of(*found, depth + 1))) return std::nullopt;
  }
  if (schema.contains("allOf")) {
    if (!schema["allOf"].is_array()) return unmerged("allOf is no list");
    for (const auto& one : schema["allOf"]) {
      if (!both(options_of(one, depth + 1))) return std::nullopt;
    }
  }
  if (schema.contains("anyOf") && !both(alternatives(schema["anyOf"], false, depth))) return std::nullopt;
  if (schema.contains("oneOf") && !both(alternatives(schema["oneOf"], true, depth))) return std::nullopt;
  return out;
}

// Of oneOf that says which properties are required: each option is without a property that another one requires. False:
// that is not possible.
bool Merger::exclude(Options& options) {
  const auto all = options;
  for (std::size_t i = 0; i < options.size(); ++i) {
    for (std::size_t j = 0; j < options.size(); ++j) {
      if (i == j) continue;
      if (!names_all(options[i].schema) || !all[j].schema.contains("required")) return false;
      const auto& names = all[j].schema["required"];
      const auto free = std::ranges::find_if(names, [&](const Json& name) {
        return name.is_string() && !is_required(options[i].schema, name.get<std::string>());
      });
      if (free == names.end()) return false;
      leave_out(options[i].schema, free->get<std::string>());
    }
  }
  return true;
}

// Of a schema that is no part of another one. What is known of all its properties is taken into account here, since
// another part might name more of them.
std::optional<Merger::Whole> Merger::whole(const Json& schema) {
  auto out = options_of(schema, 0);
  if (!out) return std::nullopt;
  bool settled = is_settled(*out);
  const auto lost = std::erase_if(*out, [](const Option& one) { return one.lost; });
  if (!settled && lost > 0) return unmerged(kNotApart);
  for (const auto* const key : kDepending) {
    if (!schema.contains(key)) continue;
    if (!schema[key].is_object()) return unmerged(cat(key, " is no object"));
    if (!settled) return unmerged(kNotApart);
    for (const auto& [name, then] : schema[key].items()) {
      Options next;
      for (const auto& one : *out) {
        const auto some = dependency(one.schema, name, then, 0);
        if (!some) return std::nullopt;
        next.insert(next.end(), some->begin(), some->end());
        if (next.size() > kMaxOptions) return unmerged(kTooManyOptions);
      }
      *out = std::move(next);
    }
  }
  // Of one oneOf alone all are apart.
  const bool one_of = std::ranges::all_of(*out, [](const Option& one) { return one.of.size() == 1; }) && [&] {
    for (std::size_t i = 1; i < out->size(); ++i) {
      for (std::size_t j = 0; j < i; ++j) {
        if (!is_apart((*out)[i], (*out)[j])) return false;
      }
    }
    return true;
  }();
  if (!settled && !one_of) return unmerged(kNotApart);
  const bool requires_only =
      schema.contains("oneOf") && std::ranges::all_of(schema["oneOf"], [](const Json& one) {
        return one.is_object() && std::ranges::all_of(one.items(), [](const auto& item) {
          return item.key() == "required" || is_descriptive(item.key());
        });
      });
  if (!settled && requires_only) {
    auto without = *out;
    settled = exclude(without);
    if (settled) *out = std::move(without);
  }
  Whole made{{}, !settled};
  for (auto& one : *out) {
    if (!settled || !one.schema.is_object() || take_not(one.schema)) made.schemas.push_back(std::move(one.schema));
  }
  return made;
}

}  // namespace

Merged merge_schemas(Json& root) { return Merger(root).run(); }

}  // namespace charonia::grammar
