// The gated delta rule of recurrent layers.
#pragma once

#include <cstdint>

#include "ops/cuda/device/runtime.h"
#include "ops/cuda/kernels/short_conv.h"
#include "ops/operations.h"
#include "ops/tensor.h"

namespace charonia::cuda {

// Like Operations::delta_net(). qkv f32|bf16|f16. q, k and gates do not change.
void delta_net(Stream& stream, const ops::Tensor& qkv, const ops::Tensor& gates, const ops::DeltaNetParams& how,
               const StateLayer& layer, const StateRows& rows);

}  // namespace charonia::cuda
