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
  // Weights are copied into the device's layout: `files` may go afterwards. Activations are one allocation, made
  // here for the largest step. Of several ranks (ops.ranks()) each has a decoder, which computes its shard.
  // Throws Error (invalid_argument, unsupported, resource_exhausted).
  Decoder(const ModelConfig& config, const WeightFiles& files, ops::Ops& ops, const ops::StepLimits& limits);

  // Once, when the cache is there: it is that of all steps.
  void prepare(ops::KvCache& cache);

  // Issues the step, from its token ids to its samples; ops.collect() gives these.
  void launch(const ops::StepInput& input);

  ops::KvLayout kv_layout(int block_len) const;
  std::int64_t weight_bytes() const { return weight_bytes_; }
  std::int64_t weight_bytes_per_step() const { return weight_bytes_per_step_; }  // read by a step of one token

 private:
  using Vector = std::unique_ptr<ops::Buffer>;  // f32

  struct Layer {
    Vector attention_norm, ffn_norm;            // [hidden]; null: none
    Vector attention_post_norm, ffn_post_norm;  // [hidden]; null: none
    Vector q_norm, k_norm;                      // [size_per_head], or of all heads of the rank; null: none
    std::unique_ptr<ops::Linear> qkv, attention_out;
    std::unique_ptr<ops::Linear> gate_up, down;  // dense, or of the shared expert; null: there is none
    // With experts:
    std::unique_ptr<ops::Linear> router;  // logits of the experts, in two halves where it stays fp32, and a shared gate
    std::unique_ptr<ops::Experts> experts;
    Vector router_bias;  // [experts]; null: none
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

  // A weight by its canonical name and what its shape must be.
  struct Wanted {
    std::string name;
    std::int64_t rows = 0, cols = 0;
  };
  // The weights on top of one another: all quantised, of one format, or none of them.
  std::unique_ptr<ops::Linear> linear(const WeightFiles& files, std::span<const Wanted> weights,
                                      const std::vector<ops::HostMatrix>& bias);
  std::unique_ptr<ops::Linear> count(std::unique_ptr<ops::Linear> made);
  std::unique_ptr<ops::Experts> dense_experts(const WeightFiles& files, std::span<const std::array<Wanted, 3>> experts);
  std::unique_ptr<ops::Experts> quantised_experts(const WeightFiles& files,
                                                  std::span<const std::array<Wanted, 3>> experts);
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
  // out [rows, hidden] = the layer's gate, up and down of `normed`.
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
  Vector rotary_, local_rotary_;  // [tables_.rows(), rotary_embedding]; null: none
  Vector q_scales_;               // [max_positions]; null: none
  Vector slopes_;                 // [heads of this rank]; null: none

  Activations activations_;
  std::unique_ptr<ops::Buffer> activation_memory_;

  ops::KvCache* cache_ = nullptr;
  ops::Ops::Issue issue_;
  // Of the steps in flight, by turns.
  std::array<std::vector<std::int32_t>, ops::kMaxStepsInFlight> rotary_rows_;
  std::size_t turn_ = 0;
  RotaryTables::Spare spare_;
};

}  // namespace charonia::model
