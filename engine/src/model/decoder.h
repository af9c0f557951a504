// The decoder's forward pass, parametrised by ModelConfig.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "charonia/config.h"
#include "model/weights.h"
#include "ops/ops.h"

namespace charonia::model {

class Decoder {
 public:
  // Weights are copied into the device's layout: `files` may go afterwards. Activations are one piece of memory, made
  // here for the largest step.
  Decoder(const ModelConfig& config, const WeightFiles& files, ops::Ops& ops, const ops::StepLimits& limits);

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

  void issue(const ops::StepShape& shape);
  void plan_activations();
  ops::Tensor view(const Activation& activation, std::int64_t rows) const;
  std::unique_ptr<ops::Buffer> device_vector(std::span<const float> values);

  ModelConfig config_;
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

  // Names are those of issue().
  Activation residual_, delta_, normed_, qkv_, attended_, gate_up_, gated_;
  Activation last_residual_, last_delta_, last_normed_, logits_;
  std::size_t activation_bytes_ = 0;
  std::unique_ptr<ops::Buffer> activations_;

  ops::KvCache* cache_ = nullptr;
  ops::Ops::Issue issue_;
};

}  // namespace charonia::model
