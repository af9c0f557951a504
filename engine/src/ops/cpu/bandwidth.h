// Measures this machine's memory read bandwidth, which limits decoding.
#pragma once

#include <cstddef>

namespace charonia::ops::cpu {

// Reads `bytes` of memory in huge pages with `threads` threads (0: one per processor), several times for about two
// seconds in all, and returns the median in GB/s (10^9 bytes). `bytes` must be much larger than the caches, at least 1
// MiB per thread. Throws Error(invalid_argument) or Error(resource_exhausted).
double measure_read_bandwidth(std::size_t bytes, int threads);

}  // namespace charonia::ops::cpu
