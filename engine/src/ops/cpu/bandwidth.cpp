#include "ops/cpu/bandwidth.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <vector>

#include "base/huge_memory.h"
#include "base/text.h"
#include "base/thread_pool.h"
#include "charonia/error.h"

namespace charonia::ops::cpu {
namespace {

constexpr std::size_t kLine = 64;
constexpr std::size_t kAhead = 1024;  // prefetch distance in bytes
constexpr std::size_t kStreams = 2;
constexpr std::size_t kRun = std::size_t{1} << 20;  // a chunk of work; its halves are the streams
constexpr double kMeasure_s = 2;

typedef std::uint64_t Words __attribute__((vector_size(16), aligned(16)));

// Returns a sum, so that the compiler keeps the reads.
std::uint64_t read_run(const std::byte* data, std::size_t bytes) {
  const std::size_t length = bytes / kStreams / kLine * kLine;
  Words sums[kStreams][4] = {};
  for (std::size_t i = 0; i < length; i += kLine) {
#pragma GCC unroll 4
    for (std::size_t s = 0; s < kStreams; ++s) {
      const auto* const at = data + s * length + i;
      __builtin_prefetch(at + kAhead);
      const auto* const words = reinterpret_cast<const Words*>(at);
#pragma GCC unroll 4
      for (int w = 0; w < 4; ++w) sums[s][w] += words[w];
    }
  }
  std::uint64_t out = 0;
  for (const auto& stream : sums) {
    for (const auto& sum : stream) out += sum[0] + sum[1];
  }
  return out;
}

}  // namespace

double measure_read_bandwidth(std::size_t bytes, int threads) {
  ThreadPool pool(threads);
  if (bytes < kRun * static_cast<std::size_t>(pool.size())) {
    throw Error(ErrorCode::invalid_argument,
                cat("measuring the read bandwidth of ", pool.size(), " threads needs at least ",
                    kRun * static_cast<std::size_t>(pool.size()), " bytes, got ", bytes));
  }
  const HugeMemory memory(bytes);
  const auto runs = static_cast<std::int64_t>(bytes / kRun);
  pool.parallel_for(runs, 1, [&](std::int64_t begin, std::int64_t end) {
    std::memset(memory.data() + static_cast<std::size_t>(begin) * kRun, 1,
                static_cast<std::size_t>(end - begin) * kRun);
  });
  using Clock = std::chrono::steady_clock;
  std::vector<double> rates;
  std::atomic<std::uint64_t> sum = 0;
  const auto start = Clock::now();
  do {
    const auto before = Clock::now();
    pool.parallel_for(runs, 8, [&](std::int64_t begin, std::int64_t end) {
      std::uint64_t part = 0;
      for (auto run = begin; run < end; ++run)
        part += read_run(memory.data() + static_cast<std::size_t>(run) * kRun, kRun);
      sum += part;
    });
    const std::chrono::duration<double> taken = Clock::now() - before;
    rates.push_back(static_cast<double>(runs) * static_cast<double>(kRun) / taken.count() / 1e9);
  } while (std::chrono::duration<double>(Clock::now() - start).count() < kMeasure_s || rates.size() < 3);
  const std::uint64_t each = 0x0101010101010101U * (kRun / sizeof(std::uint64_t));
  if (sum != each * static_cast<std::uint64_t>(runs) * rates.size()) {
    throw Error(ErrorCode::internal, "the read bandwidth measurement read wrong data");
  }
  std::nth_element(rates.begin(), rates.begin() + static_cast<std::ptrdiff_t>(rates.size() / 2), rates.end());
  return rates[rates.size() / 2];
}

}  // namespace charonia::ops::cpu
