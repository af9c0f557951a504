// The AMX tile registers, in the interface that linear_tiles.h needs.
#pragma once

#include "ops/cpu/kernels/linear_tiles.h"

namespace charonia::ops::cpu {
namespace {

// Uses assembly instead of intrinsics: the intrinsics of GCC 12 do not declare their memory accesses, so the compiler
// could move a store behind the tile load that reads it.
struct AmxTiles {
  static void configure(int rows) {
    struct alignas(64) Configuration {
      std::uint8_t palette = 1;
      std::uint8_t start_row = 0;
      std::uint8_t reserved[14] = {};
      std::uint16_t row_bytes[16] = {};
      std::uint8_t rows[16] = {};
    };
    Configuration configuration;
    for (int tile = 0; tile < 8; ++tile) {
      configuration.row_bytes[tile] = 64;
      configuration.rows[tile] = tile == kWeights || tile == kMoreWeights ? kTileRows : static_cast<std::uint8_t>(rows);
    }
    asm volatile("ldtilecfg %0" : : "m"(configuration) : "memory");
  }
  static void release() { asm volatile("tilerelease" : : : "memory"); }

  template <int T>
  static void zero() {
    asm volatile("tilezero %%tmm%c0" : : "i"(T) : "memory");
  }
  template <int T>
  static void load(const void* from, std::int64_t stride_bytes) {
    asm volatile("tileloadd (%1,%2,1), %%tmm%c0" : : "i"(T), "r"(from), "r"(stride_bytes) : "memory");
  }
  template <int T>
  static void store(void* to, std::int64_t stride_bytes) {
    asm volatile("tilestored %%tmm%c0, (%1,%2,1)" : : "i"(T), "r"(to), "r"(stride_bytes) : "memory");
  }
  template <int C, int A, int B>
  static void multiply() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(C), "i"(A), "i"(B) : "memory");
  }
};

}  // namespace
}  // namespace charonia::ops::cpu
