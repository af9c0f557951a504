// Operations of recurrent layers: distributes sequences and channels of a step over threads.
#include <algorithm>

#include "base/text.h"
#include "ops/cpu/cpu_kv_cache.h"
#include "ops/cpu/cpu_ops.h"

namespace charonia::ops::cpu {

void CpuOps::short_conv(const Tensor& out, const Tensor& in, const ShortConvParams& how, KvCache& cache, int layer) {
  constexpr std::int64_t kChannels = 256;     // of one unit of work
  constexpr std::int64_t kSmallConv = 16384;  // elements
  const auto& batch = input_.attention;
  require(layer >= 0 && layer < std::ssize(cache.layout().layers), "short_conv", "no such layer");
  const auto& of_layer = static_cast<const CpuKvCache&>(cache).layer(layer);
  const auto channels = out.cols;
  require(of_layer.kind == CacheKind::state && of_layer.state_floats >= (how.kernel - 1) * channels, "short_conv", [&] {
    return cat("the layer needs a state of ", (how.kernel - 1) * channels, " numbers, and has ", of_layer.state_floats);
  });
  require(how.kernel >= 2 && how.kernel <= kMaxShortConv && !(how.silu && how.gated), "short_conv",
          [&] { return cat("kernel ", how.kernel, " must be 2 to ", kMaxShortConv, ", and silu not be gated"); });
  require(in.dtype == DType::f32 && in.cols == (how.gated ? 3 : 1) * channels && in.rows == out.rows, "short_conv",
          "in must be f32 [rows, channels], or [rows, 3 * channels] if gated");
  require(batch.state_in.size() + 1 == batch.query_start.size() && batch.query_start.back() == in.rows, "short_conv",
          "the step has no states");
  const int slots = cache.num_blocks().state;
  for (std::size_t s = 0; s < batch.state_in.size(); ++s) {
    require(std::max(batch.state_in[s], batch.state_out[s]) < slots, "short_conv",
            [&] { return cat("sequence ", s, " has a slot beyond the ", slots, " slots of the cache"); });
  }
  const auto sequences = std::ssize(batch.state_in), parts = (channels + kChannels - 1) / kChannels;
  const auto run = out.dtype == DType::bf16 ? kernels_.short_conv_bf16 : kernels_.short_conv_f32;
  const auto work = in.rows * channels;
  pool_.parallel_for(sequences * parts, work < kSmallConv ? sequences * parts : 1,
                     [&](std::int64_t begin, std::int64_t end) {
                       for (auto i = begin; i < end; ++i) {
                         const auto s = static_cast<std::size_t>(i / parts);
                         const auto first = i % parts * kChannels;
                         const auto row = batch.query_start[s], rows = batch.query_start[s + 1] - row;
                         if (rows == 0) continue;
                         const float* const state_in = of_layer.state(batch.state_in[s]);
                         run({.in = reinterpret_cast<const float*>(row_at(in, row)) + first,
                              .in_stride = in.stride,
                              .gate_distance = how.gated ? channels : 0,
                              .rows = rows,
                              .channels = std::min(kChannels, channels - first),
                              .weight = how.weight + first,
                              .bias = how.bias == nullptr ? nullptr : how.bias + first,
                              .kernel = how.kernel,
                              .silu = how.silu,
                              .column_stride = channels,
                              .state_in = state_in == nullptr ? nullptr : state_in + first,
                              .state_out = of_layer.state(batch.state_out[s]) + first,
                              .out = row_at(out, row) + static_cast<std::size_t>(first) * size_of(out.dtype),
                              .out_stride = out.stride});
                       }
                     });
}

}  // namespace charonia::ops::cpu
