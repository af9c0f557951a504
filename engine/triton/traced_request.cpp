#include "traced_request.h"

#include <algorithm>
#include <cstdint>
#include <string>

#include "error.h"

namespace charonia::triton {
namespace {

// Reports spans one after the other, each from where the one before ended.
class Reporter {
 public:
  Reporter(TRITONSERVER_InferenceTrace* trace, std::chrono::steady_clock::time_point begin)
      : trace_(trace), begin_(begin), last_ns_(since_epoch(begin) - 1) {}

  // end_ms: from the beginning of the first span.
  void span(const std::string& name, double end_ms) {
    report(name + "_START", last_ns_ + 1);
    report(name + "_END", since_epoch(begin_) + static_cast<std::int64_t>(end_ms * 1e6));
  }

 private:
  static std::int64_t since_epoch(std::chrono::steady_clock::time_point time) {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(time.time_since_epoch()).count();
  }

  // The server tells activities apart by their times.
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

std::shared_ptr<TracedRequest> TracedRequest::of(TRITONBACKEND_Request* request) {
  TRITONSERVER_InferenceTrace* trace = nullptr;
  // A server that was built without tracing says that here; its requests are not traced.
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

// One that ended before its first token has no decode; one that was never scheduled has its queue alone.
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
