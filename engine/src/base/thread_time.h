// CPU time of threads; waiting does not count.
#pragma once

#include <ctime>

namespace charonia {

// CPU time of the calling thread, in seconds.
inline double thread_seconds() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

}  // namespace charonia
