#include "ops/cuda/gemm/gemm_operands.h"

#include <algorithm>
#include <cstring>
#include <random>

#include "base/dtype.h"
#include "ops/cuda/gemm/gemm_runner.h"
#include "ops/cuda/kernels/quant_gemm.h"

namespace charonia::cuda {
namespace {

// Both are primes, so that the rows of an input differ, and tiles of it too.
constexpr std::size_t kNumbers = 65521;
constexpr std::int64_t kRows = 61;

std::size_t matrix_bytes(DType type, std::int64_t rows, std::int64_t stride) {
  return static_cast<std::size_t>(round_up(rows * stride * static_cast<std::int64_t>(size_of(type)), 256));
}

std::size_t weight_bytes_of(const Gemm& gemm) {
  return static_cast<std::size_t>(round_up(static_cast<std::int64_t>(weight_bytes(gemm)), 256));
}

std::int64_t rows_of(const Gemm& gemm) { return std::max(gemm.rows, gemm.row_capacity); }

}  // namespace

std::size_t GemmOperands::copies(const DeviceInfo& device, const Gemm& gemm) {
  return std::clamp<std::size_t>(3 * device.l2_bytes / weight_bytes_of(gemm) + 1, 1, kMaxTimedGemms);
}

std::size_t GemmOperands::bytes(const DeviceInfo& device, const Gemm& gemm) {
  return copies(device, gemm) * weight_bytes_of(gemm) + matrix_bytes(gemm.type, rows_of(gemm), gemm.in_stride) +
         2 * matrix_bytes(gemm.out_type, rows_of(gemm), round_up(gemm.n, 8));
}

const void* GemmOperands::weight(int i) const {
  return weights_ + static_cast<std::size_t>(i) % copies_ * weight_bytes_;
}

GemmOperands::Numbers GemmOperands::numbers_of(const Gemm& gemm) {
  if (is_w8a8(gemm)) return gemm.quant->format.code == ops::Code::f8_e4m3 ? Numbers::f8 : Numbers::i8;
  const bool integers = gemm.quant && has_integer_inputs(gemm.quant->format);
  if (gemm.type == DType::f32) return integers ? Numbers::f32_integers : Numbers::f32;
  if (gemm.type == DType::f16) return integers ? Numbers::f16_integers : Numbers::f16;
  return integers ? Numbers::bf16_integers : Numbers::bf16;
}

const std::vector<std::byte>& GemmOperands::random(Numbers numbers) {
  auto& out = random_[numbers];
  if (!out.empty()) return out;
  std::mt19937 engine(1);
  std::normal_distribution<float> normal;
  std::uniform_int_distribution<int> integer(-127, 127);
  const auto fill = [&]<class T>(T, auto make) {
    std::vector<T> values(kNumbers);
    std::ranges::generate(values, make);
    out.resize(values.size() * sizeof(T));
    std::memcpy(out.data(), values.data(), out.size());
  };
  const auto whole = [&] { return static_cast<float>(integer(engine)); };
  switch (numbers) {
    case Numbers::f32:
      fill(float{}, [&] { return normal(engine); });
      break;
    case Numbers::f16:
      fill(std::uint16_t{}, [&] { return float_to_f16(normal(engine)); });
      break;
    case Numbers::bf16:
      fill(std::uint16_t{}, [&] { return float_to_bf16(normal(engine)); });
      break;
    case Numbers::f32_integers:
      fill(float{}, whole);
      break;
    case Numbers::f16_integers:
      fill(std::uint16_t{}, [&] { return float_to_f16(whole()); });
      break;
    case Numbers::bf16_integers:
      fill(std::uint16_t{}, [&] { return float_to_bf16(whole()); });
      break;
    case Numbers::i8:
      fill(std::int8_t{}, [&] { return static_cast<std::int8_t>(integer(engine)); });
      break;
    case Numbers::f8:  // exponents 4 to 9 of 15
      fill(std::uint8_t{}, [&] {
        const auto bits = engine();
        return static_cast<std::uint8_t>((bits & 0x87U) | (4 + bits / 256 % 6) << 3);
      });
      break;
  }
  return out;
}

Gemm GemmOperands::lay_out(Stream& stream, const DeviceInfo& device, const Gemm& gemm) {
  auto out = gemm;
  auto* at = memory_.as<std::byte>();
  weights_ = at;
  weight_bytes_ = weight_bytes_of(gemm);
  copies_ = copies(device, gemm);
  out.weight = weights_;
  for (std::size_t i = 0; i < copies_; ++i, at += weight_bytes_) {
    stream.copy(at, gemm.weight, cuda::weight_bytes(gemm), "weights to measure with");
  }
  out.in = at;
  const auto& numbers = random(numbers_of(gemm));
  const auto element = numbers.size() / kNumbers;
  const auto rows = std::min(kRows, rows_of(gemm));
  const auto columns = static_cast<std::size_t>(gemm.k), stride = static_cast<std::size_t>(gemm.in_stride) * element;
  std::vector<std::byte> block(static_cast<std::size_t>(rows) * stride);  // zeros beyond k
  for (std::size_t row = 0; row < static_cast<std::size_t>(rows); ++row) {
    for (std::size_t done = 0; done < columns;) {
      const auto from = (row * columns + done) % kNumbers, count = std::min(columns - done, kNumbers - from);
      std::memcpy(block.data() + row * stride + done * element, numbers.data() + from * element, count * element);
      done += count;
    }
  }
  stream.upload(at, block.data(), block.size(), "inputs to measure with");
  const auto all = static_cast<std::size_t>(rows_of(gemm)) * stride;
  for (auto done = block.size(); done < all; done *= 2) {
    stream.copy(at + done, at, std::min(done, all - done), "inputs to measure with");
  }
  at += matrix_bytes(gemm.type, rows_of(gemm), gemm.in_stride);
  out.out = at;
  out.out_stride = round_up(gemm.n, 8);
  out_bytes_ = matrix_bytes(gemm.out_type, rows_of(gemm), out.out_stride);
  second_out_ = at + out_bytes_;
  return out;
}

}  // namespace charonia::cuda
