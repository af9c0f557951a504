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

// The tokens of one step. Rows are tokens, sequence after sequence.
struct StepInput {
  std::span<const std::int32_t> ids;          // [rows]
  ops::AttentionBatch attention;
  std::span<const std::int32_t> logits_rows;  // the rows whose logits are wanted, ascending
};

class Decoder {
 public:
  // positions: longest sequence; max_rows: most tokens in a step; max_logits_rows: most rows of logits in a step.
  // Weights are copied into the device's layout: `files` may go afterwards.
  Decoder(const ModelConfig& config, const WeightFiles& files, ops::Ops& ops, int positions, int max_rows,
          int max_logits_rows);

  // Computes the step and stores its keys and values in the cache. Returns logits [logits_rows, vocab] f32, valid
  // until the next call.
  ops::Tensor forward(const StepInput& input, ops::KvCache& cache);

  ops::KvLayout kv_layout(int block_len) const;
  std::int64_t weight_bytes() const { return weight_bytes_; }
  std::int64_t weight_bytes_per_step() const { return weight_bytes_per_step_; }  // read by a step of one token

 private:
  struct Layer {
    std::unique_ptr<ops::Buffer> attention_norm, ffn_norm;  // [hidden] f32
    std::unique_ptr<ops::Linear> qkv, attention_out, gate_up, down;
  };

  ops::Tensor view(const ops::Buffer& buffer, DType dtype, std::int64_t rows, std::int64_t cols) const;
  std::unique_ptr<ops::Buffer> device_vector(std::span<const float> values);
  std::unique_ptr<ops::Buffer> activations(int rows, std::int64_t cols, DType dtype);

  ModelConfig config_;
  ops::Ops& ops_;
  ops::Precision precision_;
  float attention_scale_ = 1;
  std::vector<Layer> layers_;
  std::unique_ptr<ops::Embedding> embedding_;
  std::unique_ptr<ops::Buffer> final_norm_;
  std::unique_ptr<ops::Linear> output_;
  std::unique_ptr<ops::Buffer> rotary_;
  std::int64_t weight_bytes_ = 0, weight_bytes_per_step_ = 0;

  // Activations of a step; names are those of forward().
  std::unique_ptr<ops::Buffer> residual_, delta_, normed_, qkv_, attended_, gate_up_, gated_;
  std::unique_ptr<ops::Buffer> last_residual_, last_delta_, logits_;
};

}  // namespace charonia::model
