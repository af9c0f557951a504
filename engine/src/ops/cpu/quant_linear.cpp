#include "ops/cpu/quant_linear.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <type_traits>

#include "base/safetensors.h"
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

float load_scale(const std::byte* from, DType type) {
  if (type == DType::f8_e8m0) {
    // 0 is 2^-127, as a subnormal float.
    const auto exponent = std::to_integer<std::uint32_t>(*from);
    return std::bit_cast<float>(exponent == 0 ? 0x00400000U : exponent << 23U);
  }
  return float_at(from, 0, type);
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
  if (format.minimums) {
    const auto of_minimums = static_cast<std::size_t>(panels() * shape_.groups() * kPanel) * sizeof(float);
    minimums_ = arena.allocate(of_minimums);
    bytes_ += of_minimums;
  }
  pool.parallel_for(panels(), 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t p = begin; p < end; ++p) pack(parts, p);
  });
}

void QuantLinear::pack(std::span<const QuantSource* const> parts, std::int64_t panel_index) const {
  const auto groups = shape_.groups(), scale_bytes = static_cast<std::int64_t>(size_of(shape_.scale_type));
  std::vector<std::uint8_t> codes(static_cast<std::size_t>(kPanel * k_));
  std::vector<float> scales(static_cast<std::size_t>(kPanel * groups));
  std::vector<std::int8_t> zeros(shape_.has_zeros ? scales.size() : 0);
  std::vector<float> minimums(has_minimums() ? scales.size() : 0);
  auto* const to = data_.get() + panel_index * shape_.bytes();
  auto* const to_minimums = reinterpret_cast<float*>(minimums_.get()) + panel_index * groups * kPanel;
  std::int64_t first = 0;  // row of the part
  for (const auto* part : parts) {
    const auto begin = std::max(panel_index * kPanel, first),
               end = std::min((panel_index + 1) * kPanel, first + part->rows());
    if (begin < end) {
      part->read(begin - first, end - begin, codes.data(), scales.data(), zeros.data());
      if (has_minimums()) part->read_minimums(begin - first, end - begin, minimums.data());
      for (std::int64_t row = begin; row < end; ++row) {
        const auto column = row - panel_index * kPanel, i = row - begin;
        for (std::int64_t g = 0; g < groups; ++g) {
          auto* const group = to + g * shape_.group_bytes();
          store_codes(group + 4 * column, codes.data() + i * k_ + g * shape_.group, shape_);
          const auto at = static_cast<std::size_t>(i * groups + g);
          store_scale(group + shape_.scales() + column * scale_bytes, shape_.scale_type, scales[at]);
          if (has_minimums()) to_minimums[g * kPanel + column] = minimums[at];
          if (!shape_.has_zeros) continue;
          const int zero = zeros[at] - (shape_.code == Code::u4 ? 8 : 0);
          group[shape_.zeros() + column] = static_cast<std::byte>(static_cast<std::int8_t>(zero));
        }
      }
    }
    first += part->rows();
  }
}

void QuantLinear::read_row(std::int64_t row, float* out) const {
  const auto column = row % kPanel, groups = shape_.groups();
  const int bits = shape_.code_bits(), word_k = 32 / bits;
  const std::uint32_t flip = shape_.code == Code::i8 ? 0x80 : 0, mask = (1U << static_cast<unsigned>(bits)) - 1;
  const auto* const minimums = reinterpret_cast<const float*>(minimums_.get()) + row / kPanel * groups * kPanel;
  std::vector<float> values(static_cast<std::size_t>(k_));
  for (std::int64_t g = 0; g < groups; ++g) {
    const auto* const group = panel(row / kPanel) + g * shape_.group_bytes();
    const auto scale_bytes = static_cast<std::int64_t>(size_of(shape_.scale_type));
    const double scale = load_scale(group + shape_.scales() + column * scale_bytes, shape_.scale_type);
    int zero = shape_.has_zeros ? static_cast<std::int8_t>(group[shape_.zeros() + column]) : 0;
    if (shape_.code == Code::u4) zero += 8;
    const double minimum = has_minimums() ? minimums[g * kPanel + column] : 0;
    for (std::int64_t k = 0; k < shape_.group; ++k) {
      std::uint32_t word = 0;
      std::memcpy(&word, group + (k / word_k * kPanel + column) * 4, sizeof word);
      const auto j = static_cast<int>(k % word_k);
      const auto code = (word >> static_cast<unsigned>(j % 2 * 16 + j / 2 * bits) & mask) ^ flip;
      const double number = number_of(shape_.code, static_cast<std::uint8_t>(code));
      values[static_cast<std::size_t>(g * shape_.group + k)] = static_cast<float>(scale * (number - zero) + minimum);
    }
  }
  for (std::size_t i = 0; i < values.size(); ++i) {
    const auto value = values[i];
    out[order_.empty() ? i : static_cast<std::size_t>(order_[i])] =
        type_ == DType::bf16  ? bf16_to_float(float_to_bf16(value))
        : type_ == DType::f16 ? f16_to_float(float_to_f16(value))
                              : value;
  }
}

GemmKernel QuantLinear::gemm(const Kernels& kernels, std::int64_t /*rows*/) const {
  const auto sums = prepared_row_bytes(shape_.groups(), DType::f32);
  const auto dense = has_minimums() ? kernels.linear_f32 : nullptr;
  if (type_ == DType::bf16 && shape_.code != Code::f8_e4m3 && shape_.group >= FixedRow::kLeastGroup &&
      has_fixed_kernel(kernels)) {
    return {.dense = dense,
            .quantised = kernels.quant_linear_fixed,
            .fixed = true,
            .row_block = kQuantRowBlock,
            .prepared_bytes = FixedRow(shape_).bytes() + (has_minimums() ? sums : 0)};
  }
  const bool pairs = type_ == DType::bf16 && kernels.quant_linear_bf16 != nullptr;
  const bool widened = type_ == DType::bf16 && !pairs;
  const bool with_sums = shape_.has_zeros || has_minimums();
  const bool prepared = widened || !order_.empty() || with_sums || shape_.group % kQuantAlign != 0;
  const DType operand = pairs ? DType::bf16 : DType::f32;
  return {.dense = dense,
          .quantised = pairs ? kernels.quant_linear_bf16 : kernels.quant_linear_f32,
          .operand = operand,
          .row_block = kQuantRowBlock,
          .prepared_bytes = prepared ? prepared_row_bytes(k_, operand) + (with_sums ? sums : 0) : 0};
}

const Bf16* QuantLinear::in_column_order(const Bf16* in) const {
  if (order_.empty()) return in;
  thread_local std::vector<Bf16> gathered;
  gathered.resize(order_.size());
  for (std::size_t i = 0; i < order_.size(); ++i) gathered[i] = in[order_[i]];
  return gathered.data();
}

template <class Element>
void QuantLinear::add_sums(const Kernels& kernels, const GemmKernel& gemm, const Element* in, std::byte* out) const {
  if (!needs_sums(gemm)) return;
  auto* const sums = reinterpret_cast<float*>(out + sums_at(gemm));
  if constexpr (std::is_same_v<Element, Bf16>) {
    kernels.group_sums_bf16(sums, in, shape_.group, shape_.groups());
  } else {
    kernels.group_sums_f32(sums, in, shape_.group, shape_.groups());
  }
}

// Writes activations in the order of the columns, then zeros, then the sums of the groups.
void QuantLinear::prepare_row(const Kernels& kernels, const GemmKernel& gemm, const void* in, std::byte* out) const {
  if (gemm.fixed) {
    const auto* const ordered = in_column_order(static_cast<const Bf16*>(in));
    kernels.fixed_from_bf16(out, ordered, shape_);
    return add_sums(kernels, gemm, ordered, out);
  }
  const auto bytes = static_cast<std::size_t>(prepared_row_bytes(k_, gemm.operand));
  const auto used = static_cast<std::size_t>(k_) * size_of(gemm.operand);
  const auto gather = [&](const auto* from, auto* to) {
    for (std::size_t i = 0; i < order_.size(); ++i) to[i] = from[order_[i]];
  };
  if (gemm.operand == DType::bf16) {
    auto* const to = reinterpret_cast<Bf16*>(out);
    order_.empty() ? static_cast<void>(std::memcpy(to, in, used)) : gather(static_cast<const Bf16*>(in), to);
    add_sums(kernels, gemm, to, out);
  } else {
    auto* const to = reinterpret_cast<float*>(out);
    if (type_ == DType::bf16) {
      kernels.f32_from_bf16(to, in_column_order(static_cast<const Bf16*>(in)), k_);
    } else if (order_.empty()) {
      std::memcpy(to, in, used);
    } else {
      gather(static_cast<const float*>(in), to);
    }
    add_sums(kernels, gemm, to, out);
  }
  std::memset(out + used, 0, bytes - used);
}

void QuantLinear::multiply(const GemmKernel& gemm, std::int64_t panel_index, const Tensor& out, const GemmRows& in,
                           std::int64_t row, std::int64_t rows) const {
  const auto first = panel_index * kPanel, columns = std::min<std::int64_t>(kPanel, out.cols - first);
  auto* const to = static_cast<float*>(out.data) + row * out.stride + first;
  gemm.quantised({.a = in.row(row),
                  .a_stride = in.stride / (gemm.fixed ? 1 : static_cast<std::int64_t>(size_of(gemm.operand))),
                  .sums = shape_.has_zeros && !gemm.fixed
                              ? reinterpret_cast<const float*>(in.row(row) + sums_at(gemm))
                              : nullptr,
                  .sums_stride = in.stride / 4,
                  .rows = static_cast<int>(rows),
                  .shape = shape_,
                  .panel = panel(panel_index),
                  .out = to,
                  .out_stride = out.stride,
                  .columns = static_cast<int>(columns),
                  .bias = bias() == nullptr ? nullptr : bias() + first});
  if (has_minimums()) add_minimums(gemm, panel_index, to, out.stride, columns, in, row, rows);
}

void QuantLinear::add_minimums(const GemmKernel& gemm, std::int64_t panel_index, float* out, std::int64_t out_stride,
                               std::int64_t columns, const GemmRows& in, std::int64_t row, std::int64_t rows) const {
  const auto groups = shape_.groups();
  alignas(64) std::array<float, std::size_t{kRowBlock} * kPanel> products;
  for (std::int64_t begin = 0; begin < rows; begin += kRowBlock) {
    const auto count = std::min<std::int64_t>(kRowBlock, rows - begin);
    gemm.dense({.a = in.row(row + begin) + sums_at(gemm),
                .a_stride = in.stride / 4,
                .rows = static_cast<int>(count),
                .k = groups,
                .panel = reinterpret_cast<const float*>(minimums_.get()) + panel_index * groups * kPanel,
                .out = products.data(),
                .out_stride = kPanel,
                .columns = static_cast<int>(columns)});
    for (std::int64_t r = 0; r < count; ++r) {
      const auto* const from = products.data() + r * kPanel;
      auto* const to = out + (begin + r) * out_stride;
      for (std::int64_t j = 0; j < columns; ++j) to[j] += from[j];
    }
  }
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
