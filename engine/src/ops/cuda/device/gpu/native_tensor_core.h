// The CUDA implementation of tensor_core.h.
#pragma once

#include "ops/cuda/device/portable.h"

namespace charonia::cuda {

// d = a * b + d. Products of 16-bit elements, summed in float.
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

// The same for 32 8-bit elements.
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

// An address in shared memory in the form that its instructions take. Loops can keep it instead of converting a pointer
// each time.
using SharedAddress = std::uint32_t;
CHARONIA_DEVICE SharedAddress shared_address(const void* p) {
  return static_cast<SharedAddress>(__cvta_generic_to_shared(p));
}
// Loads four 8x8 matrices of 16-bit elements. Lane l passes the address (16-byte aligned, shared memory) of row l % 8
// of matrix l / 8. Register i then holds elements 2t, 2t + 1 of row g of matrix i; transposed: rows 2t, 2t + 1 of
// column g.
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

// Copies 16 bytes from global to shared memory, or zeros if not `valid` (then `global` is not read). After
// copy_wait<n>(), all but the last n committed groups are visible to this thread, and to the block after
// __syncthreads().
CHARONIA_DEVICE void copy_async_16(SharedAddress shared, const void* global, bool valid = true) {
  const int bytes = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(bytes)
               : "memory");
}
CHARONIA_DEVICE void copy_async_16(void* shared, const void* global, bool valid = true) {
  copy_async_16(shared_address(shared), global, valid);
}
// The same with 4 bytes, 4-byte aligned.
CHARONIA_DEVICE void copy_async_4(SharedAddress shared, const void* global, bool valid = true) {
  const int bytes = valid ? 4 : 0;
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared), "l"(global), "r"(bytes) : "memory");
}
CHARONIA_DEVICE void copy_async_4(void* shared, const void* global, bool valid = true) {
  copy_async_4(shared_address(shared), global, valid);
}
CHARONIA_DEVICE uint4 read_shared_16(SharedAddress at) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(at)
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

// Like pack() of tensor_core.h.
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

// Byte i of a word, 0 to 255. Puts the byte at the end of the mantissa of 2^23: conversion instructions run at a
// quarter of the rate.
CHARONIA_DEVICE float byte_to_float(std::uint32_t word, int i) {
  return __uint_as_float(__byte_perm(word, 0x4b000000U, 0x7650U + static_cast<unsigned>(i))) - 0x1p23F;
}
// Byte i plus 2^15, and byte i plus 2^7 (for bytes below 128): one instruction each, with the byte in the middle and at
// the top of the mantissa.
CHARONIA_DEVICE float byte_above_2_15(std::uint32_t word, int i) {
  return __uint_as_float(__byte_perm(word, 0x47000000U, 0x7604U + static_cast<unsigned>(i) * 0x10U));
}
// Bytes i and j of a word plus 2^10, as two f16 elements: the bytes are at the end of the mantissa.
CHARONIA_DEVICE std::uint32_t above_1024(std::uint32_t word, int i, int j) {
  return __byte_perm(word, 0x64646464U, 0x4040U + static_cast<unsigned>(i) + static_cast<unsigned>(j) * 0x100U);
}
CHARONIA_DEVICE float byte_above_2_7(std::uint32_t word, int i) {
  return __uint_as_float(__byte_perm(word, 0x43000000U, 0x7044U + static_cast<unsigned>(i) * 0x100U));
}

}  // namespace charonia::cuda
