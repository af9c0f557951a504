// What operators see: metrics on the server's metrics port (Triton's API for custom metrics), a line in the log for
// each request, and spans in the server's trace.
#pragma once

#include <algorithm>
#include <chrono>
#include <exception>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "charonia/metrics.h"
#include "charonia/types.h"
#include "error.h"
#include "triton_api.h"

namespace charonia::triton {

// The families of the catalogue, shared by all models of the backend. The server counts the users of a time series per
// family object. With a second family of the same name, reloading a model would delete series that the old model still
// uses.
class MetricFamilies {
 public:
  // Logs a warning and creates no families if the server has no metrics.
  MetricFamilies();

  bool available() const { return !families_.empty(); }
  TRITONSERVER_MetricFamily* of(Metric metric) const { return families_[static_cast<std::size_t>(metric)].get(); }

 private:
  std::vector<MetricFamilyPtr> families_;  // in the order of enum Metric
};

// The series of one model: label `model`, and the metric's own label if it has one. Must be destroyed before the
// families. Throws Error if the server rejects a series.
std::shared_ptr<MetricsSink> make_metrics_sink(const MetricFamilies& families, const std::string& model);

// Counts and times of all sequences of one request.
struct Totals {
  Timings timings;  // the shortest queue time, the earliest first token, the latest total
  int num_input_tokens = 0;
  int num_cached_tokens = 0;
  int num_output_tokens = 0;   // of sequences that have ended
  std::string finish_reasons;  // of these, in the order in which they ended, comma-separated

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

// Writes a line for each request if CHARONIA_ACCESS_LOG is set. The line has no text of prompts or completions.
class RequestLog {
 public:
  RequestLog();  // reads the environment

  void ended(const std::string& request_id, const Totals& totals) const;
  // Logs the kind of the error of a rejected request. The text of the error is not logged: it may quote the request.
  void rejected(const std::string& request_id, const std::exception& error) const;

 private:
  bool on_;
};

// A request that the server traces. Adds the engine's spans to its trace: queue, prefill and decode. Owns the request,
// because the server's trace needs it until the spans are added: the last owner adds them and releases the request.
// Other requests are released as soon as they are in the engine.
class TracedRequest {
 public:
  // Returns null if the server does not trace this request. Throws Error.
  static std::shared_ptr<TracedRequest> of(TRITONBACKEND_Request* request);

  TracedRequest(TRITONBACKEND_Request* request, TRITONSERVER_InferenceTrace* trace);
  ~TracedRequest();
  TracedRequest(const TracedRequest&) = delete;
  TracedRequest& operator=(const TracedRequest&) = delete;

  void submitted();  // call it when the engine receives the request
  void took(const Timings& timings) { timings_ = timings; }

 private:
  using Clock = std::chrono::steady_clock;  // the server uses the same clock

  void report_spans() const;

  TRITONBACKEND_Request* request_;
  TRITONSERVER_InferenceTrace* trace_;
  Clock::time_point submitted_;
  Timings timings_;  // all 0 if the engine has rejected the request
};

}  // namespace charonia::triton
