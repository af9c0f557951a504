#include "ops/cuda/kernel_choice.h"

#include <chrono>
#include <cmath>
#include <cstdint>
#include <utility>

#include "base/text.h"

namespace charonia::cuda {
namespace {

// The file has an entry for each kernel.
std::string entry_of(const KernelChoice::Computation& one, bool wgmma) {
  return cat(one.name, wgmma ? ", wgmma" : ", tiles");
}

std::string describe(const KernelTimes& times, int rows) {
  const auto whole = [](double x) { return static_cast<std::int64_t>(std::lround(x)); };
  return cat(times.wgmma < times.tiles ? "wgmma" : "tiles", ", measured with ", rows, " rows: wgmma ",
             whole(times.wgmma), " us, tiles ", whole(times.tiles), " us");
}

}  // namespace

KernelChoice::KernelChoice(const DeviceInfo& device, Options options)
    : options_(std::move(options)),
      memory_(considers_wgmma() ? options_.memory : std::filesystem::path{},
              autotune_key(device, "own kernels", overlap_setting(), options_.unproven)),
      seconds_left_(options_.seconds) {}

void KernelChoice::begin(std::optional<double> seconds) {
  if (seconds) seconds_left_ = *seconds;
  report_.clear();
  warning_.clear();
}

std::optional<KernelTimes> KernelChoice::stored(const Computation& one) const {
  const auto tiles = memory_.find_named(entry_of(one, false), one.rows);
  const auto wgmma = memory_.find_named(entry_of(one, true), one.rows);
  if (!tiles || !wgmma) return std::nullopt;
  return KernelTimes{tiles->microseconds, wgmma->microseconds};
}

bool KernelChoice::compare(Stream& stream, const Computation& one, Result& result) {
  auto times = one.rows > 0 ? stored(one) : std::nullopt;
  const bool measures = !times;
  if (measures && (!options_.timer || one.rows <= 0)) {
    result.text = "tiles, because nothing was measured";
    return false;
  }
  if (measures && seconds_left_ <= 0) {
    result.text = cat("tiles, because the ", options_.seconds,
                      " s for measurements are over (CHARONIA_CUDA_MEASURE_S). The next start measures it");
    return false;
  }
  const auto begin = std::chrono::steady_clock::now();
  if (measures || times->wgmma < times->tiles) {
    if (!one.agrees()) {
      times.reset();
    } else if (measures) {
      times = one.measure();
    }
  }
  stream.wait("measured kernels");
  seconds_left_ -= std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  if (!times) {
    reject(one, result);
    return false;
  }
  if (measures) {
    memory_.keep_named(entry_of(one, false), one.rows, {.microseconds = times->tiles});
    memory_.keep_named(entry_of(one, true), one.rows, {.microseconds = times->wgmma});
  }
  result.text = describe(*times, one.rows);
  return times->wgmma < times->tiles;
}

void KernelChoice::reject(const Computation& one, Result& result) {
  result = {"tiles, because the results of wgmma were wrong", true};
  warn(cat("the kernel 'wgmma' for ", one.name,
           " gave results that differ from the other kernel's, and is not used. Please report this"));
}

bool KernelChoice::attempt(Stream& stream, const Computation& one, Result& result,
                           const std::function<bool()>& act) {
  try {
    return act();
  } catch (const Error& error) {
    if (error.code() == ErrorCode::resource_exhausted) {
      result.text = "tiles, because there is no memory to measure with";
    } else {
      require_device(stream, "wgmma", one.name, true, error);
      result = {cat("tiles, because wgmma failed: ", error.what()), true};
    }
    warn(cat(one.name, ": ", result.text));
    return false;
  }
}

bool KernelChoice::compares(const Computation& one) const {
  if (one.rows <= 0) return false;
  const auto times = stored(one);
  return times ? times->wgmma < times->tiles : options_.timer && seconds_left_ > 0;
}

bool KernelChoice::check(Stream& stream, const Computation& one) {
  Result result;
  const auto begin = std::chrono::steady_clock::now();
  const bool right = attempt(stream, one, result, [&] {
    if (one.agrees()) return true;
    reject(one, result);
    return false;
  });
  seconds_left_ -= std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  if (!right) report_.push_back(cat(one.name, ": ", result.text));
  return right;
}

bool KernelChoice::choose(Stream& stream, const Computation& one) {
  return choose_all(stream, {&one, 1}).front();
}

std::vector<bool> KernelChoice::choose_all(Stream& stream, std::span<const Computation> sizes) {
  std::vector<bool> chosen;
  std::vector<std::string> lines;
  for (const auto& one : sizes) {
    Result result;
    bool wgmma = false;
    if (!one.unsupported.empty()) {
      result.text = cat("tiles, because of wgmma: ", one.unsupported);
    } else if (options_.wgmma) {
      wgmma = *options_.wgmma;
      result.text = wgmma ? "wgmma, as asked for" : "tiles, as asked for";
    } else {
      wgmma = attempt(stream, one, result, [&] { return compare(stream, one, result); });
    }
    chosen.push_back(wgmma);
    lines.push_back(cat(one.name, ": ", result.text));
    if (!result.failed) continue;
    report_.push_back(lines.back());
    return std::vector<bool>(sizes.size());
  }
  report_.insert(report_.end(), lines.begin(), lines.end());
  return chosen;
}

void KernelChoice::end() {
  if (auto failure = memory_.save(); !failure.empty()) warn(failure);
}

void KernelChoice::warn(const std::string& text) { warning_ = cat(warning_, warning_.empty() ? "" : "; ", text); }

}  // namespace charonia::cuda
