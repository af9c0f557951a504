// Calls functions with a value of an element type.
#pragma once

#include "base/dtype.h"
#include "base/text.h"
#include "charonia/error.h"
#include "ops/cuda/device/elements.h"

namespace charonia::cuda {

template <class F>
auto with_half(DType type, F f) {
  return type == DType::bf16 ? f(bf16{}) : f(f16{});
}

template <class F>
auto with_type(DType type, F f) {
  if (type == DType::f32) return f(float{});
  if (type == DType::bf16 || type == DType::f16) return with_half(type, f);
  throw Error(ErrorCode::internal, cat("no kernel computes with elements of ", to_string(type)));
}

}  // namespace charonia::cuda
