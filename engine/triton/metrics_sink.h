// Publishes the engine's metrics on the server's metrics port through Triton's custom-metric API.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "charonia/metrics.h"
#include "error.h"

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

}  // namespace charonia::triton
