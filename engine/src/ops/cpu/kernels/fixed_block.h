// What the ways of multiplying fixed-point rows (FixedRow in kernels.h) share.
#pragma once

#include "ops/cpu/kernels/integers.h"
#include "ops/cpu/kernels/quant_codes.h"
#include "ops/cpu/kernels/quant_scales.h"

namespace charonia::ops::cpu::CHARONIA_ISA {
namespace {

constexpr int kWord_bytes = 4 * kPanel;  // a word of every feature of a panel
constexpr int kAhead_bytes = 8192;       // where memory is asked for codes

// What is multiplied is kSteps * number + kMiddle: numbers of f4_e2m1 are whole halves.
template <Code C>
constexpr int kSteps = C == Code::f4_e2m1 ? 2 : 1;
template <Code C>
constexpr int kMiddle = C == Code::u4 ? 8 : C == Code::i8 ? 128 : 12;

// What belongs to a block of a group, for all rows of a call.
struct FixedBlock {
  const char* words = nullptr;          // of the panel
  std::int64_t count = 0;               // of words of a feature
  const std::int16_t* copy = nullptr;   // the words as what is multiplied; null: they are not there
  const float* scales = nullptr;        // [64] of the group; null: the group goes on
  const std::int32_t* zeros = nullptr;  // [64], as they are subtracted from stored codes; null: kMiddle of all
  bool fresh = false;                   // the first of its group
};

}  // namespace
}  // namespace charonia::ops::cpu::CHARONIA_ISA
