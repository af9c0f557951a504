// The numbers of rows for which decode steps are captured. A step takes the graph of the next bucket: padding costs a
// small step nothing (it reads the weights once whatever its rows) and a large one at most an eighth.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace charonia::cuda {

// 1, 2, 4, 8, then steps of 8 up to 64, of 16 up to 256, of 32 beyond; the last is `most` itself.
inline std::vector<std::int64_t> decode_buckets(std::int64_t most) {
  std::vector<std::int64_t> out;
  for (std::int64_t rows = 1; rows < most;) {
    out.push_back(rows);
    rows += rows < 8 ? rows : rows < 64 ? 8 : rows < 256 ? 16 : 32;
  }
  if (most > 0) out.push_back(most);
  return out;
}

// Index of the smallest bucket that holds so many rows; buckets.size() when none does.
inline std::size_t bucket_of(const std::vector<std::int64_t>& buckets, std::int64_t rows) {
  return static_cast<std::size_t>(std::lower_bound(buckets.begin(), buckets.end(), rows) - buckets.begin());
}

}  // namespace charonia::cuda
