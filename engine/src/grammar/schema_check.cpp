#include "grammar/schema_check.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <charconv>
#include <cmath>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "base/text.h"
#include "base/thread_time.h"
#include "charonia/error.h"
#include "text/utf8.h"

namespace charonia::grammar {
namespace {

using Json = nlohmann::ordered_json;

constexpr int kMaxNesting = 64;
constexpr std::size_t kMaxNamePatterns = 16;  // llguidance compares each with each other
constexpr std::size_t kMaxOptional = 700;     // properties of an object; each takes four items of the parser
// llguidance intersects the regular expressions of a text. A step of the intersection costs the product of the branches
// of each expression.
constexpr double kMaxBranches = 4096;
constexpr double kFormatBranches = 8;
constexpr double kMaxMultiples = 100'000;        // see multiple_of(); takes llguidance half a second
constexpr int kMaxCombined = 50'000;             // llguidance has the same limit
constexpr double kMaxNumber = 9007199254740991;  // 2^53 - 1: llguidance computes with doubles

// Keywords whose values are schemas, lists of schemas, and schemas by name.
constexpr std::array<std::string_view, 3> kSchemas = {"items", "additionalItems", "additionalProperties"};
constexpr std::array<std::string_view, 4> kSchemaLists = {"anyOf", "oneOf", "allOf", "prefixItems"};
constexpr std::array<std::string_view, 4> kSchemasByName = {"properties", "patternProperties", "$defs", "definitions"};
// Keywords that llguidance enforces and that have no schemas inside.
constexpr std::array<std::string_view, 17> kEnforced = {
    "type",     "const",         "enum",          "$ref",       "required",        "minItems",
    "maxItems", "minProperties", "maxProperties", "minLength",  "maxLength",       "pattern",
    "format",   "minimum",       "maximum",       "multipleOf", "exclusiveMinimum"};
// Keywords of old drafts, which llguidance takes for annotations.
constexpr std::array<std::string_view, 3> kOld = {"divisibleBy", "disallow", "extends"};
constexpr std::array<std::string_view, 6> kApplicators = {"$ref", "anyOf", "oneOf", "allOf", "const", "enum"};
// Formats that JSON Schema defines; llguidance rejects the others of them. Any other format is an annotation.
constexpr std::array<std::string_view, 10> kFormats = {"date-time", "date", "time", "duration", "email",
                                                       "hostname", "ipv4", "ipv6", "uuid", "uri"};
constexpr std::array<std::string_view, 9> kOtherFormats = {"idn-email",    "idn-hostname",          "uri-reference",
                                                           "iri",          "iri-reference",         "uri-template",
                                                           "json-pointer", "relative-json-pointer", "regex"};

// Existing dates from the year 1 on. Times have at most six digits after the point, because most parsers read no more.
const std::string kDate =
    "((000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})-"
    "((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))|"
    "([0-9]{2}(0[48]|[2468][048]|[13579][26])|(0[48]|[2468][048]|[13579][26])00)-02-29)";
const std::string kTime =
    "([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\\.[0-9]{1,6})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])";

template <class List>
bool is_in(const List& list, std::string_view one) {
  return std::ranges::find(list, one) != list.end();
}

// Whether the keyword may have a list of schemas.
bool is_list(std::string_view key) { return is_in(kSchemaLists, key) || key == "items"; }

std::string pointer(const std::string& at, std::string_view key) {
  std::string out = at + "/";
  for (const char c : key) out += c == '~' ? "~0" : c == '/' ? "~1" : std::string(1, c);
  return out;
}

// Calls visit(keyword, pointer, subschema) for each schema directly inside a schema.
void each_schema(auto& schema, const std::string& at, const auto& visit) {
  for (auto& [key, value] : schema.items()) {
    const auto here = pointer(at, key);
    if (is_in(kSchemasByName, key) && value.is_object()) {
      for (auto& [name, inner] : value.items()) visit(key, pointer(here, name), inner);
    } else if (is_list(key) && value.is_array()) {
      for (std::size_t i = 0; i < value.size(); ++i) visit(key, pointer(here, std::to_string(i)), value[i]);
    } else if (is_in(kSchemas, key)) {
      visit(key, here, value);
    }
  }
}

template <class... Text>
[[noreturn]] void refuse(const std::string& at, const Text&... why) {
  throw Error(ErrorCode::invalid_argument,
              cat("the JSON schema, at ", at.empty() ? "its root" : text::to_valid_utf8(at), ": ", why...));
}

// Returns a keyword without case, separators and the letter s at its end. Names are nearly equal if these forms are
// equal.
std::string rough(std::string_view key) {
  std::string out;
  for (const unsigned char c : key) {
    if (std::isalnum(c) != 0) out += static_cast<char>(std::tolower(c));
  }
  if (out.ends_with('s')) out.pop_back();
  return out;
}

// Returns the keyword that was probably meant, or an empty text if the name is not nearly equal to a keyword.
std::string_view nearly(std::string_view key) {
  static const auto known = [] {
    std::vector<std::pair<std::string, std::string_view>> out;
    const auto add = [&](const auto& list) {
      for (const auto one : list) out.emplace_back(rough(one), one);
    };
    add(kSchemas), add(kSchemaLists), add(kSchemasByName), add(kEnforced);
    return out;
  }();
  const auto form = rough(key);
  const auto found = std::ranges::find(known, form, [](const auto& one) { return one.first; });
  return found == known.end() || form.size() < 3 ? std::string_view() : found->second;
}

// Returns the number of branches that a regular expression has at one position, at most.
double branches(std::string_view pattern) {
  return 2.0 + static_cast<double>(std::ranges::count_if(
                   pattern, [](char c) { return std::string_view("|?*+{").find(c) != std::string_view::npos; }));
}

// Returns the JSON pointer of a reference.
std::string path_of(const std::string& reference) {
  std::string out;
  for (std::size_t i = 1; i < reference.size(); ++i) {
    unsigned byte = 0;
    const auto* const digits = reference.data() + i + 1;
    if (reference[i] == '%' && i + 2 < reference.size() &&
        std::from_chars(digits, digits + 2, byte, 16).ptr == digits + 2) {
      out += static_cast<char>(byte);
      i += 2;
    } else {
      out += reference[i];
    }
  }
  return out;
}

Json* find(Json& root, const std::string& path) {
  try {
    return &root.at(Json::json_pointer(path));
  } catch (const Json::exception&) {
    return nullptr;
  }
}

// Whether a schema is used alone: nothing else constrains the same value.
bool is_alone(const Json& schema) {
  return std::ranges::none_of(kApplicators, [&](auto key) { return schema.contains(key); });
}

class Check {
 public:
  Check(Json& root, double& multiples) : root_(root), multiples_(multiples) {}

  void run() {
    old_draft_ = is_old_draft();
    find_all_merged();
    if (merges_) {
      find_all_merged();  // and the groups
      check_intersections();
    }
    visit(root_, "", true);
    for (const auto& [path, from] : references_) {
      if (visited_.contains(path)) continue;
      auto* const schema = find(root_, path);
      if (schema == nullptr) refuse(pointer(from, "$ref"), "the reference leads nowhere");
      visit(*schema, path, true);
    }
  }

 private:
  bool is_old_draft() const {
    if (!root_.is_object() || !root_.contains("$schema") || !root_["$schema"].is_string()) return false;
    const auto name = root_["$schema"].get<std::string>();
    return name.find("draft-0") != std::string::npos || name.find("2019-09") != std::string::npos;
  }

  // The regular expressions that may apply to one text.
  struct Group {
    double product() const {
      double out = 1;
      for (const auto& [text, cost] : branches) out *= cost;
      return out;
    }

    std::map<std::string, double> branches;  // by pattern or format
    std::set<const Json*> schemas;
    std::string at;  // of the last expression
  };

  void find_all_merged() {
    found_.clear();
    references_.clear();
    groups_.clear();
    find_merged(root_, "", true, "");
    for (std::size_t i = 0; i < references_.size(); ++i) {  // it grows
      const auto path = references_[i].first;
      if (const auto* const schema = find(root_, path)) find_merged(*schema, path, true, "");
    }
  }

  // Collects the targets of references that have other keywords next to them, or that are part of allOf, anyOf or
  // oneOf. Such an object may have properties that another schema names. If a value has several schemas, also collects
  // the groups of regular expressions. value: the group of the schema's values.
  void find_merged(const Json& schema, const std::string& at, bool alone, const std::string& value) {
    if (!schema.is_object() || !found_.insert(&schema).second) return;
    static constexpr std::array<std::string_view, 5> kNotes = {"title", "description", "default", "$defs",
                                                               "definitions"};
    const auto constraints =
        std::ranges::count_if(schema.items(), [](const auto& item) { return !is_in(kNotes, item.key()); });
    if (schema.contains("$ref") && schema["$ref"].is_string()) {
      const auto path = path_of(schema["$ref"].get<std::string>());
      if (!alone || constraints > 1) merged_.insert(path);
      merges_ |= constraints > 1;
      references_.emplace_back(path, at);
    }
    if (merges_) add(schema, groups_[value], at);
    each_schema(schema, at, [&](const std::string& key, const std::string& here, const Json& inner) {
      const bool in_place = key == "allOf" || key == "anyOf" || key == "oneOf";
      combines_ |= in_place || key == "patternProperties";
      merges_ |= in_place && (constraints > 1 || (key == "allOf" && schema[key].size() > 1));
      find_merged(inner, here, !in_place || (key != "allOf" && !constrains(schema, key)),
                  in_place                                                      ? value
                  : key == "properties"                                         ? here.substr(here.rfind('/'))
                  : key == "patternProperties" || key == "additionalProperties" ? "*"
                  : is_in(kSchemasByName, key)                                  ? ""
                                                                                : "[]");
    });
  }

  // Adds the regular expressions that a schema applies to its own value.
  void add(const Json& schema, Group& group, const std::string& at) {
    if (!schema.is_object() || !group.schemas.insert(&schema).second) return;
    if (++combined_ > kMaxCombined) refuse(at, "too many schemas are combined");
    for (const auto* const key : {"pattern", "format"}) {
      if (!schema.contains(key) || !schema[key].is_string()) continue;
      const auto text = schema[key].get<std::string>();
      if (group.branches.emplace(cat(key, text), *key == 'p' ? branches(text) : kFormatBranches).second) group.at = at;
    }
    for (const auto* const key : {"allOf", "anyOf", "oneOf"}) {
      if (!schema.contains(key) || !schema[key].is_array()) continue;
      for (const auto& one : schema[key]) add(one, group, at);
    }
    if (schema.contains("$ref") && schema["$ref"].is_string()) {
      if (const auto* const other = find(root_, path_of(schema["$ref"].get<std::string>()))) add(*other, group, at);
    }
  }

  // A property that a pattern names may have the name of any property.
  void check_intersections() {
    const auto any_name = groups_["*"].product();
    for (const auto& [value, group] : groups_) {
      if (group.product() * (value.starts_with('/') ? any_name : 1) <= kMaxBranches) continue;
      refuse(group.at.empty() ? groups_["*"].at : group.at,
             "too many patterns and formats apply to one text, or have too many branches, in a schema that combines "
             "others");
    }
  }

  // Whether a schema has keywords for objects next to the applicator.
  static bool constrains(const Json& schema, std::string_view applicator) {
    return std::ranges::any_of(schema.items(), [&](const auto& item) {
      return item.key() != applicator && (is_in(kApplicators, item.key()) || is_in(kSchemas, item.key()) ||
                                          item.key() == "properties" || item.key() == "patternProperties" ||
                                          item.key() == "required");
    });
  }

  // alone: no other schema constrains the same value.
  void visit(Json& schema, const std::string& at, bool alone) {
    visited_.insert(at);
    if (!schema.is_object()) return;
    if (merged_.contains(at)) alone = false;
    simplify(schema, at);
    for (const auto& [key, value] : schema.items()) check_keyword(schema, key, value, at);
    check_object(schema, at, alone);
    each_schema(schema, at, [&](const std::string& key, const std::string& here, Json& inner) {
      const bool in_place = key == "anyOf" || key == "oneOf";
      visit(inner, here, key != "allOf" && (!in_place || (alone && !constrains(schema, key))));
    });
  }

  // Handles keywords that llguidance rejects although they have no effect, or that llguidance needs in another form.
  void simplify(Json& schema, const std::string& at) {
    if (schema.contains("uniqueItems")) {
      const bool one = schema.contains("maxItems") && schema["maxItems"].is_number() && schema["maxItems"] <= 1;
      if (schema["uniqueItems"] == Json(false) || one) schema.erase("uniqueItems");
    }
    if (schema.contains("unevaluatedProperties") && schema["unevaluatedProperties"].is_boolean()) {
      if (schema["unevaluatedProperties"] == Json(true)) {
        schema.erase("unevaluatedProperties");
      } else if (is_alone(schema)) {
        schema.erase("unevaluatedProperties");
        if (!schema.contains("additionalProperties")) schema["additionalProperties"] = false;
      }
    }
    if (schema.contains("propertyNames") && !schema.contains("properties") && !schema.contains("patternProperties")) {
      const auto& names = schema["propertyNames"];
      if (names.is_object() && names.contains("pattern") && names["pattern"].is_string() &&
          (names.size() == 1 || (names.size() == 2 && names.contains("type")))) {
        const auto more = schema.contains("additionalProperties") ? schema["additionalProperties"] : Json(true);
        schema["patternProperties"] = {{names["pattern"].get<std::string>(), more}};
        schema["additionalProperties"] = false;
        schema.erase("propertyNames");
      }
    }
    if (!schema.contains("format") || !schema["format"].is_string()) return;
    const auto format = schema["format"].get<std::string>();
    const auto expression = format == "date"        ? kDate
                            : format == "time"      ? kTime
                            : format == "date-time" ? kDate + "T" + kTime
                                                    : "";
    if (!expression.empty()) {
      if (schema.contains("pattern"))
        refuse(pointer(at, "pattern"), "pattern and format ", format, " exclude each other");
      schema.erase("format");
      schema["pattern"] = "^(" + expression + ")$";
    } else if (!is_in(kFormats, format) && !is_in(kOtherFormats, format)) {
      const auto meant = std::ranges::find(kFormats, rough(format), [](auto one) { return rough(one); });
      if (meant != kFormats.end())
        refuse(pointer(at, "format"), "the format ", format, " is unknown: is it ", *meant, "?");
      schema.erase("format");
    }
  }

  void check_keyword(const Json& schema, const std::string& key, const Json& value, const std::string& at) {
    const auto here = pointer(at, key);
    if (is_in(kOld, key)) refuse(here, "the keyword ", key, " is not supported, and would be ignored: leave it out");
    if (key == "prefixItems" && old_draft_)
      refuse(here, "prefixItems needs draft 2020-12, and $schema names an older one");
    if ((key == "$id" || key == "id") && !at.empty() && value.is_string()) {
      refuse(here, "a schema inside another one has no name of its own: references begin with #");
    }
    if (key == "$ref" && (!value.is_string() || !value.get<std::string>().starts_with('#'))) {
      refuse(here, "a reference begins with #, and leads into the same schema");
    }
    if (key == "pattern" && value.is_string()) pattern(value.get<std::string>(), here);
    if (key == "items" && value.is_array() && !old_draft_)
      refuse(here, "a list of schemas is prefixItems since draft 2020-12");
    if (key == "patternProperties" && value.is_object()) {
      for (const auto& [name, inner] : value.items()) name_pattern(name, here);
    }
    if (key == "const" || key == "enum" || key.ends_with("imum") || key == "multipleOf") {
      check_numbers(value, here);
    }
    const bool known = is_in(kEnforced, key) || is_in(kSchemas, key) || is_in(kSchemaLists, key) ||
                       is_in(kSchemasByName, key) || key == "exclusiveMaximum";
    if (!known && !key.starts_with("x-")) {
      if (const auto meant = nearly(key); !meant.empty())
        refuse(here, "there is no keyword ", key, ": is it ", meant, "?");
    }
    if (key == "multipleOf" && value.is_number()) multiple_of(value, here);
    if (key == "properties" && value.size() > names_in(schema).size() + kMaxOptional) {
      refuse(here, "more than ", kMaxOptional, " properties that are not required are not supported");
    }
    // The names of other properties may repeat, so only one of them certainly counts.
    if (key == "minProperties" && value.is_number() && value > names_in(schema).size() + 1) {
      refuse(here, "more than one property beyond the required ones is not supported, since names may repeat");
    }
  }

  static std::vector<std::string> names_in(const Json& schema) {
    const auto required = schema.find("required");
    const bool listed = required != schema.end() && required->is_array() &&
                        std::ranges::all_of(*required, [](const auto& one) { return one.is_string(); });
    return listed ? required->get<std::vector<std::string>>() : std::vector<std::string>();
  }

  void check_numbers(const Json& value, const std::string& here) {
    if (value.is_structured()) {
      for (const auto& one : value) check_numbers(one, here);
    } else if (value.is_number()) {
      const auto number = value.get<double>();
      if (!(std::abs(number) <= kMaxNumber)) refuse(here, "numbers beyond 2^53 - 1 are not supported");
      if (number != 0 && std::abs(number) < 1e-15) refuse(here, "numbers below 1e-15 are not supported");
    }
  }

  // llguidance has a state for each remainder, and computes more of them for each zero at the end of the number. Powers
  // of ten cost nothing. If values have several schemas, the numbers of states multiply.
  void multiple_of(const Json& value, const std::string& here) {
    auto digits = value.dump();
    digits.resize(std::min(digits.find('e'), digits.size()));
    std::erase_if(digits, [](char c) { return c == '.' || c == '-'; });
    digits.resize(digits.find_last_not_of('0') + 1);
    if (digits.empty() || std::stod(digits) == 1) return;
    int zeros = 0;
    for (auto rest = value.get<double>(); rest >= 10 && std::fmod(rest, 10) == 0; rest /= 10) ++zeros;
    const auto cost = std::stod(digits) * (1 + 16 * zeros);
    multiples_ += cost;
    if (multiple_values_.insert(digits + '0' + std::to_string(zeros)).second) product_ *= cost;
    if (multiples_ > kMaxMultiples || ((combines_ || merges_) && product_ > kMaxMultiples)) {
      refuse(here, "the numbers of multipleOf are too large together: the limit is ", kMaxMultiples, " states");
    }
  }

  void pattern(const std::string& text, const std::string& here) {
    try {
      repetitions_ += check_pattern(text, true);
    } catch (const Error& error) {
      refuse(here, error.what());
    }
    if (repetitions_ > kMaxRepetitions)
      refuse(here, "the patterns have more than ", kMaxRepetitions, " repetitions in all");
  }

  void name_pattern(const std::string& text, const std::string& here) {
    pattern(text, here);
    name_patterns_.insert(text);
    if (name_patterns_.size() > kMaxNamePatterns)
      refuse(here, "the schema has more than ", kMaxNamePatterns, " patterns of names");
  }

  // An object that names its properties has no others, unless another schema constrains it too.
  void check_object(Json& schema, const std::string& at, bool alone) {
    if (!alone || !is_alone(schema) || !schema.contains("properties") || schema.contains("patternProperties")) return;
    for (const auto& name : names_in(schema)) {
      if (schema["properties"].contains(name)) continue;
      if (schema.contains("additionalProperties") && schema["additionalProperties"] != Json(false)) return;
      refuse(pointer(at, "required"), '"', name, "\" is not among properties");
    }
    schema["additionalProperties"] = false;
  }

  Json& root_;
  bool old_draft_ = false;
  int repetitions_ = 0, combined_ = 0;
  bool combines_ = false;  // the schema has anyOf, oneOf, allOf or patternProperties
  double& multiples_;      // the cost of all multipleOf of the guide
  double product_ = 1;     // of the costs of their different values in this schema
  std::set<std::string> multiple_values_;
  bool merges_ = false;                     // a value has several schemas
  std::set<const Json*> found_;             // by find_merged()
  std::set<std::string> merged_, visited_;  // pointers
  std::set<std::string> name_patterns_;
  // Pointers of schemas, and of the references to them. Such a schema may have any place, for example below a keyword
  // that JSON Schema does not define.
  std::vector<std::pair<std::string, std::string>> references_;
  std::map<std::string, Group> groups_;  // by "/" and the name of a property, "*" for other properties, "[]" for items
};

}  // namespace

Json parse_json(std::string_view text, std::string_view what) {
  int depth = 0;
  bool quoted = false;
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (quoted && text[i] == '\\') ++i;
    else if (text[i] == '"') quoted = !quoted;
    else if (!quoted && (text[i] == '{' || text[i] == '[')) {
      if (++depth > kMaxNesting) {
        throw Error(ErrorCode::invalid_argument,
                    cat(what, ": JSON nested more than ", kMaxNesting, " deep, at byte ", i));
      }
    } else if (!quoted && (text[i] == '}' || text[i] == ']')) {
      --depth;
    }
  }
  try {
    return Json::parse(text);
  } catch (const Json::exception& error) {
    throw Error(ErrorCode::invalid_argument, cat(what, " is not JSON: ", text::to_valid_utf8(error.what())));
  }
}

Json checked_schema(Json schema, Space space, double& multiples) {
  if (schema == Json(true)) schema = Json::object();
  Check(schema, multiples).run();
  if (!schema.is_object()) refuse("", "no value is valid");
  if (space == Space::fixed) {
    schema["x-guidance"] = {{"whitespace_flexible", false}, {"item_separator", ", "}, {"key_separator", ": "}};
  } else {
    schema["x-guidance"] = {{"whitespace_pattern", "[ \\n]"}};
  }
  return schema;
}

int check_pattern(std::string_view pattern, bool schema) {
  const auto reject = [](std::size_t at, std::string_view why) {
    throw Error(ErrorCode::invalid_argument, cat("at byte ", at, " of the regular expression: ", why));
  };
  constexpr std::string_view kLetters = "dDwWsStnrfvxuUpP";  // escapes that mean the same everywhere
  const auto escape = [&](std::size_t at) {
    if (at + 1 >= pattern.size()) reject(at, "a backslash at the end");
    const auto c = static_cast<unsigned char>(pattern[at + 1]);
    if (std::isalnum(c) != 0 && kLetters.find(pattern[at + 1]) == std::string_view::npos) {
      reject(at, cat("the escape \\", pattern.substr(at + 1, 1), " is not supported"));
    }
  };
  int depth = 0, repetitions = 0;
  bool repeated = false;  // the part before this character is a repetition
  for (std::size_t i = 0; i < pattern.size(); ++i) {
    const char c = pattern[i];
    const bool was_repeated = std::exchange(repeated, false);
    if (c == '\\') {
      escape(i++);
      if ((pattern[i] == 'p' || pattern[i] == 'P' || pattern[i] == 'u') && pattern.substr(i + 1).starts_with('{')) {
        i = std::min(pattern.find('}', i), pattern.size());
      }
    } else if (c == '[') {
      const auto begin = i++;
      if (i < pattern.size() && pattern[i] == '^') ++i;
      if (i < pattern.size() && pattern[i] == ']') reject(i, "an empty class, or a bracket in it without a backslash");
      for (; i < pattern.size() && pattern[i] != ']'; ++i) {
        if (pattern[i] == '\\') escape(i++);
        else if (pattern[i] == '[') reject(i, "a bracket in a class needs a backslash");
        else if (i + 1 < pattern.size() && pattern[i + 1] == pattern[i] && (c == '[') &&
                 (pattern[i] == '&' || pattern[i] == '-' || pattern[i] == '~')) {
          reject(i, "this character twice in a class has different meanings: write it once, with a backslash");
        }
      }
      if (i >= pattern.size()) reject(begin, "a class without an end");
    } else if (c == '(') {
      if (++depth > kMaxNesting) reject(i, cat("brackets nested more than ", kMaxNesting, " deep"));
      if (pattern.substr(i).starts_with("(?") && !pattern.substr(i).starts_with("(?:")) {
        const bool named = pattern.substr(i).starts_with(schema ? "(?<" : "(?P<");
        const auto next = pattern.substr(i + 3, 1);
        if (!named || next == "=" || next == "!") reject(i, "this kind of group is not supported: write (?:...)");
        i += 2;
      }
    } else if (c == ')') {
      --depth;
    } else if (c == '*' || c == '+' || c == '?' || c == '{') {
      if (was_repeated && c != '?') reject(i, "what is repeated is a repetition: put it into brackets");
      if (was_repeated) {  // as few as possible; this matches the same texts
        if (i + 1 < pattern.size() && std::string_view("*+?{").find(pattern[i + 1]) != std::string_view::npos) {
          reject(i + 1, "what is repeated is a repetition: put it into brackets");
        }
        continue;
      }
      if (c == '{') {
        const auto end = pattern.find('}', i);
        const auto inside = end == std::string_view::npos ? "" : pattern.substr(i + 1, end - i - 1);
        const bool counts = !inside.empty() && std::isdigit(static_cast<unsigned char>(inside[0])) != 0 &&
                            inside.find_first_not_of("0123456789,") == std::string_view::npos;
        if (!counts) reject(i, "a brace that begins no repetition such as {1,3} needs a backslash");
        i = end;
      }
      repeated = true;
      if (++repetitions > kMaxRepetitions)
        reject(i, cat("more than ", kMaxRepetitions, " repetitions and optional parts"));
    }
  }
  return repetitions;
}

std::string place_of_error(const Json& schema, const std::function<std::string(const Json&)>& error) {
  constexpr double kMaxSeconds = 0.05;  // a large schema has many subschemas
  const auto whole = error(schema);
  const auto begun = thread_seconds();
  std::string place;
  // Whether a subschema has the same error as the whole. It gets the definitions that it may refer to.
  const auto fails = [&](Json inner) {
    if (thread_seconds() - begun > kMaxSeconds) return false;
    for (const auto* const key : {"$schema", "$defs", "definitions", "x-guidance"}) {
      if (inner.is_object() && schema.contains(key) && !inner.contains(key)) inner[key] = schema[key];
    }
    return error(inner) == whole;
  };
  const Json* at = &schema;
  for (bool deeper = true; deeper;) {
    deeper = false;
    const auto enter = [&](const Json& inner, const std::string& name) {
      if (deeper || !fails(inner)) return;
      deeper = true;
      place = name;
      at = &inner;
    };
    const auto before = place;
    each_schema(*at, before,
                [&](const std::string&, const std::string& name, const Json& inner) { enter(inner, name); });
  }
  return place;
}

}  // namespace charonia::grammar
