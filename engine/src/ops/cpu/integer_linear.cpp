#include "ops/cpu/integer_linear.h"

#include <algorithm>
#include <cmath>

#include "base/text.h"
#include "charonia/error.h"
#include "ops/cpu/dispatch.h"
#include "ops/cpu/integer_panel.h"
#include "ops/cpu/quant_linear.h"

namespace charonia::ops::cpu {

IntegerLinear::IntegerLinear(std::span<const QuantSource* const> parts, std::span<const HostMatrix> bias, DType data,
                             ThreadPool& pool, HugeArena& arena) {
  const QuantSource& first = *parts.front();
  const auto& format = first.format();
  const auto rows = check_parts(parts);
  type_ = data;
  k_ = first.cols();
  for (const auto n : rows) n_ += n;
  const auto group = format.group;
  if (group < 1 || k_ % group != 0 || (group != k_ && group % 4 != 0) || group > kIntegerGroup) {
    throw Error(ErrorCode::unsupported, cat(first.name(), ": groups of ", group, " columns in rows of ", k_,
                                            " are not supported. With 8-bit activations on the CPU, a group must be "
                                            "the whole row, or a multiple of 4 columns up to ",
                                            kIntegerGroup));
  }
  order_.assign(first.order().begin(), first.order().end());
  if (format.activations == Activations::i8_tensor) {
    for (const auto* part : parts) {
      if (!std::isfinite(part->input_scale()) || part->input_scale() <= 0) {
        throw Error(ErrorCode::invalid_argument,
                    cat(part->name(), ": the input scale ", part->input_scale(), " must be finite and greater than 0"));
      }
      input_scale_ = std::max(input_scale_, part->input_scale());
    }
  }
  shape_ = {.k = k_, .group = group, .has_zeros = format.zeros};
  set_bias(rows, bias);
  bytes_ = static_cast<std::size_t>(shape_.bytes() * panels());
  data_ = arena.allocate(bytes_);
  pool.parallel_for(panels(), 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t p = begin; p < end; ++p) pack(parts, p);
  });
}

void IntegerLinear::pack(std::span<const QuantSource* const> parts, std::int64_t panel_index) const {
  const auto groups = shape_.groups();
  std::vector<std::uint8_t> codes(static_cast<std::size_t>(kPanel * k_));
  std::vector<float> scales(static_cast<std::size_t>(kPanel * groups));
  std::vector<std::int8_t> zeros(shape_.has_zeros ? scales.size() : 0);
  std::int64_t first = 0, columns = 0;  // first: row of the part
  for (const auto* part : parts) {
    const auto begin = std::max(panel_index * kPanel, first),
               end = std::min((panel_index + 1) * kPanel, first + part->rows());
    if (begin < end) {
      part->read(begin - first, end - begin, codes.data() + columns * k_, scales.data() + columns * groups,
                 shape_.has_zeros ? zeros.data() + columns * groups : nullptr);
      columns += end - begin;
    }
    first += part->rows();
  }
  pack_integers(data_.get() + panel_index * shape_.bytes(), shape_, columns, codes.data(), scales.data(), zeros.data());
}

// With few rows, dot products, which read two panels together; with more rows, matrix tiles, if available.
GemmKernel IntegerLinear::gemm(const Kernels& kernels, std::int64_t rows) const {
  const auto integers = integer_kernels(kernels);
  const bool two_panels = rows <= kernels.two_integer_panel_rows;
  const bool tiles = !two_panels && integers.tiles != nullptr && integer_tiles_take(shape_);
  const auto sums =
      shape_.has_zeros ? (shape_.groups() * 4 + kIntegerAlign - 1) / kIntegerAlign * kIntegerAlign : std::int64_t{0};
  return {.integer = tiles ? integers.tiles : integers.linear,
          .row_block = kIntegerRowBlock,
          .panels = two_panels ? 2 : 1,
          .prepared_bytes = sums_at() + sums};
}

void IntegerLinear::prepare_row(const Kernels& kernels, const GemmKernel& /*gemm*/, const void* in,
                                std::byte* out) const {
  auto* const codes = reinterpret_cast<std::int8_t*>(out);
  const auto quantise = [&](std::int8_t* to) {
    return type_ == DType::bf16 ? kernels.integers_from_bf16(to, static_cast<const Bf16*>(in), input_scale_, k_)
                                : kernels.integers_from_f32(to, static_cast<const float*>(in), input_scale_, k_);
  };
  auto& scale = *reinterpret_cast<float*>(out + scale_at());
  if (order_.empty()) {
    scale = quantise(codes);
  } else {
    thread_local std::vector<std::int8_t> by_feature;
    by_feature.resize(static_cast<std::size_t>(scale_at()));
    scale = quantise(by_feature.data());
    for (std::size_t i = 0; i < order_.size(); ++i) codes[i] = by_feature[static_cast<std::size_t>(order_[i])];
    std::fill(codes + k_, codes + scale_at(), std::int8_t{0});
  }
  if (shape_.has_zeros) {
    kernels.sum_integers(reinterpret_cast<std::int32_t*>(out + sums_at()), codes, shape_.group, shape_.groups());
  }
}

void IntegerLinear::multiply(const GemmKernel& gemm, std::int64_t panel, const Tensor& out, const GemmRows& in,
                             std::int64_t row, std::int64_t rows) const {
  const auto first = panel * kPanel, columns = std::min(gemm.panels * kPanel, out.cols - first);
  const auto* const a = in.row(row);
  gemm.integer({.a = reinterpret_cast<const std::int8_t*>(a),
                .a_stride = in.stride,
                .scales = reinterpret_cast<const float*>(a + scale_at()),
                .sums = shape_.has_zeros ? reinterpret_cast<const std::int32_t*>(a + sums_at()) : nullptr,
                .rows = static_cast<int>(rows),
                .shape = shape_,
                .panel = data_.get() + panel * shape_.bytes(),
                .panels = static_cast<int>(std::min(gemm.panels, panels() - panel)),
                .out = static_cast<float*>(out.data) + row * out.stride + first,
                .out_stride = out.stride,
                .columns = static_cast<int>(columns),
                .bias = bias() == nullptr ? nullptr : bias() + first});
}

}  // namespace charonia::ops::cpu
