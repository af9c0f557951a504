// How many rows of a quantised weight are dequantised at a time for a library, and other sizes that the memory plan
// counts. Integers only.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "ops/cuda/kernels/quant_layout.h"

namespace charonia::cuda {

// Maximum size of a part. Beyond about 4000 rows of an 8B model, a library's GEMM gains little.
inline constexpr std::size_t kDequantisedBytes = std::size_t{64} << 20;

// Memory that operands of GEMMs may always take while kernels are measured at the start. It is free again before the
// memory of steps is allocated.
inline constexpr std::size_t kGemmOperandBytes = std::size_t{256} << 20;
// Maximum memory for 16-bit copies of blocks of a quantised cache, if attention of prompts reads copies.
inline constexpr std::size_t kWideCacheBytes = std::size_t{128} << 20;
// That memory for steps with up to `blocks` blocks, whose copies have `block_bytes` each.
inline std::size_t wide_cache_bytes(std::int64_t blocks, std::int64_t block_bytes) {
  return std::min(static_cast<std::size_t>(blocks * block_bytes), kWideCacheBytes);
}

inline constexpr std::int64_t kDequantisedElement = 2;  // bytes

// Bytes of `rows` rows of k columns.
inline std::size_t dequantised_bytes(std::int64_t rows, std::int64_t k) {
  return static_cast<std::size_t>(round_up(rows, kQuantRows) * round_up(k, kQuantK) * kDequantisedElement);
}

// The rows per part of a weight [n, k], so that a part takes at most `bytes`: as few parts as possible, of equal size,
// and in whole tiles of a library if possible. 0: not even one unit of rows fits.
inline std::int64_t dequantised_rows(std::int64_t n, std::int64_t k, std::size_t bytes) {
  constexpr std::int64_t kTileRows = 128;
  const auto most = static_cast<std::int64_t>(bytes / dequantised_bytes(kQuantRows, k)) * kQuantRows;
  if (most == 0 || n <= most) return std::min(most, round_up(n, kQuantRows));
  const auto even = divide_up(n, divide_up(n, most)), tiles = round_up(even, kTileRows);
  return tiles <= most ? tiles : round_up(even, kQuantRows);
}

// The part sizes to measure: the largest possible, and one that stays in the L2 cache between its kernels.
inline std::vector<std::int64_t> dequantised_parts(std::int64_t n, std::int64_t k, std::size_t bytes,
                                                   std::size_t l2_bytes) {
  std::vector<std::int64_t> parts;
  for (const auto limit : {bytes, std::min(bytes, l2_bytes / 2)}) {
    const auto rows = dequantised_rows(n, k, limit);
    if (rows > 0 && (parts.empty() || parts.back() != rows)) parts.push_back(rows);
  }
  return parts;
}

}  // namespace charonia::cuda
