// Common parts of the two methods to multiply fixed-point rows (FixedRow in kernels.h).
#pragma once

#include "ops/cpu/kernels/integers.h"
#include "ops/cpu/kernels/quant_codes.h"
#include "ops/cpu/kernels/quant_scales.h"

namespace charonia::ops::cpu::CHARONIA_ISA {
namespace {

constexpr int kWord_bytes = 4 * kPanel;  // one word of every feature of a panel
constexpr int kAhead_bytes = 8192;       // prefetch distance for codes

// A factor is kSteps * number + kMiddle, because the numbers of f4_e2m1 are multiples of one half.
template <Code C>
constexpr int kSteps = C == Code::f4_e2m1 ? 2 : 1;
template <Code C>
constexpr int kMiddle = C == Code::u4 ? 8 : C == Code::i8 ? 128 : 12;

// The data of a block of a group, for all rows of a call.
struct FixedBlock {
  const char* words = nullptr;          // in the panel
  std::int64_t count = 0;               // words of a feature
  const std::int16_t* copy = nullptr;   // the words, converted to factors; null: not available
  const float* scales = nullptr;        // [64] of the group; null: the group continues in the next block
  const std::int32_t* zeros = nullptr;  // [64], in the form that is subtracted from stored codes; null: kMiddle for all
  bool fresh = false;                   // the first block of its group
};

}  // namespace
}  // namespace charonia::ops::cpu::CHARONIA_ISA
