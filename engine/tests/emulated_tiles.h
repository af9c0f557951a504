// Matrix tiles in plain C++, to run linear_tiles.h without AMX.
//
// multiply() is the documented operation of TDPBF16PS (Intel's Software Developer's Manual, volume 2): for each element
// and instruction, two sums of 16 fused multiply-adds start at zero, one over the first and one over the second
// elements of the pairs. The two are added, and the result is added to the destination. Every step rounds to nearest
// even; denormals count as zeros, as inputs and outputs.
#pragma once

#include <gtest/gtest.h>

#include <array>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "base/dtype.h"

namespace charonia::ops {

struct EmulatedTile {
  int rows = 0;
  std::array<std::array<std::byte, 64>, 16> data{};
};

struct EmulatedTiles {
  using Tile = EmulatedTile;
  // Per thread, as in a processor.
  static inline thread_local std::array<Tile, 8> tiles;
  static inline thread_local bool configured = false;

  static void configure(int rows) {
    ASSERT_TRUE(rows >= 1 && rows <= 16) << rows;
    for (int t = 0; t < 8; ++t) tiles[static_cast<std::size_t>(t)] = {t == 6 || t == 7 ? 16 : rows, {}};
    configured = true;
  }
  static void release() { configured = false; }

  template <int T>
  static void zero() {
    ASSERT_TRUE(configured);
    tiles[T].data = {};
  }
  template <int T>
  static void load(const void* from, std::int64_t stride_bytes) {
    ASSERT_TRUE(configured);
    tiles[T].data = {};
    for (int r = 0; r < tiles[T].rows; ++r) {
      std::memcpy(tiles[T].data[static_cast<std::size_t>(r)].data(),
                  static_cast<const std::byte*>(from) + r * stride_bytes, 64);
    }
  }
  template <int T>
  static void store(void* to, std::int64_t stride_bytes) {
    ASSERT_TRUE(configured);
    for (int r = 0; r < tiles[T].rows; ++r) {
      std::memcpy(static_cast<std::byte*>(to) + r * stride_bytes, tiles[T].data[static_cast<std::size_t>(r)].data(),
                  64);
    }
  }
  template <int C, int A, int B>
  static void multiply() {
    ASSERT_TRUE(configured);
    ASSERT_EQ(tiles[A].rows, tiles[C].rows);
    ASSERT_EQ(tiles[B].rows, 16);
    for (int m = 0; m < tiles[C].rows; ++m) {
      for (int n = 0; n < 16; ++n) {
        float sums[2] = {0, 0};
        for (int k = 0; k < 16; ++k) {
          for (int i = 0; i < 2; ++i) {
            sums[i] = flushed(std::fma(half(tiles[A], m, 2 * k + i), half(tiles[B], k, 2 * n + i), sums[i]));
          }
        }
        float& out = element(tiles[C], m, n);
        out = flushed(flushed(out) + flushed(sums[0] + sums[1]));
      }
    }
  }

  static float flushed(float x) { return std::fabs(x) < FLT_MIN ? std::copysign(0.0F, x) : x; }

 private:
  static float half(const Tile& tile, int row, int index) {
    std::uint16_t bits = 0;
    std::memcpy(&bits, &tile.data[static_cast<std::size_t>(row)][static_cast<std::size_t>(2 * index)], 2);
    return flushed(bf16_to_float(bits));
  }
  static float& element(Tile& tile, int row, int index) {
    return reinterpret_cast<float&>(tile.data[static_cast<std::size_t>(row)][static_cast<std::size_t>(4 * index)]);
  }
};

}  // namespace charonia::ops
