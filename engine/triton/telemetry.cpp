#include "telemetry.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <span>
#include <string>

#include "base/generated/log_settings.h"
#include "base/log.h"
#include "base/text.h"
#include "charonia/error.h"
#include "error.h"

namespace charonia::triton {
namespace {

TRITONSERVER_MetricKind kind_of(MetricKind kind) {
  switch (kind) {
    case MetricKind::counter:
      return TRITONSERVER_METRIC_KIND_COUNTER;
    case MetricKind::gauge:
      return TRITONSERVER_METRIC_KIND_GAUGE;
    case MetricKind::histogram:
      return TRITONSERVER_METRIC_KIND_HISTOGRAM;
  }
  throw Error(ErrorCode::internal, "a metric of no kind");
}

ParameterPtr make_label(const std::string& name, const std::string& value) {
  ParameterPtr label(TRITONSERVER_ParameterNew(name.c_str(), TRITONSERVER_PARAMETER_STRING, value.c_str()));
  if (!label) throw Error(ErrorCode::internal, "the server rejected the metric label " + name + "=" + value);
  return label;
}

MetricArgsPtr histogram_args(std::span<const double> buckets) {
  TRITONSERVER_MetricArgs* raw = nullptr;
  check(TRITONSERVER_MetricArgsNew(&raw));
  MetricArgsPtr args(raw);
  check(TRITONSERVER_MetricArgsSetHistogram(args.get(), buckets.data(), buckets.size()));
  return args;
}

MetricPtr make_metric(TRITONSERVER_MetricFamily* family, const MetricInfo& info, const std::string& model,
                      std::string_view label_value) {
  std::vector<ParameterPtr> labels;
  labels.push_back(make_label("model", model));
  if (!info.label.empty()) labels.push_back(make_label(std::string(info.label), std::string(label_value)));
  std::vector<const TRITONSERVER_Parameter*> views;
  for (const auto& label : labels) views.push_back(label.get());
  const auto args = info.kind == MetricKind::histogram ? histogram_args(info.buckets) : MetricArgsPtr();
  TRITONSERVER_Metric* metric = nullptr;
  check(TRITONSERVER_MetricNewWithArgs(&metric, family, views.data(), views.size(), args.get()));
  return MetricPtr(metric);
}

class TritonMetricsSink : public MetricsSink {
 public:
  TritonMetricsSink(const MetricFamilies& families, const std::string& model) {
    constexpr std::array<std::string_view, 1> kNoLabel = {""};
    for (const auto& info : metric_catalogue()) {
      auto& row = series_.emplace_back();
      const auto values = info.label.empty() ? std::span<const std::string_view>(kNoLabel) : info.label_values;
      for (const auto value : values) row.push_back(make_metric(families.of(info.metric), info, model, value));
    }
  }

  // A rejected sample is not logged, because there may be thousands.
  void add(Metric metric, double value, int label_value) override {
    detail::drop(TRITONSERVER_MetricIncrement(series(metric, label_value), value));
  }
  void set(Metric gauge, double value) override { detail::drop(TRITONSERVER_MetricSet(series(gauge, 0), value)); }
  void observe(Metric histogram, double value) override {
    detail::drop(TRITONSERVER_MetricObserve(series(histogram, 0), value));
  }

 private:
  TRITONSERVER_Metric* series(Metric metric, int label_value) const {
    return series_[static_cast<std::size_t>(metric)].at(static_cast<std::size_t>(label_value)).get();
  }

  std::vector<std::vector<MetricPtr>> series_;  // [metric, label value]
};

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

MetricFamilies::MetricFamilies() {
  try {
    for (const auto& info : metric_catalogue()) {
      TRITONSERVER_MetricFamily* family = nullptr;
      check(TRITONSERVER_MetricFamilyNew(&family, kind_of(info.kind), std::string(info.name).c_str(),
                                         std::string(info.help).c_str()));
      families_.emplace_back(family);
    }
  } catch (const Error& error) {
    families_.clear();
    log_warning(std::string("the server takes no metrics, so there are none of the engine: ") + error.what());
  }
}

std::shared_ptr<MetricsSink> make_metrics_sink(const MetricFamilies& families, const std::string& model) {
  if (!families.available()) return nullptr;
  return std::make_shared<TritonMetricsSink>(families, model);
}

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
  log({LogLevel::info, cat("rejected: ", error_kind(error)), request_id, {{"error", std::string(error_kind(error))}}});
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
