#include <algorithm>
#include <array>

#include "ops/cuda/products.h"

namespace charonia::cuda {

#if defined(CHARONIA_CUDA_ON_HOST)

ProductTimer make_product_timer() { return nullptr; }

#else

namespace {

constexpr double kMicroseconds = 400;  // of products in a row: long against the clock's half microsecond
constexpr int kSamples = 3;

// As a graph, like the decode steps: so that the time is the device's and not that of launching.
double time_products(Stream& stream, double expected, const std::function<void(int)>& issue) {
  const int count = std::clamp(static_cast<int>(kMicroseconds / std::max(expected, 1.0)), 1, kMostTimedProducts);
  issue(0);  // loads the kernel, which must not happen in a recording
  stream.wait("the first of measured products");
  Graph::begin(stream);
  Graph graph;
  try {
    for (int i = 0; i < count; ++i) issue(i);
    graph = Graph::end(stream);
  } catch (...) {
    Graph::abandon(stream);
    throw;
  }
  graph.launch(stream, "measured products");
  Event begin(true), end(true);
  std::array<double, kSamples> times{};
  for (auto& time : times) {
    begin.record(stream);
    graph.launch(stream, "measured products");
    end.record(stream);
    end.wait("measured products");
    time = 1000.0 * Event::milliseconds(begin, end) / count;
  }
  std::ranges::sort(times);
  return times[kSamples / 2];
}

}  // namespace

ProductTimer make_product_timer() { return time_products; }

#endif

}  // namespace charonia::cuda
