// Kernels that use each instruction of hopper.h once. Compared with the CPU by hopper_test.cpp, also on a GPU.
#pragma once

#include "ops/cuda/device/runtime.h"
#include "ops/cuda/device/tensor_map.h"

namespace charonia::cuda {

// out [count] = in [count] + 1, through a ring in shared memory that copy_bulk() fills. count is a multiple of
// kBulkChunk.
inline constexpr int kBulkChunk = 128;
struct BulkProbe {
  const float* in;
  float* out;
  int count;
};
void probe_bulk(Stream& stream, const BulkProbe& probe);

// out: the bytes of the box at `at` in shared memory.
struct BoxProbe {
  TensorMap map;
  int at[TensorBox::kMaxRank];
  int rank, bytes;
  unsigned char* out;  // [bytes]
};
void probe_box(Stream& stream, const BoxProbe& probe);

// out [64, n] = a [64, 64] * b [n, 64]^T, with wgmma or mma; added to out if `add`. With DType::i8 the elements are
// pairs of int8 numbers, out has int, and only Factor::shared is known.
//
// Factor: the place of operand a: copied to shared memory or written there by threads, or registers.
enum class Factor { shared, written, registers, registers_transposed };  // the last: operand b is [64, n]
inline constexpr int kProbeM = 64, kProbeK = 64;
struct ProductProbe {
  TensorMap a_map, b_map;  // boxes of all rows and one width of the swizzle, or 16 bytes
  const void* a;
  const void* b;
  void* out;
  Swizzle swizzle;
  bool add;
};
void probe_wgmma(Stream& stream, DType type, int n, Factor factor, const ProductProbe& probe);
void probe_mma(Stream& stream, DType type, int n, const ProductProbe& probe);  // Factor::registers

}  // namespace charonia::cuda
