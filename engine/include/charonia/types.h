// Input and output of the engine: requests, sampling parameters, results.
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

// The maximum lengths of a request's lists (SamplingParams::validate()).
inline constexpr std::size_t kMaxStopWords = 64, kMaxBadWords = 4096, kMaxEndIds = 256, kMaxThinkingMark = 64;
inline constexpr std::size_t kMaxThinkingCallMarks = 4;
// The maximum length of Request::cache_salt, in bytes.
inline constexpr std::size_t kMaxCacheSalt = 256;

// Why a sequence ended. `none` while it runs.
enum class FinishReason { none, stop, length, cancelled, error };

// "" | "stop" | "length" | "cancelled" | "error"
std::string_view to_string(FinishReason reason);

// The kinds of structured output. The names of the first five are TensorRT-LLM's.
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

// Structured output. docs/structured_output.md lists the supported features.
struct Guide {
  GuideType type = GuideType::json;
  std::string text;  // the schema, expression, grammar, tag or list, in UTF-8. Empty for json
};

struct Request {
  std::string id;                  // the caller's id, for Engine::cancel(id). May be empty; need not be unique
  std::vector<TokenId> input_ids;  // at least one, each in [0, vocab_size)
  SamplingParams sampling;
  int priority = 0;                // higher values run first; equal values in order of arrival
  bool stream = true;              // false: exactly one Result, the last
  bool joined_responses = false;   // the caller sends results of several requests together (runtime/stream_interval.h)
  bool strip_leading_space = false;  // drop one leading space of the text if the tokenizer's decoder does

  // Marks that end the search for stop words: the beginnings of tool calls, as text or as special tokens in the
  // vocabulary's spelling. Stop words do not count within the first mark in the text or after it. At most
  // kMaxStopWords. Empty: stop words always count.
  std::vector<std::string> stop_until;
  // If true, sampling.max_tokens may exceed the remaining session_len: the text then ends where the context ends. If
  // false, such a request is rejected.
  bool fit_max_tokens = false;

  // A session is the token history of a conversation. The engine keeps it under this id, with a soft pin on its KV
  // blocks. The pin only affects speed. Requests of one session run one after the other. Empty: no session.
  std::string session_id;
  // Tokens to append to the session's history, if it has one; input_ids are then ignored. If the session has no
  // history, it begins with input_ids, or with these tokens if input_ids is empty. If continuation_ids is empty,
  // input_ids are the whole conversation and replace the history. If the history ends with an end id and these tokens
  // begin with it, it is not repeated. If history and input do not fit into session_len with room for
  // max_tokens (unset: a quarter of session_len), the oldest turns are dropped; a start id (config.ini's start_id) at
  // the beginning of the history stays.
  std::vector<TokenId> continuation_ids;
  bool end_session = false;  // remove the session when this request has ended

  // To continue responses that another engine began: the tokens that each sequence has received, or nullopt for a
  // sequence that has ended. Empty: all sequences begin. The results have only the tokens that follow, and these are
  // the tokens that the other engine would have sampled if both have the same weights, settings and kernels. Needs
  // stream and a seed. Not allowed with continuation_ids, best_of > n and prompt_logits.
  std::vector<std::optional<std::vector<TokenId>>> resumed;

  // The request finds only blocks in the prefix cache that a request with the same salt computed. So clients that do
  // not know the salt cannot detect, from num_cached_tokens or from response times, that a prompt was used before.
  // Empty: only blocks of requests without a salt. At most kMaxCacheSalt arbitrary bytes. The history of a session is
  // found for any salt.
  std::string cache_salt;

  // The LoRA adapter that the request uses, see Engine::load_adapter(). Empty: the model without an adapter.
  std::string lora_name;

  // The client that the request belongs to. Waiting sequences of equal priority are admitted owner by owner in turn,
  // and new guides are compiled owner by owner in turn.
  std::string owner;

  // Return whole rows of the prompt's logits, in separate results, as the steps produce them (Result::prompt_logits).
  // Needs stream and sampling.prompt_logprobs. If the rows that the caller holds exceed max_unread_logits_bytes, the
  // request ends with ErrorCode::resource_exhausted.
  bool prompt_logits = false;
  std::int64_t max_unread_logits_bytes = std::int64_t{4} << 30;

  // Report how much of the prompt is computed, in separate results without tokens, before the first token of sequence 0
  // (Result::num_computed_tokens). No effect without stream.
  bool prompt_progress = false;

  // "embed" or "score": return an embedding or a score (Result::pooled) instead of text. Empty: text. A model supports
  // only its own task; "any" is the model's own, for probes. Sampling parameters have no effect. Not allowed with a
  // session, several sequences, a guide, a mask or log probabilities of the prompt.
  std::string pooling;
  int dimensions = 0;  // return only the first numbers of the embedding, normalised again; 0: all

  std::optional<int> timeout_ms;  // >= 1, from submit(); then the request ends with ErrorCode::deadline_exceeded
  std::shared_ptr<TokenMaskProvider> mask;  // null: every token may follow

  // The text must match this guide. An end id then ends it, with FinishReason::stop. The grammar is compiled while
  // other requests run. An invalid guide ends the request with FinishReason::error and ErrorCode::invalid_argument. Not
  // allowed together with mask, sampling.ignore_eos or sampling.min_tokens.
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

// One response of a sequence: the tokens since the previous response. A response ends at the end of a character and
// holds back a possible beginning of a stop word, so the joined texts equal the whole text byte for byte.
struct Result {
  std::vector<TokenId> token_ids;   // includes the end id and the tokens of a stop word that ended the sequence
  // The response's text is bytes [text_begin, text_end) of the joined bytes of token_ids (see TokenTable), decoded as
  // UTF-8. Invalid bytes become U+FFFD (maximal subparts, like Python's errors="replace").
  int text_begin = 0;
  int text_end = 0;
  std::string text;                 // that text, valid UTF-8
  std::vector<float> logprobs;      // per token of token_ids, if requested
  std::vector<std::vector<TokenLogprob>> top_logprobs;  // per token, most likely first, if requested
  FinishReason finish_reason = FinishReason::none;      // set only in the last result of a request
  std::string error;                // with FinishReason::error
  ErrorCode error_code = ErrorCode::internal;  // of that error
  // The index among the request's n sequences. Each sequence has a last result, even if the request fails or is
  // cancelled before its sequences begin.
  int index = 0;
  double cumulative_logprob = 0;  // sum over its tokens so far, if log probabilities or best_of were requested
  // Per token of the prompt from the second on, if requested; in the first result of sequence 0.
  std::vector<float> prompt_logprobs;
  std::vector<std::vector<TokenLogprob>> prompt_top_logprobs;  // most likely first
  // For a request with prompt_logits: rows [vocab_size] of logits before the sampling parameters are applied. They come
  // in results without tokens, before the first token of sequence 0. Row i belongs to position first_logits + i of the
  // prompt and predicts the next token. Rows come in order, each once, without the row of the prompt's last token.
  std::vector<std::vector<float>> prompt_logits;
  int first_logits = 0;
  std::vector<float> pooled;  // with pooling, in the last result: the embedding, or the score as one number
  std::shared_ptr<const void> unread_logits;  // prompt_logits count as unread as long as a copy of this exists
  int num_session_tokens = 0;                 // part of num_input_tokens: the session's history before the input
  int num_input_tokens = 0;
  int num_output_tokens = 0;        // so far, with the end id
  int num_cached_tokens = 0;        // prompt tokens whose KV came from the prefix cache
  int num_computed_tokens = 0;      // with prompt_progress: prompt tokens whose KV exist; 0 in results with tokens
  int num_proposed_tokens = 0;      // by speculation so far
  int num_accepted_tokens = 0;      // part of num_output_tokens: proposals that were accepted
  Timings timings;
};

}  // namespace charonia
