#include "metrics_sink.h"

#include <array>

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

}  // namespace charonia::triton
