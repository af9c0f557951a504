// GEMMs with quantised weights: what gemm.h's functions do for a Gemm that has one (Gemm::quant), and what else they
// need.
//
// Weights lie as quant_layout.h says. The fast kernels (quant_stream_kernel.h) take 16-bit inputs and groups
// of 32 * 2^i columns or of a whole row; quant_plain.cu takes the rest. Which it is depends on the weight alone, and
// all tactics of a weight give a row the same bits: codes are multiplied as they are, and the sums of every 32 or 64
// columns enter a row's times their scale.
//
// Activations: int8 formats have their inputs quantised first (prepare_quant_inputs()). Their codes are then 16-bit
// numbers like others: products and sums of 64 columns are integers below 2^24, which float holds. FP8 formats take
// inputs as they are.
#pragma once

#include "ops/cuda/kernels/experts.h"
#include "ops/cuda/kernels/gemm.h"

namespace charonia::cuda {

// Bytes of the codes of a weight [n, k]; groups of a row, with those of padding.
std::size_t quant_code_bytes(const ops::QuantFormat& format, std::int64_t n, std::int64_t k);
std::int64_t quant_groups(const ops::QuantFormat& format, std::int64_t k);

// Whether the inputs become int8 codes.
bool has_integer_inputs(const ops::QuantFormat& format);
// Whether a GEMM's inputs have to be prepared before the fast kernels or any take them.
bool needs_prepared_inputs(const Gemm& gemm);
// Whether the fast kernels take this format with inputs of this type, of k columns.
bool is_fast(const ops::QuantFormat& format, DType type, std::int64_t k);

// out [rows, out_stride] = the inputs in the order of the weight's columns, as the format has them, with zeros behind
// the k-th; scales [rows], written where the format has integer activations. Where the order is the inputs' own, out
// may be in.
void prepare_quant_inputs(Stream& stream, const Gemm& gemm, void* out, std::int64_t out_stride, float* scales);

// The same for experts' inputs, all experts alike; or, with tiles, of every place in the order of its expert's columns
// ([experts][cols]). Gives the weight that takes them.
struct ExpertInputs {
  const void* in = nullptr;
  std::int64_t in_stride = 0, rows = 0, cols = 0;
  void* out = nullptr;
  std::int64_t padded = 0;
  float* scales = nullptr;            // [rows or places]
  const ExpertTile* tiles = nullptr;  // null: rows go to rows
  const std::int32_t* rows_of = nullptr;
  int num_tiles = 0, tile_rows = 0;
};
QuantWeight prepare_expert_inputs(Stream& stream, DType type, const QuantWeight& quant, const ExpertInputs& inputs);

// Whether the weight of a GEMM can become 16-bit numbers that the inputs are multiplied with: the inputs are of a 16-bit
// type and stay in it, and groups are whole vectors of 8 columns or a row.
bool can_dequantise(const Gemm& gemm);

// Rows of such a weight, the first a multiple of 16, as 16-bit numbers: scale * (code - zero), rounded once. out
// [rows rounded up to 16, gemm.weight_stride] of the inputs' type, aligned to 16 bytes. In columns from k on are some
// numbers.
void dequantise(Stream& stream, const Gemm& gemm, std::int64_t first_row, std::int64_t rows, void* out);

// Called by gemm.h's functions.
std::vector<GemmTactic> quant_tactics(const DeviceInfo& device, const Gemm& gemm, SumOrder order);
void quant_gemm(Stream& stream, const DeviceInfo& device, const Gemm& gemm, const GemmTactic& tactic, void* workspace);

// As multiply_experts(). weight: codes of all experts.
void multiply_quant_experts(Stream& stream, const DeviceInfo& device, const ExpertGemm& gemm);
// As expert_tile_rows(), for both GEMMs of an expert.
struct ExpertFormat {
  ops::QuantFormat format;
  std::int64_t k = 0;
};
int quant_expert_tile_rows(DType type, const ExpertFormat& gate_up, const ExpertFormat& down, std::int64_t assignments,
                           int experts);

}  // namespace charonia::cuda
