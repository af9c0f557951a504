// The parts of a prepared row of an integer GEMM other than its codes. In an unnamed namespace, for the reason in
// vec.h.
#pragma once

#include <cstdint>

#include "ops/cpu/kernels.h"

namespace charonia::ops::cpu {
namespace {

inline float scale_of_row(const IntegerLinearArgs& args, int row) { return args.scales[row * (args.a_stride / 4)]; }
inline const std::int32_t* sums_of_row(const IntegerLinearArgs& args, int row) {
  return args.sums + row * (args.a_stride / 4);
}

}  // namespace
}  // namespace charonia::ops::cpu
