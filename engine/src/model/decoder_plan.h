// The layers of one rank, without weights: their blocks, their KV cache, and the memory of a step's tensors.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "charonia/config.h"
#include "model/activations.h"
#include "model/blocks.h"
#include "model/shard.h"
#include "ops/device.h"
#include "ops/step.h"

namespace charonia::model {

struct DecoderPlan {
  DecoderPlan(const ModelConfig& model, std::span<const LayerAttributes> layers, const Shard& of_rank,
              const DeviceRules& rules, const ops::StepLimits& limits);
  DecoderPlan(const DecoderPlan&) = delete;  // blocks refer to its members

  // A block with its norms. The output of a part is added to the residual stream.
  struct Part {
    std::string name;  // of its norms' weights: name + "_norm.weight", name + "_post_norm.weight"
    std::unique_ptr<Block> block;
    std::size_t layer = 0;
    int kv_source = 0;        // of the layer
    std::string scalar{};     // weight of a factor of the residual stream after the part; empty: none
    bool pre_norm = true;     // has a norm before, if the model has such norms
    bool same_input = false;  // reads the input of the part before it, not the residual stream
  };

  const ModelConfig config;
  const Shard shard;
  ops::Precision precision;
  std::vector<Part> parts;  // of all layers
  ops::KvLayout kv_layout;
  // The names are those in Decoder::issue().
  Activations::Part per_layer_inputs;  // of a model with per-layer embeddings
  Activations::Part hidden;            // f32; the hidden states of a step's rows (decoder.h)
  Activations::Part kept;              // f32; of a main decoder: hidden states of earlier steps
  Activations::Part previous, joined;  // of an MTP layer or a head
  Activations::Part states, fused;     // of a head: hidden states of the main decoder in f32 and in the activation type
  Activations::Part residual, delta, normed, last_residual, last_delta, last_normed, logits_share, logits;
  std::size_t activation_bytes = 0;

 private:
  void add_layer(const LayerAttributes& layer, std::size_t index);
};

}  // namespace charonia::model
