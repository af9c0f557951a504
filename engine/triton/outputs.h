// The engine model's output tensors, and the filling of a response with them.
#pragma once

#include <array>
#include <bitset>
#include <cstddef>
#include <string_view>

#include "charonia/types.h"
#include "triton_api.h"

namespace charonia::triton {

enum class Output : std::size_t {
  output_ids,         // INT32 [n]
  text_span,          // INT32 [2]
  echo,               // BYTES [1]
  output_log_probs,   // FP32 [n], [0] where not asked for
  top_log_prob_ids,   // INT32 [n * top_logprobs]
  top_log_probs,      // FP32 [n * top_logprobs]
  finish_reason,      // BYTES [1]
  num_input_tokens,   // INT32 [1]
  num_output_tokens,  // INT32 [1]
  num_cached_tokens,  // INT32 [1]
  timings,            // FP32 [3]: queue, first token, total; milliseconds
};

inline constexpr std::array<const char*, 11> kOutputNames = {
    "output_ids",        "text_span",         "echo",          "output_log_probs",
    "top_log_prob_ids",  "top_log_probs",     "finish_reason", "num_input_tokens",
    "num_output_tokens", "num_cached_tokens", "timings"};

using OutputSet = std::bitset<kOutputNames.size()>;

// What the client asked for; a request that names none asks for all.
OutputSet requested_outputs(TRITONBACKEND_Request* request);

// Adds the tensors in `wanted` to a response. Throws Error where Triton refuses one.
void fill(TRITONBACKEND_Response* response, const Result& result, std::string_view echo, const OutputSet& wanted);

}  // namespace charonia::triton
