// GEMMs with a quantised weight by the library: rows of the weight become 16-bit numbers, a part at a time, and the
// library multiplies those.
//
// A number is scale * (code - zero), rounded once to the inputs' type, which is what transformers multiplies with. Our
// own kernels round no weight. Where rows are many, the library's kernels reach four times the rate of ours. Where they
// are few, bytes count: the numbers are four times as many as those of 4-bit codes, and are stored and read once more.
#pragma once

#include <cstddef>
#include <cstdint>

#include "ops/cuda/gemm/blas.h"

namespace charonia::cuda {

// The library's GEMM of the rows [first, first + rows) of a weight, whose numbers are, or will be, in `numbers`.
Gemm dequantised_part(const Gemm& gemm, std::int64_t first, std::int64_t rows, const void* numbers);

// Issues the GEMM without its bias, `rows` rows of the weight at a time (dequantised_parts.h), for whose numbers there
// must be room. tactic: of the library for such a part. False: the library refuses a part.
bool run_dequantised(Stream& stream, Blas& blas, const Gemm& gemm, std::int64_t rows, const BlasTactic& tactic,
                     void* numbers, void* workspace, std::size_t workspace_bytes);

}  // namespace charonia::cuda
