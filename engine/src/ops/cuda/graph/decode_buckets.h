// Decode steps are captured for these numbers of rows. A step uses the graph of the next larger bucket. Padding
// costs a small step nothing (it reads the weights once for any number of rows), and a large step at most an eighth.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace charonia::cuda {

// 1, 2, 4, 8, then steps of 8 up to 64, of 16 up to 256, of 32 beyond; the last one is `most`.
inline std::vector<std::int64_t> decode_buckets(std::int64_t most) {
  std::vector<std::int64_t> out;
  for (std::int64_t rows = 1; rows < most;) {
    out.push_back(rows);
    rows += rows < 8 ? rows : rows < 64 ? 8 : rows < 256 ? 16 : 32;
  }
  if (most > 0) out.push_back(most);
  return out;
}

// Index of the smallest bucket with at least this number of rows; buckets.size() if there is none.
inline std::size_t bucket_of(const std::vector<std::int64_t>& buckets, std::int64_t rows) {
  return static_cast<std::size_t>(std::lower_bound(buckets.begin(), buckets.end(), rows) - buckets.begin());
}

}  // namespace charonia::cuda
