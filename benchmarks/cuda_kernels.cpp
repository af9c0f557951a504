// Times of every CUDA kernel with real shapes, and their shares of what the device reaches in the same run.
//
//     cmake -S . -B build -DCHARONIA_CUDA=ON ...
//     cmake --build build --target charonia_cuda_kernels
//     build/charonia_cuda_kernels FILE.json [full | quick | tiny] [SUITE ...] [only=TEXT ...]
//
// only: of the cases those alone whose kernel, shape and variant, as JSON, have all of these texts; for a profiler.
// Suites: gemm, decode_attention, prefill_attention, rows, sampling, experts, quantised; all of them without a
// name. FILE.json is written after every suite and every few seconds. A row is one measurement: the suite, the kernel, the shape, the
// variant, whether programmatic dependent launch was on (null: a library launched it), microseconds, bytes, operations,
// which limit bounds it, and the share of that limit. What did not fit is under "skipped", what failed under "errors";
// then the exit code is 1. charonia_cuda_kernels_on_host is the same program with the kernels on the CPU, for tests
// (tiny).
#include <algorithm>
#include <cstdio>
#include <exception>
#include <string>
#include <vector>

#include "base/text.h"
#include "charonia/error.h"
#include "cuda_bench.h"

using namespace charonia;

namespace {

struct Suite {
  const char* name;
  void (*run)(bench::Bench&);
};
constexpr Suite kSuites[] = {
    {"gemm", bench::measure_gemms},
    {"decode_attention", bench::measure_decode_attention},
    {"prefill_attention", bench::measure_prefill_attention},
    {"rows", bench::measure_rows},
    {"sampling", bench::measure_sampling},
    {"experts", bench::measure_experts},
    {"quantised", bench::measure_quantised},
};

int run(const std::vector<std::string>& words) {
  if (words.empty())
    throw Error(ErrorCode::invalid_argument,
                "name a file for the results: FILE.json [full | quick | tiny] [SUITE ...]");
  auto size = bench::Size::full;
  std::vector<Suite> suites;
  std::vector<std::string> only;
  for (std::size_t i = 1; i < words.size(); ++i) {
    if (words[i] == "full" || words[i] == "quick" || words[i] == "tiny") {
      size = words[i] == "full" ? bench::Size::full : words[i] == "quick" ? bench::Size::quick : bench::Size::tiny;
      continue;
    }
    if (words[i].starts_with("only=")) {
      only.push_back(words[i].substr(5));
      continue;
    }
    const auto* const suite = std::ranges::find(kSuites, words[i], &Suite::name);
    if (suite == std::end(kSuites)) {
      std::string known;
      for (const auto& one : kSuites) known += cat(", ", one.name);
      throw Error(ErrorCode::invalid_argument,
                  cat("'", words[i], "' is neither a size (full, quick, tiny) nor a suite: ", known.substr(2)));
    }
    suites.push_back(*suite);
  }
  if (suites.empty()) suites.assign(std::begin(kSuites), std::end(kSuites));
  std::string why;
  if (cuda::device_count(why) == 0) throw Error(ErrorCode::unavailable, cat("no CUDA device: ", why));

  const bool named_cases = !only.empty();
  const cuda::OnDevice on(0);
  bench::Bench bench(size, words[0], std::move(only));
  bench.suite("limits", [&] { bench.measure_limits(); });
  const auto& limits = bench.limits();
  std::printf("%s: reads %.0f GB/s, copies %.0f GB/s; bf16 GEMMs %.1f TFLOP/s (%s), mma.sync %.1f TFLOP/s\n",
              bench.device.name.c_str(), limits.read / 1e9, limits.copy / 1e9, limits.gemms / 1e12,
              limits.gemm_by.c_str(), limits.mma / 1e12);
  for (const auto& suite : suites) bench.suite(suite.name, [&] { suite.run(bench); });
  if (named_cases && bench.empty()) {
    throw Error(ErrorCode::invalid_argument,
                "no case of these suites has all the texts of only=; a results file without only= shows how cases are "
                "written");
  }
  return bench.failed() ? 1 : 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run({argv + 1, argv + argc});
  } catch (const std::exception& error) {
    std::fprintf(stderr, "charonia_cuda_kernels: %s\n", error.what());
    return 1;
  }
}
