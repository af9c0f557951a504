// Operands of GEMMs that are measured and checked at the start of an engine.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "ops/cuda/kernels/gemm.h"

namespace charonia::cuda {

// Fills memory with repetitions of `block`.
void repeat(Stream& stream, std::byte* to, const std::vector<std::byte>& block, std::size_t bytes);

// So many copies of an operand that each has left the L2 cache before its next use in a measurement.
std::size_t copies_of(const DeviceInfo& device, std::size_t bytes);

// Scales of prepared inputs, whose codes are up to 127: 2^-8, 2^-7 and 2^-6, which differ between rows.
std::vector<float> measured_scales(std::size_t rows);

class GemmOperands {
 public:
  explicit GemmOperands(std::size_t bytes) : memory_(bytes, "operands to measure GEMMs with") {}

  // The bytes that lay_out() and lay_out_exact() need.
  static std::size_t bytes(const DeviceInfo& device, const Gemm& gemm);
  static std::size_t exact_bytes(const Gemm& gemm, std::int64_t matrices = 1);

  // Returns `gemm` with operands to measure it with: copies of its weight, so many that each has left the L2 cache
  // before its next use; an input of random numbers, or of random codes where the kernel gets prepared inputs; and two
  // outputs. Outputs have n columns, also with a gate.
  Gemm lay_out(Stream& stream, const DeviceInfo& device, const Gemm& gemm);

  // Returns `gemm` with operands to check it with. Inputs and biases are whole numbers from -3 to 3, weights are whole
  // numbers up to 15 or multiples of 0.5 up to 6, and scales are 0.5, 1 and 2. So float represents every sum of
  // products of up to 90,000 columns: kernels with any order of additions get the same sum, also with tensor cores that
  // drop low bits. Tensor cores keep 14 bits of sums of FP8 products. These sums stay below 2^13.
  // matrices: the number of quantised weights [n, k], one after the other, as experts have them.
  // Rows of the output have 8 or more columns behind the last one, which no kernel may write.
  Gemm lay_out_exact(Stream& stream, const Gemm& gemm, std::int64_t matrices = 1);

  // The input of such a GEMM from its second row on. There is one more row than the GEMM has, so as many rows follow.
  static const void* second_row(const Gemm& gemm);

  // The i-th copy of the weight, i counted modulo their number.
  const void* weight(int i) const;
  void* second_out() const { return second_out_; }
  std::size_t out_bytes() const { return out_bytes_; }
  unsigned* counter() const { return counter_.as<unsigned>(); }

 private:
  // normal: for FP8, codes with exponents 4 to 9 of 15. codes: -127 to 127. weights, inputs: -3 to 3. zeros: 0 to 3.
  // scales: 0.5, 1 and 2.
  enum class Numbers : std::uint8_t { normal, codes, weights, inputs, zeros, scales, random_bytes };
  struct Part {
    Numbers numbers = Numbers::weights;
    DType type = DType::bf16;
    std::size_t bytes = 0;  // 0: the GEMM has no such operand
  };
  struct Parts {
    Part weight{}, bias{}, scales{}, zeros{};
  };
  static Parts exact_parts(const Gemm& gemm);
  const std::vector<std::byte>& random(Numbers numbers, DType type);
  void check_room(std::size_t bytes) const;  // throws Error(internal)
  void lay_out_rows(Stream& stream, Gemm& gemm, std::byte* at, Numbers numbers);

  DeviceMemory memory_;
  DeviceMemory counter_{sizeof(unsigned)};
  const std::byte* weights_ = nullptr;
  std::size_t weight_bytes_ = 0, copies_ = 1, out_bytes_ = 0;
  void* second_out_ = nullptr;
  std::map<std::pair<Numbers, DType>, std::vector<std::byte>> random_;
};

}  // namespace charonia::cuda
