// A weight of 8-bit integers into the panels that the kernels of integers read (kernels.h).
#pragma once

#include <cstddef>
#include <cstdint>

#include "ops/cpu/kernels.h"

namespace charonia::ops::cpu {

// Output features [0, n) of a panel, n up to kPanel; the others become zeros: codes [n, k], scales [n, groups], and
// where the shape has zeros these, [n, groups], as QuantSource::read() gives them. panel: shape.bytes(), 64-byte
// aligned.
void pack_integers(std::byte* panel, const IntegerPanel& shape, std::int64_t n, const std::uint8_t* codes,
                   const float* scales, const std::int8_t* zeros);

}  // namespace charonia::ops::cpu
