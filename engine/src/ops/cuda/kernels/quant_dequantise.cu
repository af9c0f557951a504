// Converts quantised weights to 16-bit numbers in memory, for a library that multiplies them.
//
//   out [rows, stride] = scale * (number of the code - zero), the product in float, rounded once to the 16-bit type
//
// A warp takes several consecutive units of 16 rows by 64 columns (quant_layout.h) in a row of units; the loads of all
// of them are in flight together. A lane has 8 columns of rows g and g + 8 in each half of a unit, and stores 16 bytes
// of each at a time. The lanes of a row store 64 contiguous bytes: two whole sectors. Padding columns and rows are
// stored too; their codes and scales are 0.
//
// Bound: memory. A unit of int4 reads 512 bytes and stores 2048, with about 150 instructions of a warp: a quarter of
// the instructions that an H200's SMs can issue at its bandwidth.
#include "ops/cuda/kernels/quant_device.h"

namespace charonia::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / kWarp;
template <ops::Code code>
inline constexpr int kUnits = 16 / kCodeBits<code>;  // per warp: 2 KB of codes

// Two numbers times their scale.
template <class T>
CHARONIA_DEVICE std::uint32_t scaled(std::uint32_t pair, float scale) {
  return pack_at_once<T>(to_float(T{static_cast<std::uint16_t>(pair)}) * scale,
                         to_float(T{static_cast<std::uint16_t>(pair >> 16)}) * scale);
}

template <class T>
CHARONIA_DEVICE uint4 scaled_eight(const std::uint32_t (&pairs)[4], float scale) {
  return {scaled<T>(pairs[0], scale), scaled<T>(pairs[1], scale), scaled<T>(pairs[2], scale),
          scaled<T>(pairs[3], scale)};
}

template <class T, ops::Code code>
CHARONIA_KERNEL(kThreads, 4)
void dequantise_kernel(const QuantParams p) {
  constexpr int kLoads = kCodeBits<code> / 4, kCount = kUnits<code>;
  dependency_trigger();
  const int steps = p.weight_stride / kQuantK, turns = static_cast<int>(divide_up(steps, kCount));
  const int index = static_cast<int>(blockIdx.x) * kWarps + warp_id();
  const int row_unit = index / turns, first_step = index % turns * kCount;
  if (row_unit >= p.row_tiles) {
    dependency_wait();
    return;
  }
  const int lane = lane_id(), g = lane / 4, t = lane % 4;

  const auto* const codes =
      static_cast<const uint4*>(p.weight) + static_cast<std::int64_t>(row_unit) * steps * kLoads * kWarp + lane;
  uint4 of_unit[kCount][kLoads];
  ScalePair scales[kCount][2];
  std::uint32_t zeros[kCount][2];
  CHARONIA_UNROLL
  for (int u = 0; u < kCount; ++u) {
    const int step = min(first_step + u, steps - 1);  // units after the last are not stored
    CHARONIA_UNROLL
    for (int l = 0; l < kLoads; ++l) of_unit[u][l] = load_streaming(codes + (step * kLoads + l) * kWarp);
    CHARONIA_UNROLL
    for (int half = 0; half < 2; ++half) {
      const int column = step * kQuantK + half * (kQuantK / 2) + 8 * t;
      const int group = p.group_shift >= 0 ? column >> p.group_shift : column / p.group;
      const std::int64_t at = (static_cast<std::int64_t>(row_unit) * p.groups + group) * kQuantRows + 2 * g;
      scales[u][half] = load_scales(p, at);
      zeros[u][half] = load_zeros(p, at);
    }
  }
  dependency_wait();

  T* const out = static_cast<T*>(p.out) + (static_cast<std::int64_t>(row_unit) * kQuantRows + g) * p.weight_stride +
                 first_step * kQuantK + 8 * t;
  const std::int64_t lower_row = std::int64_t{kQuantRows / 2} * p.weight_stride;
  CHARONIA_UNROLL
  for (int u = 0; u < kCount; ++u) {
    if (first_step + u >= steps) break;
    CHARONIA_UNROLL
    for (int half = 0; half < 2; ++half) {
      float scale[2];
      decode_scales(p, scales[u][half], scale);
      std::uint32_t upper[4], lower[4];
      unit_numbers<T, code>(of_unit[u], half, zeros[u][half], upper, lower);
      T* const to = out + u * kQuantK + half * (kQuantK / 2);
      *reinterpret_cast<uint4*>(to) = scaled_eight<T>(upper, scale[0]);
      *reinterpret_cast<uint4*>(to + lower_row) = scaled_eight<T>(lower, scale[1]);
    }
  }
}

template <class T, ops::Code code>
void launch_kernel(Stream& stream, const QuantParams& p) {
  const auto warps = p.row_tiles * divide_up(p.weight_stride / kQuantK, kUnits<code>);
  launch(stream, "dequantised weight", {.grid_x = static_cast<unsigned>(divide_up(warps, kWarps)), .threads = kThreads},
         &dequantise_kernel<T, code>, p);
}

}  // namespace

void launch_dequantise(Stream& stream, const QuantParams& params, DType type, ops::Code code) {
  with_half(type, [&]<class T>(T) { with_code(code, [&](auto of) { launch_kernel<T, of()>(stream, params); }); });
}

}  // namespace charonia::cuda
