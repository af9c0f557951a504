#include "ops/cuda/gemm/integer_parts.h"

#include <algorithm>

#include "ops/cuda/kernels/w8a8_gemm.h"

namespace charonia::cuda {
namespace {

std::int64_t sums_stride(std::int64_t rows) { return round_up(rows, 4); }  // aligned to 16 bytes

}  // namespace

bool has_integer_codes(const Gemm& gemm) {
  return is_w8a8(gemm) && gemm.quant->format.code == ops::Code::i8 && !gemm.packed;
}

std::size_t integer_part_bytes(const Gemm& gemm, std::int64_t rows) {
  return static_cast<std::size_t>(gemm.rows * sums_stride(rows)) * sizeof(std::int32_t);
}

std::vector<std::int64_t> integer_part_rows(const Gemm& gemm, std::size_t bytes, std::size_t l2_bytes) {
  std::vector<std::int64_t> all;
  for (const auto limit : {bytes, std::min(bytes, l2_bytes / 2)}) {
    const auto most = static_cast<std::int64_t>(limit / integer_part_bytes(gemm, kIntegerTileRows)) * kIntegerTileRows;
    if (most == 0) continue;
    const auto even = divide_up(gemm.n, divide_up(gemm.n, most));
    const auto rows = std::min(most, round_up(even, kIntegerTileRows));
    if (all.empty() || all.back() != rows) all.push_back(rows);
  }
  return all;
}

Gemm integer_part(const Gemm& gemm, std::int64_t first, std::int64_t rows, void* sums) {
  auto part = gemm;
  part.quant.reset();
  part.type = DType::i8;
  part.weight = static_cast<const std::byte*>(gemm.weight) + first * gemm.weight_stride;
  part.bias = nullptr;
  part.n = rows;
  part.out = sums, part.out_type = DType::i32, part.out_stride = sums_stride(rows);
  return part;
}

bool run_integers(Stream& stream, Blas& blas, const Gemm& gemm, std::int64_t rows, const BlasTactic& tactic, void* sums,
                  void* workspace, std::size_t workspace_bytes) {
  for (std::int64_t first = 0; first < gemm.n; first += rows) {
    const auto part = integer_part(gemm, first, std::min(rows, gemm.n - first), sums);
    if (!blas.run(stream, part, tactic, workspace, workspace_bytes)) return false;
    scale_sums(stream, gemm, first, part);
  }
  return true;
}

}  // namespace charonia::cuda
