// The decoder's forward pass: the embedding, the blocks of all layers, the output.
//
// An MTP layer (multi-token prediction, DeepSeek-V3, https://arxiv.org/abs/2412.19437, section 2.2) is a decoder with
// one layer, and with the embedding and the output layer of the main decoder. Its row i has the token t of position
// i + 1 and the hidden state h of position i, and gives the token of position i + 2:
//   residual stream = eh_proj [enorm(embedding(t)); hnorm(h)]
// The hidden state of a row is the norm of the last layer's output, which the output layer reads too. A step of the
// main decoder copies the hidden states to the rows of a table that StepInput::hidden_rows names. There they stay until
// the owner of these rows (runtime/draft_model.h) uses them again. A step of an MTP layer reads them there. With
// StepInput::reads_main = false it reads its own ones, of the rows of its last step.
//
// An EAGLE-3 head (https://arxiv.org/abs/2503.01840) is a decoder with one layer, an output layer for some of the tokens,
// and the embedding of the main decoder or its own one. Its rows are those of an MTP layer. The hidden state of a row of
// the main decoder is the inputs x of some of its layers; those of the head are the output of its layer.
//   g = fc [x1; x2; x3] for a hidden state of the main decoder, and g = h for a hidden state h of the head
//   attention reads [norm(embedding(t)); norm(g)], and the residual stream is g, or norm(g) with norm_before_residual
// Heads of EAGLE-3.1 normalise x1, x2 and x3 (fused_norm), or h (norm_output).
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "charonia/config.h"
#include "model/adapter.h"
#include "model/decoder_plan.h"
#include "model/per_layer_embedding.h"
#include "model/rope.h"
#include "model/weights.h"
#include "ops/ops.h"

namespace charonia::model {

class Decoder {
 public:
  // Copies the weights into the device's layout, so `files` may be destroyed afterwards. Allocates the activations
  // once, for the largest step. With several ranks (ops.ranks()), each rank has a decoder that computes its shard.
  // Throws Error (invalid_argument, unsupported, resource_exhausted).
  // main: of an MTP layer (Manifest::mtp()) or a head, on the same device; it must outlive this decoder.
  Decoder(const ModelConfig& config, const WeightFiles& files, ops::Ops& ops, const ops::StepLimits& limits,
          const Decoder* main = nullptr);

  // On a device with adapter slots: makes them, for adapters of ranks up to max_rank. Call it before prepare().
  void make_adapter_slots(const Modules& modules, int count, int max_rank);

  // Call once, after the cache is created. All steps use this cache.
  void prepare(ops::KvCache& cache);

  // Issues the step, from its token ids to its samples. ops.collect() returns the samples. adapters: of each sequence;
  // null: none. Empty: no sequence has one. On a device with adapter slots, input.adapters has the slots of them.
  void launch(const ops::StepInput& input, std::span<const Adapter* const> adapters = {});

  // May be called from any thread. Both throw the errors of Adapter.
  std::unique_ptr<Adapter> make_adapter(const AdapterFiles& files, const Modules& modules) const;
  std::size_t adapter_bytes(const AdapterFiles& files, const Modules& modules) const;

  const ops::KvLayout& kv_layout() const { return plan_.kv_layout; }
  std::int64_t weight_bytes() const { return weight_bytes_; }
  std::int64_t weight_bytes_per_step() const { return weight_bytes_per_step_; }  // bytes that a step of one token reads

 private:
  struct Norms {
    Vector before, after;  // [hidden]; null if absent
    float scale = 1;       // factor of the residual stream after the part
  };

  void make_tables();
  void load(const WeightFiles& files);
  void load_ends(const WeightFiles& files, WeightLoader& loader);
  std::span<const std::int32_t> rotary_rows(const ops::StepInput& input);
  void group_rows(const ops::StepInput& input, std::span<const Adapter* const> adapters);
  void fill_slots(std::span<const std::int32_t> slots, std::span<const Adapter* const> adapters);
  AdaptedWeights adapted_weights(const Modules& modules) const;
  void issue(const ops::StepShape& shape);
  ops::Tensor kept() const;  // the hidden states of earlier steps
  void load_previous(const StepContext& step);
  void issue_joined(const StepContext& step, const ops::Tensor& residual);
  void issue_head_input(const StepContext& step, const ops::Tensor& residual);
  void keep_input(const StepContext& step, int layer);
  void issue_output(const StepContext& step, const Norms& pending_norms);
  const ops::Linear* output() const { return shard_.is_mtp ? main_->output() : output_.get(); }
  const ops::Embedding& embedding() const { return embedding_ ? *embedding_ : main_->embedding(); }
  // weight: of the next norm. pending: of the part whose output is added first; null: none.
  ops::NormParams norm_params(const float* weight, const Norms* pending) const;

  DecoderPlan plan_;
  const ModelConfig& config_;
  const Shard& shard_;
  ops::Ops& ops_;
  ops::StepLimits limits_;
  const Decoder* main_;  // of an MTP layer or a head; otherwise null
  float embedding_scale_ = 1;
  std::vector<Norms> norms_;  // of plan_.parts
  std::optional<PerLayerInputs> per_layer_;
  Vector final_norm_;
  Vector embedding_norm_, hidden_norm_;  // [hidden], of an MTP layer or a head
  Vector fused_norm_;                    // [columns of plan_.fused], of a head; null: none
  std::unique_ptr<ops::Linear> joined_;  // eh_proj of an MTP layer, fc of a head
  std::unique_ptr<ops::Buffer> draft_columns_;  // of a head: [vocab] the output layer's row of each token; -1: none
  std::unique_ptr<ops::Linear> output_;  // null: the model gives embeddings, or is an MTP layer
  std::unique_ptr<ops::Embedding> embedding_;  // may refer to output_; null: that of main_
  std::int64_t weight_bytes_ = 0, weight_bytes_per_step_ = 0;

  RotaryTables rotary_tables_;
  PositionTables tables_;
  std::unique_ptr<ops::Buffer> activation_memory_;

  LinearPlaces places_;  // of the weights that adapters can change
  std::vector<AdapterRows> adapters_;  // of the current step
  SlotWeights slot_weights_;
  std::vector<std::uint64_t> in_slots_;  // Adapter::id() of the adapter in each slot; 0: none

  ops::KvCache* cache_ = nullptr;
  ops::Ops::Issue issue_;
  // One for each step in flight, used alternately.
  std::array<std::vector<std::int32_t>, ops::kMaxStepsInFlight> rotary_rows_;
  std::size_t rotary_rows_index_ = 0;
  RotaryTables::Spare spare_;
};

}  // namespace charonia::model
