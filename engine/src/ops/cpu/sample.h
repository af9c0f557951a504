// Samples a token from a row of logits.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "ops/cpu/candidates.h"
#include "ops/cpu/kernels.h"
#include "ops/step.h"

namespace charonia::ops::cpu {

// A number in [0, 1) with 53 bits, a function of its arguments: SplitMix64 (Steele, Lea and Flood, "Fast splittable
// pseudorandom number generators", 2014) over a stream that begins at the mixed seed.
double random_unit(std::uint64_t seed, std::int64_t position);

// Scratch memory for sampling; each thread has its own.
struct SampleScratch {
  Candidates candidates;
  std::vector<TokenLogit> top;
  std::vector<std::uint32_t> seen;  // [vocab] the mark of the last row that contains the token
  std::vector<std::int32_t> count;  // [vocab] number of occurrences, if seen
  std::uint32_t mark = 0;
  std::vector<std::pair<std::int32_t, float>> changed;  // changed tokens with their original logits
  std::vector<float> allowed;  // the logits of the tokens that the mask allows
};

// Changes the logits in this order: adds the bias; sets banned tokens to -infinity; repetition penalty (divides
// positive logits, multiplies others, once for every token of prompt and output); presence and frequency penalty (over
// the output); then waits for the token mask, if there is one, and drops tokens that it does not allow.
// Then applies temperature, top_k, top_p (the fewest most likely tokens whose probabilities, after top_k, sum to top_p
// or more) and min_p (relative to the most likely), and draws by the inverse of the cumulative probabilities, most
// likely first. A row with a target is not sampled. Ties always go to the lower id. A token with less than e^-80 times
// the probability of the most likely is never drawn. Throws Error(invalid_argument) if no token is left,
// Error(internal) for NaN or +infinity among the logits, and the errors of the mask.
Sampled sample_row(std::span<float> logits, const SampleRow& row, const Kernels& kernels, SampleScratch& scratch);

}  // namespace charonia::ops::cpu
