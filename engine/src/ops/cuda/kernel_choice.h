// Chooses between two kernels for the same computation at the start of an engine: the usual one, which has run on GPUs,
// and a candidate, which no GPU has run yet.
//
// Ranks choose for themselves, and may choose differently. A kernel that is chosen here computes a rank's own share of
// a sum over the ranks (its heads, or its columns of experts), so all ranks still have the same sums, logits and
// tokens.
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
  double usual = 0, candidate = 0;  // microseconds
};

class KernelChoice {
 public:
  struct Options {
    // Whether the candidate is used wherever it can be, without a measurement. Unset: as the measurement says, if
    // `unproven`; otherwise it is not used.
    std::optional<bool> asked{};
    bool unproven = unproven_setting();
    // Null: nothing is measured, so the candidate is used only where the file has its times.
    GemmTimer timer = measure_seconds() > 0 ? make_gemm_timer() : nullptr;
    std::filesystem::path memory{};      // the file for times (autotune_cache.h); empty: none
    double seconds = measure_seconds();  // limit for all checks and measurements together
  };

  struct Computation {
    std::string name;           // "attention of prompts, 32 heads over 8 of 128"; times are stored by it and by `rows`
    std::string unsupported{};  // why the candidate cannot compute it; empty: it can
    int rows = 0;               // of the measurement; 0: there are too few
    std::function<bool()> agrees{};                        // whether the candidate has the results of the usual kernel
    std::function<std::optional<KernelTimes>()> measure{};  // returns nothing if the last results differ
    const char *usual = "tiles", *candidate = "wgmma";      // the kernels
  };
  using Sizes = std::vector<Computation>;  // of one computation

  KernelChoice(const DeviceInfo& device, Options options);

  // If not, choose() need not be called.
  bool considers_candidates() const { return options_.asked || options_.unproven; }
  const GemmTimer& timer() const { return options_.timer; }
  double seconds_left() const { return seconds_left_; }

  // Empties report() and warning(). seconds: the limit from now on; unset: Options::seconds.
  void begin(std::optional<double> seconds = std::nullopt);

  // Whether the candidate shall compute each size of these computations: if it is faster than the usual kernel, and all
  // sizes agree. If one size can be measured, or is stored as faster, all sizes are compared first, also those that are
  // neither. Then the first sizes of all computations are measured, then the second ones. If the candidate fails or its
  // results differ for one size, no size uses it, report() has only this size, and warning() names it. A size that
  // there is no memory for does not use it; warning() names it too. Throws Error if the device fails after a kernel
  // ran.
  std::vector<std::vector<bool>> choose_all(Stream& stream, std::span<const Sizes> all);
  std::vector<bool> choose(Stream& stream, const Sizes& sizes) { return choose_all(stream, {&sizes, 1}).front(); }

  // Stores the measured times.
  void end();

  // A line for each choice: "attention of prompts, 32 heads over 8 of 128: wgmma, measured with 2048 rows: wgmma 412
  // us, tiles 730 us".
  const std::vector<std::string>& report() const { return report_; }
  const std::string& warning() const { return warning_; }

 private:
  struct Result {
    std::string text{};   // for report(); empty: not decided yet
    bool failed = false;  // the candidate failed, or its results differ
  };
  // Calls `act`, which returns whether the results agree. Returns false, with a result and a warning, if they differ,
  // or after an error.
  bool attempt(Stream& stream, const Computation& one, Result& result, const std::function<bool()>& act);
  bool compares(const Computation& one) const;
  bool decide(Stream& stream, const Computation& one, Result& result);
  std::optional<KernelTimes> stored(const Computation& one) const;
  void warn(const std::string& text);

  Options options_;
  AutotuneCache memory_;
  double seconds_left_;
  std::vector<std::string> report_;
  std::string warning_;
};

}  // namespace charonia::cuda
