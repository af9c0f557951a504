// Which instruction set the kernels use.
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

// Those that this build has and this processor can run, the slowest on this one first. AMX is among them if a small GEMM through
// it comes out right.
std::vector<InstructionSet> instruction_sets();

// Why the best instruction set of this processor is not used, for the log; empty: it is.
std::string instruction_set_warning();

// The one named, or the best when `name` is empty. Throws Error(invalid_argument) for an unknown name and
// Error(unsupported) for one that this processor lacks, listing those that would do.
InstructionSet instruction_set(std::string_view name);

// The GEMMs of 8-bit integers of an instruction set that this processor can run. They give the same bits; that of tiles
// is the best for many rows.
struct IntegerKernels {
  void (*linear)(const IntegerLinearArgs&) = nullptr;
  void (*tiles)(const IntegerLinearArgs&) = nullptr;  // null: there are none
};
IntegerKernels integer_kernels(const Kernels& kernels);

// The GEMM of weights of integers with fixed-point activations, where an instruction set and this processor have it.
bool has_fixed_kernel(const Kernels& kernels);

}  // namespace charonia::ops::cpu
