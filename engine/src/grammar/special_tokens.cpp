#include "grammar/special_tokens.h"

#include <grammar_functor.h>

#include <algorithm>
#include <cstdint>
#include <utility>

namespace charonia::grammar {
namespace {

using Json = nlohmann::ordered_json;

constexpr char kNoText = '\xff';  // in no UTF-8

// Free text of structural tags (TagDispatch) is made of any bytes, and ExcludeToken of any tokens.
class KeptApart : public xgrammar::GrammarMutator {
 public:
  explicit KeptApart(const std::vector<TokenId>& special) : special_(special) {}

 private:
  std::int32_t VisitTagDispatch(const GrammarExpr& expr) override {
    auto dispatch = base_grammar_->GetTagDispatch(expr);
    dispatch.excludes.emplace_back(1, kNoText);
    return builder_->AddTagDispatch(dispatch);
  }

  std::int32_t VisitExcludeToken(const GrammarExpr& expr) override {
    return builder_->AddExcludeTokenSet(with_special({expr.begin(), expr.end()}));
  }

  std::int32_t VisitTokenTagDispatch(const GrammarExpr& expr) override {
    auto dispatch = base_grammar_->GetTokenTagDispatch(expr);
    dispatch.excludes = with_special(std::move(dispatch.excludes));
    return builder_->AddTokenTagDispatch(dispatch);
  }

  std::vector<std::int32_t> with_special(std::vector<std::int32_t> ids) const {
    ids.insert(ids.end(), special_.begin(), special_.end());
    std::ranges::sort(ids);
    ids.erase(std::ranges::unique(ids).begin(), ids.end());
    return ids;
  }

  const std::vector<TokenId>& special_;
};

}  // namespace

SpecialTokens::SpecialTokens(const text::TokenTable& table, int vocab_size, const std::vector<TokenId>& end_ids)
    : ends_(end_ids.begin(), end_ids.end()) {
  for (TokenId id = 0; id < std::min(vocab_size, table.size()); ++id) {
    if (!table.is_special(id) || table.raw_bytes(id).empty()) continue;
    ids_.emplace(table.raw_bytes(id), id);
    all_.push_back(id);
  }
}

std::string SpecialTokens::spelled(std::string_view name) {
  return name.empty() ? std::string() : kNoText + std::string(name);
}

void SpecialTokens::replace(Json& token) const {
  if (!token.is_string()) return;
  if (const auto found = ids_.find(token.get<std::string>()); found != ids_.end()) token = found->second;
}

void SpecialTokens::name_by_id(Json& format) const {
  if (format.is_array()) {
    for (auto& one : format) name_by_id(one);
    return;
  }
  if (!format.is_object()) return;
  for (auto& [key, value] : format.items()) {
    if (key == "json_schema") continue;
    if (key == "trigger_tokens" || key == "exclude_tokens") {
      for (auto& one : value) replace(one);
    } else if (key == "rules" && value.is_array() && format.value("type", Json()) == Json("token_dispatch")) {
      for (auto& rule : value) {
        if (rule.is_array() && !rule.empty()) replace(rule[0]);
      }
    }
    name_by_id(value);
    const bool tag = key == "begin" || key == "end";
    if (tag && value.is_object() && value.value("type", Json()) == Json("const_string")) value = "";
  }
  if (format.value("type", Json()) != Json("token") || !format.contains("token")) return;
  replace(format["token"]);
  const auto& id = format["token"];
  // Not as it is: a number that is no token id would become one.
  const auto number = id.is_number_integer() ? id.get<std::int64_t>() : -1;
  const bool end = std::in_range<TokenId>(number) && ends_.contains(static_cast<TokenId>(number));
  if (end) format = {{"type", "const_string"}, {"value", ""}};
}

xgrammar::Grammar SpecialTokens::kept_apart(const xgrammar::Grammar& grammar) const {
  return KeptApart(all_).Apply(grammar);
}

}  // namespace charonia::grammar
