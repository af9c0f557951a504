// Special tokens in grammars. They have no text: a grammar goes through one only where it names that token
// (`{"type": "token", "token": ...}` in a structural tag, Token(id) in EBNF).
#pragma once

#include <xgrammar/xgrammar.h>

#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "base/json.h"
#include "charonia/types.h"
#include "text/token_table.h"

namespace charonia::grammar {

class SpecialTokens {
 public:
  // end_ids: the model's.
  SpecialTokens(const text::TokenTable& table, int vocab_size, const std::vector<TokenId>& end_ids);

  // The bytes that stand for a special token in the compiler's vocabulary, which drops tokens without any. They begin
  // with one that is in no text. Empty for a token without a name: it is in no grammar.
  static std::string spelled(std::string_view name);

  // The same structural tag, with ids in place of special tokens' names. A token that ends answers becomes an empty
  // text: the answer may end there. Other names stay: the compiler looks them up among the tokens of texts.
  void name_by_id(nlohmann::ordered_json& format) const;

  // The same grammar, where free text, and "any token but", hold no special tokens.
  xgrammar::Grammar kept_apart(const xgrammar::Grammar& grammar) const;

 private:
  void replace(nlohmann::ordered_json& token) const;

  std::unordered_map<std::string, TokenId> ids_;  // by name
  std::vector<TokenId> all_;                      // those that have a name
  std::unordered_set<TokenId> ends_;
};

}  // namespace charonia::grammar
