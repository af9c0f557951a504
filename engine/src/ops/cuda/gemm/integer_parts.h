// GEMMs of int8 codes by the library, which writes the sums of a part of the weight's rows as 32-bit integers; a kernel
// scales them while they are in the L2 cache.
//
// Integer sums are exact, so the outputs have the bits of the built-in kernels (w8a8_gemm.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "ops/cuda/gemm/blas.h"

namespace charonia::cuda {

inline constexpr std::int64_t kIntegerTileRows = 128;  // parts have a multiple of it

// Whether the library may multiply the codes of this GEMM, if it supports their shape.
bool has_integer_codes(const Gemm& gemm);

// The numbers of the weight's rows per part to measure, whose sums take at most `bytes`, or half of the L2 cache; empty
// if there is no room for one unit of rows. integer_part_bytes(): of the sums.
std::vector<std::int64_t> integer_part_rows(const Gemm& gemm, std::size_t bytes, std::size_t l2_bytes);
std::size_t integer_part_bytes(const Gemm& gemm, std::int64_t rows);

// The library's GEMM with rows [first, first + rows) of the weight: int8 codes, with sums of int32 in `sums`.
Gemm integer_part(const Gemm& gemm, std::int64_t first, std::int64_t rows, void* sums);

// Issues the GEMM with its scales and bias, `rows` rows of the weight at a time. Returns false if the library rejects a
// part.
bool run_integers(Stream& stream, Blas& blas, const Gemm& gemm, std::int64_t rows, const BlasTactic& tactic, void* sums,
                  void* workspace, std::size_t workspace_bytes);

}  // namespace charonia::cuda
