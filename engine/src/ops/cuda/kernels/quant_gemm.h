// GEMMs with quantised weights: the implementation of gemm.h's functions for Gemm::quant, and additional functions.
//
// quant_layout.h describes the layout of weights. The fast kernels (quant_stream_kernel.h) take 16-bit inputs and
// groups of 32 * 2^i columns or a whole row; quant_plain.cu takes the rest. The choice depends only on the weight, and
// all tactics that keep SumOrder::fixed give a row the same bits: codes are multiplied without scaling, and the sums of
// every 32 or 64 columns are added to a row's sum after multiplication with their scale.
//
// Activations: int8 formats quantise their inputs first (prepare_quant_inputs()). Their codes are then ordinary 16-bit
// numbers: products and sums of 64 columns are integers below 2^24, which float represents. FP8 formats do not convert
// inputs.
#pragma once

#include "ops/cuda/kernels/experts.h"
#include "ops/cuda/kernels/gemm.h"

namespace charonia::cuda {

// Bytes of the codes of a weight [n, k], and groups of a row, both with padding.
std::size_t quant_code_bytes(const ops::QuantFormat& format, std::int64_t n, std::int64_t k);
std::int64_t quant_groups(const ops::QuantFormat& format, std::int64_t k);

// Whether the inputs are converted to int8 codes.
bool has_integer_inputs(const ops::QuantFormat& format);
// Whether a GEMM's inputs must be prepared before the kernels take them.
bool needs_prepared_inputs(const Gemm& gemm);
// Whether the fast kernels support this format with inputs of this type and k columns.
bool is_fast(const ops::QuantFormat& format, DType type, std::int64_t k);

// out [rows, out_stride] = the inputs in the order of the weight's columns, in the format's form, with zeros from
// column k on. scales [rows]: written if the format has integer activations. If the inputs have the weight's order, out
// may be in.
void prepare_quant_inputs(Stream& stream, const Gemm& gemm, void* out, std::int64_t out_stride, float* scales);

// The same for experts' inputs, in one order for all experts; or, with tiles, for every place in the order of its
// expert's columns ([experts][cols]). Returns the weight for the prepared inputs.
struct ExpertInputs {
  const void* in = nullptr;
  std::int64_t in_stride = 0, rows = 0, cols = 0;
  void* out = nullptr;
  std::int64_t padded = 0;
  float* scales = nullptr;            // [rows or places]
  const ExpertTile* tiles = nullptr;  // null: one output row per input row
  const std::int32_t* rows_of = nullptr;
  int num_tiles = 0, tile_rows = 0;
};
QuantWeight prepare_expert_inputs(Stream& stream, DType type, const QuantWeight& quant, const ExpertInputs& inputs);

// Whether the weight of a GEMM can be converted to 16-bit numbers: the inputs have a 16-bit type and are not converted,
// and groups are multiples of 8 columns or a whole row.
bool can_dequantise(const Gemm& gemm);

// Converts rows of such a weight to 16-bit numbers: scale * (code - zero), rounded once. The first row must be a
// multiple of 16. out [rows rounded up to 16, gemm.weight_stride] has the inputs' type, aligned to 16 bytes. The
// contents of columns from k on are undefined.
void dequantise(Stream& stream, const Gemm& gemm, std::int64_t first_row, std::int64_t rows, void* out);

// Called by gemm.h's functions.
std::vector<GemmTactic> quant_tactics(const DeviceInfo& device, const Gemm& gemm, SumOrder order);
void quant_gemm(Stream& stream, const DeviceInfo& device, const Gemm& gemm, const GemmTactic& tactic, void* workspace);

// Like multiply_experts(). weight: codes of all experts.
void multiply_quant_experts(Stream& stream, const DeviceInfo& device, const ExpertGemm& gemm);
// Like expert_tile_rows(), for both GEMMs of an expert.
struct ExpertFormat {
  ops::QuantFormat format;
  std::int64_t k = 0;
};
int quant_expert_tile_rows(DType type, const ExpertFormat& gate_up, const ExpertFormat& down, std::int64_t assignments,
                           int experts);

}  // namespace charonia::cuda
