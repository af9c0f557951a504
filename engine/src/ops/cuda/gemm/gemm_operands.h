// Operands of GEMMs that are measured and checked at the start of an engine.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

#include "ops/cuda/kernels/gemm.h"

namespace charonia::cuda {

// Copies of a weight, so many that each has left the L2 cache before its next use; an input of random numbers, or of
// random codes where the kernel gets prepared inputs; the output; and a second output, with the same layout.
class GemmOperands {
 public:
  explicit GemmOperands(std::size_t bytes) : memory_(bytes, "operands to measure GEMMs with") {}

  static std::size_t copies(const DeviceInfo& device, const Gemm& gemm);
  static std::size_t bytes(const DeviceInfo& device, const Gemm& gemm);

  // Returns `gemm` with these operands. Its outputs have n columns, also with a gate.
  Gemm lay_out(Stream& stream, const DeviceInfo& device, const Gemm& gemm);

  // The i-th copy of the weight, i counted modulo their number.
  const void* weight(int i) const;
  void* second_out() const { return second_out_; }
  std::size_t out_bytes() const { return out_bytes_; }
  unsigned* counter() const { return counter_.as<unsigned>(); }

 private:
  enum class Numbers : std::uint8_t { f32, f16, bf16, f32_integers, f16_integers, bf16_integers, i8, f8 };
  static Numbers numbers_of(const Gemm& gemm);
  const std::vector<std::byte>& random(Numbers numbers);

  DeviceMemory memory_;
  DeviceMemory counter_{sizeof(unsigned)};
  const std::byte* weights_ = nullptr;
  std::size_t weight_bytes_ = 0, copies_ = 1, out_bytes_ = 0;
  void* second_out_ = nullptr;
  std::map<Numbers, std::vector<std::byte>> random_;
};

}  // namespace charonia::cuda
