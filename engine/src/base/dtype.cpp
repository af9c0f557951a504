#include "base/dtype.h"

#include <array>

#include "base/text.h"
#include "charonia/error.h"

namespace charonia {

std::string_view to_string(DType type) {
  constexpr std::array<std::string_view, 9> kNames = {"fp32",  "fp16", "bf16",     "int32",   "int64",
                                                      "uint8", "int8", "fp8_e4m3", "fp8_e8m0"};
  return kNames.at(static_cast<std::size_t>(type));
}

DType weight_dtype(std::string_view name) {
  if (name == "bf16") return DType::bf16;
  if (name == "fp16") return DType::f16;
  if (name == "fp32") return DType::f32;
  throw Error(ErrorCode::unsupported,
              cat("weight_type = '", name, "' is not supported: it must be bf16, fp16 or fp32"));
}

std::uint16_t float_to_f16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const auto sign = static_cast<std::uint16_t>((bits >> 16) & 0x8000U);
  const std::uint32_t magnitude = bits & 0x7fffffffU;
  std::uint32_t out = 0;
  if (magnitude > 0x7f800000U) {
    out = 0x7e00U | ((magnitude >> 13) & 0x3ffU);
  } else if (magnitude >= 0x477ff000U) {  // 65520 and above round to infinity
    out = 0x7c00U;
  } else if (magnitude < 0x38800000U) {  // below 2^-14: adding 0.5 makes the hardware round to a multiple of 2^-24
    out = std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude) + 0.5F) - 0x3f000000U;
  } else {
    out = (magnitude + 0xfffU + ((magnitude >> 13) & 1U) - (112U << 23)) >> 13;
  }
  return static_cast<std::uint16_t>(sign | out);
}

}  // namespace charonia
