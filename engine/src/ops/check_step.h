// Checks that every device makes before it accepts a step or an operation.
#pragma once

#include <cstdint>

#include "base/cache_kind.h"
#include "ops/operations.h"
#include "ops/step.h"

namespace charonia::ops {

// Throws Error(internal) if a limit is less than 1.
void check_limits(const StepLimits& limits);

// Known facts about an engine's steps and cache. 0: unknown, not checked.
struct StepFacts {
  std::int64_t vocab = 0;  // rows of the embedding
  int block_len = 0;
  PerKind<int> num_blocks{};
  std::int64_t hidden_rows = 0;  // of the tensors that StepInput::hidden_rows refers to
  // As in StepLimits.
  int max_rows = 0, max_sequences = 0, max_positions = 0, max_logits_rows = 0;
};

// Throws Error(internal) if an array's size, an id, a position, a table or a row is out of its range. sampled_before:
// the number of sample rows of the previous step.
void check_step(const StepInput& input, const StepFacts& facts, std::int64_t sampled_before);

// Throws Error(internal) if rotary_store() cannot do this with heads of `head_dim` elements.
void check_rotation(const RotaryParams& how, int head_dim);

}  // namespace charonia::ops
