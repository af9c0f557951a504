// The limit that decoding is measured against: how fast this machine reads memory.
#pragma once

#include <cstddef>

namespace charonia::ops::cpu {

// Reads `bytes` of memory in huge pages, spread over `threads` threads (0: as many as there are processors), several
// times for about two seconds in all, and returns the median in GB/s (10^9 bytes). `bytes` must be well above the size
// of the caches, at least 1 MiB per thread. Throws Error(invalid_argument) or Error(resource_exhausted).
double measure_read_bandwidth(std::size_t bytes, int threads);

}  // namespace charonia::ops::cpu
