#include "grammar/largest_part.h"

#include <algorithm>
#include <string_view>

#include "base/guide_name.h"
#include "base/json.h"
#include "base/text.h"
#include "charonia/error.h"
#include "grammar/expression.h"
#include "grammar/schema.h"
#include "grammar/schema_sets.h"

namespace charonia::grammar {
namespace {

using Json = nlohmann::ordered_json;

constexpr double kNotable = 50;

class Search {
 public:
  // places: whether the user knows the text, and so its places.
  explicit Search(bool places) : places_(places) {}

  // named: the keys of the value are names, and not those of a schema.
  void look(const Json& value, const std::string& path, double times, bool named = false) {
    if (value.is_array()) {
      for (std::size_t i = 0; i < value.size(); ++i) look(value[i], cat(path, "/", i), times);
    }
    if (!value.is_object()) return;
    double items = 1;
    for (const auto& [key, one] : value.items()) {
      if (named) break;
      const auto at = path + pointer_step(key);
      if (key == "minItems" || key == "maxItems" || key == "minLength" || key == "maxLength") {
        const double count = one.is_number() ? one.get<double>() : 0;
        take(times * count, cat(key, " = ", one.dump()), cat(" at ", at));
        if (key.ends_with("Items")) items = std::max(items, count);
      } else if (key == "properties" && one.is_object()) {
        const auto required = value.contains("required") ? std::min(value["required"].size(), one.size()) : 0;
        const auto optional = static_cast<double>(one.size() - required);
        take(times * optional * optional / 2, cat(optional, " properties that are not required"), cat(", at ", at));
      } else if ((key == "enum" || key == "anyOf" || key == "oneOf") && one.is_array()) {
        const auto* const what = key == "enum" ? " values" : " schemas";
        take(times * static_cast<double>(one.size()), cat(one.size(), what), cat(", at ", at));
      } else if ((key == "pattern" || key == "grammar") && one.is_string()) {
        expression(one.get<std::string>(), cat(" of ", at), times);
      }
    }
    for (const auto& [key, one] : value.items()) {
      if (!named && has_values(key)) continue;
      look(one, path + pointer_step(key), times * (key == "items" ? items : 1), !named && has_names(key));
    }
  }

  void expression(std::string_view text, const std::string& where, double times) {
    const auto found = largest_repetition(text);
    if (found.count == 0) return;
    take(times * static_cast<double>(found.count), cat(found.count, " repetitions"), cat(" at byte ", found.at, where));
  }

  std::string result() const { return largest_ < kNotable ? "" : "; its largest part is probably " + what_; }

 private:
  void take(double size, const std::string& what, const std::string& place) {
    if (size <= largest_) return;
    largest_ = size;
    what_ = places_ ? what + shortened(place, 200) : what;
  }

  const bool places_;
  double largest_ = 0;
  std::string what_;
};

}  // namespace

std::string largest_part(const Guide& guide) {
  // What tools and choices beside them were made into, their users have not seen.
  Search search(guide.type != GuideType::structural_tag || called(guide) == called({}));
  if (guide.type == GuideType::regex || guide.type == GuideType::ebnf_grammar) {
    search.expression(guide.text, "", 1);
  } else if (guide.type == GuideType::json_schema || guide.type == GuideType::structural_tag) {
    try {
      check_nesting(guide.text, "it");
      search.look(Json::parse(guide.text), "", 1);
    } catch (const std::exception&) {  // it says nothing, then
      return {};
    }
  }
  return search.result();
}

}  // namespace charonia::grammar
