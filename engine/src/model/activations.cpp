#include "model/activations.h"

#include <algorithm>

#include "model/layers.h"

namespace charonia::model {

Activations::Activations(const ModelConfig& config, const Shard& shard, const ops::Precision& precision,
                         const ops::StepLimits& limits, std::size_t experts_scratch_bytes) {
  const std::int64_t hidden = config.hidden_units;
  const DType act = precision.activation, res = precision.residual, gemm_out = precision.gemm_out;
  const auto take = [this](std::size_t size) {
    constexpr std::size_t kAlignment = 256;
    const auto offset = bytes;
    bytes += (size + kAlignment - 1) / kAlignment * kAlignment;
    return offset;
  };
  const auto place = [&](int rows, std::int64_t cols, DType dtype) {
    return Part{take(static_cast<std::size_t>(rows) * static_cast<std::size_t>(cols) * size_of(dtype)), dtype, cols};
  };
  residual = place(limits.max_rows, hidden, res);
  delta = place(limits.max_rows, hidden, gemm_out);
  normed = place(limits.max_rows, hidden, act);
  qkv = place(limits.max_rows, shard.qkv_size, gemm_out);
  if (config.qk_norm_rows) squares = place(limits.max_rows, 2, DType::f32);
  attended = place(limits.max_rows, shard.q_size, act);
  if (const auto widest = std::max(shard.inter, shard.shared_inter); widest > 0) {
    gate_up = place(limits.max_rows, 2 * widest, gemm_out);
    gated = place(limits.max_rows, widest, act);
    shared_gate_up = {gate_up.offset, gemm_out, 2 * shard.shared_inter};
    shared_gated = {gated.offset, act, shard.shared_inter};
    gate_up.cols = 2 * shard.inter;
    gated.cols = shard.inter;
  }
  if (shard.expert_inter > 0) {
    router = place(limits.max_rows, router_columns(config), DType::f32);
    experts_scratch = take(experts_scratch_bytes);
    if (shard.shared_inter > 0) shared = place(limits.max_rows, hidden, gemm_out);
  }
  last_residual = place(limits.max_sequences, hidden, res);
  last_delta = place(limits.max_sequences, hidden, gemm_out);
  last_normed = place(limits.max_sequences, hidden, act);
  logits = place(limits.max_sequences, shard.ranks * shard.logits_share, DType::f32);
  if (shard.ranks > 1) logits_share = place(limits.max_sequences, shard.logits_share, DType::f32);
}

}  // namespace charonia::model
