// What goes into the engine and what comes out: requests, sampling parameters, results.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "charonia/error.h"
#include "charonia/generated/sampling.h"
#include "charonia/token_mask.h"

namespace charonia {

using TokenId = std::int32_t;

// The longest lists of a request (SamplingParams::validate()).
inline constexpr std::size_t kMaxStopWords = 64, kMaxBadWords = 4096, kMaxEndIds = 256;
// The longest Request::cache_salt, in bytes.
inline constexpr std::size_t kMaxCacheSalt = 256;

// Why a sequence ended. `none` while it runs.
enum class FinishReason { none, stop, length, cancelled, error };

// "" | "stop" | "length" | "cancelled" | "error"
std::string_view to_string(FinishReason reason);

// What the text of a request has to be. The names of the first five are TensorRT-LLM's.
enum class GuideType {
  json,            // any JSON object
  json_schema,     // a JSON value that is valid under a schema
  regex,           // a text that a regular expression matches as a whole
  ebnf_grammar,    // a text of a grammar in Lark's EBNF, from its rule `start`
  structural_tag,  // several grammars, as preprocessing makes them of tools and structural tags
  choice,          // one of the texts of a JSON list
};

// "json" | "json_schema" | "regex" | "ebnf_grammar" | "structural_tag" | "choice"
std::string_view to_string(GuideType type);
// Throws Error(invalid_argument) for any other name.
GuideType guide_type(std::string_view name);

// Structured output. See docs/structured_output.md for what is supported.
struct Guide {
  GuideType type = GuideType::json;
  std::string text;  // the schema, expression, grammar, tag or list; UTF-8. Of json: empty
};

struct Request {
  std::string id;                  // the caller's; Engine::cancel(id) takes it. May be empty; need not be unique
  std::vector<TokenId> input_ids;  // at least one, each in [0, vocab_size)
  SamplingParams sampling;
  int priority = 0;                // higher goes first; equal ones by arrival
  bool stream = true;              // false: exactly one Result, the last
  bool joined_responses = false;   // the caller sends them on with others': runtime/stream_interval.h counts it less
  bool strip_leading_space = false;  // drop one leading space of the text where the tokenizer's decoder does so

  // Stop words count up to the first of these in the text, and not within it or from there on: what begins calls of
  // tools, texts or special tokens as the vocabulary spells them. At most kMaxStopWords. Empty: they always count.
  std::vector<std::string> stop_until;
  // sampling.max_tokens may be more than session_len leaves: the text then ends where the context does. False: such a
  // request is rejected.
  bool fit_max_tokens = false;

  // A session is the token history of a conversation, kept by the engine under this name with a soft pin on its KV
  // blocks: nothing but speed depends on these. Requests of one session are answered one after the other. Empty: none.
  std::string session_id;
  // What is appended to the session's history, where it has one; input_ids then are not used (they are for a session that
  // begins, and may be empty: then this begins it). Empty: input_ids are the whole conversation and replace the history.
  // An end id that the history ends with and this begins with is not doubled. When history and input do not fit into
  // session_len with room for max_tokens (unset: for a quarter of session_len), the oldest turns are left out; a start id
  // (config.ini's start_id) at the history's beginning stays.
  std::vector<TokenId> continuation_ids;
  bool end_session = false;        // forget the session when this request has ended

  // Of the prefix cache, only blocks that a request with the same salt computed are found. So nobody who does not know the
  // salt can tell by num_cached_tokens or by the time of an answer what was asked with it. Empty: only blocks of requests
  // without one. At most kMaxCacheSalt bytes, any. A session's history is found whatever the salt of its turns.
  std::string cache_salt;

  // Report whole rows of the prompt's logits, in results of their own, as the steps give them (Result::prompt_logits). Needs
  // stream and sampling.prompt_logprobs. Rows that take more than max_unread_logits_bytes at once, because nobody lets go of
  // their results, end the request with ErrorCode::resource_exhausted.
  bool prompt_logits = false;
  std::int64_t max_unread_logits_bytes = std::int64_t{4} << 30;

  std::optional<int> timeout_ms;   // >= 1, from submit(): then the request ends with ErrorCode::deadline_exceeded
  std::shared_ptr<TokenMaskProvider> mask;  // null: every token may follow

  // The text has to be this; then an end id ends it, with FinishReason::stop. Its grammar is compiled while other requests
  // go on, and what is wrong with it is an error of the request: FinishReason::error with ErrorCode::invalid_argument. Not
  // with mask, sampling.ignore_eos or sampling.min_tokens.
  std::optional<Guide> guide;
};

struct TokenLogprob {
  TokenId id = 0;
  float logprob = 0.0F;
};

struct Timings {
  double queue_ms = 0;        // from submit to the first scheduled token
  double first_token_ms = 0;  // from submit to the first sampled token
  double total_ms = 0;        // from submit to this result
};

// One response of a sequence: the tokens since the one before. A response ends where a character ends and holds back
// what may be the beginning of a stop word, so joined texts equal the whole text byte for byte.
struct Result {
  std::vector<TokenId> token_ids;   // includes the end id and the tokens of a stop word that ended the sequence
  // The response's text is bytes [text_begin, text_end) of the joined bytes of token_ids (see TokenTable), decoded as
  // UTF-8 where whatever is no character is replaced by U+FFFD (maximal subparts, as Python's errors="replace").
  int text_begin = 0;
  int text_end = 0;
  std::string text;                 // that text, valid UTF-8
  std::vector<float> logprobs;                         // per token of token_ids, if asked for
  std::vector<std::vector<TokenLogprob>> top_logprobs; // per token, most likely first, if asked for
  FinishReason finish_reason = FinishReason::none;     // set on the last result of a request, and only there
  std::string error;                // with FinishReason::error
  ErrorCode error_code = ErrorCode::internal;  // of that error
  int index = 0;                    // which of the request's n sequences. Each has a last result; a request with an error
                                    // or cancelled before its sequences began has one for each all the same
  double cumulative_logprob = 0;    // of its tokens so far, where log probabilities or best_of were asked for
  // Per token of the prompt from the second on, if asked for; with the first result of sequence 0.
  std::vector<float> prompt_logprobs;
  std::vector<std::vector<TokenLogprob>> prompt_top_logprobs;  // most likely first
  // Of a request with prompt_logits, in results without tokens, before the first token of sequence 0: rows [vocab_size]
  // of logits, unchanged by the sampling parameters. Row i is at position first_logits + i of the prompt and says what
  // follows there. Rows come in order, each once, but for that of the prompt's last token.
  std::vector<std::vector<float>> prompt_logits;
  int first_logits = 0;
  std::shared_ptr<const void> unread_logits;  // prompt_logits count as unread as long as a copy of this lives
  int num_session_tokens = 0;       // of num_input_tokens: the session's history that went before the input
  int num_input_tokens = 0;
  int num_output_tokens = 0;        // so far, end id included
  int num_cached_tokens = 0;        // prompt tokens whose KV came from the prefix cache
  Timings timings;
};

}  // namespace charonia
