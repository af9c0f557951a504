// The numbers of rows for which decode steps are recorded. A step takes the record of the next class: padding costs a
// small step nothing (it reads the weights once whatever its rows) and a large one at most an eighth.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace charonia::cuda {

// 1, 2, 4, 8, then steps of 8 up to 64, of 16 up to 256, of 32 beyond; the last is `most` itself.
inline std::vector<std::int64_t> decode_classes(std::int64_t most) {
  std::vector<std::int64_t> out;
  for (std::int64_t rows = 1; rows < most;) {
    out.push_back(rows);
    rows += rows < 8 ? rows : rows < 64 ? 8 : rows < 256 ? 16 : 32;
  }
  if (most > 0) out.push_back(most);
  return out;
}

// Index of the least class that holds so many rows; classes.size() when none does.
inline std::size_t class_of(const std::vector<std::int64_t>& classes, std::int64_t rows) {
  return static_cast<std::size_t>(std::lower_bound(classes.begin(), classes.end(), rows) - classes.begin());
}

}  // namespace charonia::cuda
