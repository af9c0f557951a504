// GEMMs with a quantised weight by the library: converts rows of the weight to 16-bit numbers, one part at a time,
// which the library multiplies.
//
// A number is scale * (code - zero), rounded once to the inputs' type, as in Hugging Face transformers. The built-in
// kernels do not round weights. With many rows, the library's kernels reach four times the rate of the built-in
// kernels. With few rows, memory traffic dominates: the numbers take four times the memory of 4-bit codes, and are
// written and read once more.
#pragma once

#include <cstddef>
#include <cstdint>

#include "ops/cuda/gemm/blas.h"

namespace charonia::cuda {

// The library's GEMM with rows [first, first + rows) of a weight, whose dequantised numbers are in `numbers`.
Gemm dequantised_part(const Gemm& gemm, std::int64_t first, std::int64_t rows, const void* numbers);

// Issues the GEMM without its bias, `rows` rows of the weight at a time (dequantised_parts.h). `numbers` must have
// space for one part. tactic: of the library for such a part. Returns false if the library rejects a part.
bool run_dequantised(Stream& stream, Blas& blas, const Gemm& gemm, std::int64_t rows, const BlasTactic& tactic,
                     void* numbers, void* workspace, std::size_t workspace_bytes);

}  // namespace charonia::cuda
