// The 8-bit integer GEMM of processors with AMX: integer_tiles.h with the AMX tile registers.
#if defined(CHARONIA_ISA_amx)
#include "ops/cpu/kernels/amx_tiles.h"
#include "ops/cpu/kernels/integer_tiles.h"

namespace charonia::ops::cpu::CHARONIA_ISA {
namespace {

struct AmxIntegerTiles : AmxTiles {
  template <int C, int A, int B>
  static void multiply() {
    asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(C), "i"(A), "i"(B) : "memory");
  }
};

}  // namespace

void linear_i8_tiles(const IntegerLinearArgs& args) { linear_integer_tiles<AmxIntegerTiles>(args); }

}  // namespace charonia::ops::cpu::CHARONIA_ISA
#endif
