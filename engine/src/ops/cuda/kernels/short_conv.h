// The short convolution of recurrent layers.
#pragma once

#include <cstdint>

#include "ops/cuda/device/runtime.h"
#include "ops/cuda/graph/step_upload.h"
#include "ops/operations.h"
#include "ops/tensor.h"

namespace charonia::cuda {

// The slots of a layer of kind `state`.
struct StateLayer {
  float* data = nullptr;  // slot s: data + s * slot_floats
  std::int64_t slot_floats = 0;
};

// Like Operations::short_conv(). in f32|bf16|f16; out of the same type or f32. longest: the most rows that a sequence
// has; 0: not known, and a sequence has few rows.
void short_conv(Stream& stream, const ops::Tensor& out, const ops::Tensor& in, const ops::ShortConvParams& how,
                const StateLayer& layer, const StateRows& rows, std::int64_t longest);

}  // namespace charonia::cuda
