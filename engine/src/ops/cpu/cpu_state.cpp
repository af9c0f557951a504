// Operations of recurrent layers: distributes sequences and channels of a step over threads.
#include <algorithm>
#include <cmath>

#include "base/text.h"
#include "ops/cpu/cpu_kv_cache.h"
#include "ops/cpu/cpu_ops.h"

namespace charonia::ops::cpu {
namespace {

// Calls run(row, rows, in, out) for the parts of a sequence's rows that end with a state: `in` is the slot before the
// part, and `out` the slot after it.
template <class F>
void for_state_parts(const AttentionBatch& batch, std::size_t sequence, const F& run) {
  auto row = batch.query_start[sequence];
  const auto end = batch.query_start[sequence + 1];
  auto in = batch.state_in[sequence];
  for (auto last = row; last < end; ++last) {
    auto out = batch.row_states.empty() ? -1 : batch.row_states[static_cast<std::size_t>(last)];
    if (last + 1 == end) out = batch.state_out[sequence];
    if (out < 0) continue;
    run(row, last + 1 - row, in, out);
    row = last + 1;
    in = out;
  }
}

}  // namespace

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
  for (const auto slot : batch.row_states) {
    require(slot < slots, "short_conv", [&] { return cat("a row writes slot ", slot, " of ", slots); });
  }
  const auto sequences = std::ssize(batch.state_in), parts = (channels + kChannels - 1) / kChannels;
  const auto run = out.dtype == DType::bf16 ? kernels_.short_conv_bf16 : kernels_.short_conv_f32;
  const auto work = in.rows * channels;
  pool_.parallel_for(sequences * parts, work < kSmallConv ? sequences * parts : 1,
                     [&](std::int64_t begin, std::int64_t end) {
                       for (auto i = begin; i < end; ++i) {
                         const auto s = static_cast<std::size_t>(i / parts);
                         const auto first = i % parts * kChannels;
                         for_state_parts(batch, s, [&](auto row, auto rows, auto slot_in, auto slot_out) {
                           const float* const state_in = of_layer.state(slot_in);
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
                                .state_out = of_layer.state(slot_out) + first,
                                .out = row_at(out, row) + static_cast<std::size_t>(first) * size_of(out.dtype),
                                .out_stride = out.stride});
                         });
                       }
                     });
}

// Normalises q and k, and computes the gates of a row. Then each strip of a head's state takes the rows of its
// sequence.
void CpuOps::delta_net(const Tensor& qkv, const Tensor& gates, const DeltaNetParams& how, KvCache& cache, int layer) {
  constexpr float kLeastSquares = 1e-6F;
  static_assert(kDeltaStrip == DeltaNetParams::kStrip);
  const auto& batch = input_.attention;
  require(layer >= 0 && layer < std::ssize(cache.layout().layers), "delta_net", "no such layer");
  const auto& of_layer = static_cast<const CpuKvCache&>(cache).layer(layer);
  require(how.fits() && of_layer.kind == CacheKind::state && of_layer.state_floats >= how.state + how.state_floats(),
          "delta_net", [&] {
            return cat(how.k_heads, " and ", how.v_heads, " heads of ", how.k_dim, " and ", how.v_dim,
                       " elements do not fit together, or into a state of ", of_layer.state_floats, " numbers from ",
                       how.state, " on");
          });
  require(qkv.dtype == DType::f32 && qkv.cols == how.columns() && gates.dtype == DType::f32 && gates.rows == qkv.rows &&
              gates.cols == std::int64_t{2} * how.v_heads,
          "delta_net",
          [&] { return cat("qkv must be f32 [rows, ", how.columns(), "], gates f32 [rows, 2 * v_heads]"); });
  require(batch.state_in.size() + 1 == batch.query_start.size() && batch.query_start.back() == qkv.rows, "delta_net",
          "the step has no states");
  const auto q_scale = 1 / std::sqrt(static_cast<float>(how.k_dim));
  for_rows(qkv.rows, qkv.cols, [&](std::int64_t row) {
    auto* const heads = reinterpret_cast<float*>(row_at(qkv, row));
    for (int head = 0; head < 2 * how.k_heads; ++head) {
      auto* const at = heads + std::int64_t{head} * how.k_dim;
      const float factor = 1 / std::sqrt(kernels_.sum_of_squares(at, how.k_dim) + kLeastSquares);
      kernels_.scale(at, head < how.k_heads ? factor * q_scale : factor, how.k_dim);
    }
    auto* const gate = reinterpret_cast<float*>(row_at(gates, row));
    for (int head = 0; head < how.v_heads; ++head) {
      const float a = gate[how.v_heads + head] + how.dt_bias[head];
      // log(1 + e^a), without overflow.
      const float softplus = std::max(a, 0.0F) + std::log1p(std::exp(-std::abs(a)));
      gate[head] = 1 / (1 + std::exp(-gate[head]));
      gate[how.v_heads + head] = std::exp(-how.decay[head] * softplus);
    }
  });
  const int strips = how.strips();
  const auto items = std::ssize(batch.state_in) * how.v_heads * strips;
  pool_.parallel_for(items, 1, [&](std::int64_t begin, std::int64_t end) {
    for (auto i = begin; i < end; ++i) {
      const auto s = static_cast<std::size_t>(i / (std::int64_t{how.v_heads} * strips));
      const int strip = static_cast<int>(i % strips), head = static_cast<int>(i / strips % how.v_heads);
      const auto at = how.state + (std::int64_t{head} * strips + strip) * how.k_dim * kDeltaStrip;
      for_state_parts(batch, s, [&](auto row, auto rows, auto slot_in, auto slot_out) {
        const float* const from = of_layer.state(slot_in);
        auto* const heads = reinterpret_cast<float*>(row_at(qkv, row));
        auto* const q = heads + std::int64_t{how.k_head(head)} * how.k_dim;
        kernels_.delta_net({.from = from == nullptr ? nullptr : from + at,
                            .to = of_layer.state(slot_out) + at,
                            .q = q,
                            .k = q + std::int64_t{how.k_heads} * how.k_dim,
                            .v = heads + std::int64_t{2} * how.k_heads * how.k_dim + std::int64_t{head} * how.v_dim +
                                 strip * kDeltaStrip,
                            .stride = qkv.stride,
                            .gates = reinterpret_cast<const float*>(row_at(gates, row)) + head,
                            .alpha = how.v_heads,
                            .gates_stride = gates.stride,
                            .rows = rows,
                            .k_dim = how.k_dim,
                            .columns = std::min(kDeltaStrip, how.v_dim - strip * kDeltaStrip)});
      });
    }
  });
}

}  // namespace charonia::ops::cpu
