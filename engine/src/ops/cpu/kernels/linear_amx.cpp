// The bf16 GEMM of processors with AMX: linear_tiles.h with the AMX tile registers.
#if defined(CHARONIA_ISA_amx)
#include "ops/cpu/kernels/amx_tiles.h"

namespace charonia::ops::cpu::CHARONIA_ISA {

void linear_bf16(const LinearArgs& args) { linear_tiles<AmxTiles>(args); }

}  // namespace charonia::ops::cpu::CHARONIA_ISA
#endif
