// A budget for thinking: counts the tokens of a response between the marks of its thinking, and forces the end mark
// when the budget is spent. The budget is for all blocks of thinking together.
//
// A begin mark of a special token, a word and a special token is the header of a message, if the end mark begins with a
// special token. The whole response is searched for such headers. White space may stand before the word. Other text may
// stand between the word and the last token, after white space or a special token. A header with a recipient (to=)
// begins no block. The first token of the end mark ends the block; the others follow it.
//
// Any other begin mark has an effect only before other text. Calls between their marks (thinking_call_ids) are no other
// text, so blocks may follow them.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "charonia/generated/sampling.h"
#include "charonia/types.h"
#include "text/token_table.h"
#include "text/utf8.h"

namespace charonia::runtime {

// The thinking of one response. It is a function of the tokens, so a copy can follow tokens that are only proposed.
class Thinking {
 public:
  struct Rules;

  // sampling: with a thinking_budget. rules: of its marks.
  Thinking(const SamplingParams& sampling, std::shared_ptr<const Rules> rules);

  // Adds the next token of the response.
  void push(TokenId token);

  // The token that must come next. The end mark begins at the first end of a character after the budget is spent.
  std::optional<TokenId> forced() const;
  // Tokens that must not come next, because they would begin thinking again when the budget is spent; ascending. Only
  // immediately after a block or a call, and not for a begin mark that is plain text of several tokens: then the new
  // block is ended. Valid as long as a copy of this object.
  std::span<const TokenId> banned() const;
  // Whether forced() or banned() may return a token after one more token.
  bool may_decide_next() const;

 private:
  enum class Phase : std::uint8_t { before, call, inside, over };
  // A byte of the text, or kSpecial + the id of a special token.
  using Unit = std::int32_t;
  static constexpr Unit kSpecial = 256;
  struct Recent {
    Unit unit;
    bool begins_token;
  };
  static void append_units(const text::TokenTable& table, TokenId token, std::vector<Unit>& to);
  static std::vector<Unit> units_of(const text::TokenTable& table, std::span<const TokenId> ids);
  static std::vector<TokenId> beginnings(const text::TokenTable& table, std::string_view word);

  bool is_spent() const { return count_ >= budget_; }
  void push_before(Unit unit);
  void push_call(Unit unit);
  bool ends_with(const std::vector<Unit>& mark) const;  // the last units do
  void push_header(Unit unit);
  void begin_header();
  bool push_inside(Unit unit, std::size_t at);  // at: its number in the token; returns whether the block has ended
  void end_block();
  void find_begun();

  std::shared_ptr<const Rules> rules_;
  int budget_;
  Phase phase_;
  int count_ = 0;              // tokens inside
  std::size_t matched_ = 0;    // units of the begin mark; of a header, all of them if other text follows the word
  std::size_t call_matched_ = 0;  // units of the mark that begins a call
  bool is_quoted_ = false;     // inside a call, in text that may have its marks
  bool is_escaped_ = false;    // in such text, after a backslash
  std::size_t recipient_ = 0;  // characters of "to=" in the header; all of them: it has a recipient
  bool is_other_ = false;      // in a header of another channel, or its text
  // Nothing but the begin of a mark, white space and other headers came after a block or a call.
  bool after_block_ = false;
  std::size_t num_written_ = 0;  // tokens of the end mark, if the budget is spent
  int num_marked_ = 0;           // tokens of `count_` that belong to the end mark
  std::vector<Recent> recent_;   // the last units inside, or in a call, at most the length of a mark that ends it
  text::Utf8State characters_;
};

// The rules that follow from the marks of a request.
struct Thinking::Rules {
  // `table` must outlive the rules. Throws Error(invalid_argument) if a mark has no text.
  Rules(const SamplingParams& sampling, const text::TokenTable& table);

  const text::TokenTable& table;
  std::vector<TokenId> begin_ids, end_ids;
  std::vector<std::vector<TokenId>> call_ids;
  std::vector<Unit> begin, end;  // the marks, without white space before them; `end` ends a block
  // The marks of calls, and of text in them in which no mark counts. Empty: calls are other text.
  std::vector<Unit> call_begin, call_end, quote_begin, quote_end;
  bool is_header;
  std::vector<TokenId> banned;  // immediately after a block; of a header, after its first token
};

// Keeps the last rules, because the rules of a header depend on the whole vocabulary, and all requests to a model with
// headers have the same marks. Other rules are made quickly. Any thread may call.
class ThinkingRules {
 public:
  explicit ThinkingRules(const text::TokenTable& table) : table_(table) {}
  // Throws the errors of Rules.
  std::shared_ptr<const Thinking::Rules> of(const SamplingParams& sampling);

 private:
  const text::TokenTable& table_;
  std::mutex mutex_;
  std::shared_ptr<const Thinking::Rules> last_;
};

}  // namespace charonia::runtime
