// What the tests of the operations share: random tensors, host references in double, the instruction sets there are.
#pragma once

#include <array>
#include <cmath>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "ops/cpu/cpu_ops.h"
#include "ops/cpu/dispatch.h"
#include "ops/ops.h"

namespace charonia::ops {

using Random = std::mt19937;

inline int uniform(Random& random, int low, int high) { return std::uniform_int_distribution<int>(low, high)(random); }

// A row-major matrix in an element type, with the values that it holds after rounding to that type.
struct Matrix {
  DType dtype = DType::f32;
  std::int64_t rows = 0, cols = 0, stride = 0;
  std::vector<std::byte> bytes;

  Matrix() = default;
  Matrix(DType type, std::int64_t r, std::int64_t c, std::int64_t gap = 0)
      : dtype(type),
        rows(r),
        cols(c),
        stride(c + gap),
        bytes(static_cast<std::size_t>(r * (c + gap)) * size_of(type)) {}

  static Matrix random(Random& random, DType type, std::int64_t rows, std::int64_t cols, float scale = 1,
                       std::int64_t gap = 0) {
    Matrix m(type, rows, cols, gap);
    std::normal_distribution<float> normal(0, scale);
    for (std::int64_t r = 0; r < rows; ++r) {
      for (std::int64_t c = 0; c < cols; ++c) m.set(r, c, normal(random));
    }
    return m;
  }

  float at(std::int64_t r, std::int64_t c) const {
    const auto i = static_cast<std::size_t>(r * stride + c);
    std::uint16_t half = 0;
    float value = 0;
    switch (dtype) {
      case DType::f32:
        std::memcpy(&value, &bytes[4 * i], 4);
        return value;
      case DType::f16:
        std::memcpy(&half, &bytes[2 * i], 2);
        return f16_to_float(half);
      default:
        std::memcpy(&half, &bytes[2 * i], 2);
        return bf16_to_float(half);
    }
  }
  void set(std::int64_t r, std::int64_t c, float value) {
    const auto i = static_cast<std::size_t>(r * stride + c);
    const std::uint16_t half = dtype == DType::f16 ? float_to_f16(value) : float_to_bf16(value);
    if (dtype == DType::f32) {
      std::memcpy(&bytes[4 * i], &value, 4);
    } else {
      std::memcpy(&bytes[2 * i], &half, 2);
    }
  }
  Tensor tensor() { return {bytes.data(), dtype, rows, cols, stride}; }
  // Rows [begin, end), sharing the data.
  Tensor slice(std::int64_t begin, std::int64_t end) {
    return {bytes.data() + static_cast<std::size_t>(begin * stride) * size_of(dtype), dtype, end - begin, cols, stride};
  }
  HostMatrix host() const { return {bytes.data(), dtype, rows, cols}; }
  bool same_bits(std::int64_t r, const Matrix& other, std::int64_t other_row) const {
    return std::memcmp(bytes.data() + static_cast<std::size_t>(r * stride) * size_of(dtype),
                       other.bytes.data() + static_cast<std::size_t>(other_row * other.stride) * size_of(dtype),
                       static_cast<std::size_t>(cols) * size_of(dtype)) == 0;
  }
};

// Half a unit in the last place, relative: what one rounding to the type may change.
inline double rounding(DType type) { return type == DType::f32 ? 0x1p-24 : type == DType::f16 ? 0x1p-11 : 0x1p-8; }

inline std::unique_ptr<Ops> make_ops(std::string_view isa, int threads) {
  return std::make_unique<cpu::CpuOps>(threads, cpu::instruction_set(isa));
}

// Names of all instruction sets that this processor has, for parametrised tests.
inline std::vector<std::string> isa_names() {
  std::vector<std::string> names;
  for (const auto& isa : cpu::instruction_sets()) names.emplace_back(isa.name);
  return names;
}

inline constexpr std::array kWeightTypes = {DType::bf16, DType::f16, DType::f32};

}  // namespace charonia::ops
