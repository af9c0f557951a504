// Common device code of the kernels of quant_gemm.h: scales and zeros, rows of a tile, and stores of sums.
#pragma once

#include <cstdint>

#include "ops/cuda/device/tensor_core.h"
#include "ops/cuda/kernels/activation.h"
#include "ops/cuda/kernels/gemm_device.h"
#include "ops/cuda/kernels/quant_layout.h"
#include "ops/cuda/kernels/quant_numbers.h"
#include "ops/cuda/kernels/quant_params.h"

namespace charonia::cuda {

// Scales of rows g and g + 8 as stored in memory: 16 bits each in the first word, or a float in each word.
struct ScalePair {
  std::uint32_t words[2];
};

// at: index for row g, in elements.
CHARONIA_DEVICE ScalePair load_scales(const QuantParams& p, std::int64_t at) {
  if (p.scale_type == DType::f32) {
    const auto both = load_readonly(reinterpret_cast<const uint2*>(static_cast<const float*>(p.scales) + at));
    return {{both.x, both.y}};
  }
  return {{load_readonly(reinterpret_cast<const std::uint32_t*>(static_cast<const std::uint16_t*>(p.scales) + at)), 0}};
}

CHARONIA_DEVICE void decode_scales(const QuantParams& p, const ScalePair& pair, float (&out)[2]) {
  const auto half = [&](int i) { return static_cast<std::uint16_t>(pair.words[0] >> 16 * i); };
  CHARONIA_UNROLL
  for (int i = 0; i < 2; ++i) {
    out[i] = p.scale_type == DType::bf16  ? to_float(bf16{half(i)})
             : p.scale_type == DType::f16 ? to_float(f16{half(i)})
                                          : __uint_as_float(pair.words[i]);
  }
}

// Zeros of rows g and g + 8 in the lowest bytes of a word.
CHARONIA_DEVICE std::uint32_t load_zeros(const QuantParams& p, std::int64_t at) {
  return p.zeros == nullptr
             ? p.zero_pair
             : load_readonly(reinterpret_cast<const std::uint16_t*>(static_cast<const std::uint8_t*>(p.zeros) + at));
}

// The numbers of 32 columns (half of a unit) of rows g and g + 8, four registers each: columns 8t .. 8t + 7. zero: the
// rows' zero terms.
template <class T, ops::Code code>
CHARONIA_DEVICE void unit_numbers(const uint4 (&codes)[kCodeBits<code> / 4], int half, const std::uint32_t (&zero)[2],
                                  std::uint32_t (&upper)[4], std::uint32_t (&lower)[4]) {
  if constexpr (kCodeBits<code> == 4) {
    numbers<T, code>(half == 0 ? codes[0].x : codes[0].z, zero[0], upper);
    numbers<T, code>(half == 0 ? codes[0].y : codes[0].w, zero[1], lower);
  } else {
    const uint4& of = codes[half];
    const std::uint32_t words[4] = {of.x, of.y, of.z, of.w};
    CHARONIA_UNROLL
    for (int i = 0; i < 2; ++i) {
      std::uint32_t pairs[2];
      numbers<T, code>(words[i], zero[0], pairs);
      upper[2 * i] = pairs[0], upper[2 * i + 1] = pairs[1];
      numbers<T, code>(words[2 + i], zero[1], pairs);
      lower[2 * i] = pairs[0], lower[2 * i + 1] = pairs[1];
    }
  }
}

template <class T, ops::Code code>
CHARONIA_DEVICE void unit_numbers(const uint4 (&codes)[kCodeBits<code> / 4], int half, std::uint32_t zeros,
                                  std::uint32_t (&upper)[4], std::uint32_t (&lower)[4]) {
  const std::uint32_t zero[2] = {zero_term<T, code>(zeros & 0xffU), zero_term<T, code>(zeros >> 8)};
  unit_numbers<T, code>(codes, half, zero, upper, lower);
}

// The rows of a tile: `rows` rows of out from first_row on, each with a row of in.
struct QuantRows {
  int first_row, rows;
  CHARONIA_DEVICE int in_row(const QuantParams& p, int row) const {
    return p.rows_of != nullptr ? p.rows_of[first_row + row] : first_row + row;
  }
};

// Multiplies a row's sum by the scale of its inputs.
CHARONIA_DEVICE float scaled_sum(const QuantParams& p, const QuantRows& tile, int row, float sum) {
  return p.row_scales == nullptr ? sum : sum * p.row_scales[tile.in_row(p, row)];
}

// Stores a tile's outputs for weight rows from first_column on. sum(row, column) returns the sum over K, with both
// relative to the tile. A thread stores one column of a row at a time.
template <class T, int kColumns, class Sum>
CHARONIA_DEVICE void store_quant_outputs(const QuantParams& p, const QuantRows& tile, int first_column, int thread,
                                         int threads, Sum sum) {
  // The bias of the tile's expert.
  const float* const bias =
      p.expert_bias == nullptr ? nullptr : p.expert_bias + std::int64_t{p.tiles[blockIdx.x].expert} * p.n;
  if (p.gated) {
    constexpr int kOutputs = kColumns / 2;
    for (int i = thread; i < tile.rows * kOutputs; i += threads) {
      const int row = i / kOutputs, output = i % kOutputs, from = output / 8 * 16 + output % 8;
      if (first_column + from + 8 >= p.n) continue;
      float gate = scaled_sum(p, tile, row, sum(row, from)), up = scaled_sum(p, tile, row, sum(row, from + 8));
      if (bias != nullptr) gate += bias[first_column + from], up += bias[first_column + from + 8];
      static_cast<T*>(p.out)[(tile.first_row + row) * p.out_stride + first_column / 2 + output] =
          from_float<T>(gated(p.activation, gate, up));
    }
    return;
  }
  for (int i = thread; i < tile.rows * kColumns; i += threads) {
    const int row = i / kColumns, column = i % kColumns;
    if (first_column + column >= p.n) continue;
    const float x = scaled_sum(p, tile, row, sum(row, column));
    store_out<T>(p, tile.first_row + row, first_column + column,
                 bias == nullptr ? x : x + bias[first_column + column]);
  }
}

}  // namespace charonia::cuda
