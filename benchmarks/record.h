#pragma once

#include <algorithm>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <string_view>
#include <utility>
#include <vector>

namespace charonia::bench {

using Json = nlohmann::ordered_json;

// What the figures of a program have in common: "scheduler", and what varies between the lines of its table.
struct Case {
  std::string_view benchmark;
  Json varied;
};

// A figure on standard output: a line of JSON that charonia/bench/records.py reads. It is the median of `values`, of
// which there is at least one, with the smallest and the largest of them.
inline void print_figure(const Case& of, std::string_view name, std::string_view unit, std::vector<double> values) {
  std::ranges::sort(values);
  const auto middle = values.size() / 2;
  const double median = values.size() % 2 == 1 ? values[middle] : (values[middle - 1] + values[middle]) / 2;
  const Json line{{"benchmark", of.benchmark},    {"name", name},
                  {"unit", unit},                 {"value", median},
                  {"minimum", values.front()},    {"maximum", values.back()},
                  {"repeats", values.size()},     {"case", of.varied}};
  std::printf("%s\n", line.dump().c_str());
  std::fflush(stdout);
}

}  // namespace charonia::bench
