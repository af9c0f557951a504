// The gated delta rule of recurrent layers.
#pragma once

#include <cstdint>

#include "ops/cuda/device/runtime.h"
#include "ops/cuda/kernels/short_conv.h"
#include "ops/operations.h"
#include "ops/tensor.h"

namespace charonia::cuda {

// Like Operations::delta_net(). qkv f32|bf16|f16. q, k and gates do not change. items [num_items]: the sequences.
void delta_net(Stream& stream, const ops::Tensor& qkv, const ops::Tensor& gates, const ops::DeltaNetParams& how,
               const StateLayer& layer, const StateItem* items, std::int64_t num_items);

}  // namespace charonia::cuda
