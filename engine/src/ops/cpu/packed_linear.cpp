#include "ops/cpu/packed_linear.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "base/text.h"
#include "charonia/error.h"
#include "ops/cpu/kernels.h"

namespace charonia::ops::cpu {
namespace {

// Converts an element to another type, through float.
template <class To, class From>
To element(From value) {
  if constexpr (std::is_same_v<To, From>) {
    return value;
  } else {
    float x = 0;
    if constexpr (std::is_same_v<From, float>) {
      x = value;
    } else if constexpr (std::is_same_v<From, Bf16>) {
      x = bf16_to_float(value.bits);
    } else {
      x = f16_to_float(value.bits);
    }
    if constexpr (std::is_same_v<To, float>) {
      return x;
    } else if constexpr (std::is_same_v<To, Bf16>) {
      return {float_to_bf16(x)};
    } else {
      return {float_to_f16(x)};
    }
  }
}

// Calls fn with a value of the element type.
template <class Fn>
void with_type(DType type, Fn fn) {
  switch (type) {
    case DType::f32:
      return fn(float{});
    case DType::f16:
      return fn(F16{});
    case DType::bf16:
      return fn(Bf16{});
    default:
      throw Error(ErrorCode::unsupported, cat("a weight of type ", to_string(type), ": it must be fp32, fp16 or bf16"));
  }
}

// Unaligned, because safetensors data may begin anywhere.
template <class T>
T read(const void* data, std::int64_t index) {
  T out;
  std::memcpy(&out, static_cast<const std::byte*>(data) + static_cast<std::size_t>(index) * sizeof(T), sizeof(T));
  return out;
}

// The index of element k of column `column` in a panel.
template <class T>
constexpr std::int64_t packed_at(std::int64_t k, std::int64_t column) {
  if constexpr (std::is_same_v<T, Bf16>) {
    return (k / 2) * 2 * kPanel + 2 * column + k % 2;
  } else {
    return k * kPanel + column;
  }
}

// Packs elements [begin, end) along k of one source row into column `column` of a panel.
template <class To, class From>
void pack(To* panel, int column, const void* row, std::int64_t begin, std::int64_t end) {
  for (std::int64_t k = begin; k < end; ++k) {
    panel[packed_at<To>(k, column)] = element<To>(read<From>(row, k));
  }
}

}  // namespace

void convert_to(void* out, DType to, const void* in, DType from, std::int64_t n) {
  if (to == from) {
    std::memcpy(out, in, static_cast<std::size_t>(n) * size_of(to));
    return;
  }
  with_type(to, [&](auto to_type) {
    using To = decltype(to_type);
    with_type(from, [&](auto from_type) {
      auto* const typed = static_cast<To*>(out);
      for (std::int64_t i = 0; i < n; ++i) typed[i] = element<To>(read<decltype(from_type)>(in, i));
    });
  });
}

void convert(float* out, const void* in, DType type, std::int64_t n) { convert_to(out, DType::f32, in, type, n); }

PackedLinear::PackedLinear(std::span<const HostMatrix> parts, std::span<const HostMatrix> bias, DType weight,
                           ThreadPool& pool, HugeArena& arena) {
  type_ = weight;
  if (parts.empty()) throw Error(ErrorCode::invalid_argument, "a linear weight needs at least one part");
  k_ = parts[0].cols;
  for (const auto& part : parts) {
    if (part.cols != k_ || part.rows < 1 || part.cols < 1 || part.data == nullptr) {
      throw Error(ErrorCode::invalid_argument, cat("a part [", part.rows, ", ", part.cols,
                                                   "] of a linear weight must have data and ", k_, " columns"));
    }
    n_ += part.rows;
  }
  std::vector<std::int64_t> rows_of_parts;
  for (const auto& part : parts) rows_of_parts.push_back(part.rows);
  set_bias(rows_of_parts, bias);
  const std::int64_t rows_of_panel = weight == DType::bf16 ? (k_ + 1) / 2 * 2 : k_;
  panel_bytes_ = static_cast<std::size_t>(rows_of_panel) * kPanel * size_of(weight);
  bytes_ = panel_bytes_ * static_cast<std::size_t>(panels());
  data_ = arena.allocate(bytes_);

  struct Row {
    const void* data = nullptr;
    DType type = DType::f32;
  };
  constexpr std::int64_t kStrip = 64;  // columns of a strip: a panel's strip fits the L1 cache
  pool.parallel_for(panels(), 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t p = begin; p < end; ++p) {
      std::array<Row, kPanel> rows;
      std::int64_t first = 0;
      for (const auto& part : parts) {
        for (std::int64_t j = 0; j < kPanel; ++j) {
          const std::int64_t row = p * kPanel + j - first;
          if (row < 0 || row >= part.rows) continue;
          rows[static_cast<std::size_t>(j)] = {part.row(row), part.dtype};
        }
        first += part.rows;
      }
      with_type(type_, [&](auto to_type) {
        using To = decltype(to_type);
        auto* const out = reinterpret_cast<To*>(data_.get() + static_cast<std::size_t>(p) * panel_bytes_);
        for (std::int64_t k = 0; k < k_; k += kStrip) {
          for (int j = 0; j < kPanel; ++j) {
            const auto& row = rows[static_cast<std::size_t>(j)];
            if (row.data == nullptr) continue;
            with_type(row.type, [&](auto from_type) {
              pack<To, decltype(from_type)>(out, j, row.data, k, std::min(k + kStrip, k_));
            });
          }
        }
      });
    }
  });
}

void PackedLinear::read_row(std::int64_t row, float* out) const {
  with_type(type_, [&](auto type) {
    using T = decltype(type);
    const auto* const from = reinterpret_cast<const T*>(panel(row / kPanel));
    for (std::int64_t k = 0; k < k_; ++k) out[k] = element<float>(from[packed_at<T>(k, row % kPanel)]);
  });
}

GemmKernel PackedLinear::gemm(const Kernels& kernels, std::int64_t rows) const {
  if (type_ == DType::f16) return {.dense = kernels.linear_f16};
  if (type_ != DType::bf16) return {.dense = kernels.linear_f32};
  if (rows <= kernels.two_panel_rows) return {.dense = kernels.linear_bf16, .panels = 2};
  if (kernels.linear_bf16_widened == nullptr) return {.dense = kernels.linear_bf16};
  return {.dense = kernels.linear_bf16_widened,
          .row_block = rows >= kWidenedFrom ? kWidenedRowBlock : kRowBlock,
          .prepared_bytes = prepared_row_bytes(k_, DType::f32)};
}

void PackedLinear::prepare_row(const Kernels& kernels, const GemmKernel& /*gemm*/, const void* in,
                               std::byte* out) const {
  kernels.f32_from_bf16(reinterpret_cast<float*>(out), static_cast<const Bf16*>(in), k_);
}

void PackedLinear::multiply(const GemmKernel& gemm, std::int64_t panel_index, const Tensor& out, const GemmRows& in,
                            std::int64_t row, std::int64_t rows) const {
  const auto first = panel_index * kPanel, columns = std::min(gemm.panels * kPanel, out.cols - first);
  const bool halves = type_ == DType::bf16 && gemm.prepared_bytes == 0;
  gemm.dense({.a = in.row(row),
              .a_stride = in.stride / (halves ? 2 : 4),
              .rows = static_cast<int>(rows),
              .k = k_,
              .panel = panel(panel_index),
              .panels = static_cast<int>(std::min(gemm.panels, panels() - panel_index)),
              .out = static_cast<float*>(out.data) + row * out.stride + first,
              .out_stride = out.stride,
              .columns = static_cast<int>(columns),
              .bias = bias() == nullptr ? nullptr : bias() + first});
}

}  // namespace charonia::ops::cpu
