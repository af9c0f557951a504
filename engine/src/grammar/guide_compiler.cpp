#include "grammar/guide_compiler.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cctype>
#include <limits>
#include <map>
#include <mutex>
#include <span>
#include <string_view>
#include <utility>

#include "base/guide_name.h"
#include "base/text.h"
#include "base/thread_time.h"
#include "charonia/error.h"
#include "grammar/library.h"
#include "grammar/schema_check.h"
#include "text/utf8.h"

namespace charonia::grammar {

using Json = nlohmann::ordered_json;
using text::TokenTable;

// One grammar: its entry in llguidance's list, and its name in errors.
struct GuideCompiler::Part {
  Json entry;
  std::string called;
};

namespace {

using Part = GuideCompiler::Part;

constexpr int kMaxBrackets = 64;
constexpr int kMaxTerminalDepth = 64;
constexpr double kMaxTerminalBytes = 1e6;
// llguidance's time for one byte of text can grow with the number of alternatives of a rule times the number of places
// that name the rule. So many take 0.3 s.
constexpr double kMaxCompletions = 100'000;
constexpr char kSpecial = '\xff';  // llguidance's mark of special tokens; no text has this byte

// CPU time of one mask. The other sequences of a step wait for it, so the request of a slower mask ends.
constexpr double kMaxMaskSeconds = 0.1;

// CPU time of the proposals of a sequence in a step. All sequences wait for them, so the search for certain text stops
// after half of it. A sequence whose proposals take longer more often than once in kSlowCost times gets no more.
constexpr double kMaxProposalSeconds = 0.005;
constexpr int kSlowCost = 8;
constexpr int kMaxSlow = 3 * kSlowCost;
constexpr std::size_t kMostTokenText = 16;  // bytes of certain text for each token that is wanted

// Limits of one grammar. A mask that costs more ends its request with an error.
constexpr llg::ParserLimits kLimits{.max_items_in_row = 3000,
                                    .initial_lexer_fuel = 1'000'000,
                                    .step_lexer_fuel = 100'000,
                                    .step_max_items = 50'000,
                                    .max_lexer_states = 25'000,
                                    .max_grammar_size = 65'000};

[[noreturn]] void refuse(std::string_view why) { throw Error(ErrorCode::invalid_argument, std::string(why)); }

// llguidance's error as one line.
std::string error_of(llg::Matcher* matcher) {
  const char* const error = llguidance().matcher_get_error(matcher);
  std::string out = error == nullptr ? "" : error;
  for (const char* const more : {"\n<non-verbose/>", "\n  while processing ", "\n<backtrace>"}) {
    if (const auto end = out.find(more); end != std::string::npos) out.resize(end);
  }
  std::ranges::replace(out, '\n', ' ');
  return text::to_valid_utf8(trim(out));
}

// Reads the token <[id]> at a position of a text in Lark. Returns its id and the position after it. The id is -1 if
// there is no token.
std::pair<TokenId, std::size_t> token_at(std::string_view text, std::size_t at) {
  TokenId id = 0;
  auto end = at + 2;
  if (!text.substr(at).starts_with("<[")) return {-1, at};
  for (; end < text.size() && std::isdigit(static_cast<unsigned char>(text[end])) != 0 && id < (1 << 24); ++end) {
    id = 10 * id + (text[end] - '0');
  }
  return text.substr(end).starts_with("]>") && end > at + 2 ? std::pair{id, end + 2} : std::pair{TokenId{-1}, at};
}

// The definitions of a grammar. llguidance copies a terminal to each place that names it.
class Definitions {
 public:
  // Adds a word of the grammar, and the bytes of a literal. may_begin: the word may be the name of a definition.
  void add(std::string_view word, bool may_begin) {
    if (may_begin) last_ = words_.size();
    words_.push_back(word);
  }
  void add_bytes(std::size_t count) { bytes_ += static_cast<double>(count); }
  void add_alternative() { ++alternatives_; }

  // The last word that may begin a definition is the name of the next one.
  void begin() {
    if (last_ >= words_.size()) return;
    const auto name = words_[last_];
    words_.resize(last_);
    end();
    name_ = name;
  }

  void end() {
    auto& one = all_[name_];
    one.words.insert(one.words.end(), words_.begin(), words_.end());
    one.bytes += std::exchange(bytes_, 0);
    one.alternatives += std::exchange(alternatives_, 1);
    words_.clear();
  }

  void check() {
    double all = 0;
    for (auto& [name, one] : all_) all += expand(one, name, 0);
    if (all > kMaxTerminalBytes)
      refuse(cat("with the terminals that they name, the rules have more than ", kMaxTerminalBytes, " bytes"));
    double completions = 0;
    for (const auto& [name, one] : all_) {
      for (const auto word : one.words) {
        const auto found = is_terminal(word) ? all_.end() : all_.find(word);
        if (found != all_.end()) completions += found->second.alternatives;
      }
    }
    if (completions > kMaxCompletions)
      refuse(cat("the alternatives of all rules, each times the number of places that name its rule, are more than ",
                 kMaxCompletions));
  }

 private:
  struct Definition {
    std::vector<std::string_view> words;
    double bytes = 0;
    double alternatives = 0;
    double expanded = 0;  // 0: unknown
    int height = 0;       // of the terminals below it
  };

  static bool is_terminal(std::string_view word) {
    const auto letter = word.find_first_not_of('_');
    return letter != std::string_view::npos && std::isupper(static_cast<unsigned char>(word[letter])) != 0;
  }

  double expand(Definition& one, std::string_view name, int depth) {
    if (depth + one.height > kMaxTerminalDepth)
      refuse(cat(name, ": terminals nested more than ", kMaxTerminalDepth, " deep"));
    if (one.expanded > 0) return one.expanded;
    double bytes = one.bytes + 1;
    for (const auto word : one.words) {
      const auto found = is_terminal(word) ? all_.find(word) : all_.end();
      if (found == all_.end()) continue;
      bytes += expand(found->second, word, depth + 1);
      one.height = std::max(one.height, found->second.height + 1);
    }
    return one.expanded = bytes;
  }

  std::map<std::string_view, Definition> all_;
  std::string_view name_;
  std::vector<std::string_view> words_;  // since the definition began
  std::size_t last_ = 0;                 // in words_
  double bytes_ = 0;
  double alternatives_ = 1;
};

// Reads the JSON schema behind %json. Returns the schema and the position after it.
std::pair<Json, std::size_t> schema_at(std::string_view text, std::size_t at) {
  const auto begin = text.find_first_not_of(" \t\r\n", at);
  if (begin == std::string::npos || text[begin] != '{')
    refuse("after %json an object is expected, which is a JSON schema");
  std::size_t end = begin;
  int depth = 0;
  bool quoted = false;
  do {
    if (end >= text.size()) refuse("the JSON schema after %json has no end");
    const char c = text[end];
    if (quoted && c == '\\')
      ++end;
    else if (c == '"')
      quoted = !quoted;
    else if (!quoted)
      depth += c == '{' ? 1 : c == '}' ? -1 : 0;
    ++end;
  } while (depth > 0);
  return {parse_json(text.substr(begin, end - begin), "the JSON schema after %json"), end};
}

// Returns the same Lark with checked schemas behind %json. Tokens that end responses become empty texts: the response
// may end there. Rejects a grammar that costs too much, or that combines regular expressions with & and ~, whose cost
// has no limit. own: the grammar was made by this project. multiples: see checked_schema().
std::string checked_lark(std::string_view text, bool own, const std::vector<TokenId>& end_ids, double& multiples) {
  std::string out;
  int depth = 0, repetitions = 0;
  Definitions definitions;
  const auto end_of_literal = [&](std::size_t at) {
    const char end = text[at];
    for (++at; at < text.size() && text[at] != end && text[at] != '\n'; ++at) {
      if (end == '/' && (text[at] == '*' || text[at] == '?' || text[at] == '{')) ++repetitions;
      if (text[at] == '\\') ++at;
    }
    return std::min(at + 1, text.size());
  };
  const auto is_letter = [&](std::size_t at) {
    return at < text.size() && (std::isalnum(static_cast<unsigned char>(text[at])) != 0 || text[at] == '_');
  };
  for (std::size_t i = 0, end = 0; i < text.size(); out += text.substr(i, end - i), i = end) {
    const char c = text[i];
    const auto rest = text.substr(i);
    end = i + 1;
    if (c == '#' || rest.starts_with("//")) {
      end = std::min(text.find('\n', i), text.size());
    } else if (c == '"' || c == '/') {
      end = end_of_literal(i);
      definitions.add_bytes(end - i);
    } else if (rest.starts_with("%json")) {
      auto [schema, after] = schema_at(text, i + 5);
      out += "%json " + checked_schema(std::move(schema), Space::free, multiples).dump();
      i = end = after;
    } else if (const auto [id, after] = token_at(text, i); std::ranges::find(end_ids, id) != end_ids.end()) {
      out += "\"\"";
      i = end = after;
    } else if (is_letter(i)) {
      while (is_letter(end)) ++end;
      if (std::isdigit(static_cast<unsigned char>(c)) == 0) definitions.add(text.substr(i, end - i), depth == 0);
    } else if (rest.starts_with("::=")) {
      refuse(R"(this is EBNF, and Lark is expected. Instead of root ::= "a" item+ write start: "a" item+)");
    } else if (rest.starts_with("::")) {
      end = i + 2;
    } else if (c == ':' && depth == 0) {
      definitions.begin();
    } else if (c == '(' || c == '[' || c == '{') {
      if (++depth > kMaxBrackets) refuse(cat("brackets nested more than ", kMaxBrackets, " deep, at byte ", i));
      repetitions += c == '{' ? 1 : 0;
    } else if ((c == ')' || c == ']' || c == '}') && depth > 0) {
      --depth;
    } else if (c == '|') {
      definitions.add_alternative();
    } else if (c == '*' || c == '?') {
      ++repetitions;
    } else if ((c == '&' || c == '~') && !own) {
      refuse(cat("the operators & and ~ are not supported, at byte ", i, "; write a{1,3} instead of a~1..3"));
    }
  }
  if (repetitions > kMaxRepetitions) refuse(cat("more than ", kMaxRepetitions, " repetitions and optional parts"));
  definitions.end();
  definitions.check();
  return out;
}

// Returns a text as a literal of Lark. Lark and JSON have the same literals.
std::string lark_literal(const std::string& text) { return Json(text).dump(); }

std::string lark_of_choices(const std::string& text) {
  const auto choices = parse_json(text, "the choices");
  const bool texts = choices.is_array() && !choices.empty() &&
                     std::ranges::all_of(choices, [](const auto& one) { return one.is_string(); });
  if (!texts) refuse("the choices: a JSON list of at least one text is expected");
  std::string out = "start: CHOICE\nCHOICE: ";
  for (std::size_t i = 0; i < choices.size(); ++i) {
    out += (i > 0 ? " | " : "") + lark_literal(choices[i].get<std::string>());
  }
  return out;
}

std::string lark_of_regex(const std::string& text) {
  check_pattern(text, false);
  std::string out = "start: /";
  for (std::size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (c == '\\' && i + 1 < text.size()) out += cat(c, text[++i]);
    else if (c == '/') out += "\\/";
    else if (c == '\n') out += "\\n";
    else if (c == '\r') out += "\\r";
    else out += c;
  }
  return out + "/";
}

// Reads the grammars that preprocessing creates for tools and structural tags: {"grammars": [{"name", "called", and
// "lark_grammar", "regex" or "json_schema"}, ...]}. called: the name of the grammar in errors.
std::vector<Part> parts_of_list(const Guide& guide, const std::vector<TokenId>& end_ids) {
  const auto name = called(guide);
  auto list = parse_json(guide.text, cat(name, ": the grammars"));
  if (!list.is_object() || !list.contains("grammars") || !list["grammars"].is_array() || list["grammars"].empty()) {
    refuse(cat(name, R"(: {"grammars": [...]} is expected)"));
  }
  std::vector<Part> out;
  double multiples = 0;
  for (auto& one : list["grammars"]) {
    const auto text = [&](const char* key) {
      return one.contains(key) && one[key].is_string() ? one[key].get<std::string>() : "";
    };
    if (!one.is_object()) refuse(cat(name, ": each of the grammars is an object"));
    Part part{Json::object(), text("called").empty() ? name : text("called")};
    if (one.contains("name")) part.entry["name"] = one["name"];
    try {
      if (one.contains("json_schema")) {
        part.entry["json_schema"] = checked_schema(std::move(one["json_schema"]), Space::free, multiples);
      } else {
        part.entry["lark_grammar"] =
            one.contains("regex") ? lark_of_regex(text("regex"))
                                  : checked_lark(text("lark_grammar"), !one.contains("name"), end_ids, multiples);
      }
    } catch (const Error& error) {
      refuse(cat(part.called, ": ", error.what()));
    }
    out.push_back(std::move(part));
  }
  return out;
}

Json entry_of(const Guide& guide, const std::vector<TokenId>& end_ids) {
  double multiples = 0;
  switch (guide.type) {
    case GuideType::json:
      return {{"json_schema", checked_schema({{"type", "object"}}, Space::fixed, multiples)}};
    case GuideType::json_schema:
      return {{"json_schema", checked_schema(parse_json(guide.text, "the JSON schema"), Space::fixed, multiples)}};
    case GuideType::regex:
      return {{"lark_grammar", lark_of_regex(guide.text)}};
    case GuideType::ebnf_grammar:
      return {{"lark_grammar", checked_lark(guide.text, false, end_ids, multiples)}};
    case GuideType::choice:
      return {{"lark_grammar", lark_of_choices(guide.text)}};
    case GuideType::structural_tag:
      break;
  }
  throw Error(ErrorCode::internal, "a guide of several grammars");
}

// Returns the grammars of a guide. The text begins with the first grammar.
std::vector<Part> parts_of(const Guide& guide, bool after_space, const std::vector<TokenId>& end_ids) {
  std::vector<Part> out;
  if (guide.type == GuideType::structural_tag) {
    out = parts_of_list(guide, end_ids);
  } else {
    try {
      out.push_back({entry_of(guide, end_ids), called(guide)});
    } catch (const Error& error) {
      refuse(cat(called(guide), ": ", error.what()));
    }
  }
  if (!after_space) return out;
  // With several grammars, the leading space is optional: it has no meaning, and the text may begin with a special
  // token.
  out.front().entry["name"] = "text";
  const auto* const space = guide.type == GuideType::structural_tag ? R"(start: " "? @text)" : R"(start: " " @text)";
  out.insert(out.begin(), {{{"lark_grammar", space}}, called(guide)});
  return out;
}

class Provider : public TokenMaskProvider {
 public:
  // prompt: unset: no text is forced or proposed.
  Provider(std::shared_ptr<const Matchers> grammar, const Vocabulary& vocabulary, std::vector<TokenId> end_ids,
           std::optional<std::vector<TokenId>> prompt, bool proposes)
      : grammar_(std::move(grammar)), vocabulary_(vocabulary), end_ids_(std::move(end_ids)),
        prompt_(std::move(prompt)), proposes_(proposes), at_(begin()) {}

  void fill(std::span<const std::int32_t> output, std::span<std::uint32_t> mask) override {
    go_back(output);  // not timed: without proposals there is nothing to read again
    const auto begun = thread_seconds();
    fill_after(output, mask);
    if (thread_seconds() - begun > kMaxMaskSeconds) {
      throw Error(ErrorCode::invalid_argument,
                  cat("the grammar costs too much: one mask took more than ", kMaxMaskSeconds, " s. Make it simpler"));
    }
  }

  std::span<const TokenId> forced() const override { return forced_; }

  std::vector<TokenId> propose(std::span<const TokenId> output, std::span<const TokenId> guess, int most) override {
    if (!proposes_ || slow_ >= kMaxSlow || most <= 0) return {};
    const auto begun = thread_seconds();
    follow(output);
    // Certain tokens are kept while the output follows them. In one step, several sources may propose for one output.
    auto used = output.size() - std::min(output.size(), certain_at_);
    if (output.size() != certain_at_ &&
        (used >= certain_.size() || !std::ranges::equal(output.last(used), std::span(certain_).first(used)))) {
      certain_ = certain_tokens(output, kMostTokenText * static_cast<std::size_t>(most), kMaxProposalSeconds / 2);
      certain_at_ = output.size();
      used = 0;
    }
    std::vector<TokenId> out(certain_.begin() + static_cast<std::ptrdiff_t>(used), certain_.end());
    if (out.empty()) {
      const auto end = std::ranges::find_first_of(guess, end_ids_);
      const std::vector<std::uint32_t> ids(guess.begin(), end);
      const int valid = llguidance().matcher_validate_tokens(at_.tokens.get(), ids.data(), ids.size());
      out.assign(guess.begin(), guess.begin() + std::max(valid, 0));
    }
    out.resize(std::min(out.size(), static_cast<std::size_t>(most)));
    slow_ = thread_seconds() - begun > kMaxProposalSeconds ? slow_ + kSlowCost : std::max(slow_ - 1, 0);
    return out;
  }

  std::unique_ptr<TokenMaskProvider> clone() const override {
    throw Error(ErrorCode::internal, "a guide makes a provider for each sequence");
  }

 private:
  void fill_after(std::span<const std::int32_t> output, std::span<std::uint32_t> mask) {
    follow(output);
    if (!proposes_ && forced_.empty()) forced_ = certain_tokens(output, text::TokenSplit::kMostText, kMaxMaskSeconds);
    if (forced_.empty()) return fill_allowed(mask);
    const auto id = static_cast<std::size_t>(forced_.front());
    mask[id / 32] |= 1U << (id % 32);
  }

  // The grammar at its beginning. A copy, because a matcher changes.
  Matchers begin() const {
    static std::mutex mutex;  // copies are made on several threads
    const std::lock_guard lock(mutex);
    const auto copy = [](const MatcherPtr& one) {
      return MatcherPtr(one ? llguidance().clone_matcher(one.get()) : nullptr);
    };
    return {copy(grammar_->tokens), prompt_ ? copy(grammar_->bytes) : nullptr};
  }

  // Goes to the end of an output.
  void follow(std::span<const TokenId> output) {
    go_back(output);
    for (const auto id : output.subspan(followed_.size())) accept(id);
  }

  // Goes back to the last token that is in the output too.
  void go_back(std::span<const TokenId> output) {
    const auto same = std::ranges::mismatch(followed_, output, {}, &Followed::id);
    const bool failed = llguidance().matcher_get_error(at_.tokens.get()) != nullptr;
    const auto dropped = static_cast<std::size_t>(std::distance(same.in1, followed_.end()));
    if (dropped == 0 && !failed) return;
    std::size_t steps = 0;
    for (auto one = same.in1; one != followed_.end(); ++one) steps += one->byte_steps;
    followed_.erase(same.in1, followed_.end());
    const auto back = [](const MatcherPtr& matcher, std::size_t count) {
      return !matcher || count == 0 || llguidance().matcher_rollback(matcher.get(), count) == 0;
    };
    if (!failed && back(at_.tokens, dropped) && back(at_.bytes, steps)) return;
    // A matcher with an error, such as a proposal that costs too much, cannot go back. So the output is read again.
    at_ = begin();
    slow_ += kSlowCost;
    for (const auto& one : std::exchange(followed_, {})) accept(one.id);
  }

  void accept(TokenId id) {
    followed_.push_back({id, 0});  // also if an error follows: then go_back() reads the output again
    consume(at_.tokens.get(), {static_cast<std::uint32_t>(id)});
    if (!forced_.empty()) forced_.erase(forced_.begin());  // the mask allowed no other token
    std::vector<std::uint32_t> steps;
    const auto accept_bytes = [&] {
      steps.push_back(static_cast<std::uint32_t>(id));
      if (llguidance().matcher_validate_tokens(at_.bytes.get(), steps.data(), 1) != 1) {
        steps.clear();
        for (const unsigned char byte : vocabulary_.table->text_bytes(id)) steps.push_back(vocabulary_.id_of_byte(byte));
      }
      consume(at_.bytes.get(), steps);
    };
    if (at_.bytes) use_bytes(accept_bytes);
    followed_.back().byte_steps = steps.size();
  }

  // Calls a function that uses at_.bytes. If it is for proposals only, its errors end the use of at_.bytes.
  template <class Function>
  void use_bytes(const Function& function) {
    try {
      function();
    } catch (const Error&) {
      if (!proposes_) throw;
      at_.bytes.reset();
    }
  }

  // Returns the tokens of the text that the grammar requires next, up to the first token that ends the response.
  std::vector<TokenId> certain_tokens(std::span<const TokenId> output, std::size_t most_bytes, double most_seconds) {
    std::string text;
    if (at_.bytes) use_bytes([&] { text = certain_text(most_bytes, most_seconds); });
    if (!at_.bytes) return {};
    auto tokens = vocabulary_.split->forced(last_tokens(output), text);
    tokens.erase(std::ranges::find_first_of(tokens, end_ids_), tokens.end());
    return tokens;
  }

  static void consume(llg::Matcher* matcher, const std::vector<std::uint32_t>& ids) {
    if (llguidance().matcher_consume_tokens(matcher, ids.data(), ids.size()) != 0) {
      const auto error = error_of(matcher);
      if (error.find("items; max is") != std::string::npos)
        throw Error(ErrorCode::invalid_argument, cat("the grammar costs too much: ", error));
      throw Error(ErrorCode::internal, cat("a token does not follow in the grammar: ", error));
    }
  }

  // Returns false if no token may follow. Throws other errors.
  static bool compute(llg::Matcher* matcher, std::span<std::uint32_t> mask) {
    if (llguidance().matcher_compute_mask_into(matcher, mask.data(), mask.size_bytes()) == 0) return true;
    const auto error = error_of(matcher);
    if (!error.starts_with("NoExtension")) throw Error(ErrorCode::invalid_argument, cat("the grammar: ", error));
    return false;
  }

  void fill_allowed(std::span<std::uint32_t> mask) {
    const bool may_end = llguidance().matcher_is_accepting(at_.tokens.get());
    if (!compute(at_.tokens.get(), mask)) std::ranges::fill(mask, 0U);
    for (const auto id : end_ids_) {
      auto& word = mask[static_cast<std::size_t>(id) / 32];
      const auto bit = 1U << (id % 32);
      word = may_end ? word | bit : word & ~bit;
    }
  }

  // Returns the text that the grammar requires next, or its beginning.
  std::string certain_text(std::size_t most_bytes, double most_seconds) {
    std::string out;
    const auto begun = thread_seconds();
    most_bytes = std::min(most_bytes, text::TokenSplit::kMostText);
    std::vector<std::uint32_t> mask(vocabulary_.byte_mask_words());
    while (out.size() < most_bytes && thread_seconds() - begun < most_seconds &&
           !llguidance().matcher_is_accepting(at_.bytes.get()) && compute(at_.bytes.get(), mask)) {
      int allowed = 0;
      for (const auto word : mask) allowed += std::popcount(word);
      if (allowed != 1) break;
      const auto word = std::ranges::find_if(mask, [](auto one) { return one != 0; });
      const auto id = static_cast<std::uint32_t>(32 * (word - mask.begin()) + std::countr_zero(*word));
      if (id < vocabulary_.id_of_byte(0)) break;  // a token that the grammar names
      consume(at_.bytes.get(), {id});
      out += static_cast<char>(id - vocabulary_.id_of_byte(0));
    }
    if (llguidance().matcher_rollback(at_.bytes.get(), out.size()) != 0) {
      throw Error(ErrorCode::internal, cat("the grammar cannot go back: ", error_of(at_.bytes.get())));
    }
    return out;
  }

  std::vector<TokenId> last_tokens(std::span<const TokenId> output) const {
    constexpr auto kMost = text::TokenSplit::kContext + 1;
    const auto before = kMost - std::min(kMost, output.size());
    std::vector<TokenId> out(prompt_->end() - static_cast<std::ptrdiff_t>(std::min(before, prompt_->size())),
                             prompt_->end());
    const auto own = output.last(std::min(kMost, output.size()));
    out.insert(out.end(), own.begin(), own.end());
    return out;
  }

  struct Followed {
    TokenId id;
    std::size_t byte_steps;
  };

  const std::shared_ptr<const Matchers> grammar_;
  const Vocabulary& vocabulary_;
  const std::vector<TokenId> end_ids_;
  const std::optional<std::vector<TokenId>> prompt_;
  const bool proposes_;  // certain text is proposed, not forced
  int slow_ = 0;         // kSlowCost for each slow or failed proposal, and 1 less for each fast one
  Matchers at_;          // after the tokens of followed_
  std::vector<Followed> followed_;
  std::vector<TokenId> forced_;
  std::vector<TokenId> certain_;  // proposed after the first certain_at_ tokens of the output
  std::size_t certain_at_ = std::numeric_limits<std::size_t>::max();
};

TokenizerPtr make_tokenizer(const std::vector<std::string>& tokens) {
  std::string bytes;
  std::vector<std::uint32_t> sizes;
  for (const auto& token : tokens) {
    bytes += token;
    sizes.push_back(static_cast<std::uint32_t>(token.size()));
  }
  llg::TokenizerInit init;
  init.vocab_size = static_cast<std::uint32_t>(tokens.size());
  init.token_lens = sizes.data();
  init.token_bytes = reinterpret_cast<const std::uint8_t*>(bytes.data());
  init.use_approximate_greedy_tokenize_fn = true;  // llguidance forces no tokens: it allows every spelling of a text
  std::array<char, 256> error{};
  TokenizerPtr out(llguidance().new_tokenizer(&init, error.data(), error.size()));
  if (!out) throw Error(ErrorCode::internal, cat("llguidance does not take the vocabulary: ", error.data()));
  return out;
}

// Returns the bytes of a token for llguidance. A token without bytes is in no text.
std::string spelled(const TokenTable& table, TokenId id) {
  if (id >= table.size()) return "";
  const auto bytes = table.raw_bytes(id);
  if (table.is_special(id)) return bytes.empty() ? "" : cat(kSpecial, bytes);
  return bytes.find(kSpecial) == std::string_view::npos ? std::string(bytes) : "";
}

}  // namespace

void FreeMatcher::operator()(llg::Matcher* matcher) const { llguidance().free_matcher(matcher); }
void FreeTokenizer::operator()(llg::Tokenizer* tokenizer) const { llguidance().free_tokenizer(tokenizer); }

std::unique_ptr<TokenMaskProvider> CompiledGuide::provider(const std::vector<TokenId>& end_ids,
                                                           std::optional<std::vector<TokenId>> prompt,
                                                           bool proposes) const {
  return std::make_unique<Provider>(matchers_, *vocabulary_, end_ids, std::move(prompt), proposes);
}

GuideCompiler::GuideCompiler(const TokenTable& table, int vocab_size, std::vector<TokenId> end_ids,
                             const text::TokenSplit* split, double max_explained_seconds)
    : vocabulary_{&table, split, vocab_size}, end_ids_(std::move(end_ids)),
      max_explained_seconds_(max_explained_seconds) {
  std::vector<std::string> tokens(static_cast<std::size_t>(vocab_size));
  for (TokenId id = 0; id < vocab_size; ++id) tokens[static_cast<std::size_t>(id)] = spelled(table, id);
  tokens_ = make_tokenizer(tokens);
  if (split == nullptr) return;
  for (TokenId id = 0; id < vocab_size; ++id) tokens[static_cast<std::size_t>(id)] = cat(kSpecial, "token ", id);
  for (int byte = 0; byte < Vocabulary::kBytes; ++byte) {
    tokens.push_back(byte == 0xff ? "" : std::string(1, static_cast<char>(byte)));
  }
  bytes_ = make_tokenizer(tokens);
}

MatcherPtr GuideCompiler::match(const llg::Tokenizer* tokenizer, const std::string& type,
                                const std::string& text) const {
  llg::ConstraintInit init;
  init.tokenizer = tokenizer;
  init.limits = kLimits;
  return MatcherPtr(llguidance().new_matcher(&init, type.c_str(), text.c_str()));
}

std::unique_ptr<const CompiledGuide> GuideCompiler::compile(const Guide& guide, bool after_space) const {
  const auto parts = parts_of(guide, after_space, end_ids_);
  Json list = Json::array();
  for (const auto& part : parts) list.push_back(part.entry);
  const auto text = Json{{"grammars", std::move(list)}}.dump();
  auto out = std::make_unique<CompiledGuide>();
  out->vocabulary_ = &vocabulary_;
  const auto begun = thread_seconds();
  Matchers made{match(tokens_.get(), "llguidance", text), nullptr};
  if (const auto error = error_of(made.tokens.get()); !error.empty()) {
    refuse(thread_seconds() - begun > max_explained_seconds_ ? cat(parts.back().called, ": ", error)
                                                           : explain(parts, error));
  }
  if (bytes_) made.bytes = match(bytes_.get(), "llguidance", text);
  out->matchers_ = std::make_shared<const Matchers>(std::move(made));
  return out;
}

std::string schema_for_llguidance(const std::string& schema) {
  double multiples = 0;
  return checked_schema(parse_json(schema, "the JSON schema"), Space::fixed, multiples).dump();
}

std::string regex_for_llguidance(const std::string& expression) { return lark_of_regex(expression); }

// Returns the error with the name of the wrong part and the place in its schema.
std::string GuideCompiler::explain(const std::vector<Part>& parts, const std::string& error) const {
  const auto error_of_schema = [&](const Json& schema) {
    return error_of(match(tokens_.get(), "json_schema", schema.dump()).get());
  };
  for (const auto& [entry, name] : parts) {
    if (!entry.contains("json_schema")) continue;
    const auto own = error_of_schema(entry["json_schema"]);
    if (own.empty()) continue;
    const auto place = place_of_error(entry["json_schema"], error_of_schema);
    return cat(name, ": the JSON schema, at ", place.empty() ? "its root" : text::to_valid_utf8(place), ": ", own,
               own.starts_with("Unimplemented keys") ? ". These keywords are not supported: leave them out" : "");
  }
  return cat(parts.back().called, ": ", error);
}

}  // namespace charonia::grammar
