#include "ops/quant_weight.h"

#include <array>
#include <cmath>
#include <limits>

#include "base/text.h"

namespace charonia::ops {

std::string_view to_string(Code code) {
  switch (code) {
    case Code::u4:
      return "int4";
    case Code::i8:
      return "int8";
    case Code::f8_e4m3:
      return "fp8";
    case Code::f4_e2m1:
      return "mxfp4";
  }
  return "";
}

float number_of(Code code, std::uint8_t bits) {
  switch (code) {
    case Code::u4:
      return static_cast<float>(bits & 15U);
    case Code::i8:
      return static_cast<float>(static_cast<std::int8_t>(bits));
    case Code::f8_e4m3:
      return e4m3_to_float(bits);
    case Code::f4_e2m1: {
      constexpr std::array kMagnitudes{0.0F, 0.5F, 1.0F, 1.5F, 2.0F, 3.0F, 4.0F, 6.0F};
      const float magnitude = kMagnitudes[bits & 7U];
      return (bits & 8U) != 0 ? -magnitude : magnitude;
    }
  }
  return 0;
}

std::string to_string(const QuantFormat& format) {
  std::string out = cat(to_string(format.code), ", groups of ", format.group);
  if (format.zeros) out += ", zeros";
  if (format.minimums) out += ", minimums";
  switch (format.activations) {
    case Activations::as_is:
      break;
    case Activations::i8_token:
      out += ", int8 activations";
      break;
    case Activations::i8_tensor:
      out += ", int8 activations with one scale";
      break;
    case Activations::f8_token:
      out += ", fp8 activations";
      break;
    case Activations::f8_tensor:
      out += ", fp8 activations with one scale";
      break;
  }
  return out;
}

}  // namespace charonia::ops
