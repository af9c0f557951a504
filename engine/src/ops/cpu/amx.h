// Processor features that the compiler's builtins cannot check: matrix tiles, and whether this process may use them.
#pragma once

#include <string>

#include "ops/cpu/kernels.h"

namespace charonia::ops::cpu {

// Whether processor and operating system have AMX with bf16, and this process may use it. The first call sends the
// permission request that the system requires once per process. False if the build has no AMX support.
bool has_amx();
// The same for AMX with 8-bit integers.
bool has_amx_int8();
// Whether processor and operating system have the byte dot products of AVX-512 (AVX512_VNNI) and of AVX2 (AVX-VNNI).
bool has_avx512_vnni();
bool has_avx_vnni();

// Multiplies small random matrices with two GEMM kernels for bf16 weights, and describes where they differ by more than
// rounding; empty if nowhere. Uses 1 to kRowBlock rows, an odd k, and a number of features that is not a multiple of a
// tile.
std::string gemm_mismatch(void (*candidate)(const LinearArgs&), void (*reference)(const LinearArgs&));

}  // namespace charonia::ops::cpu
