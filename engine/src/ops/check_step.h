// What every device checks of a step before it takes it.
#pragma once

#include <cstdint>

#include "ops/step.h"

namespace charonia::ops {

// Throws Error(internal) when a limit is less than 1.
void check_limits(const StepLimits& limits);

// What is known of an engine's steps and cache. 0: not known, and not checked.
struct StepFacts {
  std::int64_t vocab = 0;  // of the embedding
  int block_len = 0;
  int num_blocks = 0;
  // StepLimits
  int max_rows = 0, max_sequences = 0, max_positions = 0;
};

// Throws Error(internal) when an array's size, an id, a position, a table or a row is out of its range.
// sampled_before: the number of sample rows of the step before.
void check_step(const StepInput& input, const StepFacts& facts, std::int64_t sampled_before);

}  // namespace charonia::ops
