// The emulated device's implementation of tensor_core.h.
#pragma once

#include <cstring>

#include "ops/cuda/device/portable.h"

namespace charonia::cuda {

template <class T>
void mma_m16n8k16(float (&d)[4], const std::uint32_t (&a)[4], const std::uint32_t (&b)[2]) {
  struct Operands {
    std::uint32_t a[4], b[2];
  };
  const auto* lanes = host_grid::exchange(Operands{{a[0], a[1], a[2], a[3]}, {b[0], b[1]}});
  const auto unpack = [](std::uint32_t pair, float* to) {
    to[0] = to_float(T{static_cast<std::uint16_t>(pair)});
    to[1] = to_float(T{static_cast<std::uint16_t>(pair >> 16)});
  };
  // The two rows of A and the two columns of B that this lane multiplies.
  const int g = lane_id() / 4, t = lane_id() % 4;
  float rows[2][16], cols[2][16];
  for (int pair = 0; pair < 4; ++pair) {
    for (int half = 0; half < 2; ++half) {
      for (int i = 0; i < 2; ++i) {
        unpack(lanes[g * 4 + pair].a[i + 2 * half], &rows[i][8 * half + 2 * pair]);
        unpack(lanes[(2 * t + i) * 4 + pair].b[half], &cols[i][8 * half + 2 * pair]);
      }
    }
  }
  float sums[4] = {};
  for (int k = 0; k < 16; ++k) {
    for (int i = 0; i < 4; ++i) sums[i] += rows[i / 2][k] * cols[i % 2][k];
  }
  for (int i = 0; i < 4; ++i) d[i] += sums[i];
}

template <class T>
void mma_m16n8k32(SumType<T> (&d)[4], const std::uint32_t (&a)[4], const std::uint32_t (&b)[2]) {
  struct Operands {
    std::uint32_t a[4], b[2];
  };
  const auto* lanes = host_grid::exchange(Operands{{a[0], a[1], a[2], a[3]}, {b[0], b[1]}});
  const auto unpack = [](std::uint32_t word, SumType<T>* to) {
    for (int i = 0; i < 4; ++i) {
      const auto bits = static_cast<std::uint8_t>(word >> 8 * i);
      if constexpr (std::is_same_v<T, i8x2>) {
        to[i] = static_cast<std::int8_t>(bits);
      } else {
        to[i] = e4m3_to_float(bits);
      }
    }
  };
  const int g = lane_id() / 4, t = lane_id() % 4;
  SumType<T> rows[2][32], cols[2][32], sums[4] = {};
  for (int four = 0; four < 4; ++four) {
    for (int half = 0; half < 2; ++half) {
      for (int i = 0; i < 2; ++i) {
        unpack(lanes[g * 4 + four].a[i + 2 * half], &rows[i][16 * half + 4 * four]);
        unpack(lanes[(2 * t + i) * 4 + four].b[half], &cols[i][16 * half + 4 * four]);
      }
    }
  }
  for (int k = 0; k < 32; ++k) {
    for (int i = 0; i < 4; ++i) sums[i] += rows[i / 2][k] * cols[i % 2][k];
  }
  for (int i = 0; i < 4; ++i) d[i] += sums[i];
}

inline void load_matrix_x4(std::uint32_t (&r)[4], const void* row) {
  host_grid::check_shared(row, 16, "load_matrix_x4");
  const auto* rows = host_grid::exchange(row);
  const int g = lane_id() / 4, t = lane_id() % 4;
  for (int i = 0; i < 4; ++i) std::memcpy(&r[i], static_cast<const char*>(rows[i * 8 + g]) + 4 * t, 4);
}
inline void load_matrix_x4_transposed(std::uint32_t (&r)[4], const void* row) {
  host_grid::check_shared(row, 16, "load_matrix_x4_transposed");
  const auto* rows = host_grid::exchange(row);
  const int g = lane_id() / 4, t = lane_id() % 4;
  for (int i = 0; i < 4; ++i) {
    std::uint16_t low = 0, high = 0;
    std::memcpy(&low, static_cast<const char*>(rows[i * 8 + 2 * t]) + 2 * g, 2);
    std::memcpy(&high, static_cast<const char*>(rows[i * 8 + 2 * t + 1]) + 2 * g, 2);
    r[i] = static_cast<std::uint32_t>(high) << 16 | low;
  }
}

inline void copy_async_16(void* shared, const void* global, bool valid = true) {
  host_grid::copy_later(shared, valid ? global : nullptr, 16);
}
using SharedAddress = unsigned char*;
inline SharedAddress shared_address(void* p) { return static_cast<unsigned char*>(p); }
inline uint4 read_shared_16(SharedAddress at) {
  host_grid::check_aligned(at, 16, "read_shared_16");
  return *reinterpret_cast<const uint4*>(at);
}
inline std::uint32_t read_shared_4(SharedAddress at) { return *reinterpret_cast<const std::uint32_t*>(at); }
inline void copy_async_4(void* shared, const void* global, bool valid = true) {
  host_grid::copy_later(shared, valid ? global : nullptr, 4);
}
inline void copy_commit() { host_grid::commit_copies(); }
template <int n>
void copy_wait() {
  host_grid::wait_copies(n);
}

template <class T>
std::uint32_t pack_at_once(float low, float high) {
  return static_cast<std::uint32_t>(from_float<T>(high).bits) << 16 | from_float<T>(low).bits;
}

inline float byte_to_float(std::uint32_t word, int i) { return static_cast<float>(word >> 8 * i & 0xffU); }

inline std::uint32_t above_1024(std::uint32_t word, int i, int j) {
  const auto half = [&](int byte) -> std::uint32_t {
    return from_float<f16>(1024 + byte_to_float(word, byte)).bits;
  };
  return half(i) | half(j) << 16;
}

inline float byte_above_2_15(std::uint32_t word, int i) { return byte_to_float(word, i) + 0x1p15F; }
inline float byte_above_2_7(std::uint32_t word, int i) { return byte_to_float(word, i) + 0x1p7F; }

}  // namespace charonia::cuda
