#include <algorithm>
#include <array>

#include "ops/cuda/gemm/gemm_runner.h"

namespace charonia::cuda {

namespace {

constexpr double kMicroseconds = 400;  // of a sequence of GEMMs: long compared with the clock's 0.5
constexpr int kSamples = 3;

// Uses a graph, like the decode steps, so that the time excludes launches.
double time_gemms(Stream& stream, double expected, const std::function<void(int)>& issue) {
  const int count = std::clamp(static_cast<int>(kMicroseconds / std::max(expected, 1.0)), 1, kMaxTimedGemms);
  issue(0);  // loads the kernel, which must not happen in a capture
  stream.wait("the first of measured GEMMs");
  Graph::begin(stream);
  Graph graph;
  try {
    for (int i = 0; i < count; ++i) issue(i);
    graph = Graph::end(stream);
  } catch (...) {
    Graph::abandon(stream);
    throw;
  }
  graph.launch(stream, "measured GEMMs");
  Event begin(true), end(true);
  std::array<double, kSamples> times{};
  for (auto& time : times) {
    begin.record(stream);
    graph.launch(stream, "measured GEMMs");
    end.record(stream);
    end.wait("measured GEMMs");
    time = 1000.0 * Event::milliseconds(begin, end) / count;
  }
  std::ranges::sort(times);
  return times[kSamples / 2];
}

}  // namespace

GemmTimer make_gemm_timer() { return time_gemms; }

}  // namespace charonia::cuda
