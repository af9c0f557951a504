// Whether this process may use the processor's matrix tiles.
#pragma once

#include <string>

#include "ops/cpu/kernels.h"

namespace charonia::ops::cpu {

// Whether processor and operating system have AMX with bf16, and whether this process was let use it: the system asks
// for one request per process, made here the first time. False too where the build knows nothing of AMX.
bool has_amx();

// Multiplies small random matrices with both GEMM kernels of bf16 weights and says where they differ by more than
// rounding; empty: nowhere. Rows 1 to kRowBlock, an odd k, features that are no whole tile.
std::string gemm_mismatch(void (*candidate)(const LinearArgs&), void (*reference)(const LinearArgs&));

}  // namespace charonia::ops::cpu
