// Operations on single rows: embedding, norm, gated activation, soft cap, gather, and the rows' way into the cache.
#pragma once

#include <cstdint>

#include "base/dtype.h"
#include "ops/cuda/device/runtime.h"
#include "ops/cuda/emulated/host_device.h"
#include "ops/kv_quant.h"
#include "ops/operations.h"

namespace charonia::cuda {

using ops::Tensor;

// Rows as 8-bit codes (w8a8_gemm.h), where a kernel makes them of what it would leave in its output. Device memory.
struct RowCodes {
  unsigned char* codes = nullptr;  // [rows, cols], aligned to 16 bytes
  float* scales = nullptr;         // [rows]
  float scale = 0;                 // of all rows; 0: each has its own
  bool fp8 = false;                // else int8
};

// out [rows, hidden] f32 <- rows of table [vocab, hidden] of `table_type`. ids [rows]: a token id, or -1 - i
// for sampled[i], which the step before left there (negative there: that row failed; the row becomes token 0). All
// times `scale`, in float.
void embed(Stream& stream, const Tensor& out, const void* table, DType table_type, const std::int32_t* ids,
           const std::int32_t* sampled, float scale = 1);

// As Operations::rms_norm(). residual f32; out f32|bf16|f16, delta of the same type. Sums in float, in an order given
// by hidden alone.
void rms_norm(Stream& stream, const Tensor& out, const Tensor& residual, const Tensor& delta,
              const ops::NormParams& how);
// The same with codes of the 16-bit numbers that out would have, which stays as it is; residual too where the answer is
// false: there is no such kernel. Those are for rows of 16 elements or a multiple, aligned, to 16384, delta as it is.
bool rms_norm_codes(Stream& stream, const RowCodes& codes, const Tensor& out, const Tensor& residual,
                    const Tensor& delta, const ops::NormParams& how);

// As Operations::qk_squares(). sums [rows, 2]; qkv f32|bf16|f16. Sums in float, in an order given by the sizes alone.
void qk_squares(Stream& stream, float* sums, const Tensor& qkv, std::int64_t q_size, std::int64_t k_size);

// out [rows, inter] = activation(gate_up[:, :inter]) * gate_up[:, inter:], both of one type, f32|bf16|f16.
void gated_activation(Stream& stream, const Tensor& out, const Tensor& gate_up, ops::Activation kind);
// As rms_norm_codes(), of rows of any length.
bool gated_activation_codes(Stream& stream, const RowCodes& codes, const Tensor& out, const Tensor& gate_up,
                            ops::Activation kind);

// logits [rows, cols] f32 *= scale; then, where cap > 0, logits = cap * tanh(logits / cap).
void scale_logits(Stream& stream, const Tensor& logits, float scale, float cap);

// out [out.rows, cols] = in[rows[i], :], same type.
void gather_rows(Stream& stream, const Tensor& out, const Tensor& in, const std::int32_t* rows);

// out [rows, ranks * cols] = shards [ranks][rows, cols] side by side, same type (f32).
void side_by_side(Stream& stream, const Tensor& out, const void* shards, int ranks);

// One layer of the cache: [block][k, v][kv head][slot][head_dim], blocks of block_len slots. Quantised, a block has
// {[k, v][kv head][slot][row_bytes] integers as ops/kv_quant.h packs them, [k, v][kv head][slot][scale, zero] f16}: so
// that integers are read by the 16 bytes wherever a row has a multiple of them, and the scales of neighbours together.
struct CacheLayer {
  void* data = nullptr;
  DType dtype = DType::bf16;  // quantised: of what k and v are computed in
  int kv_heads = 0, head_dim = 0, block_len = 0;
  int quant_bits = 0;  // 4 or 8: quantised

  // Quantised, in bytes. A row: of k at [kv head][slot] in its block; of v, half_rows() further.
  CHARONIA_HD int half_rows() const { return kv_heads * block_len; }
  CHARONIA_HD int row_bytes() const { return static_cast<int>(ops::kv_quant_row_bytes(head_dim, quant_bits)); }
  CHARONIA_HD std::int64_t quant_block_bytes() const {
    return std::int64_t{2} * half_rows() * (row_bytes() + static_cast<int>(ops::kKvScaleBytes));
  }
  CHARONIA_HD std::int64_t integers_at(std::int64_t block, int row) const {
    return block * quant_block_bytes() + static_cast<std::int64_t>(row) * row_bytes();
  }
  CHARONIA_HD std::int64_t scale_at(std::int64_t block, int row) const {
    return block * quant_block_bytes() + std::int64_t{2} * half_rows() * row_bytes() +
           static_cast<std::int64_t>(row) * static_cast<int>(ops::kKvScaleBytes);
  }

  // Not quantised, in elements.
  CHARONIA_HD std::int64_t head_size() const { return static_cast<std::int64_t>(block_len) * head_dim; }
  CHARONIA_HD std::int64_t block_size() const { return 2 * kv_heads * head_size(); }
  CHARONIA_HD std::int64_t k_at(std::int64_t block, int kv_head, int slot) const {
    return block * block_size() + kv_head * head_size() + static_cast<std::int64_t>(slot) * head_dim;
  }
  CHARONIA_HD std::int64_t v_at(std::int64_t block, int kv_head, int slot) const {
    return k_at(block, kv_heads + kv_head, slot);
  }

  std::int64_t block_bytes() const {
    return quant_bits != 0 ? quant_block_bytes() : block_size() * static_cast<std::int64_t>(size_of(dtype));
  }
};

// qkv [rows, (heads + 2 kv_heads) * head_dim] f32|bf16|f16: q heads, k heads, v heads. Normalises, rotates and scales q
// and k as `how` says, q in place; stores k and v, in the cache of the same type or quantised, into slot
// kv_slots[row] (block * block_len + slot in the block; -1: the row is padding and stores nothing). positions [rows]:
// of how.q_scale; rotary_rows [rows]: of how.cos_sin.
void rotary_store(Stream& stream, const Tensor& qkv, const ops::RotaryParams& how, const CacheLayer& cache, int heads,
                  const std::int32_t* positions, const std::int32_t* rotary_rows, const std::int32_t* kv_slots);

// Copies a block to another in `layers` layers that lie layer_bytes apart, of which `first` is the first.
void copy_block(Stream& stream, const CacheLayer& first, int layers, std::size_t layer_bytes, std::int32_t from,
                std::int32_t to);

}  // namespace charonia::cuda
