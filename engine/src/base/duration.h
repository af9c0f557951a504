// Converts seconds of settings and requests to durations of the steady clock.
#pragma once

#include <algorithm>
#include <chrono>

namespace charonia {

// Limits the duration to about 31 years, so that adding it to a time point does not overflow. `seconds` must not be
// NaN.
inline std::chrono::steady_clock::duration duration_of(double seconds) {
  constexpr double kLongest = 1e9;
  return std::chrono::duration_cast<std::chrono::steady_clock::duration>(
      std::chrono::duration<double>(std::clamp(seconds, -kLongest, kLongest)));
}

}  // namespace charonia
