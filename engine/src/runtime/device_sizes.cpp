#include "runtime/device_sizes.h"
#include "ops/cpu/make_cpu_ops.h"

#include <memory>

#include "ops/cuda/experts_workspace.h"
#include "ops/cuda/gemm/dequantised_parts.h"
#include "ops/kv_quant.h"

namespace charonia::runtime {
namespace {

// Fixed parts of a GPU's steps: cuBLASLt's work space (32 MiB), penalties' and bans' lists (16 MiB), tables and partial
// results of attention, and the graphs of decode steps.
constexpr std::size_t kCudaStepBytes = std::size_t{192} << 20;

std::size_t cuda_kv_block_bytes(const ops::KvLayout& layout) {
  if (layout.quant_bits != 0) {
    return static_cast<std::size_t>(layout.num_layers) * static_cast<std::size_t>(layout.kv_heads) *
           ops::kv_quant_head_bytes(layout.head_dim, layout.block_len, layout.quant_bits);
  }
  return std::size_t{2} * static_cast<std::size_t>(layout.num_layers) * static_cast<std::size_t>(layout.kv_heads) *
         static_cast<std::size_t>(layout.head_dim) * static_cast<std::size_t>(layout.block_len) * size_of(layout.dtype);
}

}  // namespace

model::DeviceSizes device_sizes(std::string_view device) {
  if (device == "cuda") {
    return {
        [](DType weight) {
          return ops::Precision{
              .weight = weight, .residual = DType::f32, .gemm_out = weight, .activation = weight, .kv = weight};
        },
        cuda_kv_block_bytes,
        [](const ops::ExpertsShape& shape, std::int64_t rows) { return cuda::ExpertsWorkspace(shape, rows).bytes; }};
  }
  const std::shared_ptr<ops::Ops> cpu = ops::make_cpu_ops(1);
  return {[cpu](DType weight) { return cpu->precision(weight); },
          [cpu](const ops::KvLayout& layout) { return cpu->kv_block_bytes(layout); },
          [cpu](const ops::ExpertsShape& shape, std::int64_t rows) { return cpu->experts_scratch_bytes(shape, rows); }};
}

std::size_t step_bytes(std::string_view device, const ModelConfig& model, const model::Manifest& manifest,
                       const model::Shard& shard, const ops::StepLimits& limits) {
  if (device != "cuda") return 0;  // what the CPU's threads take is less than a megabyte each
  const auto sampled = static_cast<std::size_t>(limits.max_sequences);
  // Counts of tokens for penalties (16 bits each), token masks (1 bit each), and histograms of logits.
  constexpr std::size_t kHistograms = 16384;
  const auto vocab = static_cast<std::size_t>(model.vocab_size);
  auto out = kCudaStepBytes + sampled * (vocab * 2 + vocab / 8 + kHistograms);
  out += loaded_step_bytes(device, manifest, shard);
  if (shard.ranks > 1) {
    out += static_cast<std::size_t>(limits.max_rows) * static_cast<std::size_t>(model.hidden_units) * sizeof(float) *
           static_cast<std::size_t>(shard.ranks);
  }
  return out;
}

std::size_t loaded_step_bytes(std::string_view device, const model::Manifest& manifest, const model::Shard& shard) {
  return device == "cuda" && manifest.elements(shard.rank).quantised_bytes > 0 ? cuda::kDequantisedBytes : 0;
}

}  // namespace charonia::runtime
