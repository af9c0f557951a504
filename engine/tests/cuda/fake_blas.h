// A library instead of cuBLASLt: it computes with the built-in kernels, or rejects GEMMs. On the emulated device it
// also multiplies int8 codes. And a fixture and a timer of runners.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ops/cuda/gemm/gemm_runner.h"
#include "test_folder.h"

namespace charonia::cuda {

class FakeBlas final : public Blas {
 public:
  struct Run {
    std::int64_t rows, n;
    std::uint64_t algorithm;
  };
  struct Log {
    std::vector<Run> runs;
    std::function<bool(const Gemm&)> rejects = [](const Gemm&) { return false; };
    std::uint64_t wrong = 0;  // the algorithm that writes zeros
    std::function<bool(const Gemm&)> loses = [](const Gemm&) { return false; };  // whether it writes nothing
  };

  explicit FakeBlas(Log& log, std::string version = "library 1") : log_(log), version_(std::move(version)) {}

  std::string version() const override { return version_; }
  std::vector<BlasTactic> tactics(const Gemm& gemm, std::size_t) override {
    if (gemm.type == DType::i8 && !kMultipliesIntegers) return {};
    return {tactic(3), tactic(1), tactic(2)};
  }
  bool serves(const Gemm&, const BlasTactic& tactic, std::size_t) override { return tactic.algorithm[0] <= 3; }
  bool run(Stream& stream, const Gemm& gemm, const BlasTactic& tactic, void*, std::size_t) override {
    log_.runs.push_back({gemm.rows, gemm.n, tactic.algorithm[0]});
    if (log_.rejects(gemm)) return false;
    if (log_.loses(gemm)) return true;
    if (gemm.type == DType::i8) {
      multiply_integers(stream, gemm, tactic.algorithm[0] == log_.wrong);
      return true;
    }
    auto without_bias = gemm;
    without_bias.bias = nullptr;
    const auto info = device_info(0);
    auto own = gemm_tactics(info, gemm);
    std::erase_if(own, [](const GemmTactic& one) { return one.k_blocks > 1; });  // these need a workspace
    cuda::gemm(stream, info, without_bias, own.at(0), workspace_.data());
    if (tactic.algorithm[0] == log_.wrong) {
      const auto row = static_cast<std::size_t>(gemm.out_stride) * size_of(gemm.out_type);
      stream.fill_zero(gemm.out, static_cast<std::size_t>(gemm.rows - 1) * row + size_of(gemm.out_type), "wrong sums");
    }
    return true;
  }

 private:
#if defined(CHARONIA_CUDA_ON_HOST)
  static constexpr bool kMultipliesIntegers = true;
  static void multiply_integers(Stream& stream, const Gemm& gemm, bool wrong) {
    enqueue(stream.native(), [gemm, wrong] {
      for (std::int64_t row = 0; row < gemm.rows; ++row) {
        for (std::int64_t column = 0; column < gemm.n; ++column) {
          const auto* const x = static_cast<const std::int8_t*>(gemm.in) + row * gemm.in_stride;
          const auto* const w = static_cast<const std::int8_t*>(gemm.weight) + column * gemm.weight_stride;
          std::int32_t sum = 0;
          for (std::int64_t k = wrong ? 16 : 0; k < gemm.k; ++k) sum += x[k] * w[k];
          static_cast<std::int32_t*>(gemm.out)[row * gemm.out_stride + column] = sum;
        }
      }
    });
  }
#else
  static constexpr bool kMultipliesIntegers = false;
  static void multiply_integers(Stream&, const Gemm&, bool) {}
#endif
  static BlasTactic tactic(std::uint64_t algorithm) { return {{algorithm, 7}, 0}; }

  Log& log_;
  std::string version_;
  DeviceMemory workspace_{kGemmCounterBytes};
};

// Finds each candidate faster than the one before it.
inline GemmTimer falling_times() {
  return [time = 1000.0](Stream&, double, const std::function<void(int)>& issue) mutable {
    issue(0);
    return --time;
  };
}

class RunnerTest : public ::testing::Test {
 protected:
  ~RunnerTest() override { std::filesystem::remove_all(folder_); }

  // time(): of the measured GEMM, in microseconds; log_ has its runs.
  GemmRunner::Options runner_options(std::function<double()> time, const std::string& version = "library 1") {
    GemmRunner::Options options;
    options.blas = std::make_unique<FakeBlas>(log_, version);
    options.memory = file();
    options.unproven = true;
    options.seconds = 3600;  // enough for a slow machine or a sanitizer: the measured times do not depend on it
    options.timer = [this, time](Stream& stream, double expected, const std::function<void(int)>& issue) {
      EXPECT_GT(expected, 0);
      issue(kMaxTimedGemms - 1);
      log_.runs.clear();
      issue(0);
      stream.wait("test");
      ++measured_;
      return time();
    };
    return options;
  }
  std::filesystem::path file() const { return folder_ / "cache" / "gemms.json"; }

  const std::filesystem::path folder_ = charonia::testing::test_folder();
  FakeBlas::Log log_;
  int measured_ = 0;
};

}  // namespace charonia::cuda
