// Operations on single rows: embedding, norm, gated activation, gather, and the rows' way into the cache.
#pragma once

#include <cstdint>

#include "base/dtype.h"
#include "ops/cuda/device/host_device.h"
#include "ops/cuda/runtime.h"
#include "ops/ops.h"

namespace charonia::cuda {

using ops::Tensor;

// out [rows, hidden] f32|bf16|f16 <- rows of table [vocab, hidden] of `table_type`. ids [rows]: a token id, or -1 - i for
// sampled[i], which the step before left there (negative there: that row failed; the row becomes token 0).
void embed(Stream& stream, const Tensor& out, const void* table, DType table_type, const std::int32_t* ids,
           const std::int32_t* sampled);

// residual += delta (when it has data); out = residual / sqrt(mean(residual^2) + eps) * weight. residual f32|bf16|f16,
// delta and out f32|bf16|f16, weight [hidden] f32. Sums in float, in an order given by hidden alone.
void rms_norm(Stream& stream, const Tensor& out, const Tensor& residual, const Tensor& delta, const float* weight,
              float eps);

// out [rows, inter] = silu(gate_up[:, :inter]) * gate_up[:, inter:].
void silu_mul(Stream& stream, const Tensor& out, const Tensor& gate_up);

// out [out.rows, cols] = in[rows[i], :], same type.
void gather_rows(Stream& stream, const Tensor& out, const Tensor& in, const std::int32_t* rows);

// out [rows, ranks * cols] = pieces [ranks][rows, cols] side by side, same type (f32).
void side_by_side(Stream& stream, const Tensor& out, const void* pieces, int ranks);

// One layer of the cache: [block][k, v][kv head][slot][head_dim], blocks of block_len slots.
struct CacheLayer {
  void* data = nullptr;
  DType dtype = DType::bf16;
  int kv_heads = 0, head_dim = 0, block_len = 0;

  // In elements.
  CHARONIA_HD std::int64_t head_size() const { return static_cast<std::int64_t>(block_len) * head_dim; }
  CHARONIA_HD std::int64_t block_size() const { return 2 * kv_heads * head_size(); }
  CHARONIA_HD std::int64_t k_at(std::int64_t block, int kv_head, int slot) const {
    return block * block_size() + kv_head * head_size() + static_cast<std::int64_t>(slot) * head_dim;
  }
  CHARONIA_HD std::int64_t v_at(std::int64_t block, int kv_head, int slot) const {
    return k_at(block, kv_heads + kv_head, slot);
  }
};

// qkv [rows, (heads + 2 kv_heads) * head_dim] f32|bf16|f16: q heads, k heads, v heads. Rotates q in place; rotates k and
// stores k and v, both rounded to the cache's type, into slot kv_slots[row] (block * block_len + slot in the block; -1:
// the row is padding and stores nothing). positions [rows]; cos_sin [positions, head_dim] f32: pairs (d, d + head_dim/2),
// cosines in the first half of a row, sines in the second.
void rotary_store(Stream& stream, const Tensor& qkv, const float* cos_sin, const CacheLayer& cache, int heads,
                  const std::int32_t* positions, const std::int32_t* kv_slots);

}  // namespace charonia::cuda
