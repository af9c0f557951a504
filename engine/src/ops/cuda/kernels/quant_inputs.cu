// Prepares the inputs of a GEMM with a quantised weight: in the order of its columns, aligned, and as int8 codes if its
// format has integer activations.
//
// A block takes a row: once for its largest value, if codes need it, and once for its codes. Bound: launch latency, and
// memory for many rows: 4 bytes per element for reading and writing.
#include <algorithm>

#include "ops/cuda/device/portable.h"
#include "ops/cuda/kernels/element_types.h"
#include "ops/cuda/kernels/quant_gemm.h"

namespace charonia::cuda {
namespace {

constexpr int kThreads = 256;

struct InputParams {
  const void* in;
  void* out;
  const std::int32_t* order;
  float* scales;  // [rows]; null: elements are not quantised
  std::int64_t in_stride, out_stride;
  int k;
  float scale;              // 0: one scale per row
  const ExpertTile* tiles;  // block (x, y) takes row y of tile x, in the order of the tile's expert; null: row x
  const std::int32_t* rows_of;
};

template <class T>
CHARONIA_KERNEL(kThreads, 4)
void input_kernel(const InputParams p) {
  CHARONIA_SHARED(float, scratch, [kWarp]);
  dependency_trigger();
  dependency_wait();
  std::int64_t row = blockIdx.x, in_row = row;
  const std::int32_t* order = p.order;
  if (p.tiles != nullptr) {
    const ExpertTile tile = p.tiles[blockIdx.x];
    if (static_cast<int>(blockIdx.y) >= tile.rows) return;
    row = tile.first + static_cast<int>(blockIdx.y);
    in_row = p.rows_of[row];
    order += static_cast<std::int64_t>(tile.expert) * p.k;
  }
  const T* const in = static_cast<const T*>(p.in) + in_row * p.in_stride;
  T* const out = static_cast<T*>(p.out) + row * p.out_stride;
  const int tid = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
  float scale = p.scale;
  if (p.scales != nullptr) {
    if (scale == 0) {
      float greatest = 0;
      for (int c = tid; c < p.k; c += threads) greatest = fmaxf(greatest, fabsf(to_float(in[c])));
      scale = block_max(greatest, scratch) / 127.0F;  // after its barriers, the row may be overwritten
    }
    if (tid == 0) p.scales[row] = scale;
  }
  for (int c = tid; c < static_cast<int>(p.out_stride); c += threads) {
    if (c >= p.k) {
      out[c] = from_float<T>(0);
      continue;
    }
    const T x = in[order != nullptr ? order[c] : c];
    if (p.scales == nullptr) {
      out[c] = x;
    } else {
      const float code = scale == 0 ? 0.0F : rintf(to_float(x) / scale);
      // Values that are not finite become NaN; the clamp alone would produce a number.
      out[c] = from_float<T>(fminf(127.0F, fmaxf(-127.0F, code)) + to_float(x) * 0.0F);
    }
  }
}

void launch_inputs(Stream& stream, DType type, const InputParams& p, Launch shape) {
  shape.threads = static_cast<unsigned>(std::min<std::int64_t>(kThreads, round_up(p.k, kWarp)));
  with_type(type, [&]<class T>(T) { launch(stream, "inputs of a quantised GEMM", shape, &input_kernel<T>, p); });
}

float given_scale(const QuantWeight& quant) {
  return quant.format.activations == ops::Activations::i8_tensor ? quant.input_scale : 0;
}

}  // namespace

void prepare_quant_inputs(Stream& stream, const Gemm& gemm, void* out, std::int64_t out_stride, float* scales) {
  const auto& quant = *gemm.quant;
  launch_inputs(stream, gemm.type,
                {.in = gemm.in,
                 .out = out,
                 .order = quant.order,
                 .scales = has_integer_inputs(quant.format) ? scales : nullptr,
                 .in_stride = gemm.in_stride,
                 .out_stride = out_stride,
                 .k = static_cast<int>(gemm.k),
                 .scale = given_scale(quant),
                 .tiles = nullptr,
                 .rows_of = nullptr},
                {.grid_x = static_cast<unsigned>(gemm.rows)});
}

QuantWeight prepare_expert_inputs(Stream& stream, DType type, const QuantWeight& quant, const ExpertInputs& inputs) {
  const bool codes = has_integer_inputs(quant.format);
  Launch shape{.grid_x = static_cast<unsigned>(inputs.rows)};
  if (inputs.tiles != nullptr) {
    shape.grid_x = static_cast<unsigned>(inputs.num_tiles);
    shape.grid_y = static_cast<unsigned>(inputs.tile_rows);
  }
  launch_inputs(stream, type,
                {.in = inputs.in,
                 .out = inputs.out,
                 .order = inputs.tiles != nullptr ? quant.order : nullptr,
                 .scales = codes ? inputs.scales : nullptr,
                 .in_stride = inputs.in_stride,
                 .out_stride = inputs.padded,
                 .k = static_cast<int>(inputs.cols),
                 .scale = given_scale(quant),
                 .tiles = inputs.tiles,
                 .rows_of = inputs.rows_of},
                shape);
  auto prepared = quant;
  prepared.prepared = true;
  prepared.order = nullptr;
  prepared.row_scales = codes ? inputs.scales : nullptr;
  return prepared;
}

}  // namespace charonia::cuda
