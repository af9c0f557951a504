// Packs an 8-bit integer weight into the panels that the integer kernels read (kernels.h).
#pragma once

#include <cstddef>
#include <cstdint>

#include "ops/cpu/kernels.h"

namespace charonia::ops::cpu {

// Packs output features [0, n) of a panel, n <= kPanel; the other features become zeros. Input as from
// QuantSource::read(): codes [n, k], scales [n, groups], and zeros [n, groups] if the shape has zeros. panel:
// shape.bytes(), 64-byte aligned.
void pack_integers(std::byte* panel, const IntegerPanel& shape, std::int64_t n, const std::uint8_t* codes,
                   const float* scales, const std::int8_t* zeros);

}  // namespace charonia::ops::cpu
