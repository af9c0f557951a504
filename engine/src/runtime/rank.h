// One tensor-parallel rank: a device, its share of the model, its KV cache. Used by one thread at a time.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "charonia/config.h"
#include "model/decoder.h"
#include "model/weights.h"
#include "ops/ops.h"

namespace charonia::runtime {

class Rank {
 public:
  explicit Rank(std::unique_ptr<ops::Ops> ops) : ops_(std::move(ops)) {}

  // Throws Error(resource_exhausted) with the numbers and what to change where the weights, the activations and one KV
  // block do not fit into the device's memory. Before any of the ranks loads, as they may share it.
  void check_memory(const ModelConfig& model, const model::Manifest& manifest, const EngineConfig& config,
                    const ops::StepLimits& limits);
  // Uploads the weights.
  void load(const ModelConfig& model, const model::WeightFiles& files, const ops::StepLimits& limits);

  // After load().
  std::size_t block_bytes() const { return ops_->kv_block_bytes(layout()); }
  // What is free once everything else that the model and its steps take is there. Memory that a device gives only when
  // it is first written counts as taken.
  std::size_t free_for_cache() const;
  // Makes the KV cache, with memory for the first `committed` blocks, and everything else that steps need.
  void make_cache(int num_blocks, int committed);

  // After make_cache(). Provides memory for the first `num_blocks` blocks. Between steps.
  void commit_blocks(int num_blocks) { ops_->commit_blocks(*cache_, num_blocks); }
  void launch(const ops::StepInput& input) { decoder_->launch(input); }
  // Waits for the oldest step in flight.
  std::vector<ops::Sampled> collect() { return ops_->collect(); }

  ops::Ops& ops() { return *ops_; }
  const ops::Ops& ops() const { return *ops_; }
  const model::Decoder& decoder() const { return *decoder_; }

 private:
  ops::KvLayout layout() const { return decoder_->kv_layout(limits_.block_len); }

  ops::StepLimits limits_;
  std::size_t left_ = 0;           // of the memory that was free before the model was loaded, beside all that it needs
  std::size_t step_bytes_ = 0;     // that steps will take once the model is loaded
  std::unique_ptr<ops::Ops> ops_;  // what follows lives on it
  std::unique_ptr<model::Decoder> decoder_;
  std::unique_ptr<ops::KvCache> cache_;
};

}  // namespace charonia::runtime
