// How a GEMM with a packed weight is computed: the one place that chooses among the kernels. What a row gets does
// not depend on the choice, since all of them compute an element in the same order.
#pragma once

#include <cstdint>

#include "ops/cpu/kernels.h"
#include "ops/cpu/packed_linear.h"
#include "ops/tensor.h"

namespace charonia::ops::cpu {

// Rows whose activations are widened at a time: enough to keep the GEMMs busy.
inline constexpr std::int64_t kWidenedRows = 2 * kWidenedRowBlock;

struct GemmKernel {
  void (*kernel)(const LinearArgs&) = nullptr;
  std::int64_t row_block = kRowBlock;  // rows that one call takes at most
  std::int64_t panels = 1;             // panels that one call takes at most
  bool widened = false;                // the kernel takes the activations of bf16 weights as floats
};

GemmKernel gemm_kernel_for(const Kernels& kernels, DType weight, std::int64_t rows);

// How many blocks of equal size `rows` rows are cut into, and how many rows a block has; the last may have fewer.
struct RowBlocks {
  RowBlocks(const GemmKernel& gemm, std::int64_t rows)
      : count((rows + gemm.row_block - 1) / gemm.row_block), size((rows + count - 1) / count) {}
  std::int64_t count, size;
};

// Rows [row, row + rows) of `in` and `out` times gemm.panels panels from `panel` on, or those that are left.
void multiply_panels(const GemmKernel& gemm, const PackedLinear& weight, std::int64_t panel, const Tensor& out,
                     const Tensor& in, std::int64_t row, std::int64_t rows);

// Multiplications of a GEMM with one panel.
inline std::int64_t work_of_panel(std::int64_t rows, std::int64_t in_features) { return rows * in_features * kPanel; }
// GEMMs of fewer multiplications than this take less time than waking a thread.
inline constexpr std::int64_t kSmallGemm = 65536;

}  // namespace charonia::ops::cpu
