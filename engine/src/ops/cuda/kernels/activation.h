// The activations of gated layers (ops::Activation), in float.
#pragma once

#include "ops/cuda/device/portable.h"
#include "ops/operations.h"

namespace charonia::cuda {

// Both are x / (1 + 2^-y): silu with y = log2(e) x; gelu_tanh, because (1 + tanh(z)) / 2 = 1 / (1 + e^(-2 z)), with y =
// 2 log2(e) sqrt(2 / pi) (x + 0.044715 x^3).
template <ops::Activation::Kind kind>
CHARONIA_DEVICE float activation(float x) {
  float y = kLog2E * x;
  if constexpr (kind == ops::Activation::gelu_tanh) {
    constexpr float kLinear = 2.3022082F, kCubic = 0.10294324F;  // 2 log2(e) sqrt(2 / pi), and the same times 0.044715
    y = x * fmaf(x * x, kCubic, kLinear);
  }
  return fast_divide(x, 1.0F + fast_exp2(-y));
}

CHARONIA_DEVICE float sigmoid(float x) {
  return fast_divide(1.0F, 1.0F + fast_exp2(-kLog2E * x));
}

// The output for the outputs of the gate and of up. NaN stays NaN.
template <ops::Activation::Kind kind>
CHARONIA_DEVICE float gated(const ops::Activation& how, float gate, float up) {
  if constexpr (kind == ops::Activation::clamped_swiglu) {
    if (gate > how.limit) gate = how.limit;
    if (up > how.limit) up = how.limit;
    if (up < -how.limit) up = -how.limit;
    return fast_divide(gate, 1.0F + fast_exp2(-kLog2E * how.alpha * gate)) * (up + 1.0F);
  } else {
    return activation<kind>(gate) * up;
  }
}
CHARONIA_DEVICE float gated(const ops::Activation& how, float gate, float up) {
  if (how.kind == ops::Activation::silu) return gated<ops::Activation::silu>(how, gate, up);
  if (how.kind == ops::Activation::gelu_tanh) return gated<ops::Activation::gelu_tanh>(how, gate, up);
  return gated<ops::Activation::clamped_swiglu>(how, gate, up);
}

}  // namespace charonia::cuda
