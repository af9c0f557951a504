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
#include "error.h"

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

// Times are measured in microseconds.
double rounded(double ms) { return std::round(ms * 1e3) / 1e3; }

const char* kind_of(const std::exception& error) {
  const auto* ours = dynamic_cast<const Error*>(&error);
  switch (ours == nullptr ? ErrorCode::internal : ours->code()) {
    case ErrorCode::invalid_argument: return "invalid_argument";
    case ErrorCode::unsupported: return "unsupported";
    case ErrorCode::resource_exhausted: return "resource_exhausted";
    case ErrorCode::unavailable: return "unavailable";
    case ErrorCode::deadline_exceeded: return "deadline_exceeded";
    case ErrorCode::internal: break;
  }
  return "internal";
}

// Reports consecutive spans. Each begins when the previous one ends.
class Reporter {
 public:
  Reporter(TRITONSERVER_InferenceTrace* trace, std::chrono::steady_clock::time_point begin)
      : trace_(trace), begin_(begin), last_ns_(since_epoch(begin) - 1) {}

  // end_ms: since the beginning of the first span.
  void span(const std::string& name, double end_ms) {
    report(name + "_START", last_ns_ + 1);
    report(name + "_END", since_epoch(begin_) + static_cast<std::int64_t>(end_ms * 1e6));
  }

 private:
  static std::int64_t since_epoch(std::chrono::steady_clock::time_point time) {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(time.time_since_epoch()).count();
  }

  // The server needs a different time for each activity.
  void report(const std::string& name, std::int64_t time_ns) {
    last_ns_ = std::max(time_ns, last_ns_ + 1);
    log_failure(TRITONSERVER_InferenceTraceReportActivity(trace_, static_cast<std::uint64_t>(last_ns_), name.c_str()),
                "tracing a request");
  }

  TRITONSERVER_InferenceTrace* trace_;
  std::chrono::steady_clock::time_point begin_;
  std::int64_t last_ns_;
};

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

std::shared_ptr<TracedRequest> TracedRequest::of(TRITONBACKEND_Request* request) {
  TRITONSERVER_InferenceTrace* trace = nullptr;
  // A server that was built without tracing returns an error here.
  if (const ErrorPtr error(TRITONBACKEND_RequestTrace(request, &trace)); error || trace == nullptr) return nullptr;
  return std::make_shared<TracedRequest>(request, trace);
}

TracedRequest::TracedRequest(TRITONBACKEND_Request* request, TRITONSERVER_InferenceTrace* trace)
    : request_(request), trace_(trace) {}

TracedRequest::~TracedRequest() {
  if (timings_.total_ms > 0) report_spans();
  log_failure(TRITONBACKEND_RequestRelease(request_, TRITONSERVER_REQUEST_RELEASE_ALL), "releasing a traced request");
}

void TracedRequest::submitted() { submitted_ = Clock::now(); }

// A request that ended before its first token has no decode span. A request that was never scheduled has only a queue
// span.
void TracedRequest::report_spans() const {
  Reporter reporter(trace_, submitted_);
  reporter.span("queue", timings_.queue_ms);
  if (timings_.first_token_ms > 0) {
    reporter.span("prefill", timings_.first_token_ms);
    reporter.span("decode", timings_.total_ms);
  } else if (timings_.total_ms > timings_.queue_ms) {
    reporter.span("prefill", timings_.total_ms);
  }
}

}  // namespace charonia::triton
