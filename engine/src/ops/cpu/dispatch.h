// Selects the instruction set of the kernels.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "ops/cpu/kernels.h"

namespace charonia::ops::cpu {

struct InstructionSet {
  std::string_view name;  // portable | avx2 | avx512 | avx512_bf16 | amx
  const Kernels* kernels = nullptr;
};

// The instruction sets that this build has and this processor can run, the slowest first. AMX is included only if a
// small test GEMM is correct.
std::vector<InstructionSet> instruction_sets();

// Why the best instruction set of this processor is not used, for the log; empty if it is used.
std::string instruction_set_warning();

// The instruction set of this name, or the best one if `name` is empty. Throws Error(invalid_argument) for an unknown
// name, and Error(unsupported), with the list of available ones, if this processor does not have it.
InstructionSet instruction_set(std::string_view name);

// The GEMMs with 8-bit integers of an instruction set that this processor can run. They give the same bits; `tiles` is
// the fastest for many rows.
struct IntegerKernels {
  void (*linear)(const IntegerLinearArgs&) = nullptr;
  void (*tiles)(const IntegerLinearArgs&) = nullptr;  // null if not available
};
IntegerKernels integer_kernels(const Kernels& kernels);

// The GEMM of integer weights with fixed-point activations, if the instruction set and this processor have it.
bool has_fixed_kernel(const Kernels& kernels);

}  // namespace charonia::ops::cpu
