#include "ops/cuda/device/cuda_settings.h"

#include <cstdlib>

#include "base/text.h"
#include "charonia/error.h"

namespace charonia::cuda {
namespace {

std::string_view environment(const char* name) {
  const char* const value = std::getenv(name);
  return value == nullptr ? "" : value;
}

}  // namespace

Overlap parse_overlap(std::string_view setting) {
  if (setting.empty() || setting == "1" || setting == "early") return Overlap::early;
  if (setting == "0" || setting == "off") return Overlap::off;
  if (setting == "late") return Overlap::late;
  throw Error(ErrorCode::invalid_argument, cat("CHARONIA_CUDA_PDL = ", setting, ": expected off, early or late"));
}

int parse_decode_split(std::string_view setting) {
  if (setting.empty()) return 256;
  const auto positions = parse_number<int>(setting);
  if (!positions || (*positions != 64 && *positions != 128 && *positions != 256)) {
    throw Error(ErrorCode::invalid_argument,
                cat("CHARONIA_CUDA_DECODE_SPLIT = ", setting, ": expected 64, 128 or 256 positions"));
  }
  return *positions;
}

std::size_t parse_prefetch(std::string_view setting) {
  if (setting.empty()) return 0;
  const auto mib = parse_number<int>(setting);
  if (!mib || *mib < 0 || *mib > 64) {
    throw Error(ErrorCode::invalid_argument, cat("CHARONIA_CUDA_PREFETCH = ", setting, ": expected 0 to 64 MiB"));
  }
  return static_cast<std::size_t>(*mib) << 20;
}

// All kernels use the same division. An SM must be empty before its division changes, so kernels with different
// divisions do not overlap. 100, the maximum of shared memory (228 of 256 KB on compute capability 9.0), allows two
// blocks of attention or three of a GEMM per SM. A GEMM with few rows then has 28 KB of L1 cache for its input. Not
// measured.
int parse_carveout(std::string_view setting) {
  if (setting.empty()) return 100;
  const auto percent = parse_number<int>(setting);
  if (!percent || *percent < -1 || *percent > 100) {
    throw Error(ErrorCode::invalid_argument,
                cat("CHARONIA_CUDA_CARVEOUT = ", setting, ": expected a percentage, 0 to 100, or -1"));
  }
  return *percent;
}

Overlap overlap_setting() {
  static const auto value = parse_overlap(environment("CHARONIA_CUDA_PDL"));
  return value;
}

int decode_split_setting() {
  static const int value = parse_decode_split(environment("CHARONIA_CUDA_DECODE_SPLIT"));
  return value;
}

std::size_t prefetch_setting() {
  static const auto value = parse_prefetch(environment("CHARONIA_CUDA_PREFETCH"));
  return value;
}

int carveout_setting() {
  static const int value = parse_carveout(environment("CHARONIA_CUDA_CARVEOUT"));
  return value;
}

void check_settings() {
  overlap_setting();
  decode_split_setting();
  prefetch_setting();
  carveout_setting();
  unproven_setting();
}

}  // namespace charonia::cuda
