#include "grammar/guide_compiler.h"

#include <dlpack/dlpack.h>
#include <xgrammar/xgrammar.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <optional>
#include <stdexcept>
#include <utility>
#include <variant>

#include "base/guide_name.h"
#include "base/json.h"
#include "base/text.h"
#include "base/thread_time.h"
#include "charonia/error.h"
#include "grammar/compile_step.h"
#include "grammar/expression.h"
#include "grammar/interface_version.h"
#include "grammar/largest_part.h"
#include "grammar/schema.h"
#include "grammar/special_tokens.h"
#include "grammar/xgrammar_messages.h"
#include "text/utf8.h"

namespace charonia::grammar {
namespace {

using Json = nlohmann::ordered_json;

// Of one mask: the other sequences of its step wait for it.
constexpr double kMaxMaskSeconds = 0.5;

// Numbers of which a grammar consists: parts that may be left out take the square of their count.
constexpr unsigned long kMaxGrammar = 1UL << 24;

struct Stopped {};
struct TooLong {};
struct TooLarge {};

thread_local const std::function<bool()>* stop_asked = nullptr;

// While it lives, parse_step() on this thread ends what goes beyond the time of a mask.
class MaskLimit {
 public:
  MaskLimit() : cpu_end_(thread_seconds() + kMaxMaskSeconds), look_at_(Clock::now() + from_seconds(kMaxMaskSeconds)) {
    current = this;
  }
  ~MaskLimit() { current = nullptr; }
  MaskLimit(const MaskLimit&) = delete;
  MaskLimit& operator=(const MaskLimit&) = delete;

  // The clock of all is read, which costs little; that of the thread where it may have come to the limit.
  static void check() {
    if (current == nullptr || Clock::now() < current->look_at_) return;
    const double left = current->cpu_end_ - thread_seconds();
    if (left <= 0) throw TooLong();
    current->look_at_ = Clock::now() + from_seconds(left);
  }

 private:
  using Clock = std::chrono::steady_clock;
  static Clock::duration from_seconds(double seconds) {
    return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
  }

  static thread_local MaskLimit* current;
  const double cpu_end_;
  Clock::time_point look_at_;
};
thread_local MaskLimit* MaskLimit::current = nullptr;

// While it lives, compile_step() on this thread asks `stopped`.
class Stoppable {
 public:
  explicit Stoppable(const std::function<bool()>& stopped) { stop_asked = &stopped; }
  ~Stoppable() { stop_asked = nullptr; }
  Stoppable(const Stoppable&) = delete;
  Stoppable& operator=(const Stoppable&) = delete;
};

[[noreturn]] void refuse(std::string_view what, std::string_view why) {
  throw Error(ErrorCode::invalid_argument, cat(what, ": ", text::to_valid_utf8(trim(why))));
}

// xgrammar's own errors have the place in its sources in front, in what() alone. It cuts texts within characters.
std::string text_of(const std::exception& error) {
  const auto* const runtime = dynamic_cast<const std::runtime_error*>(&error);
  return runtime != nullptr ? runtime->std::runtime_error::what() : error.what();
}

// One line with a space after commas and colons: with white space as they like, small models go on with it for ever.
xgrammar::Grammar of_schema(const std::string& schema) {
  constexpr bool kAnyWhitespace = false, kStrict = false;
  return xgrammar::Grammar::FromJSONSchema(schema, kAnyWhitespace, std::nullopt, std::nullopt, kStrict);
}

xgrammar::Grammar of_choices(const std::string& text) {
  check_nesting(text, "the choices");
  const auto choices = Json::parse(text, nullptr, false);
  const bool texts = choices.is_array() && !choices.empty() &&
                     std::ranges::all_of(choices, [](const auto& one) { return one.is_string(); });
  if (!texts) refuse("the choices", "a JSON list of at least one text is expected");
  std::string ebnf = "root ::= ";
  for (std::size_t i = 0; i < choices.size(); ++i) {
    if (i > 0) ebnf += " | ";
    ebnf += ebnf_literal(choices[i].get<std::string>());
  }
  return xgrammar::Grammar::FromEBNF(ebnf);
}

// An error that names what it is of.
struct NamedError : Error {
  using Error::Error;
};

// What xgrammar makes of a regular expression is EBNF. Its errors may name a place in that, which nobody has written.
xgrammar::Grammar of_regex(const std::string& text, std::string_view what) {
  check_expression(text, Syntax::regex, what);
  try {
    return xgrammar::Grammar::FromRegex(text);
  } catch (const std::runtime_error& error) {
    const auto problem = text_of(error);
    const auto end = problem.starts_with("EBNF ") ? problem.find(": ") : std::string::npos;
    if (end == std::string::npos) throw;
    throw std::runtime_error(problem.substr(end + 2));
  }
}

xgrammar::Grammar of_ebnf(const std::string& text, std::string_view what) {
  check_expression(text, Syntax::ebnf, what);
  return xgrammar::Grammar::FromEBNF(text);
}

// A schema, an expression or a grammar in a structural tag. What has one may have a `name`, by which errors call it.
template <class Check>
void check_part(const Json& part, const std::string& at, std::string_view what, Check check) {
  const bool named = part.contains("name") && part["name"].is_string();
  const auto place = named ? std::string(what) : cat("the structural tag's ", at);
  const auto refused = [&](ErrorCode code, const std::string& why) {
    if (named) throw NamedError(code, cat(part["name"].get<std::string>(), ": ", why));
    throw Error(code, why);
  };
  try {
    check(place);
  } catch (const Error& error) {
    refused(error.code(), error.what());
  } catch (const std::runtime_error& error) {  // xgrammar's
    refused(ErrorCode::invalid_argument,
            cat(place, " cannot be compiled: ", text::to_valid_utf8(trim(text_of(error)))));
  }
}

// Of what no text in a part holds: without these, strings whose characters are counted do not hold it either.
std::string first_characters(const Json& part) {
  std::string out;
  if (!part.contains("excludes") || !part["excludes"].is_array()) return out;
  for (const auto& one : part["excludes"]) {
    const auto text = one.is_string() ? one.get<std::string>() : std::string();
    if (!text.empty() && static_cast<unsigned char>(text[0]) < 0x80) out += text[0];
  }
  return out;
}

// Checks the schemas, regular expressions and grammars inside.
void check_parts(Json& part, const std::string& path) {
  if (part.is_object()) {
    for (auto& [key, value] : part.items()) {
      const auto at = cat(path, "/", key);
      if (key == "json_schema" || key == "schema") {
        check_part(part, at, "", [&](const std::string& where) {
          try {
            value = Json::parse(checked_schema(value.dump(), first_characters(part)));
          } catch (const Error& error) {
            if (where.empty()) throw;
            throw Error(error.code(), cat("in the structural tag, at ", at, ": ", error.what()));
          }
        });
      } else if ((key == "pattern" || key == "grammar") && value.is_string()) {
        const bool regex = key == "pattern";
        check_part(part, at, regex ? "the regular expression" : "the grammar", [&](const std::string& what) {
          // What only the compiler finds would be said of the whole tag.
          if (regex) {
            of_regex(value.get<std::string>(), what);
          } else {
            of_ebnf(value.get<std::string>(), what);
          }
        });
      } else {
        check_parts(value, at);
      }
    }
  } else if (part.is_array()) {
    for (std::size_t i = 0; i < part.size(); ++i) check_parts(part[i], cat(path, "/", i));
  }
}

// The older form, {"structures": [{"begin", "schema", "end"}], "triggers": [...]}, in today's.
Json of_structures(const Json& old) {
  Json tags = Json::array();
  for (const auto& one : old["structures"]) {
    if (!one.is_object() || !one.contains("begin") || !one.contains("schema") || !one.contains("end")) {
      refuse("the structural tag", "each of structures has begin, schema and end");
    }
    tags.push_back({{"type", "tag"},
                    {"begin", one["begin"]},
                    {"content", {{"type", "json_schema"}, {"json_schema", one["schema"]}}},
                    {"end", one["end"]}});
  }
  return {{"type", "structural_tag"},
          {"format", {{"type", "triggered_tags"}, {"triggers", old["triggers"]}, {"tags", tags}}}};
}

xgrammar::Grammar of_structural_tag(const std::string& text, const xgrammar::TokenizerInfo& tokens,
                                    const SpecialTokens& special) {
  check_nesting(text, "the structural tag");
  auto tag = Json::parse(text, nullptr, false);
  if (!tag.is_object()) refuse("the structural tag", "a JSON object is expected");
  if (tag.contains("structures") && tag["structures"].is_array() && tag.contains("triggers")) tag = of_structures(tag);
  check_parts(tag, "");
  special.name_by_id(tag);
  auto grammar = xgrammar::Grammar::FromStructuralTag(tag.dump(), tokens);
  if (const auto* const error = std::get_if<xgrammar::StructuralTagError>(&grammar)) {
    std::visit([](const auto& one) { refuse("the structural tag", one.what()); }, *error);
  }
  return std::get<xgrammar::Grammar>(std::move(grammar));
}

// One space before the text, which the text stream drops. A structural tag whose text is parsed, where white space at
// the beginning means nothing, says `"space": "free"`: it may begin with a special token, which a space need not precede.
xgrammar::Grammar after_one_space(const Guide& guide, const xgrammar::Grammar& grammar) {
  bool free = false;
  if (guide.type == GuideType::structural_tag) {
    const auto tag = Json::parse(guide.text, nullptr, false);
    free = tag.is_object() && tag.contains("space") && tag["space"] == Json("free");
  }
  const auto* const space = free ? R"(root ::= " " | "")" : R"(root ::= " ")";
  return xgrammar::Grammar::Concat({xgrammar::Grammar::FromEBNF(space), grammar});
}

xgrammar::Grammar grammar_of(const Guide& guide, const xgrammar::TokenizerInfo& tokens, const SpecialTokens& special) {
  switch (guide.type) {
    case GuideType::json:
      return of_schema(R"({"type": "object"})");
    case GuideType::json_schema:
      return of_schema(checked_schema(guide.text));
    case GuideType::regex:
      return of_regex(guide.text, "the regular expression");
    case GuideType::ebnf_grammar:
      return of_ebnf(guide.text, "the grammar");
    case GuideType::structural_tag:
      return of_structural_tag(guide.text, tokens, special);
    case GuideType::choice:
      return of_choices(guide.text);
  }
  throw Error(ErrorCode::internal, "a guide without a type");
}

class Provider : public TokenMaskProvider {
 public:
  // split: null: nothing is forced.
  Provider(xgrammar::CompiledGrammar grammar, const std::vector<TokenId>& end_ids, const text::TokenSplit* split,
           std::vector<TokenId> prompt)
      : grammar_(std::move(grammar)), end_ids_(end_ids), split_(split), prompt_(std::move(prompt)) {}

  void fill(std::span<const std::int32_t> output, std::span<std::uint32_t> mask) override {
    const MaskLimit limit;
    try {
      follow(output, mask);
    } catch (const TooLong&) {
      throw Error(ErrorCode::invalid_argument, cat("the grammar is too ambiguous: to find what may follow took more than ",
                                                   kMaxMaskSeconds, " s, which is the limit"));
    }
  }

  std::span<const TokenId> forced() const override { return forced_; }

  std::unique_ptr<TokenMaskProvider> clone() const override {
    return std::make_unique<Provider>(grammar_, end_ids_, split_, prompt_);
  }

 private:
  void follow(std::span<const std::int32_t> output, std::span<std::uint32_t> mask) {
    const Messages messages;
    if (!matcher_) matcher_.emplace(grammar_, end_ids_);
    for (; accepted_ < output.size(); ++accepted_) {
      if (!matcher_->AcceptToken(output[accepted_])) {
        throw Error(ErrorCode::internal,
                    cat("token ", output[accepted_], " does not follow in the grammar. ", messages.warning()));
      }
      if (!forced_.empty()) forced_.erase(forced_.begin());  // the mask allowed no other one
    }
    if (split_ != nullptr && forced_.empty()) {
      forced_ = split_->forced(last_tokens(output), matcher_->FindJumpForwardString());
      // A token that ends the answer is no text.
      forced_.erase(std::ranges::find_first_of(forced_, end_ids_), forced_.end());
    }
    if (!forced_.empty()) {
      const auto id = forced_.front();
      mask[static_cast<std::size_t>(id) / 32] |= 1U << (id % 32);
      return;
    }
    std::int64_t size = std::ssize(mask);
    DLTensor tensor{.data = mask.data(),
                    .device = {kDLCPU, 0},
                    .ndim = 1,
                    .dtype = xgrammar::GetBitmaskDLType(),
                    .shape = &size,
                    .strides = nullptr,
                    .byte_offset = 0};
    matcher_->FillNextTokenBitmask(&tensor);
    const bool may_end = matcher_->IsCompleted();
    for (const auto id : end_ids_) {
      auto& word = mask[static_cast<std::size_t>(id) / 32];
      const auto bit = 1U << (id % 32);
      word = may_end ? word | bit : word & ~bit;
    }
  }

  std::vector<TokenId> last_tokens(std::span<const TokenId> output) const {
    constexpr auto kMost = text::TokenSplit::kContext + 1;
    const auto before = kMost - std::min(kMost, output.size());
    std::vector<TokenId> out(prompt_.end() - static_cast<std::ptrdiff_t>(std::min(before, prompt_.size())), prompt_.end());
    const auto own = output.last(std::min(kMost, output.size()));
    out.insert(out.end(), own.begin(), own.end());
    return out;
  }

  const xgrammar::CompiledGrammar grammar_;
  const std::vector<TokenId> end_ids_;
  const text::TokenSplit* const split_;
  const std::vector<TokenId> prompt_;
  std::vector<TokenId> forced_;
  std::optional<xgrammar::GrammarMatcher> matcher_;  // made on the thread of masks
  std::size_t accepted_ = 0;
};

class Compiled : public CompiledGuide {
 public:
  Compiled(xgrammar::CompiledGrammar grammar, const text::TokenSplit* split)
      : grammar_(std::move(grammar)), split_(split) {}
  std::size_t bytes() const override { return grammar_.MemorySizeBytes(); }
  std::unique_ptr<TokenMaskProvider> provider(const std::vector<TokenId>& end_ids,
                                              std::optional<std::vector<TokenId>> prompt) const override {
    return std::make_unique<Provider>(grammar_, end_ids, prompt ? split_ : nullptr,
                                      std::move(prompt).value_or(std::vector<TokenId>()));
  }

 private:
  const xgrammar::CompiledGrammar grammar_;
  const text::TokenSplit* const split_;
};

xgrammar::TokenizerInfo tokenizer_info(const text::TokenTable& table, int vocab_size,
                                       const std::vector<TokenId>& end_ids) {
  std::vector<std::string> tokens;
  for (TokenId id = 0; id < std::min(vocab_size, table.size()); ++id) {
    tokens.push_back(table.is_special(id) ? SpecialTokens::spelled(table.raw_bytes(id))
                                          : std::string(table.raw_bytes(id)));
  }
  return xgrammar::TokenizerInfo(tokens, xgrammar::VocabType::RAW, vocab_size, end_ids);
}

}  // namespace

// Called by xgrammar's compiler, too, before each state of a grammar (CMakeLists.txt).
void compile_step() {
  if (stop_asked != nullptr && *stop_asked && (*stop_asked)()) throw Stopped();
}

// Called by xgrammar before a grammar, which has `size` numbers, gets another part (CMakeLists.txt).
void grammar_step(unsigned long size);
void grammar_step(unsigned long size) {
  constexpr unsigned kParts = 64;  // between looks
  thread_local unsigned steps = 0;
  if (size > kMaxGrammar) throw TooLarge();
  if (++steps % kParts == 0) compile_step();
}

// Called by xgrammar's parser before each byte that it tries (CMakeLists.txt).
void parse_step();
void parse_step() {
  // Bytes between looks: one takes some hundred nanoseconds, and in an ambiguous grammar many milliseconds.
  constexpr unsigned kMask = 8, kCompile = 256;
  thread_local unsigned steps = 0;
  if (++steps % kMask == 0) MaskLimit::check();
  if (steps % kCompile == 0) compile_step();
}

namespace {

class Compiler : public GuideCompiler {
 public:
  Compiler(const text::TokenTable& table, int vocab_size, const std::vector<TokenId>& end_ids,
           const text::TokenSplit* split)
      : tokens_(tokenizer_info(table, vocab_size, end_ids)),
        special_(table, vocab_size, end_ids),
        compiler_(tokens_, 1, false),
        split_(split) {}

  std::shared_ptr<const CompiledGuide> compile(const Guide& guide, bool after_space,
                                               const std::function<bool()>& stopped) const override;
  std::string largest_part(const Guide& guide) const override { return grammar::largest_part(guide); }

 private:
  const xgrammar::TokenizerInfo tokens_;
  const SpecialTokens special_;
  mutable xgrammar::GrammarCompiler compiler_;  // without a cache and threads: the engine has its own
  const text::TokenSplit* const split_;
};

std::shared_ptr<const CompiledGuide> Compiler::compile(const Guide& guide, bool after_space,
                                                       const std::function<bool()>& stopped) const {
  const auto refused = [&](std::string_view how, std::string_view why) {
    throw NamedError(ErrorCode::invalid_argument,
                     cat(called(guide), ": the guide (", to_string(guide.type), ") ", how, ": ", text::to_valid_utf8(trim(why))));
  };
  const Stoppable stoppable(stopped);
  const Messages messages;
  try {
    auto grammar = special_.kept_apart(grammar_of(guide, tokens_, special_));
    if (after_space) grammar = after_one_space(guide, grammar);
    if (!messages.warning().empty()) refused("is not supported", messages.warning());
    auto compiled = compiler_.CompileGrammar(grammar);
    if (!messages.warning().empty()) refused("is not supported", messages.warning());
    return std::make_shared<Compiled>(std::move(compiled), split_);
  } catch (const Stopped&) {
    return nullptr;
  } catch (const TooLarge&) {
    throw Error(ErrorCode::invalid_argument,
                cat(called(guide), ": its grammar is too large: it repeats too much, or has too many parts that may be ",
                    "left out", largest_part(guide)));
  } catch (const NamedError&) {
    throw;
  } catch (const Error& error) {
    throw Error(error.code(), cat(called(guide), ": ", error.what()));
  } catch (const std::bad_alloc&) {
    throw;
  } catch (const std::exception& error) {
    refused("cannot be compiled", text_of(error));
  }
  return nullptr;
}

}  // namespace
}  // namespace charonia::grammar

// What the engine looks up when it opens the library. The name has the interface's version.
extern "C" [[gnu::visibility("default")]] charonia::grammar::MakeGuideCompiler CHARONIA_MAKE_GUIDE_COMPILER;
charonia::grammar::GuideCompiler* CHARONIA_MAKE_GUIDE_COMPILER(const charonia::text::TokenTable& table, int vocab_size,
                                                               const std::vector<charonia::TokenId>& end_ids,
                                                               const charonia::text::TokenSplit* split) {
  return new charonia::grammar::Compiler(table, vocab_size, end_ids, split);
}
