#include "ops/cuda/kernel_choice.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <utility>

#include "base/text.h"

namespace charonia::cuda {
namespace {

// The file has an entry for each kernel.
std::string entry_of(const KernelChoice::Computation& one, const char* kernel) { return cat(one.name, ", ", kernel); }

std::string describe(const KernelTimes& times, const KernelChoice::Computation& one) {
  const auto whole = [](double x) { return static_cast<std::int64_t>(std::lround(x)); };
  return cat(times.candidate < times.usual ? one.candidate : one.usual, ", measured with ", one.rows, " rows: ",
             one.candidate, " ", whole(times.candidate), " us, ", one.usual, " ", whole(times.usual), " us");
}

}  // namespace

KernelChoice::KernelChoice(const DeviceInfo& device, Options options)
    : options_(std::move(options)),
      memory_(considers_candidates() ? options_.memory : std::filesystem::path{},
              autotune_key(device, "own kernels", overlap_setting(), options_.unproven)),
      seconds_left_(options_.seconds) {}

void KernelChoice::begin(std::optional<double> seconds) {
  seconds_left_ = seconds.value_or(options_.seconds);
  report_.clear();
  warning_.clear();
}

std::optional<KernelTimes> KernelChoice::stored(const Computation& one) const {
  const auto usual = memory_.find_named(entry_of(one, one.usual), one.rows);
  const auto candidate = memory_.find_named(entry_of(one, one.candidate), one.rows);
  if (!usual || !candidate) return std::nullopt;
  return KernelTimes{usual->microseconds, candidate->microseconds};
}

bool KernelChoice::attempt(Stream& stream, const Computation& one, Result& result, const std::function<bool()>& act) {
  const auto begin = std::chrono::steady_clock::now();
  try {
    if (!act()) {
      result = {cat(one.usual, ", because the results of ", one.candidate, " were wrong"), true};
      warn(cat("the kernel '", one.candidate, "' for ", one.name,
               " gave results that differ from the other kernel's, and is not used. Please report this"));
    }
    stream.wait("measured kernels");
  } catch (const Error& error) {
    if (error.code() == ErrorCode::resource_exhausted) {
      result.text = cat(one.usual, ", because there is no memory to measure with");
    } else {
      require_device(stream, one.candidate, one.name, true, error);
      result = {cat(one.usual, ", because ", one.candidate, " failed: ", error.what()), true};
    }
    warn(cat(one.name, ": ", result.text, result.failed ? ". Please report this" : ""));
  }
  seconds_left_ -= std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  return result.text.empty();
}

// Whether `one` can be measured, or is stored as faster.
bool KernelChoice::compares(const Computation& one) const {
  if (options_.asked || !one.unsupported.empty() || one.rows <= 0) return false;
  const auto times = stored(one);
  return times ? times->candidate < times->usual : options_.timer && seconds_left_ > 0;
}

bool KernelChoice::decide(Stream& stream, const Computation& one, Result& result) {
  if (!one.unsupported.empty()) {
    result.text = cat(one.usual, ", because of ", one.candidate, ": ", one.unsupported);
    return false;
  }
  if (options_.asked) {
    result.text = cat(*options_.asked ? one.candidate : one.usual, ", as asked for");
    return *options_.asked;
  }
  auto times = one.rows > 0 ? stored(one) : std::nullopt;
  if (!times && (!options_.timer || one.rows <= 0)) {
    result.text = cat(one.usual, ", because nothing was measured");
    return false;
  }
  if (!times && seconds_left_ <= 0) {
    result.text = cat(one.usual, ", because the ", options_.seconds,
                      " s for measurements are over (CHARONIA_CUDA_MEASURE_S). The next start measures it");
    return false;
  }
  if (!times) {
    const auto measure = [&] {
      times = one.measure();
      return times.has_value();
    };
    if (!attempt(stream, one, result, measure)) return false;
    memory_.keep_named(entry_of(one, one.usual), one.rows, {.microseconds = times->usual});
    memory_.keep_named(entry_of(one, one.candidate), one.rows, {.microseconds = times->candidate});
  }
  result.text = describe(*times, one);
  return times->candidate < times->usual;
}

std::vector<std::vector<bool>> KernelChoice::choose_all(Stream& stream, std::span<const Sizes> all) {
  std::vector<std::vector<bool>> chosen;
  std::vector<std::vector<Result>> results;
  std::size_t most = 0;
  const auto failed = [&](std::size_t of) { return std::ranges::any_of(results[of], &Result::failed); };
  for (const auto& sizes : all) {
    most = std::max(most, sizes.size());
    chosen.emplace_back(sizes.size());
    results.emplace_back(sizes.size());
    if (std::ranges::none_of(sizes, [&](const auto& one) { return compares(one); })) continue;
    for (std::size_t i = 0; i < sizes.size() && !failed(results.size() - 1); ++i) {
      attempt(stream, sizes[i], results.back()[i], sizes[i].agrees);
    }
  }
  const auto each = [&](const auto& act) {
    for (std::size_t i = 0; i < most; ++i) {
      for (std::size_t of = 0; of < all.size(); ++of) {
        if (i < all[of].size()) act(of, i);
      }
    }
  };
  each([&](std::size_t of, std::size_t i) {
    auto& result = results[of][i];
    if (result.text.empty() && !failed(of)) chosen[of][i] = decide(stream, all[of][i], result);
  });
  each([&](std::size_t of, std::size_t i) {
    const bool none = failed(of);
    if (none) chosen[of][i] = false;
    if (!none || results[of][i].failed) report_.push_back(cat(all[of][i].name, ": ", results[of][i].text));
  });
  return chosen;
}

void KernelChoice::end() {
  if (auto failure = memory_.save(); !failure.empty()) warn(failure);
}

void KernelChoice::warn(const std::string& text) { warning_ = cat(warning_, warning_.empty() ? "" : "; ", text); }

}  // namespace charonia::cuda
