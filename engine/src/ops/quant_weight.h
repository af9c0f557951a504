// Quantised weights: the common form of all formats, before a device packs it into its own layout.
//
// A weight [rows, cols] (out_features, in_features) has a code for each element. `group` columns of a row share a scale
// and, if the format has zeros, a zero:
//   weight[r, c] = scale[r, g] * (number(code[r, c]) - zero[r, g]) + minimum[r, g],  g = c / group
// Only GGUF's types have minimums. A zero is a whole number; a minimum is any number.
// If a format shares scales between rows (one for the whole tensor, blocks of 128 x 128), they are repeated for every
// row. If a format does not quantise columns in their own order (GPTQ's desc_act), the columns are sorted by group, and
// order() returns the input feature of each column.
#pragma once

#include <array>
#include <compare>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/dtype.h"
#include "ops/tensor.h"

namespace charonia::ops {

// The number formats of codes.
enum class Code : std::uint8_t {
  u4,       // 0 .. 15
  i8,       // two's complement
  f8_e4m3,  // OCP FP8 E4M3: no infinities; 0x7f and 0xff are NaN, which readers reject
  f4_e2m1,  // OCP MX FP4 in the low 4 bits: a sign, and 0, 0.5, 1, 1.5, 2, 3, 4 or 6
};

std::string_view to_string(Code code);  // "int4", "int8", "fp8", "mxfp4", as in weight_type
constexpr int bits_of(Code code) { return code == Code::u4 || code == Code::f4_e2m1 ? 4 : 8; }
float number_of(Code code, std::uint8_t bits);  // 4-bit codes: the high bits are ignored

// How a GEMM converts its inputs before it multiplies them with the weight.
enum class Activations : std::uint8_t {
  as_is,      // no conversion: 16 bits, or fp32
  i8_token,   // int8: codes round(x / s), ties to even, with s = max |x| / 127 of each row; a row of zeros has s = 0
  i8_tensor,  // int8 with one scale for all: codes clamp(round(x / s), -127, 127)
  f8_token,   // FP8 E4M3 with s = max |x| / 448 of each row; not converted on devices without FP8 arithmetic
  f8_tensor,  // FP8 E4M3 with one scale for all, clamped to +-448; not converted on devices without FP8 arithmetic
};

struct QuantFormat {
  Code code = Code::u4;
  std::int64_t group = 0;         // columns of a group; divides cols. Equal to cols: one scale per row
  bool zeros = false;             // false: every zero is 8 for u4, and 0 for other codes
  DType scale_type = DType::f32;  // f32, f16, bf16 or f8_e8m0: a type that represents all scales exactly
  Activations activations = Activations::as_is;
  bool minimums = false;  // false: every minimum is 0

  auto operator<=>(const QuantFormat&) const = default;
};

// Whether the CUDA device dequantises weights of this format when it loads them. Its fast kernels support neither
// minimums nor groups of 16 columns, which most of GGUF's types have.
constexpr bool cuda_dequantises(const QuantFormat& format) {
  return format.activations == Activations::as_is && (format.minimums || format.group == 16);
}

std::string to_string(const QuantFormat& format);  // "int4, groups of 128, zeros", for people to read

// A quantised weight in host memory, as in its file.
class QuantSource {
 public:
  virtual ~QuantSource() = default;
  std::int64_t rows() const { return rows_; }
  std::int64_t cols() const { return cols_; }
  const QuantFormat& format() const { return format_; }
  std::int64_t groups() const { return cols_ / format_.group; }

  // Reads rows [first, first + n), one byte per code: codes [n, cols] (4-bit codes in the low bits, the high bits are
  // 0), scales [n, groups], zeros [n, groups]. Zeros are written only if the format has them, each in [-128, 127], or
  // in [0, 16] for u4. Several threads may call it at the same time. Throws Error(invalid_argument) with the tensor's
  // name for invalid values (NaN).
  virtual void read(std::int64_t first, std::int64_t n, std::uint8_t* codes, float* scales,
                    std::int8_t* zeros) const = 0;

  // Writes the minimums [n, groups] of rows [first, first + n), if the format has them. Like read().
  virtual void read_minimums(std::int64_t /*first*/, std::int64_t /*n*/, float* /*minimums*/) const {}

  // [cols]: column c of read() multiplies input feature order()[c]. Empty: column c multiplies feature c.
  virtual std::span<const std::int32_t> order() const { return {}; }
  // The static scale s of i8_tensor and f8_tensor, finite and greater than 0.
  virtual float input_scale() const { return 0; }
  // The name in the checkpoint, for messages.
  virtual std::string name() const = 0;

 protected:
  std::int64_t rows_ = 0, cols_ = 0;
  QuantFormat format_;
};

// Reads a quantised weight row by row as numbers.
class DequantisedRows {
 public:
  // The source must live as long as the reader.
  explicit DequantisedRows(const QuantSource& source);
  // Returns the weights [cols] of a row in the order of the input features, each rounded once. They are valid until the
  // next call. Fast if rows are requested in ascending order.
  std::span<const float> at(std::int64_t row);

 private:
  const QuantSource* source_;
  std::array<float, 256> numbers_{};      // of all codes
  std::int64_t first_ = 0, count_ = 0;    // the rows in the following members
  std::vector<std::uint8_t> codes_;       // [count, cols]
  std::vector<float> scales_, minimums_;  // [count, groups]
  std::vector<std::int8_t> zeros_;        // [count, groups]
  std::vector<float> columns_, row_;      // a row in the order of the source; and of the features, if it differs
};

// The weights of one quantised expert, like ExpertSource. All experts of a layer have one format for gate and up, and
// one format for down.
struct QuantExpertSource {
  const QuantSource* gate = nullptr;
  const QuantSource* up = nullptr;
  const QuantSource* down = nullptr;
  ExpertBiases bias{};
};

}  // namespace charonia::ops
