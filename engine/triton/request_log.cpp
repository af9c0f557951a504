#include "request_log.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <string>

#include "base/generated/log_settings.h"
#include "base/log.h"
#include "base/text.h"
#include "charonia/error.h"

namespace charonia::triton {
namespace {

bool asked_for() {
  const char* value = std::getenv(log_settings::kAccessLog);
  if (value == nullptr) return false;
  std::string lower(value);
  for (auto& letter : lower) {
    if (letter >= 'A' && letter <= 'Z') letter = static_cast<char>(letter - 'A' + 'a');
  }
  return std::ranges::find(log_settings::kTrueWords, lower) != log_settings::kTrueWords.end();
}

// Microseconds are all that is known.
double rounded(double ms) { return std::round(ms * 1e3) / 1e3; }

const char* kind_of(const std::exception& error) {
  const auto* ours = dynamic_cast<const Error*>(&error);
  switch (ours == nullptr ? ErrorCode::internal : ours->code()) {
    case ErrorCode::invalid_argument: return "invalid_argument";
    case ErrorCode::unsupported: return "unsupported";
    case ErrorCode::resource_exhausted: return "resource_exhausted";
    case ErrorCode::unavailable: return "unavailable";
    case ErrorCode::pending: return "pending";
    case ErrorCode::deadline_exceeded: return "deadline_exceeded";
    case ErrorCode::internal: break;
  }
  return "internal";
}

}  // namespace

RequestLog::RequestLog() : on_(asked_for()) {}

void RequestLog::ended(const std::string& request_id, const Totals& totals) const {
  if (!on_) return;
  const auto& timings = totals.timings;
  log({LogLevel::info,
       cat(totals.finish_reasons, ": ", totals.num_input_tokens, " + ", totals.num_output_tokens, " tokens in ",
           static_cast<std::int64_t>(std::llround(timings.total_ms)), " ms"),
       request_id,
       {{"prompt_tokens", std::int64_t{totals.num_input_tokens}},
        {"cached_tokens", std::int64_t{totals.num_cached_tokens}},
        {"completion_tokens", std::int64_t{totals.num_output_tokens}},
        {"finish_reasons", totals.finish_reasons},
        {"queue_ms", rounded(timings.queue_ms)},
        {"first_token_ms", rounded(timings.first_token_ms)},
        {"total_ms", rounded(timings.total_ms)}}});
}

void RequestLog::rejected(const std::string& request_id, const std::exception& error) const {
  if (!on_) return;
  log({LogLevel::info, cat("rejected: ", kind_of(error)), request_id, {{"error", std::string(kind_of(error))}}});
}

}  // namespace charonia::triton
