// How rms_norm() normalises. In a header of its own, because the CPU's kernels include it.
#pragma once

namespace charonia::ops {

// norm(x, w) = x / sqrt(mean(x^2) + eps) * w. Pointers are the device's.
struct NormParams {
  const float* weight = nullptr;  // [hidden]; null: out is the residual, without a norm
  float eps = 0;
  const float* delta_weight = nullptr;  // [hidden]: delta is normalised before it is added; null: it is not
  float delta_scale = 1;                // delta, or its norm, is multiplied by it
  bool subtract_mean = false;           // out = norm(residual - mean(residual), weight): LayerNorm without bias
};

}  // namespace charonia::ops
