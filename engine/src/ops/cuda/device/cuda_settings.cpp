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

void check_settings() {
  overlap_setting();
  decode_split_setting();
  prefetch_setting();
  unproven_setting();
}

}  // namespace charonia::cuda
