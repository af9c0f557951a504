#include "grammar/schema.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <cmath>
#include <cstdint>
#include <map>
#include <numeric>
#include <optional>
#include <set>
#include <span>
#include <utility>
#include <vector>

#include "base/json.h"
#include "base/text.h"
#include "charonia/error.h"
#include "grammar/expression.h"
#include "grammar/schema_merge.h"
#include "grammar/schema_sets.h"

namespace charonia::grammar {
namespace {

using Json = nlohmann::ordered_json;

// Bounds that keep compilation and steps short.
constexpr int kMaxDepth = 128;               // of schemas in schemas, references included
constexpr std::int64_t kMaxCount = 100'000;  // of items and characters
constexpr std::size_t kMaxSchemas = 10'000;
constexpr std::int64_t kMaxMultipleOf = 1000;
constexpr int kMaxDecimals = 6;    // of a bound, and of a number beside one
constexpr int kMaxRange = 10'000;  // numbers within the bounds beside multipleOf
constexpr double kMaxInteger = 9007199254740991;  // 2^53 - 1: what zod and others write where there is no bound
constexpr std::size_t kMaxOptional = 1000;  // properties of one object: the time goes with the square

// Keywords that do not say what is valid.
constexpr auto kAnnotations = std::to_array<std::string_view>(
    {"$schema", "$id", "$comment", "$defs", "definitions", "title", "default", "deprecated", "readOnly", "writeOnly",
     "description", "examples", "example", "$anchor", "discriminator", "contentEncoding", "contentMediaType",
     "markdownDescription"});
constexpr auto kTypes =
    std::to_array<std::string_view>({"null", "boolean", "integer", "number", "string", "array", "object"});
constexpr auto kOfNumbers =
    std::to_array<std::string_view>({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"});
constexpr auto kOfStrings = std::to_array<std::string_view>({"minLength", "maxLength", "pattern", "format"});
constexpr auto kOfArrays =
    std::to_array<std::string_view>({"items", "prefixItems", "minItems", "maxItems", "uniqueItems"});
constexpr auto kOfObjects =
    std::to_array<std::string_view>({"properties", "required", "additionalProperties", "patternProperties",
                                     "propertyNames", "minProperties", "maxProperties", "unevaluatedProperties"});
// Of JSON Schema, in one of its versions, and not enforced.
constexpr auto kUnsupported = std::to_array<std::string_view>(
    {"not", "if", "then", "else", "dependencies", "dependentRequired", "dependentSchemas", "contains", "minContains",
     "maxContains", "additionalItems", "unevaluatedItems", "$dynamicRef", "$recursiveRef", "$dynamicAnchor",
     "$recursiveAnchor", "propertyDependencies", "divisibleBy", "disallow", "extends"});
constexpr auto kConditions = std::to_array<std::string_view>({"if", "then", "else"});
constexpr auto kCombining = std::to_array<std::string_view>({"type", "$ref", "enum", "const", "anyOf", "oneOf", "allOf"});
constexpr auto kUnsupportedFormats = std::to_array<std::string_view>(
    {"idn-email", "idn-hostname", "iri", "iri-reference", "json-pointer", "relative-json-pointer", "regex"});
constexpr auto kTimes = std::to_array<std::string_view>({"date", "time", "date-time"});
constexpr auto kFormats =
    std::to_array<std::string_view>({"email", "date", "time", "date-time", "duration", "ipv4", "ipv6", "hostname",
                                     "uuid", "uri", "uri-reference", "uri-template"});

std::string joined(std::span<const std::string_view> names) {
  std::string out;
  for (const auto name : names) out += cat(out.empty() ? "" : ", ", name);
  return out;
}

// How many characters have to be put in, left out, replaced or exchanged with the next.
std::size_t distance(std::string_view left, std::string_view right) {
  std::vector<std::vector<std::size_t>> away(left.size() + 1, std::vector<std::size_t>(right.size() + 1));
  for (std::size_t i = 0; i <= left.size(); ++i) {
    for (std::size_t j = 0; j <= right.size(); ++j) {
      auto& here = away[i][j];
      if (i == 0 || j == 0) {
        here = i + j;
        continue;
      }
      const std::size_t replaced = left[i - 1] == right[j - 1] ? 0 : 1;
      here = std::min({away[i - 1][j - 1] + replaced, away[i - 1][j] + 1, away[i][j - 1] + 1});
      const bool exchanged = i > 1 && j > 1 && left[i - 1] == right[j - 2] && left[i - 2] == right[j - 1];
      if (exchanged) here = std::min(here, away[i - 2][j - 2] + 1);
    }
  }
  return away.back().back();
}

struct Guess {
  std::string_view name;
  std::size_t distance;
};

// The one of the names that was probably meant: the nearest one, if any is near.
std::optional<Guess> misspelt(std::string_view name, std::span<const std::string_view> names) {
  const auto plain = [](std::string_view text) {
    std::string out;
    for (const char c : text) {
      if (c != '-' && c != '_' && c != '$') out += static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
    }
    return out;
  };
  const auto given = plain(name);
  std::optional<Guess> nearest;
  if (given.size() < 4 || given.size() > 40) return nearest;
  for (const auto one : names) {
    if (one.size() < 4) continue;
    const auto away = distance(given, plain(one));
    if (away <= (one.size() < 9 ? 1U : 2U) && (!nearest || away < nearest->distance)) nearest = Guess{one, away};
  }
  return nearest;
}

// Whether a number is written with kMaxDecimals at most, which is as far as the compiler looks.
bool has_few_decimals(double value) {
  const double scaled = value * std::pow(10.0, kMaxDecimals);
  return std::abs(value) >= 1e9 || std::abs(scaled - std::round(scaled)) <= 1e-9 * std::abs(scaled);
}

constexpr auto kKeywords = std::to_array<std::span<const std::string_view>>(
    {kOfNumbers, kOfStrings, kOfArrays, kOfObjects, kCombining, kUnsupported});

bool is_annotation(std::string_view key) { return has(kAnnotations, key) || key.starts_with("x-"); }

// Whether it says what is valid.
bool is_enforced(std::string_view key) {
  return !is_annotation(key) && std::ranges::any_of(kKeywords, [&](auto names) { return has(names, key); });
}

// Whether $schema names a draft before 2020-12, which brought prefixItems.
bool is_of_older_draft(const Json& root) {
  if (!root.is_object() || !root.contains("$schema") || !root["$schema"].is_string()) return false;
  const auto name = root["$schema"].get<std::string>();
  return name.find("json-schema.org/draft-0") != std::string::npos ||
         name.find("json-schema.org/draft/2019-09") != std::string::npos;
}

// Dates that there are, no second 60, which most readers refuse, and fractions that come to an end.
std::string pattern_of_time(std::string_view format) {
  const std::string leap = "(0[48]|[2468][048]|[13579][26])";
  const std::string year = R"((\d{3}[1-9]|\d{2}[1-9]0|\d[1-9]00|[1-9]000))";
  const std::string day =
      R"(((0[13578]|1[02])-(0[1-9]|[12]\d|3[01])|(0[469]|11)-(0[1-9]|[12]\d|30)|02-(0[1-9]|1\d|2[0-8])))";
  const auto date = cat("(", year, "-", day, R"(|(\d{2})", leap, "|", leap, "00)-02-29)");
  const std::string time = R"(([01]\d|2[0-3]):[0-5]\d:[0-5]\d(\.\d{1,6})?(Z|[+-]([01]\d|2[0-3]):[0-5]\d))";
  return cat("^", format == "time" ? time : format == "date" ? date : cat(date, "T", time), "$");
}

class Checker {
 public:
  // unmerged: by place, why schemas were not merged.
  Checker(Json schema, std::map<std::string, std::string> unmerged, std::string_view without)
      : root_(std::move(schema)), unmerged_(std::move(unmerged)), older_draft_(is_of_older_draft(root_)) {
    constexpr std::string_view kDigits = "0123456789abcdef";
    for (const char c : without) {
      const auto byte = static_cast<unsigned char>(c);
      without_ += cat("\\x", kDigits.substr(byte / 16, 1), kDigits.substr(byte % 16, 1));
    }
  }

  std::string run() {
    visit(root_, "", 0);
    check_ends();
    for (const auto& [path, key, value] : edits_) {
      check_edit(path, key);
      auto& at = root_[Json::json_pointer(path)];
      if (value.is_discarded()) {
        at.erase(key);
      } else {
        at[key] = value;
      }
    }
    // The longest first: a path may lead through others. No reference does, as none leads through a list.
    std::ranges::sort(exclusive_, {}, [](const auto& path) { return -std::ssize(path); });
    for (const auto& path : exclusive_) {
      auto& at = root_[Json::json_pointer(path)];
      auto options = std::move(at["oneOf"]);
      at.erase("oneOf");
      at["anyOf"] = std::move(options);
    }
    return root_.dump();
  }

 private:
  struct Edit {
    std::string path, key;
    Json value;  // discarded: it goes
  };
  // What a value of a schema has in it: values of all schemas at `all`, and of `count` of those at `some`.
  struct Needs {
    std::vector<std::string> all, some = {};
    std::size_t count = 0;
  };

  template <class... Parts>
  [[noreturn]] static void refuse(const std::string& path, const Parts&... parts) {
    throw Error(ErrorCode::invalid_argument,
                cat("the JSON schema, at ", path.empty() ? "its root" : path, ": ", parts...));
  }

  void check_edit(const std::string& path, const std::string& key) const;
  void visit(const Json& schema, const std::string& path, int depth);
  void visit_object_schema(const Json& schema, const std::string& path, int depth);
  void visit_ref(const Json& schema, const std::string& path, int depth);
  static void check_numbers(const Json& value, const std::string& path);
  void visit_values(const Json& schema, const std::string& path);
  void visit_options(const Json& schema, const std::string& path, const std::string& keyword, int depth);
  void visit_types(const Json& schema, const std::string& path, int depth);
  static void check_bounds(const Json& schema, const std::string& path, bool whole);
  static void check_multiples(const Json& schema, const std::string& path);
  void visit_number(const Json& schema, const std::string& path, bool whole);
  bool has_format(const Json& schema, const std::string& path);
  void visit_string(const Json& schema, const std::string& path);
  void visit_array(const Json& schema, const std::string& path, int depth);
  void visit_object(const Json& schema, const std::string& path, int depth);
  static void check_optional(const Json& schema, const std::string& path);
  void visit_properties(const Json& schema, const std::string& path, int depth);
  void check_open_object(const Json& schema, const std::string& path, bool open);
  void visit_names(const Json& schema, const std::string& path, bool open);
  Needs needs_of_array(const Json& schema, const std::string& path) const;
  Needs needs_of_object(const Json& schema, const std::string& path) const;
  void check_ends() const;

  // Nothing beside annotations and `with` may stand beside the keyword: it would be ignored.
  void check_keyword(const std::string& key, const std::string& path) const;
  void alone(const Json& schema, const std::string& path, std::string_view keyword,
             std::span<const std::string_view> with = {}) const;
  std::string why_unmerged(const std::string& path) const;
  static void check_pattern(const Json& pattern, const std::string& path);
  static std::vector<std::string> types_of(const Json& schema, const std::string& path);
  static std::optional<std::int64_t> count_of(const Json& schema, const std::string& path, const std::string& key);
  const Json& target(const std::string& uri, const std::string& path) const;

  Json root_;
  const std::map<std::string, std::string> unmerged_;
  const bool older_draft_;
  std::string without_;  // as part of a regular expression's class
  std::set<std::string> visited_;  // paths
  // By path: a value of the schema has what one of these says; none: there is a value that has no others in it.
  std::map<std::string, std::vector<Needs>> needs_;
  std::set<std::string> through_;  // paths of schemas that are being visited with no value read since
  std::vector<Edit> edits_;
  std::set<std::string> values_;  // paths of const and enum
  std::vector<std::string> exclusive_;  // paths of schemas whose oneOf is as good as anyOf
  Disjoint disjoint_{[this](const Json& uri) {
    return uri.is_string() ? &target(uri.get<std::string>(), "") : nullptr;  // it was visited
  }};
};

void Checker::visit(const Json& schema, const std::string& path, int depth) {
  if (through_.contains(path)) refuse(path, "it refers to itself and to nothing else");
  if (!visited_.insert(path).second) return;
  if (depth > kMaxDepth) refuse(path, "schemas are nested more than ", kMaxDepth, " deep, references included");
  if (visited_.size() > kMaxSchemas) refuse(path, "there are more than ", kMaxSchemas, " schemas in it");
  if (schema.is_boolean()) {
    if (!schema.get<bool>()) refuse(path, "false allows no value");
    return;
  }
  if (!schema.is_object()) refuse(path, "a schema is an object or true, and this is ", schema.type_name());
  through_.insert(path);
  visit_object_schema(schema, path, depth);
  through_.erase(path);
}

void Checker::visit_object_schema(const Json& schema, const std::string& path, int depth) {
  for (const auto& [key, value] : schema.items()) check_keyword(key, path);
  if (schema.contains("$ref")) return visit_ref(schema, path, depth);
  if (schema.contains("const") || schema.contains("enum")) return visit_values(schema, path);
  for (const auto* const keyword : {"anyOf", "oneOf", "allOf"}) {
    if (schema.contains(keyword)) return visit_options(schema, path, keyword, depth);
  }
  visit_types(schema, path, depth);
}

// JSON Schema takes names that it does not define for annotations. One that is nearly a keyword is taken for a mistake.
void Checker::check_keyword(const std::string& key, const std::string& path) const {
  if ((key == "$id" || key == "id") && !path.empty()) refuse(path + "/" + key, key, " is supported at the root only");
  if (has(kUnsupported, key)) {
    refuse(path + pointer_step(key), "the keyword ", key, " is not supported, and would be ignored: ",
           has(kConditions, key) ? "write anyOf with a whole schema for each case, or leave it out" : "leave it out",
           key == "not" || key.starts_with("depend") ? why_unmerged(path) : std::string());
  }
  if (is_annotation(key)) return;
  for (const auto names : kKeywords) {
    if (has(names, key)) return;
  }
  std::optional<Guess> nearest;
  for (const auto names : kKeywords) {
    const auto guess = misspelt(key, names);
    if (guess && (!nearest || guess->distance < nearest->distance)) nearest = guess;
  }
  if (nearest) {
    refuse(path + pointer_step(key), "the keyword ", key, " is unknown, and would be ignored: is it ", nearest->name, "?");
  }
}

void Checker::alone(const Json& schema, const std::string& path, std::string_view keyword,
                    std::span<const std::string_view> with) const {
  for (const auto& [key, value] : schema.items()) {
    if (key == keyword || !is_enforced(key) || has(with, key)) continue;
    const bool values = keyword == "const" || keyword == "enum";
    refuse(path + pointer_step(key), key, " beside ", keyword, " is not supported: ",
           values ? "leave it out, and name the values alone that it allows" : "put both into one schema",
           why_unmerged(path));
  }
}

std::string Checker::why_unmerged(const std::string& path) const {
  const auto found = unmerged_.find(path);
  return found == unmerged_.end() ? std::string() : cat(" (they were not merged: ", found->second, ")");
}

const Json& Checker::target(const std::string& uri, const std::string& path) const {
  if (uri == "#") return root_;
  if (!uri.starts_with("#/") || uri.find_first_of("~%") != std::string::npos || uri.ends_with('/') ||
      uri.find("//") != std::string::npos) {
    refuse(path, "the reference ", uri, " is not supported: it has to be # or #/<key>/<key>... in this schema, ",
           "without ~ and %");
  }
  const auto* at = &root_;
  enum class Holds : std::uint8_t { schema, names, anything };
  auto holds = Holds::schema;  // `at`; names: of schemas; anything: such as "components", and what is in it
  for (std::size_t begin = 2; begin < uri.size();) {
    const auto end = std::min(uri.find('/', begin), uri.size());
    const auto key = uri.substr(begin, end - begin);
    if (!at->is_object() || !at->contains(key)) refuse(path, "there is nothing at ", uri);
    // What is written for the compiler would be written into the value. Lists of values are no way.
    if (holds == Holds::schema && has_values(key) && !at->at(key).is_array()) {
      refuse(path, "the reference ", uri, " leads into ", key, ", which has values and no schemas");
    }
    if (holds == Holds::schema && key == "propertyNames") {
      refuse(path, "the reference ", uri, " leads into propertyNames: put what both need into $defs");
    }
    if (holds == Holds::names) {
      holds = Holds::schema;
    } else if (holds == Holds::schema) {
      holds = has_names(key) ? Holds::names : is_enforced(key) ? Holds::schema : Holds::anything;
    }
    at = &at->at(key);
    begin = end + 1;
  }
  return *at;
}

void Checker::visit_ref(const Json& schema, const std::string& path, int depth) {
  if (!schema["$ref"].is_string()) refuse(path + "/$ref", "$ref is a string");
  alone(schema, path, "$ref");
  const auto uri = schema["$ref"].get<std::string>();
  needs_[path].push_back({{uri.substr(1)}});
  visit(target(uri, path + "/$ref"), uri.substr(1), depth + 1);
}

void Checker::check_numbers(const Json& value, const std::string& path) {
  if (value.is_number() && std::abs(value.get<double>()) > 9e15) {
    refuse(path, "numbers beyond 9e15 are not supported here");
  }
  if (value.is_object()) {
    for (const auto& [key, one] : value.items()) check_numbers(one, path + pointer_step(key));
  } else if (value.is_array()) {
    for (std::size_t i = 0; i < value.size(); ++i) check_numbers(value[i], cat(path, "/", i));
  }
}

// References lead anywhere: no value may change by what is written for the compiler, and nothing that is referred to may
// go.
void Checker::check_edit(const std::string& path, const std::string& key) const {
  for (auto end = path.size(); end != std::string::npos && end > 0; end = path.rfind('/', end - 1)) {
    if (values_.contains(path.substr(0, end))) {
      refuse(path, "a reference leads into const or enum, which have values and no schemas");
    }
  }
  const auto names = path + "/propertyNames";
  const auto visited = visited_.lower_bound(names);
  if (key == "propertyNames" && visited != visited_.end() && (*visited == names || visited->starts_with(names + "/"))) {
    refuse(names, "a reference leads into it: put what both need into $defs");
  }
}

void Checker::visit_values(const Json& schema, const std::string& path) {
  const std::string keyword = schema.contains("const") ? "const" : "enum";
  values_.insert(path + "/" + keyword);
  alone(schema, path, keyword, std::to_array<std::string_view>({"type"}));
  const auto types = types_of(schema, path);
  const auto check = [&](const Json& value, const std::string& at) {
    check_numbers(value, at);
    if (types.empty()) return;
    if (std::ranges::none_of(types, [&](const auto& type) { return is_type(value, type); })) {
      refuse(at, "the value is not of the type that stands beside it");
    }
  };
  if (keyword == "const") return check(schema["const"], path + "/const");
  const auto& values = schema["enum"];
  if (!values.is_array() || values.empty()) refuse(path + "/enum", "enum is a list of at least one value");
  for (std::size_t i = 0; i < values.size(); ++i) check(values[i], cat(path, "/enum/", i));
}

void Checker::visit_options(const Json& schema, const std::string& path, const std::string& keyword, int depth) {
  alone(schema, path, keyword);
  const auto& options = schema[keyword];
  const auto here = path + "/" + keyword;
  if (!options.is_array() || options.empty()) refuse(here, keyword, " is a list of at least one schema");
  if (keyword == "allOf" && options.size() > 1) {
    refuse(here, "allOf with more than one schema is supported where they can be merged into one: write them as one",
           why_unmerged(path));
  }
  for (std::size_t i = 0; i < options.size(); ++i) {
    needs_[path].push_back({{cat(here, "/", i)}});
    visit(options[i], cat(here, "/", i), depth + 1);
  }
  if (keyword != "oneOf") return;
  exclusive_.push_back(path);
  for (std::size_t i = 0; i < options.size(); ++i) {
    for (std::size_t j = 0; j < i; ++j) {
      if (disjoint_(options[i], options[j])) continue;
      if (disjoint_.is_tired()) refuse(here, "oneOf has too many schemas to compare: write anyOf");
      refuse(cat(here, "/", i), "a value may be valid here and under ", here, "/", j,
             ", which oneOf forbids: make them ",
             "differ in type, or in a required property with const or enum; or write anyOf");
    }
  }
}

std::vector<std::string> Checker::types_of(const Json& schema, const std::string& path) {
  if (!schema.contains("type")) return {};
  const auto& type = schema["type"];
  std::vector<std::string> out;
  const auto take = [&](const Json& one) {
    if (!one.is_string() || !has(kTypes, one.get<std::string>())) {
      refuse(path + "/type", "type is one or more of ", joined(kTypes), ", and not ", one.dump());
    }
    out.push_back(one.get<std::string>());
  };
  if (type.is_array()) {
    if (type.empty()) refuse(path + "/type", "type is an empty list");
    for (const auto& one : type) take(one);
  } else {
    take(type);
  }
  return out;
}

void Checker::visit_types(const Json& schema, const std::string& path, int depth) {
  auto types = types_of(schema, path);
  if (types.empty()) {
    // The compiler takes what has keywords of objects for an object, and of arrays for an array.
    const auto any = [&](std::span<const std::string_view> keys) -> std::string {
      for (const auto key : keys) {
        if (schema.contains(key)) return std::string(key);
      }
      return {};
    };
    const bool object = schema.contains("properties") || schema.contains("additionalProperties");
    const bool array = schema.contains("items") || schema.contains("prefixItems");
    if (object != array) {
      types = {object ? "object" : "array"};
    } else {
      for (const auto keys :
           {std::span<const std::string_view>(kOfObjects), std::span<const std::string_view>(kOfArrays),
            std::span<const std::string_view>(kOfStrings), std::span<const std::string_view>(kOfNumbers)}) {
        if (const auto key = any(keys); !key.empty()) refuse(path + "/" + key, key, " needs a type beside it");
      }
    }
  }
  for (const auto& type : types) {
    if (type == "integer" || type == "number") visit_number(schema, path, type == "integer");
    if (type == "string") visit_string(schema, path);
    if (type == "array") visit_array(schema, path, depth);
    if (type == "object") visit_object(schema, path, depth);
  }
  const auto nests = [](const std::string& type) { return type == "array" || type == "object"; };
  if (types.empty() || !std::ranges::all_of(types, nests)) return;
  for (const auto& type : types) {
    needs_[path].push_back(type == "array" ? needs_of_array(schema, path) : needs_of_object(schema, path));
  }
}

void Checker::visit_number(const Json& schema, const std::string& path, bool whole) {
  for (const auto key_view : kOfNumbers) {
    const std::string key(key_view);
    if (!schema.contains(key)) continue;
    const auto& value = schema[key];
    const auto at = path + "/" + key;
    if (!value.is_number()) refuse(at, key, " is a number, and not ", value.dump());
    const bool exact = whole ? std::abs(value.get<double>()) <= kMaxInteger : std::abs(value.get<double>()) <= 9e15;
    if (!exact) refuse(at, "bounds beyond ", whole ? "2^53 - 1" : "9e15", " are not supported");
    if (key == "multipleOf") {
      if (!whole) refuse(at, "multipleOf is supported for integers only: leave it out");
      const double step = value.get<double>();
      if (step < 1 || step > kMaxMultipleOf || step != std::floor(step)) {
        refuse(at, "multipleOf is a whole number from 1 to ", kMaxMultipleOf);
      }
      const bool least = schema.contains("minimum") || schema.contains("exclusiveMinimum");
      const bool most = schema.contains("maximum") || schema.contains("exclusiveMaximum");
      if (least != most) {
        refuse(at, "multipleOf beside a bound is supported where the number has a minimum and a maximum: give the other one");
      }
    } else if (whole && value.get<double>() != std::floor(value.get<double>())) {
      refuse(at, key, " of an integer is a whole number");
    } else if (!whole && !has_few_decimals(value.get<double>())) {
      refuse(at, "bounds with more than ", kMaxDecimals, " decimals are not supported, and this is ", value.dump());
    }
  }
  check_bounds(schema, path, whole);
  if (schema.contains("multipleOf")) check_multiples(schema, path);
}

// Some number has to be within all of them, with the decimals that the compiler allows.
void Checker::check_bounds(const Json& schema, const std::string& path, bool whole) {
  for (const auto* const least : {"minimum", "exclusiveMinimum"}) {
    for (const auto* const most : {"maximum", "exclusiveMaximum"}) {
      if (!schema.contains(least) || !schema.contains(most)) continue;
      const int open = (least[0] == 'e' ? 1 : 0) + (most[0] == 'e' ? 1 : 0);
      const double room = schema[most].get<double>() - schema[least].get<double>();
      const double steps = whole ? room : std::round(room * std::pow(10.0, kMaxDecimals));
      if (room >= 0 && steps >= open) continue;
      const auto which = whole || room <= 0 ? std::string() : cat(" with at most ", kMaxDecimals, " decimals");
      refuse(cat(path, "/", least), "no number", which, " is left by ", least, " = ", schema[least].dump(), " and ", most,
             " = ", schema[most].dump());
    }
  }
}

// Of whole numbers, with bounds on both sides or on none.
void Checker::check_multiples(const Json& schema, const std::string& path) {
  const auto bound = [&](const std::string& name, double none) { return schema.contains(name) ? schema[name].get<double>() : none; };
  if (!schema.contains("minimum") && !schema.contains("exclusiveMinimum")) return;
  const double least = std::max(bound("minimum", -kMaxInteger), bound("exclusiveMinimum", -kMaxInteger - 1) + 1);
  const double most = std::min(bound("maximum", kMaxInteger), bound("exclusiveMaximum", kMaxInteger + 1) - 1);
  const auto at = path + "/multipleOf";
  if (most - least >= kMaxRange) {
    refuse(at, "multipleOf beside bounds is supported where at most ", kMaxRange, " numbers are within them");
  }
  const double step = schema["multipleOf"].get<double>();
  if (std::floor(most / step) * step < least) {
    refuse(at, "no multiple of ", schema["multipleOf"].dump(), " is within the bounds beside it");
  }
}

std::optional<std::int64_t> Checker::count_of(const Json& schema, const std::string& path, const std::string& key) {
  if (!schema.contains(key)) return std::nullopt;
  const auto& value = schema[key];
  if (!value.is_number_integer() || value.get<double>() < 0) {
    refuse(path + "/" + key, key, " is a whole number from 0 on, and not ", value.dump());
  }
  if (value.get<double>() > kMaxCount)
    refuse(path + "/" + key, key, " is at most ", kMaxCount, ", and not ", value.dump());
  return value.get<std::int64_t>();
}

void Checker::check_pattern(const Json& pattern, const std::string& path) {
  if (!pattern.is_string()) refuse(path, "a pattern is a string");
  const auto text = pattern.get<std::string>();
  check_expression(text, Syntax::regex, cat("the JSON schema's pattern at ", path));
  if (const auto problem = problem_of_string_pattern(text); !problem.empty()) {
    refuse(path, "the pattern is not supported in a JSON string: ", problem);
  }
}

// Whether strings have a format that is enforced. One that JSON Schema does not define is an annotation.
bool Checker::has_format(const Json& schema, const std::string& path) {
  if (!schema.contains("format")) return false;
  const auto& value = schema["format"];
  if (!value.is_string()) refuse(path + "/format", "format is a string");
  const auto format = value.get<std::string>();
  if (has(kTimes, format)) {
    edits_.push_back({path, "format", Json(Json::value_t::discarded)});
    edits_.push_back({path, "pattern", pattern_of_time(format)});
  }
  if (has(kFormats, format)) return true;
  if (has(kUnsupportedFormats, format) || misspelt(format, kFormats)) {
    refuse(path + "/format", "the format ", value.dump(), " is not supported: it is one of ", joined(kFormats));
  }
  edits_.push_back({path, "format", Json(Json::value_t::discarded)});
  return false;
}

void Checker::visit_string(const Json& schema, const std::string& path) {
  const auto least = count_of(schema, path, "minLength"), most = count_of(schema, path, "maxLength");
  const bool formatted = has_format(schema, path);
  if (formatted && schema.contains("pattern")) refuse(path + "/pattern", "pattern beside format is not supported");
  if (schema.contains("pattern")) check_pattern(schema["pattern"], path + "/pattern");
  if (!least && !most) return;
  if (least && most && *least > *most) refuse(path, "minLength is greater than maxLength");
  for (const auto* const other : {"pattern", "format"}) {
    if (schema.contains(other) && (formatted || other != std::string_view("format"))) {
      refuse(path + "/" + other, other, " beside minLength or maxLength is not supported: ",
             other == std::string_view("pattern") ? "write the length into the pattern, as in a{2,4}" : "leave one out");
    }
  }
  // As a pattern, whose characters are those that may stand in a JSON string.
  edits_.push_back({path, "minLength", Json(Json::value_t::discarded)});
  edits_.push_back({path, "maxLength", Json(Json::value_t::discarded)});
  edits_.push_back(
      {path, "pattern",
       cat("^[^\"\\\\\\x00-\\x1f\\x7f", without_, "]{", least.value_or(0), ",", most ? cat(*most) : std::string{}, "}$")});
}

void Checker::visit_array(const Json& schema, const std::string& path, int depth) {
  const auto least = count_of(schema, path, "minItems"), most = count_of(schema, path, "maxItems");
  if (least && most && *least > *most) refuse(path, "minItems is greater than maxItems");
  if (schema.contains("uniqueItems") && schema["uniqueItems"] != Json(false) && most.value_or(2) > 1) {
    refuse(path + "/uniqueItems",
           "uniqueItems is not supported where maxItems is more than 1 or missing, and would be ignored: leave it out, and ",
           "look for equal items in the answer");
  }
  if (schema.contains("uniqueItems")) edits_.push_back({path, "uniqueItems", Json(Json::value_t::discarded)});
  // Values have been read when these begin, so that they may refer back.
  const auto through = std::exchange(through_, {});
  std::size_t first = 0;
  if (schema.contains("prefixItems")) {
    const auto& items = schema["prefixItems"];
    if (older_draft_) {
      refuse(path + "/prefixItems",
             "the draft that $schema names does not have prefixItems: name draft 2020-12, or leave $schema out");
    }
    if (!items.is_array()) refuse(path + "/prefixItems", "prefixItems is a list of schemas");
    for (; first < items.size(); ++first) {
      if (!items[first].is_object()) refuse(cat(path, "/prefixItems/", first), "a schema here is an object");
      visit(items[first], cat(path, "/prefixItems/", first), depth + 1);
    }
    if (most && *most < static_cast<std::int64_t>(first)) {
      refuse(path + "/maxItems", "maxItems is less than the ", first, " schemas of prefixItems: leave out those behind it");
    }
  }
  bool open = !schema.contains("prefixItems");
  if (schema.contains("items")) {
    const auto& items = schema["items"];
    open = items != Json(false);
    if (items.is_array()) refuse(path + "/items", "items is one schema: a list of them is called prefixItems");
    if (open) visit(items, path + "/items", depth + 1);
  } else {
    edits_.push_back({path, "items", open});
  }
  if (!open && least && *least > static_cast<std::int64_t>(first)) {
    refuse(path + "/minItems", "minItems is more than there can be: ", first);
  }
  through_ = through;
}

void Checker::visit_object(const Json& schema, const std::string& path, int depth) {
  const auto least = count_of(schema, path, "minProperties"), most = count_of(schema, path, "maxProperties");
  if (least && most && *least > *most) refuse(path, "minProperties is greater than maxProperties");
  const auto through = std::exchange(through_, {});
  visit_properties(schema, path, depth);
  bool open = !schema.contains("properties") && !schema.contains("patternProperties");
  if (schema.contains("unevaluatedProperties") && schema["unevaluatedProperties"] != Json(false)) {
    refuse(path + "/unevaluatedProperties", "only false is supported");
  }
  if (schema.contains("additionalProperties")) {
    const auto& other = schema["additionalProperties"];
    open = other != Json(false);
    if (open && schema.contains("properties") && !schema["properties"].empty()) {
      // Those that are named suffice: what is left out is valid too. A name that is spelled in another way, with
      // escapes, would be one of them again.
      open = false;
      edits_.push_back({path, "additionalProperties", false});
    }
    if (open) visit(other, path + "/additionalProperties", depth + 1);
  } else if (schema.contains("unevaluatedProperties")) {
    open = false;
    edits_.push_back({path, "additionalProperties", false});
  } else {
    edits_.push_back({path, "additionalProperties", open});
  }
  check_open_object(schema, path, open);
  through_ = through;
}

// Each may be followed by any of those after it.
void Checker::check_optional(const Json& schema, const std::string& path) {
  if (!schema.contains("properties")) return;
  std::size_t optional = 0;
  for (const auto& item : schema["properties"].items()) optional += is_required(schema, item.key()) ? 0 : 1;
  if (optional > kMaxOptional) {
    refuse(path + "/properties", "an object has at most ", kMaxOptional, " properties that are not required, and this has ",
           optional);
  }
}

void Checker::visit_properties(const Json& schema, const std::string& path, int depth) {
  if (schema.contains("properties")) {
    if (!schema["properties"].is_object()) refuse(path + "/properties", "properties is an object of schemas");
    for (const auto& [name, property] : schema["properties"].items()) {
      if (property == Json(false) && !schema.contains("minProperties")) {
        if (is_required(schema, name)) refuse(path + "/properties" + pointer_step(name), "false allows no value");
        edits_.push_back({path + "/properties", name, Json(Json::value_t::discarded)});
        continue;
      }
      visit(property, path + "/properties" + pointer_step(name), depth + 1);
    }
  }
  check_optional(schema, path);
  if (schema.contains("required")) {
    const auto& required = schema["required"];
    if (!required.is_array()) refuse(path + "/required", "required is a list of names");
    for (std::size_t i = 0; i < required.size(); ++i) {
      const auto at = cat(path, "/required/", i);
      if (!required[i].is_string()) refuse(at, "required is a list of names");
      if (!schema.contains("properties") || !schema["properties"].contains(required[i].get<std::string>())) {
        refuse(at, required[i].dump(), " is not among properties: describe it there");
      }
    }
    const auto most = count_of(schema, path, "maxProperties");
    const auto names = static_cast<std::int64_t>(std::set<Json>(required.begin(), required.end()).size());
    if (most && *most < names) {
      refuse(path + "/maxProperties", "maxProperties is less than the ", names, " properties that are required");
    }
  }
  if (!schema.contains("patternProperties")) return;
  const auto& patterns = schema["patternProperties"];
  const auto at = path + "/patternProperties";
  if (!patterns.is_object() || patterns.size() != 1)
    refuse(at, "patternProperties with exactly one pattern is supported");
  if (schema.contains("properties")) refuse(at, "patternProperties beside properties is not supported");
  check_pattern(patterns.items().begin().key(), at);
  visit(patterns.front(), at + pointer_step(patterns.items().begin().key()), depth + 1);
}

void Checker::visit_names(const Json& names, const std::string& path, bool open) {
  const auto at = path + "/propertyNames";
  if (!names.is_object() && names != Json(true)) refuse(at, "propertyNames is a schema of strings");
  if (names.is_object()) {
    for (const auto& [key, value] : names.items()) check_keyword(key, at);
    if (names.contains("$ref") || names.contains("anyOf") || names.contains("oneOf") || names.contains("allOf") ||
        names.contains("const") || names.contains("enum") ||
        (names.contains("type") && names["type"] != Json("string"))) {
      refuse(at, "propertyNames is supported with pattern, format, minLength and maxLength only");
    }
    visit_string(names, at);
    for (const auto& [key, value] : names.items()) {
      if (key != "type" && !has(kOfStrings, key) && is_enforced(key)) {
        refuse(at + pointer_step(key), "the keyword ", key, " is not supported here");
      }
    }
  }
  // The compiler takes names whose type it cannot see for any value, and allows what has names.
  if (!open || names == Json(true)) {
    edits_.push_back({path, "propertyNames", Json(Json::value_t::discarded)});
  } else {
    edits_.push_back({at, "type", "string"});
  }
}

Checker::Needs Checker::needs_of_array(const Json& schema, const std::string& path) const {
  const auto least = static_cast<std::size_t>(count_of(schema, path, "minItems").value_or(0));
  const auto first = schema.contains("prefixItems") ? schema["prefixItems"].size() : 0;
  Needs out;
  for (std::size_t i = 0; i < std::min(least, first); ++i) out.all.push_back(cat(path, "/prefixItems/", i));
  if (least > first && schema.contains("items")) out.all.push_back(path + "/items");
  return out;
}

Checker::Needs Checker::needs_of_object(const Json& schema, const std::string& path) const {
  const auto least = static_cast<std::size_t>(count_of(schema, path, "minProperties").value_or(0));
  Needs out;
  if (schema.contains("required")) {
    for (const auto& name : schema["required"]) {
      out.all.push_back(path + "/properties" + pointer_step(name.get<std::string>()));
    }
  }
  if (least == 0) return out;
  const bool named = schema.contains("properties") && !schema["properties"].empty();
  if (named) {
    out.count = least;
    for (const auto& item : schema["properties"].items()) {
      out.some.push_back(path + "/properties" + pointer_step(item.key()));
    }
  } else if (schema.contains("patternProperties")) {
    out.all.push_back(path + "/patternProperties" + pointer_step(schema["patternProperties"].items().begin().key()));
  } else if (schema.contains("additionalProperties")) {
    out.all.push_back(path + "/additionalProperties");
  }
  return out;
}

// Every schema has a value that comes to an end. One that always has another value of itself in it would have none.
void Checker::check_ends() const {
  struct Left {
    const std::string* path;
    std::size_t all, some;
  };
  std::map<std::string_view, std::vector<std::size_t>> in_all, in_some;  // which of `left` wait for a path
  std::vector<Left> left;
  std::set<std::string_view> waiting;
  std::vector<std::string_view> ended;
  for (const auto& [path, needs] : needs_) waiting.insert(path);
  const auto end = [&](std::string_view path) {
    if (waiting.erase(path) > 0) ended.push_back(path);
  };
  for (const auto& [path, needs] : needs_) {
    for (const auto& one : needs) {
      const auto ends = [&](const std::string& other) { return !needs_.contains(other); };
      const auto some_end = static_cast<std::size_t>(std::ranges::count_if(one.some, ends));
      Left of{&path, 0, one.count - std::min(one.count, some_end)};
      for (const auto& other : one.all) {
        if (ends(other)) continue;
        ++of.all;
        in_all[other].push_back(left.size());
      }
      for (const auto& other : one.some) {
        if (!ends(other)) in_some[other].push_back(left.size());
      }
      if (of.all == 0 && of.some == 0) end(path);
      left.push_back(of);
    }
  }
  for (std::size_t i = 0; i < ended.size(); ++i) {
    const auto path = ended[i];
    for (const auto at : in_all[path]) {
      if (--left[at].all == 0 && left[at].some == 0) end(*left[at].path);
    }
    for (const auto at : in_some[path]) {
      if (left[at].some > 0 && --left[at].some == 0 && left[at].all == 0) end(*left[at].path);
    }
  }
  if (waiting.empty()) return;
  // Along what it needs, until it comes round.
  std::string path(*waiting.begin()), before;
  for (std::set<std::string> seen; seen.insert(path).second;) {
    before = path;
    for (const auto& one : needs_.at(path)) {
      for (const auto* const list : {&one.all, &one.some}) {
        const auto next = std::ranges::find_if(*list, [&](const auto& other) { return waiting.contains(other); });
        if (next != list->end()) path = *next;
      }
    }
  }
  refuse(before, "no value comes to an end: each has another one of ", path.empty() ? "the whole schema" : path,
         " in it. Allow one without, such as null or an empty list, or leave it out of required");
}

// Names that are not in the schema might come twice.
void Checker::check_open_object(const Json& schema, const std::string& path, bool open) {
  const bool named = schema.contains("properties") && !schema["properties"].empty();
  if (open && schema.contains("patternProperties")) {
    refuse(path + "/additionalProperties", "additionalProperties beside patternProperties is supported as false only");
  }
  if (schema.contains("propertyNames")) {
    if (named || schema.contains("patternProperties")) {
      refuse(path + "/propertyNames", "propertyNames beside properties or patternProperties is not supported");
    }
    visit_names(schema["propertyNames"], path, open);
  }
  const bool many = open || schema.contains("patternProperties");
  if (many && schema.contains("minProperties") && schema["minProperties"] > Json(1)) {
    refuse(path + "/minProperties",
           "minProperties of more than 1 is supported for objects whose properties are all named");
  }
  if (!open && !schema.contains("patternProperties") && schema.contains("minProperties")) {
    const auto count = schema.contains("properties") ? schema["properties"].size() : 0;
    if (schema["minProperties"] > Json(count)) {
      refuse(path + "/minProperties", "minProperties is more than there can be: ", count);
    }
  }
}

}  // namespace

void check_nesting(std::string_view json, std::string_view what) {
  int depth = 0;
  bool in_string = false;
  for (std::size_t i = 0; i < json.size(); ++i) {
    const char c = json[i];
    if (in_string) {
      if (c == '\\') {
        ++i;
      } else if (c == '"') {
        in_string = false;
      }
    } else if (c == '"') {
      in_string = true;
    } else if (c == '{' || c == '[') {
      if (++depth > kMaxNesting) {
        throw Error(ErrorCode::invalid_argument,
                    cat(what, " is nested more than ", kMaxNesting, " levels deep, at byte ", i));
      }
    } else if (c == '}' || c == ']') {
      --depth;
    }
  }
}

std::string checked_schema(std::string_view schema, std::string_view without) {
  check_nesting(schema, "the JSON schema");
  Json parsed;
  try {
    parsed = Json::parse(schema);
  } catch (const Json::parse_error& error) {
    throw Error(ErrorCode::invalid_argument, cat("the JSON schema is no JSON: at byte ", error.byte));
  }
  auto [merged, unmerged] = merge_schemas(parsed);
  try {
    return Checker(std::move(parsed), std::move(unmerged), without).run();
  } catch (const Error& error) {
    if (!merged) throw;
    throw Error(error.code(), cat(error.what(), " (the place is that after schemas beside others, as in allOf, were merged)"));
  }
}

}  // namespace charonia::grammar
