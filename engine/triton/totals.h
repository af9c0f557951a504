// What all sequences of one request took together.
#pragma once

#include <algorithm>
#include <string>

#include "charonia/types.h"

namespace charonia::triton {

struct Totals {
  Timings timings;  // the shortest wait, the first token of any, the last result
  int num_input_tokens = 0;
  int num_cached_tokens = 0;
  int num_output_tokens = 0;   // of sequences that have ended
  std::string finish_reasons;  // theirs, in the order of their ends, comma-separated

  void see(const Result& result) {
    const auto take_earlier = [](double& kept, double other) {
      if (other > 0 && (kept == 0 || other < kept)) kept = other;
    };
    take_earlier(timings.queue_ms, result.timings.queue_ms);
    take_earlier(timings.first_token_ms, result.timings.first_token_ms);
    timings.total_ms = std::max(timings.total_ms, result.timings.total_ms);
    num_input_tokens = std::max(num_input_tokens, result.num_input_tokens);
    num_cached_tokens = std::max(num_cached_tokens, result.num_cached_tokens);
    if (result.finish_reason == FinishReason::none) return;
    num_output_tokens += result.num_output_tokens;
    if (!finish_reasons.empty()) finish_reasons += ",";
    finish_reasons += to_string(result.finish_reason);
  }
};

}  // namespace charonia::triton
