// The decoder's forward pass, parametrised by ModelConfig.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "charonia/config.h"
#include "model/shard.h"
#include "model/weights.h"
#include "ops/ops.h"

namespace charonia::model {

class Decoder {
 public:
  // Weights are copied into the device's layout: `files` may go afterwards. Activations are one piece of memory, made
  // here for the largest step. Of several ranks (ops.ranks()) each has a decoder, which computes its shard.
  Decoder(const ModelConfig& config, const WeightFiles& files, ops::Ops& ops, const ops::StepLimits& limits);

  // What a decoder with these limits takes of the device's memory, before there is one.
  struct MemoryNeeds {
    std::size_t weights = 0, activations = 0, kv_block = 0;  // bytes; kv_block: of one block in all layers
  };
  static MemoryNeeds memory_needs(const ModelConfig& config, const ops::Ops& ops, const ops::StepLimits& limits);

  // Once, when the cache is there: it is that of all steps.
  void prepare(ops::KvCache& cache);

  // Issues the step, from its token ids to its samples; ops.collect() gives these.
  void launch(const ops::StepInput& input);

  ops::KvLayout kv_layout(int block_len) const;
  std::int64_t weight_bytes() const { return weight_bytes_; }
  std::int64_t weight_bytes_per_step() const { return weight_bytes_per_step_; }  // read by a step of one token

 private:
  struct Layer {
    std::unique_ptr<ops::Buffer> attention_norm, ffn_norm;  // [hidden] f32
    std::unique_ptr<ops::Linear> qkv, attention_out, gate_up, down;
  };

  // A part of the activations.
  struct Activation {
    std::size_t offset = 0;  // bytes
    DType dtype = DType::f32;
    std::int64_t cols = 0;
  };
  // All parts, one after the other. Names are those of issue().
  struct Activations {
    Activations(const ModelConfig& config, const Shard& shard, const ops::Precision& precision,
                const ops::StepLimits& limits);
    Activation residual, delta, normed, qkv, attended, gate_up, gated;
    Activation last_residual, last_delta, last_normed, logits_share, logits;
    std::size_t bytes = 0;
  };

  void issue(const ops::StepShape& shape);
  ops::Tensor view(const Activation& activation, std::int64_t rows) const;
  std::unique_ptr<ops::Buffer> device_vector(std::span<const float> values);

  ModelConfig config_;
  Shard shard_;
  ops::Ops& ops_;
  ops::StepLimits limits_;
  ops::Precision precision_;
  float attention_scale_ = 1;
  std::vector<Layer> layers_;
  std::unique_ptr<ops::Embedding> embedding_;
  std::unique_ptr<ops::Buffer> final_norm_;
  std::unique_ptr<ops::Linear> output_;
  std::unique_ptr<ops::Buffer> rotary_;
  std::int64_t weight_bytes_ = 0, weight_bytes_per_step_ = 0;

  Activations activations_;
  std::unique_ptr<ops::Buffer> activation_memory_;

  ops::KvCache* cache_ = nullptr;
  ops::Ops::Issue issue_;
};

}  // namespace charonia::model
