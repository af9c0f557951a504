// The memory of a step's tensors: one allocation, sized for the largest step.
#pragma once

#include <cstddef>
#include <cstdint>

#include "charonia/config.h"
#include "model/shard.h"
#include "ops/device.h"
#include "ops/step.h"

namespace charonia::model {

struct Activations {
  // experts_scratch_bytes: the scratch memory of ops.experts() for limits.max_rows rows.
  Activations(const ModelConfig& config, const Shard& shard, const ops::Precision& precision,
              const ops::StepLimits& limits, std::size_t experts_scratch_bytes);

  struct Part {
    std::size_t offset = 0;  // bytes
    DType dtype = DType::f32;
    std::int64_t cols = 0;
  };
  // The names are those in Decoder::issue().
  Part residual, delta, normed, qkv, squares, attended, gate_up, gated, router;
  Part shared_gate_up, shared_gated, shared;  // the first two share the memory of gate_up and gated
  Part last_residual, last_delta, last_normed, logits_share, logits;
  std::size_t experts_scratch = 0;  // offset
  std::size_t bytes = 0;
};

}  // namespace charonia::model
