// Generated from definitions/tensors.toml by `make generate`; do not edit.
#pragma once

#include <array>
#include <cstddef>

namespace charonia::triton {

// The engine model's output tensors.
enum class Output : std::size_t {
  // INT32 [n]: text_span, then output_ids
  text_tokens,
  // INT32 [n]: its tokens
  output_ids,
  // INT32 [2]: the text is bytes [begin, end) of the joined bytes of output_ids, UTF-8 with U+FFFD for what is no
  // character
  text_span,
  // BYTES [1]: the input text where exclude_input_in_output is false, else empty; `engine` hands it on with the first
  // response
  echo,
  // INT32 [1]: which of the request's sequences
  sequence_index,
  // FP32 [n]: of output_ids; [0] where not asked for
  output_log_probs,
  // INT32 [n]: flat, `len(output_ids) * top_logprobs` entries, a row per token
  top_log_prob_ids,
  // FP32 [n]: of top_log_prob_ids
  top_log_probs,
  // FP32 [1]: of the sequence so far, where log probabilities or best_of were asked for
  cum_log_probs,
  // INT32 [n]: the prompt, with the first response of sequence 0 where prompt_logprobs asked for it; else [0], as the
  // next three
  prompt_ids,
  // FP32 [n]: of the prompt's tokens from the second on
  prompt_log_probs,
  // INT32 [n]: flat, a row of `prompt_logprobs` entries for each entry of prompt_log_probs
  prompt_top_log_prob_ids,
  // FP32 [n]: of prompt_top_log_prob_ids
  prompt_top_log_probs,
  // BYTES [1]: stop, length, cancelled or error; "" until the last response of a sequence
  finish_reason,
  // INT32 [1]: tokens of the prompt, a session's history included
  num_input_tokens,
  // INT32 [1]: so far
  num_output_tokens,
  // INT32 [1]: of num_input_tokens: those whose KV came from the prefix cache
  num_cached_tokens,
  // INT32 [1]: with `prompt_progress`: of num_input_tokens, those whose KV exist; 0 in responses with tokens
  num_computed_tokens,
  // INT32 [1]: of num_input_tokens: the session's history
  num_session_tokens,
  // FP32 [3]: queue, first token, total; milliseconds
  timings,
  // BYTES [1]: of a subscription: the next Delivery, a protobuf message (contracts.md, Subscriptions)
  deliveries,
};

inline constexpr std::array<const char*, 21> kOutputNames = {
    "text_tokens",
    "output_ids",
    "text_span",
    "echo",
    "sequence_index",
    "output_log_probs",
    "top_log_prob_ids",
    "top_log_probs",
    "cum_log_probs",
    "prompt_ids",
    "prompt_log_probs",
    "prompt_top_log_prob_ids",
    "prompt_top_log_probs",
    "finish_reason",
    "num_input_tokens",
    "num_output_tokens",
    "num_cached_tokens",
    "num_computed_tokens",
    "num_session_tokens",
    "timings",
    "deliveries",
};

}  // namespace charonia::triton
