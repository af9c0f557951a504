// Operations on single rows: embedding, norm, gated activation, soft cap, gather, and storing rows in the cache.
#pragma once

#include <cstdint>

#include "base/dtype.h"
#include "ops/cuda/device/runtime.h"
#include "ops/cuda/device/host_device.h"
#include "ops/kv_quant.h"
#include "ops/operations.h"

namespace charonia::cuda {

using ops::Tensor;

// Rows as 8-bit codes (w8a8_gemm.h), written by a kernel instead of its output. Device memory.
struct RowCodes {
  unsigned char* codes = nullptr;  // [rows, cols], aligned to 16 bytes
  float* scales = nullptr;         // [rows]
  float scale = 0;                 // of all rows; 0: one per row
  bool fp8 = false;                // otherwise int8
};

// A table [vocab, hidden] in device memory: row-major, or packed (gemm.h).
struct TableRows {
  const void* data = nullptr;
  DType type = DType::f32;
  std::int64_t stride = 0;  // elements
  bool packed = false;
};

// out [rows, hidden] f32 = scale * rows of the table, in float. ids [rows]: a token id, or -1 - i for sampled[i] of the
// previous step (if that is negative, its row failed, and token 0 is used).
void embed(Stream& stream, const Tensor& out, const TableRows& table, const std::int32_t* ids,
           const std::int32_t* sampled, float scale = 1);

// Like Operations::add_embedding(). x f32|bf16|f16; table [vocab, columns of x] of the same type, in memory that the
// device can read.
void add_embedding(Stream& stream, const Tensor& x, const void* table, const std::int32_t* ids,
                   const std::int32_t* sampled, const ops::EmbeddingSum& how);

// Like Operations::rms_norm(). residual f32; out f32|bf16|f16, delta of the same type. Sums in float, in an order that
// depends only on hidden.
void rms_norm(Stream& stream, const Tensor& out, const Tensor& residual, const Tensor& delta,
              const ops::NormParams& how);
// The same, but writes codes of the 16-bit numbers that out would have; out does not change. Returns false, and changes
// nothing, if no kernel supports the arguments. Kernels support aligned rows of a multiple of 16 elements, up to 16384,
// with delta not normalised.
bool rms_norm_codes(Stream& stream, const RowCodes& codes, const Tensor& out, const Tensor& residual,
                    const Tensor& delta, const ops::NormParams& how);

// Like Operations::qk_squares(). sums [rows, 2]; qkv f32|bf16|f16. Sums in float, in an order that depends only on the
// sizes.
void qk_squares(Stream& stream, float* sums, const Tensor& qkv, std::int64_t q_size, std::int64_t k_size);

// out [rows, inter] = activation(gate_up[:, :inter]) * gate_up[:, inter:], both of one type, f32|bf16|f16.
void gated_activation(Stream& stream, const Tensor& out, const Tensor& gate_up, ops::Activation how);
// Like rms_norm_codes(), for rows of any length.
bool gated_activation_codes(Stream& stream, const RowCodes& codes, const Tensor& out, const Tensor& gate_up,
                            ops::Activation kind);

// x [rows, cols] *= sigmoid(gate), both of one type, f32|bf16|f16.
void sigmoid_gate(Stream& stream, const Tensor& x, const Tensor& gate);
// Like Operations::gated_norm(). out, x and gate of one type, f32|bf16|f16. Sums in float, in an order that depends
// only on head_dim.
void gated_norm(Stream& stream, const Tensor& out, const Tensor& x, const Tensor& gate, const float* weight, float eps,
                int head_dim);

// logits [rows, cols] f32 *= scale; then, if cap > 0, logits = cap * tanh(logits / cap).
void scale_logits(Stream& stream, const Tensor& logits, float scale, float cap);

// out [out.rows, cols] = in[rows[i], :], same type; a row with rows[i] = -1 does not change.
void gather_rows(Stream& stream, const Tensor& out, const Tensor& in, const std::int32_t* rows);
// out[rows[i], :] = in [in.rows, cols], same type; a row with rows[i] = -1 is not copied.
void store_rows(Stream& stream, const Tensor& out, const Tensor& in, const std::int32_t* rows);

// Like Operations::scatter_logits().
void scatter_logits(Stream& stream, const Tensor& out, const Tensor& in, const std::int32_t* columns);

// out [rows, ranks * cols] = shards [ranks][rows, cols], concatenated along the columns, same type (f32).
void side_by_side(Stream& stream, const Tensor& out, const void* shards, int ranks);

// One layer of the cache: [block][k, v][kv head][slot][head_dim], blocks of block_len slots. A quantised block has {[k,
// v][kv head][slot][row_bytes] integers, packed as in ops/kv_quant.h, then [k, v][kv head][slot][scale, zero] f16}. So
// integers can be read 16 bytes at a time if a row is a multiple of that, and the scales of neighbours are contiguous.
// FP8 has codes in place of the integers, and no scales.
struct CacheLayer {
  void* data = nullptr;
  DType dtype = DType::bf16;  // quantised: the type that k and v are computed in
  int kv_heads = 0, head_dim = 0, block_len = 0;
  int quant_bits = 0;  // 4, 8 or ops::kKvFp8: quantised
  bool stores = true;  // false: another layer with the same memory stores k and v

  // Quantised, in bytes. Row of k: [kv head][slot] in its block; row of v: half_rows() further.
  CHARONIA_HD int half_rows() const { return kv_heads * block_len; }
  CHARONIA_HD int row_bytes() const { return static_cast<int>(ops::kv_quant_row_bytes(head_dim, quant_bits)); }
  CHARONIA_HD int scale_bytes() const { return static_cast<int>(ops::kv_quant_scale_bytes(quant_bits)); }
  CHARONIA_HD std::int64_t quant_block_bytes() const {
    return std::int64_t{2} * half_rows() * (row_bytes() + scale_bytes());
  }
  CHARONIA_HD std::int64_t integers_at(std::int64_t block, int row) const {
    return block * quant_block_bytes() + static_cast<std::int64_t>(row) * row_bytes();
  }
  CHARONIA_HD std::int64_t scale_at(std::int64_t block, int row) const {
    return block * quant_block_bytes() + std::int64_t{2} * half_rows() * row_bytes() +
           static_cast<std::int64_t>(row) * scale_bytes();
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

// qkv [rows, (heads + 2 kv_heads) * head_dim] f32|bf16|f16: q heads, and k heads and v heads if the layer stores them.
// Normalises, rotates and scales q and k according to `how`, q in place. Stores k and v, in a cache of the same type or
// quantised, in slot kv_slots[row] (block * block_len + slot in the block; -1: the row is padding and is not stored).
// positions [rows]: for how.q_scale; rotary_rows [rows]: for how.cos_sin.
void rotary_store(Stream& stream, const Tensor& qkv, const ops::RotaryParams& how, const CacheLayer& cache, int heads,
                  const std::int32_t* positions, const std::int32_t* rotary_rows, const std::int32_t* kv_slots);

// Copies a block to another one in `layers` layers, which are layer_bytes apart; `first` is the first layer.
void copy_block(Stream& stream, const CacheLayer& first, int layers, std::size_t layer_bytes, std::int32_t from,
                std::int32_t to);

}  // namespace charonia::cuda
