// The decoder's forward pass, parametrised by ModelConfig.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "charonia/config.h"
#include "model/activations.h"
#include "model/rope.h"
#include "model/shard.h"
#include "model/weights.h"
#include "ops/ops.h"

namespace charonia::model {

class Decoder {
 public:
  // Copies the weights into the device's layout, so `files` may be destroyed afterwards. Allocates the activations
  // once, for the largest step. With several ranks (ops.ranks()), each rank has a decoder that computes its shard.
  // Throws Error (invalid_argument, unsupported, resource_exhausted).
  Decoder(const ModelConfig& config, const WeightFiles& files, ops::Ops& ops, const ops::StepLimits& limits);

  // Call once, after the cache is created. All steps use this cache.
  void prepare(ops::KvCache& cache);

  // Issues the step, from its token ids to its samples. ops.collect() returns the samples.
  void launch(const ops::StepInput& input);

  ops::KvLayout kv_layout(int block_len) const;
  std::int64_t weight_bytes() const { return weight_bytes_; }
  std::int64_t weight_bytes_per_step() const { return weight_bytes_per_step_; }  // bytes that a step of one token reads

 private:
  using Vector = std::unique_ptr<ops::Buffer>;  // f32

  struct Layer {
    Vector attention_norm, ffn_norm;            // [hidden]; null if absent
    Vector attention_post_norm, ffn_post_norm;  // [hidden]; null if absent
    Vector q_norm, k_norm;                      // [size_per_head], or [all heads of the rank]; null if absent
    Vector sinks;                               // [heads of the rank]; null if absent
    std::unique_ptr<ops::Linear> qkv, attention_out;
    std::unique_ptr<ops::Linear> gate_up, down;  // dense, or the shared expert; null if absent
    // With experts:
    // Logits of the experts (in two halves if it stays fp32), then the shared expert's gate.
    std::unique_ptr<ops::Linear> router;
    std::unique_ptr<ops::Experts> experts;
    Vector router_bias;  // [experts]; null if absent, or if it is the router's own bias
    ops::RouterParams choice;
    ops::RotaryParams rotary;
    ops::AttentionParams attention;
  };

  void load_attention(const WeightFiles& files, int index, Layer& layer);
  void load_qk_norm(const WeightFiles& files, const std::string& at, Layer& layer) const;
  void load_feed_forward(const WeightFiles& files, int index, Layer& layer);
  void load_mlp(const WeightFiles& files, const std::string& at, std::int64_t inter, Layer& layer);
  void load_router(const WeightFiles& files, const std::string& at, Layer& layer);
  void load_experts(const WeightFiles& files, const std::string& at, Layer& layer);
  void load_output(const WeightFiles& files);
  void make_tables();
  void set_params(int index, Layer& layer) const;

  // A weight: its canonical name and its required shape.
  struct Wanted {
    std::string name;
    std::int64_t rows = 0, cols = 0;
  };
  // Stacks the weights along the rows. Either all are quantised in one format, or none is quantised.
  std::unique_ptr<ops::Linear> linear(const WeightFiles& files, std::span<const Wanted> weights,
                                      const std::vector<ops::HostMatrix>& bias);
  std::unique_ptr<ops::Linear> count(std::unique_ptr<ops::Linear> made);
  std::vector<ops::ExpertBiases> expert_biases(const WeightFiles& files, const std::string& at) const;
  std::unique_ptr<ops::Experts> dense_experts(const WeightFiles& files, std::span<const std::array<Wanted, 3>> experts,
                                              const std::vector<ops::ExpertBiases>& biases);
  std::unique_ptr<ops::Experts> quantised_experts(const WeightFiles& files,
                                                  std::span<const std::array<Wanted, 3>> experts,
                                                  const std::vector<ops::ExpertBiases>& biases);
  std::vector<float> norm_values(const WeightFiles& files, const std::string& name, std::int64_t n) const;
  Vector norm(const WeightFiles& files, const std::string& name, std::int64_t n) const;
  Vector device_vector(std::span<const float> values) const;

  static const float* data(const Vector& vector) { return vector ? vector->as<float>() : nullptr; }
  ops::NormParams norm_params(const Vector& weight, const float* delta_weight) const;
  ops::RotaryParams rotary_params(const Layer& layer, const ops::Tensor& qkv);
  std::span<const std::int32_t> rotary_rows(const ops::StepInput& input);
  void issue(const ops::StepShape& shape);
  void issue_feed_forward(const Layer& layer, const ops::Tensor& delta, const ops::Tensor& normed,
                          const ops::StepShape& shape);
  void issue_experts(const Layer& layer, const ops::Tensor& delta, const ops::Tensor& normed,
                     const ops::StepShape& shape);
  // out [rows, hidden] = the layer's gate, up and down projections of `normed`.
  void issue_mlp(const Layer& layer, const ops::Tensor& out, const ops::Tensor& gate_up, const ops::Tensor& gated,
                 const ops::Tensor& normed);
  ops::Tensor view(const Activations::Part& part, std::int64_t rows) const;

  ModelConfig config_;
  Shard shard_;
  ops::Ops& ops_;
  ops::StepLimits limits_;
  ops::Precision precision_;
  ops::Activation activation_ = ops::Activation::silu;
  float embedding_scale_ = 1;
  std::vector<Layer> layers_;
  std::unique_ptr<ops::Embedding> embedding_;
  Vector final_norm_;
  std::unique_ptr<ops::Linear> output_;
  std::int64_t weight_bytes_ = 0, weight_bytes_per_step_ = 0;

  RotaryTables tables_;
  Vector rotary_, local_rotary_;  // [tables_.rows(), rotary_embedding]; null if absent
  Vector q_scales_;               // [max_positions]; null if absent
  Vector slopes_;                 // [heads of this rank]; null if absent

  Activations activations_;
  std::unique_ptr<ops::Buffer> activation_memory_;

  ops::KvCache* cache_ = nullptr;
  ops::Ops::Issue issue_;
  // One for each step in flight, used alternately.
  std::array<std::vector<std::int32_t>, ops::kMaxStepsInFlight> rotary_rows_;
  std::size_t rotary_rows_index_ = 0;
  RotaryTables::Spare spare_;
};

}  // namespace charonia::model
