// GEMMs of 8-bit weights with 8-bit activations on tensor cores: int8 (compute capability 8.0), and FP8 E4M3 (8.9).
//
//   out [rows, n] = column_scales[n] * (codes of in [rows, k] * codes of weight [n, k]^T) * row_scales[rows] + bias
//
// Weights have one scale per row and the layout of 16-bit weights (gemm.h), row-major or packed, with two codes per
// element. The kernels are those for 16-bit weights (gemm_stream_kernel.h, gemm_tile_kernel.h): a GEMM may permute the
// codes of K as long as both operands use the same order, and 16 bytes are moved in the same way. On compute capability
// 9.0, int8 has another kernel for 17 rows and more (w8a8_wgmma.cu).
//
// Integers are summed exactly as integers, with every tactic. Then come the products with the two scales, each rounded,
// in the order of the CPU's kernels: the outputs equal the CPU's bit for bit. Products of FP8 are summed from 0 for
// every 64 columns, because tensor cores keep only about 14 bits of such sums, and then added in float. The order of
// additions is the same as in gemm.h.
//
// Bound: the same as for those kernels, with half the bytes of weights and inputs, and at least twice the rate of
// tensor cores: int8 has 1979 TOP/s in an H200's datasheet; mma.sync reaches about 60 % of that.
#pragma once

#include <cstdint>
#include <vector>

#include "ops/cuda/kernels/gemm.h"

namespace charonia::cuda {

// Whether a device multiplies a weight of this format with inputs of this type in 8 bits. It needs one scale per row,
// no zeros, a multiple of 16 columns and, for int8, few enough columns that a sum fits 32 bits. FP8 only with 16-bit
// types, because fp32 is for verification.
bool is_w8a8(const ops::QuantFormat& format, DType type, std::int64_t k, const DeviceInfo& device);

// Called by gemm.h's functions.
std::vector<GemmTactic> w8a8_tactics(const DeviceInfo& device, const Gemm& gemm, SumOrder order);
void w8a8_gemm(Stream& stream, const Gemm& gemm, const GemmTactic& tactic, void* workspace);

// Writes codes [rows, k] of the inputs of such a GEMM, in the order of the weight's columns, aligned to 16 bytes, and
// their scales [rows]. A row that is not finite has the scale NaN.
void quantise_inputs(Stream& stream, const Gemm& gemm, void* codes, float* scales);

// Columns of out from `first` on = the sums of a part of the weight's rows, scaled, plus the bias. sums: a GEMM whose
// out [rows, n] has the sums as int32.
void scale_sums(Stream& stream, const Gemm& gemm, std::int64_t first, const Gemm& sums);

}  // namespace charonia::cuda
