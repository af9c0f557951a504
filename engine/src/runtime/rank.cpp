#include "runtime/rank.h"

#include <algorithm>
#include <utility>

#include "base/text.h"
#include "charonia/error.h"
#include "model/memory_needs.h"
#include "runtime/cache_size.h"
#include "runtime/device_sizes.h"

namespace charonia::runtime {

void Rank::check_memory(const ModelConfig& model, const model::Manifest& manifest, const EngineConfig& config,
                        const ops::StepLimits& limits) {
  const model::Shard shard(model, manifest, ops_->rank());
  auto needs = model::memory_needs(model, manifest, shard, model::sizes_of(*ops_), limits);
  if (ops_->device() == "null") needs.weights = 0;  // which are not kept
  const auto of_steps = step_bytes(ops_->device(), model, manifest, shard, limits);
  step_bytes_ = of_steps - loaded_step_bytes(ops_->device(), manifest, shard);
  const auto free = ops_->free_memory(), taken = needs.weights + needs.activations + of_steps;
  left_ = free - std::min(free, taken);
  check_model_fits(config, {ops_->device(), needs.weights, needs.activations + of_steps, needs.kv_block, free});
}

std::size_t Rank::free_for_cache() const {
  const auto now = ops_->free_memory();
  return std::min(left_, now - std::min(now, step_bytes_));
}

void Rank::load(const ModelConfig& model, const model::WeightFiles& files, const ops::StepLimits& limits) {
  limits_ = limits;
  decoder_ = std::make_unique<model::Decoder>(model, files, *ops_, limits);
}

void Rank::make_cache(int num_blocks, int committed) {
  cache_ = ops_->make_kv_cache(layout(), num_blocks, committed);
  decoder_->prepare(*cache_);
}

}  // namespace charonia::runtime
