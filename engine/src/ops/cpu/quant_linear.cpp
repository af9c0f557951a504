#include "ops/cpu/quant_linear.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>

#include "base/text.h"
#include "charonia/error.h"
#include "ops/cpu/dispatch.h"
#include "ops/cpu/integer_linear.h"

namespace charonia::ops::cpu {
namespace {

void store_scale(std::byte* to, DType type, float value) {
  if (type == DType::f8_e8m0) {
    *to = static_cast<std::byte>(std::bit_cast<std::uint32_t>(value) >> 23U);
    return;
  }
  const std::uint16_t half = type == DType::bf16 ? float_to_bf16(value) : float_to_f16(value);
  if (type == DType::f32) {
    std::memcpy(to, &value, sizeof value);
  } else {
    std::memcpy(to, &half, sizeof half);
  }
}

// Stores the codes of a group as words of one feature, 4 * kPanel bytes apart.
void store_codes(std::byte* to, const std::uint8_t* codes, const QuantPanel& shape) {
  const int bits = shape.code_bits(), word_k = 32 / bits;
  const std::uint32_t flip = shape.code == Code::i8 ? 0x80 : 0;  // i8 is stored as code + 128
  const std::uint32_t zero = shape.code == Code::u4 ? 8 : flip;  // the stored code of the number zero
  const std::int64_t words = shape.scales() / (4 * kPanel);
  for (std::int64_t i = 0; i < words; ++i) {
    std::uint32_t word = 0;
    for (int j = 0; j < word_k; ++j) {
      const std::int64_t k = i * word_k + j;
      const std::uint32_t code = k < shape.group ? codes[k] ^ flip : zero;
      word |= code << (j % 2 * 16 + j / 2 * bits);
    }
    std::memcpy(to + i * 4 * kPanel, &word, sizeof word);
  }
}

}  // namespace

std::vector<std::int64_t> check_parts(std::span<const QuantSource* const> parts) {
  const QuantSource& first = *parts.front();
  const auto& format = first.format();
  const auto k = first.cols();
  std::vector<std::int64_t> rows;
  for (const auto* part : parts) {
    if (part->cols() != k || part->format() != format || !std::ranges::equal(part->order(), first.order())) {
      throw Error(ErrorCode::invalid_argument,
                  cat(part->name(), " [", part->rows(), ", ", part->cols(), "], ", to_string(part->format()),
                      ", cannot be stacked with ", first.name(), " [", first.rows(), ", ", k, "], ", to_string(format),
                      ": columns, format and order must be the same"));
    }
    rows.push_back(part->rows());
  }
  if (!first.order().empty() && std::ssize(first.order()) != k) {
    throw Error(ErrorCode::invalid_argument,
                cat(first.name(), ": its order has ", first.order().size(), " columns, but the weight has ", k));
  }
  for (const auto feature : first.order()) {
    if (feature < 0 || feature >= k) {
      throw Error(ErrorCode::invalid_argument,
                  cat(first.name(), ": its order has the column ", feature, ", but the weight has ", k, " columns"));
    }
  }
  return rows;
}

QuantLinear::QuantLinear(std::span<const QuantSource* const> parts, std::span<const HostMatrix> bias, DType data,
                         ThreadPool& pool, HugeArena& arena) {
  const QuantSource& first = *parts.front();
  const auto& format = first.format();
  type_ = data;
  k_ = first.cols();
  const auto rows = check_parts(parts);
  for (const auto n : rows) n_ += n;
  if (format.group < 2 || format.group % 2 != 0 || k_ % format.group != 0) {
    throw Error(
        ErrorCode::unsupported,
        cat(first.name(), ": groups of ", format.group, " columns in rows of ", k_,
            " are not supported. On the CPU, a group must have an even number of columns that divides the row's"));
  }
  order_.assign(first.order().begin(), first.order().end());
  shape_ = {
      .code = format.code, .scale_type = format.scale_type, .has_zeros = format.zeros, .k = k_, .group = format.group};
  set_bias(rows, bias);
  bytes_ = static_cast<std::size_t>(shape_.bytes() * panels());
  data_ = arena.allocate(bytes_);
  pool.parallel_for(panels(), 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t p = begin; p < end; ++p) pack(parts, p);
  });
}

void QuantLinear::pack(std::span<const QuantSource* const> parts, std::int64_t panel_index) const {
  const auto groups = shape_.groups(), scale_bytes = static_cast<std::int64_t>(size_of(shape_.scale_type));
  std::vector<std::uint8_t> codes(static_cast<std::size_t>(kPanel * k_));
  std::vector<float> scales(static_cast<std::size_t>(kPanel * groups));
  std::vector<std::int8_t> zeros(shape_.has_zeros ? scales.size() : 0);
  auto* const to = data_.get() + panel_index * shape_.bytes();
  std::int64_t first = 0;  // row of the part
  for (const auto* part : parts) {
    const auto begin = std::max(panel_index * kPanel, first),
               end = std::min((panel_index + 1) * kPanel, first + part->rows());
    if (begin < end) {
      part->read(begin - first, end - begin, codes.data(), scales.data(), zeros.data());
      for (std::int64_t row = begin; row < end; ++row) {
        const auto column = row - panel_index * kPanel, i = row - begin;
        for (std::int64_t g = 0; g < groups; ++g) {
          auto* const group = to + g * shape_.group_bytes();
          store_codes(group + 4 * column, codes.data() + i * k_ + g * shape_.group, shape_);
          const auto at = static_cast<std::size_t>(i * groups + g);
          store_scale(group + shape_.scales() + column * scale_bytes, shape_.scale_type, scales[at]);
          if (!shape_.has_zeros) continue;
          const int zero = zeros[at] - (shape_.code == Code::u4 ? 8 : 0);
          group[shape_.zeros() + column] = static_cast<std::byte>(static_cast<std::int8_t>(zero));
        }
      }
    }
    first += part->rows();
  }
}

GemmKernel QuantLinear::gemm(const Kernels& kernels, std::int64_t /*rows*/) const {
  if (type_ == DType::bf16 && shape_.code != Code::f8_e4m3 && shape_.group >= FixedRow::kLeastGroup &&
      has_fixed_kernel(kernels)) {
    return {.quantised = kernels.quant_linear_fixed,
            .fixed = true,
            .row_block = kQuantRowBlock,
            .prepared_bytes = FixedRow(shape_).bytes()};
  }
  const bool pairs = type_ == DType::bf16 && kernels.quant_linear_bf16 != nullptr;
  const bool widened = type_ == DType::bf16 && !pairs;
  const bool prepared = widened || !order_.empty() || shape_.has_zeros || shape_.group % kQuantAlign != 0;
  const DType operand = pairs ? DType::bf16 : DType::f32;
  const auto sums = shape_.has_zeros ? prepared_row_bytes(shape_.groups(), DType::f32) : 0;
  return {.quantised = pairs ? kernels.quant_linear_bf16 : kernels.quant_linear_f32,
          .operand = operand,
          .row_block = kQuantRowBlock,
          .prepared_bytes = prepared ? prepared_row_bytes(k_, operand) + sums : 0};
}

const Bf16* QuantLinear::in_column_order(const Bf16* in) const {
  if (order_.empty()) return in;
  thread_local std::vector<Bf16> gathered;
  gathered.resize(order_.size());
  for (std::size_t i = 0; i < order_.size(); ++i) gathered[i] = in[order_[i]];
  return gathered.data();
}

// Writes activations in the order of the columns, then zeros, then the sums of the groups.
void QuantLinear::prepare_row(const Kernels& kernels, const GemmKernel& gemm, const void* in, std::byte* out) const {
  if (gemm.fixed) return kernels.fixed_from_bf16(out, in_column_order(static_cast<const Bf16*>(in)), shape_);
  const auto bytes = static_cast<std::size_t>(prepared_row_bytes(k_, gemm.operand));
  const auto used = static_cast<std::size_t>(k_) * size_of(gemm.operand);
  auto* const sums = reinterpret_cast<float*>(out + bytes);
  const auto gather = [&](const auto* from, auto* to) {
    for (std::size_t i = 0; i < order_.size(); ++i) to[i] = from[order_[i]];
  };
  if (gemm.operand == DType::bf16) {
    auto* const to = reinterpret_cast<Bf16*>(out);
    order_.empty() ? static_cast<void>(std::memcpy(to, in, used)) : gather(static_cast<const Bf16*>(in), to);
    if (shape_.has_zeros) kernels.group_sums_bf16(sums, to, shape_.group, shape_.groups());
  } else {
    auto* const to = reinterpret_cast<float*>(out);
    if (type_ == DType::bf16) {
      kernels.f32_from_bf16(to, in_column_order(static_cast<const Bf16*>(in)), k_);
    } else if (order_.empty()) {
      std::memcpy(to, in, used);
    } else {
      gather(static_cast<const float*>(in), to);
    }
    if (shape_.has_zeros) kernels.group_sums_f32(sums, to, shape_.group, shape_.groups());
  }
  std::memset(out + used, 0, bytes - used);
}

void QuantLinear::multiply(const GemmKernel& gemm, std::int64_t panel_index, const Tensor& out, const GemmRows& in,
                           std::int64_t row, std::int64_t rows) const {
  const auto first = panel_index * kPanel;
  const auto sums = prepared_row_bytes(k_, gemm.operand);
  gemm.quantised({.a = in.row(row),
                  .a_stride = in.stride / (gemm.fixed ? 1 : static_cast<std::int64_t>(size_of(gemm.operand))),
                  .sums = shape_.has_zeros && !gemm.fixed ? reinterpret_cast<const float*>(in.row(row) + sums) : nullptr,
                  .sums_stride = in.stride / 4,
                  .rows = static_cast<int>(rows),
                  .shape = shape_,
                  .panel = panel(panel_index),
                  .out = static_cast<float*>(out.data) + row * out.stride + first,
                  .out_stride = out.stride,
                  .columns = static_cast<int>(std::min<std::int64_t>(kPanel, out.cols - first)),
                  .bias = bias() == nullptr ? nullptr : bias() + first});
}

std::unique_ptr<CpuLinear> make_quantised(std::span<const QuantSource* const> parts, std::span<const HostMatrix> bias,
                                          DType data, ThreadPool& pool, HugeArena& arena) {
  if (parts.empty()) throw Error(ErrorCode::invalid_argument, "a quantised weight needs at least one part");
  const auto& format = parts.front()->format();
  if (format.activations == Activations::i8_token || format.activations == Activations::i8_tensor) {
    if (format.code == Code::i8) return std::make_unique<IntegerLinear>(parts, bias, data, pool, arena);
    throw Error(ErrorCode::unsupported, cat(parts.front()->name(), ": the CPU device does not support ",
                                            to_string(format), ": int8 activations need int8 weights"));
  }
  return std::make_unique<QuantLinear>(parts, bias, data, pool, arena);
}

}  // namespace charonia::ops::cpu
