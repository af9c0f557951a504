// What the suites of charonia_cuda_kernels share: operands, the clock, the limits of the run, and the file of results.
#pragma once

#include <chrono>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "base/dtype.h"
#include "ops/cuda/device/runtime.h"
#include "ops/cuda/gemm/blas.h"

namespace charonia::bench {

// full: the tables. quick: fewer shapes and shorter measurements. tiny: shapes for the CPU, whose times say nothing.
enum class Size { full, quick, tiny };

// Of this run. Bytes and operations a second; 0: not measured.
struct Limits {
  double read = 0;   // of memory by a kernel that only reads
  double copy = 0;   // of a copy within the device, bytes read and written
  double gemms = 0;  // bf16 GEMMs of two 8192 x 8192 matrices by cuBLASLt; without it that of `mma`
  double mma = 0;    // mma.sync out of registers
  std::string gemm_by;
};

// Of a shape: a number or a name.
struct Extent {
  template <std::integral T>
  Extent(T number) : value(static_cast<std::int64_t>(number)) {}
  template <std::convertible_to<std::string_view> T>
  Extent(const T& name) : value(std::string(std::string_view(name))) {}
  std::variant<std::int64_t, std::string> value;
};
using Shape = std::vector<std::pair<std::string_view, Extent>>;

// One kernel, or the kernels of one operation, with one shape.
struct Case {
  std::string kernel;          // its name in benchmarks/cuda_predictions.md
  Shape shape;
  std::string variant;         // of several ways to compute it
  double bytes = 0;            // that must move between memory and SMs: read and written once
  double operations = 0;       // multiplications and additions of tensor cores, which fp32 does not use
  bool launched_by_us = true;  // false: a library launches it, and programmatic dependent launch is its own matter
};

class Bench {
 public:
  // only: of the cases those alone whose JSON has all of these texts.
  Bench(Size size, std::filesystem::path file, std::vector<std::string> only = {});
  ~Bench();
  Bench(const Bench&) = delete;
  Bench& operator=(const Bench&) = delete;

  const Size size;
  const cuda::DeviceInfo device;
  cuda::Stream stream;
  std::mt19937 random{1};

  // Measures the limits, once.
  void measure_limits();
  const Limits& limits() const { return limits_; }

  // Runs a suite and writes the file. An error that leaves the device usable is recorded with its case, and the suite
  // goes on; another one is recorded and thrown.
  void suite(std::string_view name, const std::function<void()>& run);

  // Times `issue(i)`, which issues the i-th of many like launches; those of neighbouring i should use different
  // operands (copies()). With programmatic dependent launch and without it, where the launches are ours and the device
  // has it.
  void measure(const Case& what, const std::function<void(int index)>& issue);
  void skip(const Case& what, std::string why);
  bool failed() const;
  bool empty() const;  // nothing was measured, or failed to be

  // How many copies of operands of so many bytes are out of the L2 cache when their turn comes again; at most
  // kMaxCopies.
  int copies(std::size_t bytes) const;
  static constexpr int kMaxCopies = 32;

  // Device memory with random numbers: N(0, scale) of a floating type.
  cuda::DeviceMemory random_values(DType type, std::int64_t count, float scale = 1);
  // With `pattern` over and over.
  cuda::DeviceMemory repeated(const void* pattern, std::size_t pattern_bytes, std::size_t bytes);
  template <class T>
  cuda::DeviceMemory uploaded(const std::vector<T>& values) {
    return repeated(values.data(), values.size() * sizeof(T), values.size() * sizeof(T));
  }
  // Whether so much more would still leave a tenth of the memory free.
  bool fits(std::size_t bytes) const;

 private:
  bool wanted(const Case& what) const;
  struct Results;  // JSON, which not every suite compiles

  // Median microseconds of one of the launches.
  double time(double expected, const std::function<void(int)>& issue);
  void record(const Case& what, std::optional<bool> overlap, double microseconds);
  void write();

  std::filesystem::path file_;
  std::vector<std::string> only_;
  std::map<std::pair<DType, float>, std::vector<std::byte>> patterns_;  // random numbers, drawn once
  Limits limits_;
  std::string suite_;
  std::chrono::steady_clock::time_point written_{};
  std::unique_ptr<Results> results_;
};

// A model's sizes, as charonia/bench/random_model.py has them. tiny: of the same proportions.
struct ModelShape {
  std::string name;
  std::int64_t hidden, heads, kv_heads, head_dim, inter, vocab;
};
std::vector<ModelShape> model_shapes(Size size);

// Every algorithm that cuBLASLt has for a GEMM, with_copy(i) of which is the i-th of many like ones.
void measure_library(Bench& bench, cuda::Blas& blas, Case what, const std::function<cuda::Gemm(int index)>& with_copy);
// GEMMs of 8-bit numbers, and what makes such inputs: a part of the suite of quantised weights (cuda_w8a8.cpp).
void measure_w8a8(Bench& bench);

// The suites, a file each.
void measure_gemms(Bench& bench);              // cuda_gemm.cpp
void measure_decode_attention(Bench& bench);   // cuda_attention.cpp
void measure_prefill_attention(Bench& bench);  // cuda_attention.cpp
void measure_rows(Bench& bench);               // cuda_rows.cpp
void measure_sampling(Bench& bench);           // cuda_sampling.cpp
void measure_experts(Bench& bench);            // cuda_experts.cpp
void measure_quantised(Bench& bench);          // cuda_quant.cpp

}  // namespace charonia::bench
