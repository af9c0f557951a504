// Seconds as settings and requests have them, as durations of the steady clock.
#pragma once

#include <algorithm>
#include <chrono>

namespace charonia {

// What is longer than any process lives (about 31 years) is cut to that, so that a sum with a point in time does not
// overflow. seconds: no NaN.
inline std::chrono::steady_clock::duration duration_of(double seconds) {
  constexpr double kLongest = 1e9;
  return std::chrono::duration_cast<std::chrono::steady_clock::duration>(
      std::chrono::duration<double>(std::clamp(seconds, -kLongest, kLongest)));
}

}  // namespace charonia
