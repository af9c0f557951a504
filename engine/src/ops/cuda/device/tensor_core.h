// Tensor-core products, matrix loads from shared memory, and asynchronous copies to shared memory (sm_80 and newer),
// each with its host version. Layouts are those of PTX ISA, "Matrix Fragments for mma.m16n8k16". With g = lane / 4, t =
// lane % 4,
//   A [16, 16]  a[0] = (g, 2t..2t+1)  a[1] = (g + 8, 2t..)  a[2] = (g, 2t + 8..)  a[3] = (g + 8, 2t + 8..)
//   B [16, 8]   b[0] = (2t..2t+1, g)  b[1] = (2t + 8.., g)                    two elements of one column per register
//   C, D [16, 8] c[0], c[1] = (g, 2t), (g, 2t + 1)   c[2], c[3] = (g + 8, 2t), (g + 8, 2t + 1)
// Within a register the element of the lower index is in the low half. The layouts of mma.m16n8k32, for 8-bit elements,
// are the same with two 8-bit elements for each 16-bit element. So kernels that move 16-bit elements can move pairs of
// 8-bit elements (i8x2, e4m3x2), and multiply them with mma<T>() in the same way.
#pragma once

#include "ops/cuda/device/fp8.h"
#include "ops/cuda/device/pairs.h"
#include "ops/cuda/device/portable.h"

namespace charonia::cuda {

#if defined(CHARONIA_CUDA_ON_HOST)

// d = a * b + d. Products of 16-bit elements, summed in float.
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

// The same for 32 8-bit elements.
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

// Loads four 8x8 matrices of 16-bit elements. Lane l passes the address (16-byte aligned, shared memory) of row l % 8
// of matrix l / 8. Register i then holds elements 2t, 2t + 1 of row g of matrix i; transposed: rows 2t, 2t + 1 of
// column g.
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

// Copies 16 bytes from global to shared memory, or zeros if not `valid` (then `global` is not read). After
// copy_wait<n>(), all but the last n committed groups are visible to this thread, and to the block after
// __syncthreads().
inline void copy_async_16(void* shared, const void* global, bool valid = true) {
  host_grid::copy_later(shared, valid ? global : nullptr, 16);
}
// An address in shared memory in the form that its instructions take. Loops can keep it instead of converting a pointer
// each time.
using SharedAddress = unsigned char*;
inline SharedAddress shared_address(void* p) { return static_cast<unsigned char*>(p); }
inline uint4 read_shared_16(SharedAddress at) {
  host_grid::check_aligned(at, 16, "read_shared_16");
  return *reinterpret_cast<const uint4*>(at);
}
inline std::uint32_t read_shared_4(SharedAddress at) { return *reinterpret_cast<const std::uint32_t*>(at); }
// The same with 4 bytes, 4-byte aligned.
inline void copy_async_4(void* shared, const void* global, bool valid = true) {
  host_grid::copy_later(shared, valid ? global : nullptr, 4);
}
inline void copy_commit() { host_grid::commit_copies(); }
template <int n>
void copy_wait() {
  host_grid::wait_copies(n);
}

// Like pack(), below.
template <class T>
std::uint32_t pack_at_once(float low, float high) {
  return static_cast<std::uint32_t>(from_float<T>(high).bits) << 16 | from_float<T>(low).bits;
}

// Byte i of a word, 0 to 255.
inline float byte_to_float(std::uint32_t word, int i) { return static_cast<float>(word >> 8 * i & 0xffU); }

// Byte i plus 2^15, and byte i plus 2^7 (for bytes below 128): one instruction each.
inline float byte_above_2_15(std::uint32_t word, int i) { return byte_to_float(word, i) + 0x1p15F; }
inline float byte_above_2_7(std::uint32_t word, int i) { return byte_to_float(word, i) + 0x1p7F; }

#else

template <class T>
CHARONIA_DEVICE void mma_m16n8k16(float (&d)[4], const std::uint32_t (&a)[4], const std::uint32_t (&b)[2]);
template <>
CHARONIA_DEVICE void mma_m16n8k16<bf16>(float (&d)[4], const std::uint32_t (&a)[4], const std::uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
template <>
CHARONIA_DEVICE void mma_m16n8k16<f16>(float (&d)[4], const std::uint32_t (&a)[4], const std::uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

template <class T>
CHARONIA_DEVICE void mma_m16n8k32(SumType<T> (&d)[4], const std::uint32_t (&a)[4], const std::uint32_t (&b)[2]);
template <>
CHARONIA_DEVICE void mma_m16n8k32<i8x2>(int (&d)[4], const std::uint32_t (&a)[4], const std::uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
// Compute capability 8.9 and newer (DeviceInfo::fp8).
template <>
CHARONIA_DEVICE void mma_m16n8k32<e4m3x2>([[maybe_unused]] float (&d)[4], [[maybe_unused]] const std::uint32_t (&a)[4],
                                          [[maybe_unused]] const std::uint32_t (&b)[2]) {
#if __CUDA_ARCH__ >= 890
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else
  __trap();
#endif
}

using SharedAddress = std::uint32_t;
CHARONIA_DEVICE SharedAddress shared_address(const void* p) {
  return static_cast<SharedAddress>(__cvta_generic_to_shared(p));
}
CHARONIA_DEVICE void load_matrix_x4(std::uint32_t (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row))
               : "memory");
}
CHARONIA_DEVICE void load_matrix_x4_transposed(std::uint32_t (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row))
               : "memory");
}

CHARONIA_DEVICE void copy_async_16(SharedAddress shared, const void* global, bool valid = true) {
  const int bytes = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(bytes)
               : "memory");
}
CHARONIA_DEVICE void copy_async_16(void* shared, const void* global, bool valid = true) {
  copy_async_16(shared_address(shared), global, valid);
}
CHARONIA_DEVICE void copy_async_4(SharedAddress shared, const void* global, bool valid = true) {
  const int bytes = valid ? 4 : 0;
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared), "l"(global), "r"(bytes) : "memory");
}
CHARONIA_DEVICE void copy_async_4(void* shared, const void* global, bool valid = true) {
  copy_async_4(shared_address(shared), global, valid);
}
CHARONIA_DEVICE uint4 read_shared_16(SharedAddress at) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at)
               : "memory");
  return v;
}
CHARONIA_DEVICE std::uint32_t read_shared_4(SharedAddress at) {
  std::uint32_t v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(at) : "memory");
  return v;
}
CHARONIA_DEVICE void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int n>
CHARONIA_DEVICE void copy_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(n) : "memory");
}

template <class T>
CHARONIA_DEVICE std::uint32_t pack_at_once(float low, float high);
template <>
CHARONIA_DEVICE std::uint32_t pack_at_once<bf16>(float low, float high) {
  std::uint32_t both;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}
template <>
CHARONIA_DEVICE std::uint32_t pack_at_once<f16>(float low, float high) {
  std::uint32_t both;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}

// Puts the byte at the end of the mantissa of 2^23: conversion instructions run at a quarter of the rate.
CHARONIA_DEVICE float byte_to_float(std::uint32_t word, int i) {
  return __uint_as_float(__byte_perm(word, 0x4b000000U, 0x7650U + static_cast<unsigned>(i))) - 0x1p23F;
}
// With the byte in the middle and at the top of the mantissa.
CHARONIA_DEVICE float byte_above_2_15(std::uint32_t word, int i) {
  return __uint_as_float(__byte_perm(word, 0x47000000U, 0x7604U + static_cast<unsigned>(i) * 0x10U));
}
CHARONIA_DEVICE float byte_above_2_7(std::uint32_t word, int i) {
  return __uint_as_float(__byte_perm(word, 0x43000000U, 0x7044U + static_cast<unsigned>(i) * 0x100U));
}

#endif

// d += the product of a chunk of 16 bytes of 16 rows. a0 and b0 hold the lanes' words x and y, a1 and b1 hold z and w.
// Tensor cores keep fewer bits than float in sums of FP8, so the sum of a chunk starts at 0 and is added in float.
template <class T>
CHARONIA_DEVICE void multiply_chunk(SumType<T> (&d)[4], const std::uint32_t (&a0)[4], const std::uint32_t (&a1)[4],
                                    const std::uint32_t (&b0)[2], const std::uint32_t (&b1)[2]) {
  if constexpr (std::is_same_v<T, e4m3x2>) {
    float fresh[4] = {0, 0, 0, 0};
    mma_m16n8k32<T>(fresh, a0, b0);
    mma_m16n8k32<T>(fresh, a1, b1);
    CHARONIA_UNROLL
    for (int c = 0; c < 4; ++c) d[c] += fresh[c];
  } else {
    mma_m16n8k32<T>(d, a0, b0);
    mma_m16n8k32<T>(d, a1, b1);
  }
}

// Packs two floats into a register of two 16-bit elements, `low` in the low half. pack_at_once does this in one
// instruction, but needs more registers if many results are pending.
template <class T>
CHARONIA_DEVICE std::uint32_t pack(float low, float high) {
  return static_cast<std::uint32_t>(from_float<T>(high).bits) << 16 | from_float<T>(low).bits;
}

}  // namespace charonia::cuda
