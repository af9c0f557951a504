// Settings of the device for measurements, from the environment.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "base/text.h"
#include "charonia/error.h"

namespace charonia::cuda {

// Programmatic dependent launch (CHARONIA_CUDA_PDL).
enum class Overlap : std::uint8_t {
  off,    // "0", "off": no kernel starts before the previous one has ended
  early,  // "1", "early", the default: a kernel lets the next one start when it starts itself
  late,   // "late": a kernel that supports it does so when it has requested its last data from memory
};

// Throw Error(invalid_argument) for values that are not valid; empty: the default.
Overlap parse_overlap(std::string_view setting);
int parse_decode_split(std::string_view setting);  // CHARONIA_CUDA_DECODE_SPLIT: 64, 128 or 256 positions, the default
std::size_t parse_prefetch(std::string_view setting);  // CHARONIA_CUDA_PREFETCH: MiB, 0 to 64; in bytes
// CHARONIA_CUDA_CARVEOUT: the percentage of an SM's memory that is shared memory and no L1 cache; -1: the driver
// decides for each kernel.
int parse_carveout(std::string_view setting);
// CHARONIA_CUDA_UNPROVEN: 0, the default, or 1. Defined here because the memory plan asks too, in builds without CUDA.
inline bool parse_unproven(std::string_view setting) {
  if (setting.empty() || setting == "0") return false;
  if (setting == "1") return true;
  throw Error(ErrorCode::invalid_argument, cat("CHARONIA_CUDA_UNPROVEN = ", setting, ": expected 0 or 1"));
}

// The values of the environment when the process first asks.
Overlap overlap_setting();
int decode_split_setting();
std::size_t prefetch_setting();
int carveout_setting();
inline bool unproven_setting() {
  static const bool value = [] {
    const char* const setting = std::getenv("CHARONIA_CUDA_UNPROVEN");
    return parse_unproven(setting == nullptr ? "" : setting);
  }();
  return value;
}
// Throws if one of them is not valid.
void check_settings();

}  // namespace charonia::cuda
