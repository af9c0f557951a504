// From a row of logits to a token.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "ops/cpu/candidates.h"
#include "ops/cpu/kernels.h"
#include "ops/step.h"

namespace charonia::ops::cpu {

// A number in [0, 1) with 53 bits, a function of its arguments alone: SplitMix64 (Steele, Lea and Flood, "Fast
// splittable pseudorandom number generators", 2014) over a stream that begins at the mixed seed.
double random_unit(std::uint64_t seed, std::int64_t position);

// What sampling of one row needs besides it; each thread has its own.
struct SampleScratch {
  Candidates candidates;
  std::vector<TokenLogit> top;
  std::vector<std::uint32_t> seen;  // [vocab] the row's mark in which a token was seen last
  std::vector<std::int32_t> count;  // [vocab] how often, where seen
  std::uint32_t mark = 0;
  std::vector<std::pair<std::int32_t, float>> changed;  // tokens with the logits they had
};

// The logits are changed in this order: bias is added, banned tokens get -infinity, repetition penalty (positive logits
// are divided, others multiplied, once for every token of prompt and output), presence and frequency penalty (over the
// output); where there is a mask it is waited for then, and what it does not allow gets -infinity. Then temperature,
// top_k, top_p (the fewest most likely tokens whose probabilities, after top_k, sum to top_p or more), min_p (relative
// to the most likely), and a draw by the inverse of the cumulated probabilities, most likely first. A row with a
// target is not sampled. Ties go to the lower id everywhere. A token less likely than e^-80 times the most likely is never drawn.
// Throws Error(invalid_argument) when no token is left, Error(internal) for NaN or +infinity among the logits, and what
// the mask throws.
Sampled sample_row(std::span<float> logits, const SampleRow& row, const Kernels& kernels, SampleScratch& scratch);

}  // namespace charonia::ops::cpu
