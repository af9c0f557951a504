// The kinds of blocks. decoder_plan.cpp chooses the blocks of each layer.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "charonia/config.h"
#include "model/block.h"
#include "model/generated/layer_attributes.h"
#include "model/shard.h"

namespace charonia::model {

// `config` and `shard` must outlive the blocks.

// Rotary or ALiBi attention. prefix: of its weights' names.
std::unique_ptr<Block> make_attention(const ModelConfig& config, const Shard& shard, std::string prefix,
                                      const LayerAttributes& layer);
// Multi-head latent attention. For a config with latent_size.
std::unique_ptr<Block> make_latent_attention(const ModelConfig& config, const Shard& shard, std::string prefix);
// A gated short convolution (ShortConvParams): out(C * conv(B * x)) with [B | C | x] = in(input).
std::unique_ptr<Block> make_short_conv(const ModelConfig& config, const Shard& shard, std::string prefix);
// A gated delta net (DeltaNetParams) after a short convolution: out(norm(o) * silu(z)) with [q | k | v | z] and
// [b | a] = in(input), and the convolution of q, k and v.
std::unique_ptr<Block> make_delta_net(const ModelConfig& config, const Shard& shard, std::string prefix);
// A gated MLP: down(activation(gate x) * up x). inter: its columns on this rank.
std::unique_ptr<Block> make_mlp(const ModelConfig& config, const Shard& shard, std::string prefix, std::int64_t inter);
// The per-layer embedding of a layer: projection(gelu_tanh(gate x) * input of the layer). inputs: of PerLayerInputs.
std::unique_ptr<Block> make_per_layer_embedding(const ModelConfig& config, std::string prefix, std::size_t layer,
                                                const Activations::Part& inputs);
// A router and experts, and the shared expert if the model has one.
std::unique_ptr<Block> make_experts(const ModelConfig& config, const Shard& shard, std::string prefix);

}  // namespace charonia::model
