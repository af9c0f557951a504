#include "ops/cuda/gemm/dequantised.h"

#include <algorithm>

#include "ops/cuda/kernels/quant_gemm.h"

namespace charonia::cuda {

Gemm dequantised_part(const Gemm& gemm, std::int64_t first, std::int64_t rows, const void* numbers) {
  auto part = gemm;
  part.quant.reset();
  part.weight = numbers;
  part.n = rows;
  part.bias = gemm.bias == nullptr ? nullptr : gemm.bias + first;
  part.out = static_cast<std::byte*>(gemm.out) + first * static_cast<std::int64_t>(size_of(gemm.out_type));
  return part;
}

bool run_dequantised(Stream& stream, Blas& blas, const Gemm& gemm, std::int64_t rows, const BlasTactic& tactic,
                     void* numbers, void* workspace, std::size_t workspace_bytes) {
  // Operands that the library would reject; dequantising would be useless.
  if (!aligned(gemm.in, gemm.in_stride, gemm.type) || !aligned(gemm.out, gemm.out_stride, gemm.out_type)) return false;
  for (std::int64_t first = 0; first < gemm.n; first += rows) {
    const auto part = dequantised_part(gemm, first, std::min(rows, gemm.n - first), numbers);
    dequantise(stream, gemm, first, part.n, numbers);
    if (!blas.run(stream, part, tactic, workspace, workspace_bytes)) return false;
  }
  return true;
}

}  // namespace charonia::cuda
