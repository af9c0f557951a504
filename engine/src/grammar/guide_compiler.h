// Compiles the guides of requests to grammars of llguidance over the engine's token table.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "charonia/token_mask.h"
#include "charonia/types.h"
#include "grammar/llguidance.h"
#include "text/token_split.h"
#include "text/token_table.h"

namespace charonia::grammar {

struct FreeMatcher {
  void operator()(llg::Matcher* matcher) const;
};
struct FreeTokenizer {
  void operator()(llg::Tokenizer* tokenizer) const;
};
using MatcherPtr = std::unique_ptr<llg::Matcher, FreeMatcher>;
using TokenizerPtr = std::unique_ptr<llg::Tokenizer, FreeTokenizer>;

// The engine's tokens. Forced text needs a second vocabulary. In it, single bytes have the ids from vocab_size on. The
// other tokens have the same ids and no text, so that they are allowed only where a grammar names them.
struct Vocabulary {
  static constexpr int kBytes = 256;

  std::uint32_t id_of_byte(unsigned char byte) const { return static_cast<std::uint32_t>(vocab_size) + byte; }
  std::size_t byte_mask_words() const { return (static_cast<std::size_t>(vocab_size) + kBytes + 31) / 32; }

  const text::TokenTable* table;
  const text::TokenSplit* split;  // null: no text is forced
  int vocab_size;
};

// A grammar over tokens, and the same grammar over single bytes, to find certain text; null: no text is forced.
struct Matchers {
  MatcherPtr tokens, bytes;
};

// A grammar before its first token. Makes providers on one thread at a time; its compiler must outlive it and them.
class CompiledGuide {
 public:
  // For one sequence. end_ids, ascending: the mask allows each where the text may end, and nowhere else. prompt: if
  // given, certain text is forced as the tokenizer splits it; the last TokenSplit::kContext + 1 tokens are enough.
  // proposes: certain text is not forced, but proposed.
  std::unique_ptr<TokenMaskProvider> provider(const std::vector<TokenId>& end_ids,
                                              std::optional<std::vector<TokenId>> prompt = {},
                                              bool proposes = false) const;

 private:
  friend class GuideCompiler;
  std::shared_ptr<const Matchers> matchers_;
  const Vocabulary* vocabulary_ = nullptr;
};

class GuideCompiler {
 public:
  // Takes 0.3 s for 130,000 tokens. end_ids: of the model. split: splits forced text; null: no text is forced. `table`
  // and `split` must outlive the compiler. max_explained_seconds: to find the place of an error, a schema is compiled
  // several times, unless compiling it took longer. Throws Error(invalid_argument) if llguidance cannot be used.
  GuideCompiler(const text::TokenTable& table, int vocab_size, std::vector<TokenId> end_ids,
                const text::TokenSplit* split, double max_explained_seconds = 0.05);

  // Takes milliseconds, and at most about two seconds for a grammar at llguidance's limits. Thread-safe.
  // after_space: one space comes before the text; the text stream drops it. Throws Error(invalid_argument) if the guide
  // is wrong, is not supported or costs too much. The text of the error begins with the guide's name.
  std::unique_ptr<const CompiledGuide> compile(const Guide& guide, bool after_space) const;

  struct Part;

 private:
  std::string explain(const std::vector<Part>& parts, const std::string& error) const;
  MatcherPtr match(const llg::Tokenizer* tokenizer, const std::string& type, const std::string& text) const;

  const Vocabulary vocabulary_;
  const std::vector<TokenId> end_ids_;
  const double max_explained_seconds_;
  TokenizerPtr tokens_;
  TokenizerPtr bytes_;  // of single bytes; null: no text is forced
};

// Returns the text of a JSON schema that llguidance receives. For tests. Throws Error(invalid_argument).
std::string schema_for_llguidance(const std::string& schema);

// Returns a regular expression as the grammar in Lark that llguidance receives. For tests. Throws
// Error(invalid_argument).
std::string regex_for_llguidance(const std::string& expression);

}  // namespace charonia::grammar
