// What the CPU's products reach, against the machine's read bandwidth measured in the same run.
//
//     cmake -S . -B build -DCHARONIA_BENCHMARKS=ON ... && cmake --build build --target charonia_cpu_ops
//     build/charonia_cpu_ops [threads]
//
// Few rows: weights of about 0.9 GB in all (layers of 4096 x 1536), so that caches do not help; GB/s of weights read.
// Many rows: 512 rows of the same shape; GFLOP/s. Medians of several rounds.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <random>
#include <vector>

#include "ops/cpu/bandwidth.h"
#include "ops/ops.h"

using namespace charonia;

namespace {

constexpr std::int64_t kN = 4096, kK = 1536;
constexpr std::int64_t kTotalBytes = 900'000'000;

double median_seconds(int rounds, const std::function<void()>& run) {
  std::vector<double> times;
  run();
  for (int i = 0; i < rounds; ++i) {
    const auto before = std::chrono::steady_clock::now();
    run();
    times.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - before).count());
  }
  std::nth_element(times.begin(), times.begin() + rounds / 2, times.end());
  return times[static_cast<std::size_t>(rounds / 2)];
}

ops::Tensor tensor(const ops::Buffer& buffer, DType type, std::int64_t rows, std::int64_t cols) {
  return {buffer.data(), type, rows, cols, cols};
}

}  // namespace

int main(int argc, char** argv) {
  const int threads = argc > 1 ? std::atoi(argv[1]) : 0;
  const double limit = ops::cpu::measure_read_bandwidth(std::size_t{2} << 30, threads);
  const auto ops = ops::make_cpu_ops(threads);
  const auto isa = ops->instruction_set();
  std::printf("read bandwidth %.1f GB/s; instruction set %.*s\n", limit, static_cast<int>(isa.size()), isa.data());
  std::printf("%-6s %6s %10s %10s %12s\n", "type", "rows", "GB/s", "share", "GFLOP/s");

  std::mt19937 random(1);
  std::normal_distribution<float> normal(0, 1);
  std::vector<float> values(static_cast<std::size_t>(kN * kK));
  for (auto& x : values) x = normal(random);
  const ops::HostMatrix source{values.data(), DType::f32, kN, kK};

  for (const auto type : {DType::bf16, DType::f16, DType::f32}) {
    const auto layers = kTotalBytes / (kN * kK * static_cast<std::int64_t>(size_of(type)));
    std::vector<std::unique_ptr<ops::Linear>> weights;
    for (std::int64_t i = 0; i < layers; ++i) weights.push_back(ops->make_linear({&source, 1}, {}, type));
    const auto activation = ops->precision(type).activation;
    for (const std::int64_t rows : {1, 2, 4, 6, 8, 12, 16, 32, 512}) {
      const auto in = ops->allocate(static_cast<std::size_t>(rows * kK) * sizeof(float));
      const auto out = ops->allocate(static_cast<std::size_t>(rows * kN) * sizeof(float));
      std::vector<std::uint16_t> bits(static_cast<std::size_t>(rows * kK));
      std::transform(values.begin(), values.begin() + rows * kK, bits.begin(), float_to_bf16);
      ops->upload(in->data(), activation == DType::bf16 ? static_cast<const void*>(bits.data()) : values.data(),
                  static_cast<std::size_t>(rows * kK) * size_of(activation));
      const auto used = rows == 512 ? std::min<std::int64_t>(layers, 4) : layers;
      const double seconds = median_seconds(rows == 512 ? 5 : 15, [&] {
        for (std::int64_t i = 0; i < used; ++i) {
          ops->linear(tensor(*out, DType::f32, rows, kN), tensor(*in, activation, rows, kK),
                      *weights[static_cast<std::size_t>(i)]);
        }
      });
      const double bytes = static_cast<double>(used) * static_cast<double>(weights[0]->bytes());
      const double flops = 2.0 * static_cast<double>(used * rows * kN * kK);
      const auto name = to_string(type);
      std::printf("%-6.*s %6lld %10.1f %9.0f%% %12.0f\n", static_cast<int>(name.size()), name.data(),
                  static_cast<long long>(rows), bytes / seconds / 1e9, 100 * bytes / seconds / 1e9 / limit,
                  flops / seconds / 1e9);
    }
  }
  return 0;
}
