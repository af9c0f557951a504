// What of the processor the compiler's own questions do not tell: matrix tiles, and whether this process may use them.
#pragma once

#include <string>

#include "ops/cpu/kernels.h"

namespace charonia::ops::cpu {

// Whether processor and operating system have AMX with bf16, and whether this process was let use it: the system asks
// for one request per process, made here the first time. False too where the build knows nothing of AMX.
bool has_amx();
// The same with 8-bit integers.
bool has_amx_int8();
// Whether processor and operating system have the dot products of bytes of AVX-512, and those of AVX2.
bool has_avx512_vnni();
bool has_avx_vnni();

// Multiplies small random matrices with both GEMM kernels of bf16 weights and says where they differ by more than
// rounding; empty: nowhere. Rows 1 to kRowBlock, an odd k, features that are no whole tile.
std::string gemm_mismatch(void (*candidate)(const LinearArgs&), void (*reference)(const LinearArgs&));

}  // namespace charonia::ops::cpu
