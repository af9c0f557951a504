// The changes of a weight by LoRA adapters: out += scale * B (A in), for the rows of a step that have an adapter.
#pragma once

#include <cstddef>
#include <cstdint>

#include "ops/cuda/device/runtime.h"
#include "ops/cuda/low_rank_workspace.h"
#include "ops/tensor.h"

namespace charonia::cuda {

struct LowRankWork {
  const AdapterItem* items = nullptr;  // [max_items]
  const std::int32_t* rows = nullptr;  // [max_rows]: rows of the step, grouped by adapter
  std::int64_t max_items = 0, max_rows = 0;
  const std::byte* slots = nullptr;  // images of adapters (ops/low_rank.h), slot_bytes apart
  std::int64_t slot_bytes = 0;
  int weight = 0;  // its index in the images
  ops::AdapterSlots::Weight shape;
  float* workspace = nullptr;  // low_rank_floats(shape, max_rows)
};

// out [rows, n] of the type of in, or f32; in [rows, shape.in_features].
void add_adapters(Stream& stream, const ops::Tensor& out, const ops::Tensor& in, const LowRankWork& work);

}  // namespace charonia::cuda
