// The parameters of rms_norm(), in a separate header because the CPU's kernels include it.
#pragma once

namespace charonia::ops {

// norm(x, w) = x / sqrt(mean(x^2) + eps) * w. Pointers are device pointers.
struct NormParams {
  const float* weight = nullptr;  // [hidden]; null: no norm, `out` is the residual
  float eps = 0;
  const float* delta_weight = nullptr;  // [hidden]: weight of a norm of delta before it is added; null: no such norm
  float delta_scale = 1;                // factor of delta, or of its norm
  float residual_scale = 1;             // factor of the residual before delta is added; 0: the residual is not read
  bool subtract_mean = false;           // out = norm(residual - mean(residual), weight): LayerNorm without bias
};

}  // namespace charonia::ops
