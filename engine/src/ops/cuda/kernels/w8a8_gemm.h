// GEMMs of 8-bit weights with 8-bit activations on tensor cores: int8 (compute capability 8.0), and FP8 E4M3 (8.9).
//
//   out [rows, n] = column_scales[n] * (codes of in [rows, k] * codes of weight [n, k]^T) * row_scales[rows] + bias
//
// Weights have one scale for a row, and lie as 16-bit weights do (gemm.h), row-major or packed, two codes for an
// element. The kernels are those of 16-bit weights (gemm_stream_kernel.h, gemm_tile_kernel.h): which codes of K a
// tensor core multiplies together makes no difference as long as both operands agree, and 16 bytes are 16 bytes.
//
// Integers are added up as integers, whatever the tactic; then come the products with the two scales, each rounded, in
// the order of the CPU's kernels: the outputs are the CPU's, bit for bit. Products of FP8 are added up from 0 for every
// 64 columns, because tensor cores keep some 14 bits of such sums, and then in float. The order of adding is that of
// gemm.h.
//
// Bound: as those kernels, with half of the bytes of a weight and of the inputs, and at least twice the rate of tensor
// cores: int8 has 1979 TOP/s in an H200's datasheet, of which mma.sync reaches some 60 %.
#pragma once

#include <cstdint>
#include <vector>

#include "ops/cuda/kernels/gemm.h"

namespace charonia::cuda {

// Whether a weight of this format, with inputs of a type, is multiplied so on a device: one scale for a row, no zeros,
// 16 columns or a multiple, and not so many of int8 that a sum could leave 32 bits. FP8 with 16-bit types only: fp32 is
// for checking.
bool is_w8a8(const ops::QuantFormat& format, DType type, std::int64_t k, const DeviceInfo& device);

// Called by gemm.h's functions.
std::vector<GemmTactic> w8a8_tactics(const DeviceInfo& device, const Gemm& gemm, SumOrder order);
void w8a8_gemm(Stream& stream, const Gemm& gemm, const GemmTactic& tactic, void* workspace);

// Codes [rows, k] of the inputs of such a GEMM, in the order of the weight's columns, aligned to 16 bytes, and their
// scales [rows]. A row that is not finite has the scale NaN.
void quantise_inputs(Stream& stream, const Gemm& gemm, void* codes, float* scales);

}  // namespace charonia::cuda
