// The engine model's output tensors, and the filling of a response with them.
#pragma once

#include <array>
#include <bitset>
#include <cstddef>
#include <span>
#include <string_view>

#include "charonia/types.h"
#include "triton_api.h"

namespace charonia::triton {

enum class Output : std::size_t {
  output_ids,        // INT32 [n]
  text_span,         // INT32 [2]
  echo,              // BYTES [1]
  sequence_index,    // INT32 [1]: which of the request's sequences
  output_log_probs,  // FP32 [n], [0] where not asked for
  top_log_prob_ids,  // INT32 [n * top_logprobs]
  top_log_probs,     // FP32 [n * top_logprobs]
  cum_log_probs,     // FP32 [1]: of the sequence so far
  prompt_ids,        // INT32 [p + 1]: the prompt, with its log probabilities
  prompt_log_probs,  // FP32 [p]: of the prompt's tokens from the second on, with the first response of sequence 0;
                     // [0] in others and where not asked for
  prompt_top_log_prob_ids,  // INT32 [p * prompt_logprobs]
  prompt_top_log_probs,     // FP32 [p * prompt_logprobs]
  finish_reason,            // BYTES [1]
  num_input_tokens,         // INT32 [1]
  num_output_tokens,        // INT32 [1]
  num_cached_tokens,        // INT32 [1]
  num_session_tokens,       // INT32 [1]
  timings,                  // FP32 [3]: queue, first token, total; milliseconds
};

inline constexpr std::array<const char*, 18> kOutputNames = {"output_ids",
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
                                                             "num_session_tokens",
                                                             "timings"};

using OutputSet = std::bitset<kOutputNames.size()>;

// What the client asked for; a request that names none asks for all.
OutputSet requested_outputs(TRITONBACKEND_Request* request);

// What a response holds beside its result.
struct Extras {
  std::string_view echo;
  std::span<const TokenId> prompt_ids;
};

// Adds the tensors in `wanted` to a response. Throws Error where Triton refuses one.
void fill(TRITONBACKEND_Response* response, const Result& result, const Extras& extras, const OutputSet& wanted);

}  // namespace charonia::triton
