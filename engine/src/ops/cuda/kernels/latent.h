// Latent attention (Operations::latent_store()): the store of latents, and attention over them.
#pragma once

#include <cstdint>

#include "ops/cuda/device/runtime.h"
#include "ops/cuda/kernels/attention.h"
#include "ops/cuda/kernels/rows.h"

namespace charonia::cuda {

// A latent layer of the cache: [block][slot][row_dim]. Its CacheLayer has one head of row_dim / 2 elements, so that k
// and v together have the size of a row.
inline int latent_row(const CacheLayer& cache) { return 2 * cache.head_dim; }

// Like Operations::latent_store(). All tensors and the cache have one type: f32, bf16 or f16. kv_slots, positions,
// rotary_rows: as in rotary_store().
void latent_store(Stream& stream, const Tensor& queries, const Tensor& plain, const Tensor& q, const Tensor& latent,
                  const ops::LatentParams& how, const CacheLayer& cache, int heads, const std::int32_t* positions,
                  const std::int32_t* rotary_rows, const std::int32_t* kv_slots);

// out [rows, heads * values] = attention over latents; queries [rows, heads * row_dim] from latent_store(). shape,
// work: as in attention(), for heads of row_dim elements; partial results are not used.
void latent_attention(Stream& stream, const DeviceInfo& device, const Tensor& out, const Tensor& queries,
                      const CacheLayer& cache, const AttentionShape& shape, float scale, const AttentionWork& work);

}  // namespace charonia::cuda
