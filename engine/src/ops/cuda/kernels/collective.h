// What is left to do with the shards of tensor-parallel ranks once they are in one place.
#pragma once

#include "ops/cuda/device/runtime.h"
#include "ops/tensor.h"

namespace charonia::cuda {

// out [rows, cols] f32|bf16|f16, rows one behind the other = the sum of shards [ranks][rows, cols] of the same type,
// added in the order of the ranks in float.
void sum_shards(Stream& stream, const ops::Tensor& out, const void* shards, int ranks);

}  // namespace charonia::cuda
