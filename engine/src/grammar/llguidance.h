// The part of llguidance's C API that the engine calls, as version 1.9.1 defines it. The library is a Python extension
// module that exports this API; grammar/library.h opens it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace charonia::grammar::llg {

constexpr const char* kVersion = "llguidance@1.9.1";
constexpr std::uint32_t kNoToken = 0xffffffff;  // as tok_eos: the tokenizer has no end token

struct Tokenizer;  // the vocabulary as a trie; shared by all matchers and threads
struct Matcher;    // one grammar and the position of one sequence in it; one thread at a time

// llguidance reads 0 as a limit of 0, not as its default, so every field has llguidance's default.
struct ParserLimits {
  std::size_t max_items_in_row = 2000;
  std::uint64_t initial_lexer_fuel = 1'000'000;  // 50 units a microsecond
  std::uint64_t step_lexer_fuel = 200'000;       // of one mask
  std::size_t step_max_items = 50'000;           // of one mask
  std::size_t max_lexer_states = 250'000;        // 1 to 2 kB each
  std::size_t max_grammar_size = 500'000;        // symbols
  bool precompute_large_lexemes = true;
  bool verbose_errors = false;
};

struct ConstraintInit {
  const Tokenizer* tokenizer = nullptr;
  std::uint32_t log_buffer_level = 0;
  std::uint32_t log_stderr_level = 0;
  bool ff_tokens_ok = false;
  bool backtrack_ok = false;
  ParserLimits limits;
};

using TokenizeFn = std::size_t(const void* user_data, const std::uint8_t* bytes, std::size_t bytes_len,
                               std::uint32_t* output_tokens, std::size_t output_tokens_len);

struct TokenizerInit {
  std::uint32_t vocab_size = 0;
  std::uint32_t tok_eos = kNoToken;
  const std::uint32_t* token_lens = nullptr;   // [vocab_size]
  const std::uint8_t* token_bytes = nullptr;   // of all tokens; a special token begins with the byte 0xff
  const char* tokenizer_json = nullptr;
  bool tokenize_assumes_string = false;
  TokenizeFn* tokenize_fn = nullptr;
  bool use_approximate_greedy_tokenize_fn = false;
  const void* tokenize_user_data = nullptr;
  const char* const* slices = nullptr;
};

// The functions of the library. A function that returns int returns 0 or, on error, -1; then matcher_get_error()
// returns a text.
struct Api {
  const char* (*get_version)();
  Tokenizer* (*new_tokenizer)(const TokenizerInit* init, char* error, std::size_t error_len);
  void (*free_tokenizer)(Tokenizer* tokenizer);
  // Does not return null. constraint_type: "json_schema", "regex", "lark" or "llguidance" (a list of grammars).
  Matcher* (*new_matcher)(const ConstraintInit* init, const char* constraint_type, const char* data);
  Matcher* (*clone_matcher)(const Matcher* matcher);  // copies its caches too
  void (*free_matcher)(Matcher* matcher);
  const char* (*matcher_get_error)(Matcher* matcher);
  int (*matcher_compute_mask_into)(Matcher* matcher, std::uint32_t* mask, std::size_t mask_bytes);
  int (*matcher_consume_tokens)(Matcher* matcher, const std::uint32_t* tokens, std::size_t count);
  int (*matcher_rollback)(Matcher* matcher, std::size_t count);
  bool (*matcher_is_accepting)(Matcher* matcher);
  // Returns the number of tokens that could be consumed, or -1.
  int (*matcher_validate_tokens)(Matcher* matcher, const std::uint32_t* tokens, std::size_t count);
  int (*validate_grammar)(const ConstraintInit* init, const char* constraint_type, const char* data, char* message,
                          std::size_t message_len);
};

}  // namespace charonia::grammar::llg
