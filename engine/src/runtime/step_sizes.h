// How many tokens and sequences a step may have where the user leaves it to the device (token_budget = 0,
// max_batch_size = 0).
//
// On the CPU: 512 tokens, 64 sequences. More tokens make it no faster, as its GEMMs are bound by arithmetic from a few
// dozen rows on, and let decoding requests wait for longer.
//
// On a GPU with S SMs (the minimum of all ranks' GPUs), of which a rank has F bytes free before its weights
// are loaded (the minimum of all ranks):
//
//     token_budget   = min(16 S, F / 8 MiB),   rounded down to a multiple of 256, within [512, 8192]
//     max_batch_size = min(2 S, F / 256 MiB),  rounded down to a multiple of 64, within [64, 512]
//
// 16 S: the GEMM of R rows with a weight of 4096 rows has R / 128 * 32 tiles of 128 x 128. With R = 16 S that is four
// tiles for each SM, so that a last round which is not full costs little. Wider weights have more.
// F / 8 MiB: the activations of a row take at most about half a MiB in today's models (hidden_units 8192, inter_size
// 28672, 16 bits), so that those of all rows take a sixteenth of the memory.
//
// 2 S: a decode step reads all weights once. It takes hardly longer with more rows until arithmetic takes as long as
// these reads, which is at as many rows as the GPU does 16-bit operations per byte that it reads: about 150 on an A100,
// 200 on an H200, 300 on an H100, 400 on an L4. 2 S is 216, 264, 264, 116. Beyond that each user pays for the next one.
// F / 256 MiB: keys and values of 2048 tokens of Llama-3-8B take so much. Sequences for which the cache has no room
// would only give their blocks back to each other.
//
// An H200 (S = 132, F = 139 GiB) has 2048 and 256 by that, an A100 of 80 GiB 1536 and 192, an L4 of 22 GiB 768 and 64.
#pragma once

#include <cstddef>
#include <string_view>

#include "charonia/config.h"

namespace charonia::runtime {

// Of a GPU that is not here and of which nothing but the memory is known: an H100's and an H200's.
inline constexpr int kUsualSms = 132;

// What the sizes follow from.
struct StepDevice {
  std::string_view device;     // "cpu" | "cuda" | "null"
  int sms = 0;                 // of a GPU; the CPU: not looked at
  std::size_t free_bytes = 0;  // the same
};

// Puts the device's sizes where the configuration has 0.
void resolve_step_sizes(EngineConfig& config, const StepDevice& device);

// Throws Error(internal) naming the setting where one is still 0: nothing computes with that.
void require_step_sizes(const EngineConfig& config);

}  // namespace charonia::runtime
