// The engine's metrics on the server's metrics port, through Triton's custom-metric API.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "charonia/metrics.h"
#include "raii.h"

namespace charonia::triton {

// The families of the catalogue. The server counts the users of a time series within one family object, so all models
// of the backend share these: a second family of the same name would delete the series under the first one's feet when
// a model is loaded anew while its predecessor still runs.
class MetricFamilies {
 public:
  // Where the server has no metrics, a warning goes to the log and there are no families.
  MetricFamilies();

  bool available() const { return !families_.empty(); }
  TRITONSERVER_MetricFamily* of(Metric metric) const { return families_[static_cast<std::size_t>(metric)].get(); }

 private:
  std::vector<MetricFamilyPtr> families_;  // in the order of enum Metric
};

// The series of one model: label `model`, and the metric's own label where it has one. To be destroyed before the
// families. Throws Error where the server refuses a series.
std::shared_ptr<MetricsSink> make_metrics_sink(const MetricFamilies& families, const std::string& model);

}  // namespace charonia::triton
