#include "ops/cpu/gemm_kernel.h"

#include <algorithm>

namespace charonia::ops::cpu {

GemmKernel gemm_kernel_for(const Kernels& kernels, DType weight, std::int64_t rows) {
  if (weight == DType::f16) return {.kernel = kernels.linear_f16};
  if (weight != DType::bf16) return {.kernel = kernels.linear_f32};
  if (rows <= kernels.two_panel_rows) return {.kernel = kernels.linear_bf16, .panels = 2};
  if (kernels.linear_bf16_widened == nullptr) return {.kernel = kernels.linear_bf16};
  return {.kernel = kernels.linear_bf16_widened,
          .row_block = rows >= kWidenedFrom ? kWidenedRowBlock : kRowBlock,
          .widened = true};
}

void multiply_panels(const GemmKernel& gemm, const PackedLinear& weight, std::int64_t panel, const Tensor& out,
                     const Tensor& in, std::int64_t row, std::int64_t rows) {
  const auto first = panel * kPanel, columns = std::min(gemm.panels * kPanel, out.cols - first);
  const auto* const a = static_cast<const std::byte*>(in.data);
  gemm.kernel({.a = a + static_cast<std::size_t>(row * in.stride) * size_of(in.dtype),
               .a_stride = in.stride,
               .rows = static_cast<int>(rows),
               .k = in.cols,
               .panel = weight.panel(panel),
               .panels = static_cast<int>(std::min(gemm.panels, weight.panels() - panel)),
               .out = static_cast<float*>(out.data) + row * out.stride + first,
               .out_stride = out.stride,
               .columns = static_cast<int>(columns),
               .bias = weight.bias() == nullptr ? nullptr : weight.bias() + first});
}

}  // namespace charonia::ops::cpu
