// Operations on the gathered shards of tensor-parallel ranks.
#pragma once

#include "ops/cuda/device/runtime.h"
#include "ops/tensor.h"

namespace charonia::cuda {

// out [rows, cols] f32|bf16|f16, contiguous rows, = the sum of shards [ranks][rows, cols] of the same type, added in
// rank order in float.
void sum_shards(Stream& stream, const ops::Tensor& out, const void* shards, int ranks);

}  // namespace charonia::cuda
