// Guides of requests, compiled into grammars that say which tokens may follow: xgrammar's work, on the engine's token
// table. It is a library of its own, since two fifths of what there is to compile are its: this header is what both know of
// each other. runtime/guide_library.h opens it.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "charonia/token_mask.h"
#include "charonia/types.h"
#include "text/token_split.h"
#include "text/token_table.h"

namespace charonia::grammar {

// Any number of sequences may use one at the same time.
class CompiledGuide {
 public:
  virtual ~CompiledGuide() = default;
  virtual std::size_t bytes() const = 0;  // about, in memory
  // For one sequence. Of end_ids, ascending, each is allowed where the text may end, and nowhere else. prompt: where it
  // is given, tokens that are certain are forced: the tokenizer's own, as they follow the prompt. Its last
  // TokenSplit::kContext + 1 tokens suffice.
  virtual std::unique_ptr<TokenMaskProvider> provider(const std::vector<TokenId>& end_ids,
                                                      std::optional<std::vector<TokenId>> prompt = {}) const = 0;
};

class GuideCompiler {
 public:
  virtual ~GuideCompiler() = default;

  // after_space: one space comes before the text, which the text stream drops. stopped: asked again and again; once it
  // is true, the result is null. From any thread, several at a time. Throws Error(invalid_argument) where the guide is
  // wrong, is not supported or is too much; its text begins with what called() says, or with what a part of a structural
  // tag is named.
  virtual std::shared_ptr<const CompiledGuide> compile(const Guide& guide, bool after_space,
                                                       const std::function<bool()>& stopped = {}) const = 0;

  // Which part of a guide makes its grammar large, as the end of a sentence (largest_part.h).
  virtual std::string largest_part(const Guide& guide) const = 0;
};

// The library's one function. end_ids: the model's. Takes some tenths of a second for a large vocabulary. `table` is not
// used afterwards. split: by which tokens are forced; it outlives what is compiled. Null: none are.
using MakeGuideCompiler = GuideCompiler*(const text::TokenTable& table, int vocab_size, const std::vector<TokenId>& end_ids,
                                         const text::TokenSplit* split);

}  // namespace charonia::grammar
