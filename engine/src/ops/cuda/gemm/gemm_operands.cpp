#include "ops/cuda/gemm/gemm_operands.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <random>

#include "base/dtype.h"
#include "base/text.h"
#include "charonia/error.h"
#include "ops/cuda/gemm/gemm_runner.h"
#include "ops/cuda/kernels/quant_gemm.h"
#include "ops/cuda/kernels/quant_layout.h"

namespace charonia::cuda {
namespace {

// Both are primes, so that the rows of an input differ, and tiles of it too.
constexpr std::size_t kNumbers = 65521;
constexpr std::int64_t kRows = 61;

std::size_t rounded(std::size_t bytes) {
  return static_cast<std::size_t>(round_up(static_cast<std::int64_t>(bytes), 256));
}

std::size_t matrix_bytes(DType type, std::int64_t rows, std::int64_t stride) {
  return rounded(static_cast<std::size_t>(rows * stride) * size_of(type));
}

// The stride of a checked output: a wrong store behind the columns of the GEMM shows.
std::int64_t checked_stride(const Gemm& gemm) { return round_up(gemm.n, 8) + 8; }

std::int64_t rows_of(const Gemm& gemm) { return std::max(gemm.rows, gemm.row_capacity); }

// Bytes of the input, which has one more row, and both outputs.
std::size_t row_bytes(const Gemm& gemm) {
  return matrix_bytes(gemm.type, rows_of(gemm) + 1, gemm.in_stride) +
         2 * matrix_bytes(gemm.out_type, rows_of(gemm), checked_stride(gemm));
}

// The type of inputs, and of weights that are not quantised or are multiplied in 8 bits.
DType operand_type(const Gemm& gemm) {
  if (!is_w8a8(gemm)) return gemm.type;
  return gemm.quant->format.code == ops::Code::f8_e4m3 ? DType::f8_e4m3 : DType::i8;
}

void put(DType type, float x, std::byte* to) {
  const auto copy = [&](auto bits) { std::memcpy(to, &bits, sizeof bits); };
  constexpr std::array<std::uint8_t, 4> kFp8{0, 0x38, 0x40, 0x44};  // 0 to 3
  switch (type) {
    case DType::f32:
      return copy(x);
    case DType::f16:
      return copy(float_to_f16(x));
    case DType::f8_e4m3:
      return copy(static_cast<std::uint8_t>(kFp8.at(static_cast<std::size_t>(std::abs(x))) | (x < 0 ? 0x80U : 0U)));
    case DType::f8_e8m0:
      return copy(static_cast<std::uint8_t>(127 + std::ilogb(x)));
    case DType::i8:
      return copy(static_cast<std::int8_t>(x));
    default:
      return copy(float_to_bf16(x));
  }
}

// The weights [n, k] of experts as one.
Gemm stacked(Gemm gemm, std::int64_t matrices) {
  if (matrices > 1) gemm.n = matrices * round_up(gemm.n, kQuantRows);
  return gemm;
}

}  // namespace

void repeat(Stream& stream, std::byte* to, const std::vector<std::byte>& block, std::size_t bytes) {
  auto done = std::min(bytes, block.size());
  stream.upload(to, block.data(), done, "operands of a GEMM");
  for (; done < bytes; done *= 2) stream.copy(to + done, to, std::min(done, bytes - done), "operands of a GEMM");
}

std::size_t copies_of(const DeviceInfo& device, std::size_t bytes) {
  return std::clamp<std::size_t>(3 * device.l2_bytes / bytes + 1, 1, kMaxTimedGemms);
}

std::vector<float> measured_scales(std::size_t rows) {
  std::vector<float> out(rows);
  for (std::size_t row = 0; row < rows; ++row) out[row] = std::ldexp(0x1p-8F, static_cast<int>(row % 3));
  return out;
}

std::size_t GemmOperands::bytes(const DeviceInfo& device, const Gemm& gemm) {
  return copies_of(device, rounded(weight_bytes(gemm))) * rounded(weight_bytes(gemm)) + row_bytes(gemm);
}

std::size_t GemmOperands::exact_bytes(const Gemm& gemm, std::int64_t matrices) {
  const auto parts = exact_parts(stacked(gemm, matrices));
  return rounded(parts.weight.bytes) + rounded(parts.bias.bytes) + rounded(parts.scales.bytes) +
         rounded(parts.zeros.bytes) + row_bytes(gemm);
}

const void* GemmOperands::weight(int i) const {
  return weights_ + static_cast<std::size_t>(i) % copies_ * weight_bytes_;
}

const void* GemmOperands::second_row(const Gemm& gemm) {
  const auto stride = static_cast<std::size_t>(gemm.in_stride) * size_of(operand_type(gemm));
  return static_cast<const std::byte*>(gemm.in) + stride;
}

GemmOperands::Parts GemmOperands::exact_parts(const Gemm& gemm) {
  Parts out{.weight = {Numbers::weights, operand_type(gemm), weight_bytes(gemm)}};
  const auto columns = static_cast<std::size_t>(gemm.n);
  if (gemm.bias != nullptr) out.bias = {Numbers::weights, DType::f32, columns * sizeof(float)};
  if (is_w8a8(gemm)) {
    out.scales = {Numbers::scales, DType::f32, columns * sizeof(float)};
  } else if (gemm.quant) {
    const auto& format = gemm.quant->format;
    const auto groups = static_cast<std::size_t>(round_up(gemm.n, kQuantRows) * quant_groups(format, gemm.k));
    out.weight.type = format.code == ops::Code::f8_e4m3 ? DType::f8_e4m3 : DType::i8;
    if (ops::bits_of(format.code) == 4) out.weight.numbers = Numbers::random_bytes;
    out.scales = {Numbers::scales, format.scale_type, groups * size_of(format.scale_type)};
    if (gemm.quant->zeros != nullptr) out.zeros = {Numbers::zeros, DType::i8, groups};
  }
  return out;
}

const std::vector<std::byte>& GemmOperands::random(Numbers numbers, DType type) {
  auto& out = random_[{numbers, type}];
  if (!out.empty()) return out;
  const auto size = size_of(type);
  out.resize(kNumbers * size);
  std::mt19937 engine(static_cast<unsigned>(numbers));
  std::normal_distribution<float> normal;
  const auto whole = [&](int from, int to) {
    return static_cast<float>(std::uniform_int_distribution<int>(from, to)(engine));
  };
  for (std::size_t i = 0; i < kNumbers; ++i) {
    auto* const to = out.data() + i * size;
    if (numbers == Numbers::random_bytes) {
      *to = static_cast<std::byte>(engine());
    } else if (numbers == Numbers::normal && type == DType::f8_e4m3) {
      const auto bits = engine();
      *to = static_cast<std::byte>((bits & 0x87U) | (4 + bits / 256 % 6) << 3);
    } else {
      put(type,
          numbers == Numbers::normal   ? normal(engine)
          : numbers == Numbers::codes  ? whole(-127, 127)
          : numbers == Numbers::zeros  ? whole(0, 3)
          : numbers == Numbers::scales ? std::exp2(whole(-1, 1))
                                       : whole(-kMaxCheckedBias, kMaxCheckedBias),
          to);
    }
  }
  return out;
}

// The input, with one more row and with zeros beyond k, and both outputs.
void GemmOperands::lay_out_rows(Stream& stream, Gemm& gemm, std::byte* at, Numbers kind) {
  gemm.in = at;
  const auto& numbers = random(kind, operand_type(gemm));
  const auto element = size_of(operand_type(gemm));
  const auto rows = static_cast<std::size_t>(std::min(kRows, rows_of(gemm) + 1));
  const auto columns = static_cast<std::size_t>(gemm.k), stride = static_cast<std::size_t>(gemm.in_stride) * element;
  std::vector<std::byte> block(rows * stride);
  for (std::size_t row = 0; row < rows; ++row) {
    for (std::size_t done = 0; done < columns;) {
      const auto from = (row * columns + done) % kNumbers, count = std::min(columns - done, kNumbers - from);
      std::memcpy(block.data() + row * stride + done * element, numbers.data() + from * element, count * element);
      done += count;
    }
  }
  repeat(stream, at, block, static_cast<std::size_t>(rows_of(gemm) + 1) * stride);
  at += matrix_bytes(gemm.type, rows_of(gemm) + 1, gemm.in_stride);
  gemm.out = at;
  gemm.out_stride = kind == Numbers::inputs ? checked_stride(gemm) : round_up(gemm.n, 8);
  out_bytes_ = matrix_bytes(gemm.out_type, rows_of(gemm), gemm.out_stride);
  second_out_ = at + out_bytes_;
}

void GemmOperands::check_room(std::size_t bytes) const {
  if (bytes <= memory_.bytes()) return;
  throw Error(ErrorCode::internal, cat("operands of ", bytes, " bytes in a memory of ", memory_.bytes()));
}

Gemm GemmOperands::lay_out(Stream& stream, const DeviceInfo& device, const Gemm& gemm) {
  check_room(bytes(device, gemm));
  auto out = gemm;
  auto* at = memory_.as<std::byte>();
  weights_ = at;
  weight_bytes_ = rounded(weight_bytes(gemm));
  copies_ = copies_of(device, rounded(weight_bytes(gemm)));
  out.weight = weights_;
  for (std::size_t i = 0; i < copies_; ++i, at += weight_bytes_) {
    stream.copy(at, gemm.weight, cuda::weight_bytes(gemm), "weights to measure with");
  }
  const bool codes = gemm.quant && (has_integer_inputs(gemm.quant->format) || operand_type(gemm) == DType::i8);
  lay_out_rows(stream, out, at, codes ? Numbers::codes : Numbers::normal);
  return out;
}

Gemm GemmOperands::lay_out_exact(Stream& stream, const Gemm& gemm, std::int64_t matrices) {
  check_room(exact_bytes(gemm, matrices));
  auto out = gemm;
  auto* at = memory_.as<std::byte>();
  const auto parts = exact_parts(stacked(gemm, matrices));
  const auto lay = [&](const Part& part) {
    auto* const to = at;
    if (part.bytes > 0) repeat(stream, to, random(part.numbers, part.type), part.bytes);
    at += rounded(part.bytes);
    return to;
  };
  out.weight = lay(parts.weight);
  if (gemm.bias != nullptr) out.bias = reinterpret_cast<const float*>(lay(parts.bias));
  if (is_w8a8(gemm)) {
    out.quant->column_scales = reinterpret_cast<const float*>(lay(parts.scales));
  } else if (gemm.quant) {
    out.quant->scales = lay(parts.scales);
    if (gemm.quant->zeros != nullptr) out.quant->zeros = lay(parts.zeros);
  }
  lay_out_rows(stream, out, at, Numbers::inputs);
  return out;
}

}  // namespace charonia::cuda
