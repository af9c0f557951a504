// Chooses between two kernels for the same computation at the start of an engine: "tiles", which has run on GPUs, and
// "wgmma", which no GPU has run yet.
#pragma once

#include <filesystem>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "charonia/error.h"
#include "ops/cuda/gemm/autotune_cache.h"
#include "ops/cuda/gemm/gemm_runner.h"

namespace charonia::cuda {

struct KernelTimes {
  double tiles = 0, wgmma = 0;  // microseconds
};

class KernelChoice {
 public:
  struct Options {
    // Whether wgmma is used wherever it can be, without a measurement. Unset: as the measurement says, if `unproven`;
    // otherwise it is not used.
    std::optional<bool> wgmma{};
    bool unproven = unproven_setting();
    // Null: nothing is measured, so wgmma is used only where the file has its times.
    GemmTimer timer = measure_seconds() > 0 ? make_gemm_timer() : nullptr;
    std::filesystem::path memory{};      // the file for times (autotune_cache.h); empty: none
    double seconds = measure_seconds();  // limit for all checks and measurements together
  };

  struct Computation {
    std::string name;           // "attention of prompts, 32 heads over 8 of 128"; times are stored by it and by `rows`
    std::string unsupported{};  // why wgmma cannot compute it; empty: it can
    int rows = 0;               // of the measurement; 0: there are too few, or they need too much memory
    std::function<bool()> agrees{};                        // whether wgmma has the results of tiles
    std::function<std::optional<KernelTimes>()> measure{};  // returns nothing if the last results differ
  };

  KernelChoice(const DeviceInfo& device, Options options);

  // If not, choose() need not be called.
  bool considers_wgmma() const { return options_.wgmma || options_.unproven; }
  const GemmTimer& timer() const { return options_.timer; }

  // Empties report() and warning(). seconds: if set, the new limit.
  void begin(std::optional<double> seconds = std::nullopt);

  // Whether choose() would compare and measure, or has times that make wgmma a candidate.
  bool compares(const Computation& one) const;

  // Whether agrees() returns true. Otherwise report() and warning() say why wgmma is not used. For a caller that must
  // know it for several computations before it chooses. Throws like choose().
  bool check(Stream& stream, const Computation& one);

  // Whether wgmma shall compute this: if it is faster than tiles and its results agree. Results are also compared if
  // the file has the times. warning() names a kernel whose results differ, or that could not be measured. Throws Error
  // if the device fails after a kernel ran.
  bool choose(Stream& stream, const Computation& one);

  // The same for several sizes of one computation. If wgmma fails or its results differ for one of them, no size uses it,
  // and report() has only this one. A size that there is no memory for does not use it.
  std::vector<bool> choose_all(Stream& stream, std::span<const Computation> sizes);

  // Stores the measured times.
  void end();

  // A line for each choice: "attention of prompts, 32 heads over 8 of 128: wgmma, measured with 2048 rows: wgmma 412 us,
  // tiles 730 us".
  const std::vector<std::string>& report() const { return report_; }
  const std::string& warning() const { return warning_; }

 private:
  struct Result {
    std::string text;
    bool failed = false;  // wgmma failed, or its results differ
  };
  // Calls `act` and returns its result; false, with a warning, after an error.
  bool attempt(Stream& stream, const Computation& one, Result& result, const std::function<bool()>& act);
  bool compare(Stream& stream, const Computation& one, Result& result);
  void reject(const Computation& one, Result& result);
  std::optional<KernelTimes> stored(const Computation& one) const;
  void warn(const std::string& text);

  Options options_;
  AutotuneCache memory_;
  double seconds_left_;
  std::vector<std::string> report_;
  std::string warning_;
};

}  // namespace charonia::cuda
