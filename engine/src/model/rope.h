// Rotary position embedding: frequencies for each kind of scaling, and the tables of cosines and sines.
//
// Some kinds of scaling depend on the length of a text. Here they are a function of (position, length of the prompt),
// so that a request's tokens do not depend on how its prefill is chunked:
//   dynamic    for prompts longer than the trained length, the whole prompt uses the base for the prompt's length;
//              every later position p uses the base for length p + 1
//   longrope   the long factors apply to all positions of a prompt that is longer than the original length, and to
//              every position beyond that length; the short factors apply to the rest
//   qwen       the prompt's length selects one base for all positions of the sequence
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "charonia/config.h"
#include "ops/step.h"

namespace charonia::model {

// Inverse frequencies [rotary_embedding / 2], as Hugging Face transformers computes them, by rope_scaling_type:
//   default    theta^(-2i/d)
//   linear     divided by rope_factor
//   dynamic    the base theta becomes theta * (factor * length / max_position_embeddings - (factor - 1))^(d/(d-2))
//   llama3     wavelengths above original / low_freq_factor are multiplied by rope_factor, wavelengths below
//              original / high_freq_factor do not change; linear interpolation between them
//   yarn       wavelengths are multiplied by rope_factor for dimensions with less than beta_slow rotations within the
//              original length, and do not change for more than beta_fast rotations; a ramp between them
//              (https://arxiv.org/abs/2309.00071)
//   proportional  divided by rope_factor for the first rope_turned / 2 pairs; 0 for the others
//   longrope   divided by the short factors, or by the long factors if length > original
//   qwen       the base becomes theta * alpha^(d/(d-2)), alpha = max(2^ceil(log2(length / trained) + 1) - 1, 1)
// length: tokens of the text. 0: at most the trained length.
std::vector<float> inverse_frequencies(const ModelConfig& config, int length = 0);

// The rotated elements per head of the layers with local rotation.
int local_rotary_dim(const ModelConfig& config);
// Without scaling and with another base, for the layers with a window (rope_local_theta): [local_rotary_dim / 2].
std::vector<float> local_inverse_frequencies(const ModelConfig& config);

// The factor of cosines and sines (yarn, longrope; otherwise 1).
float rotary_attention_factor(const ModelConfig& config);

// The class of a prompt length: equal classes have equal rotations of k at every position, and only they may share KV.
// 0 if the rotation depends on the position only. prompt_tokens: the prompt's length, which is fixed for a sequence.
std::uint64_t rotary_class(const ModelConfig& config, int prompt_tokens);

// The tables of a decoder: rows of cosines, then sines [rotary_embedding]. Row p of the first part is for position p of
// prompts with rotary_class 0. For longrope and qwen, one part of the same size follows for every other class. For
// dynamic, spare rows follow, which each step fills for its long prompts. Layers with another base use a second table
// with the same rows.
class RotaryTables {
 public:
  // positions: the longest sequence (session_len). step_rows: the maximum rows of a step (token_budget).
  RotaryTables(const ModelConfig& config, int positions, int step_rows);

  std::int64_t rows() const { return rows_; }
  bool has_local() const { return config_.rope_local_theta > 0; }
  std::size_t bytes() const;  // of all tables

  std::vector<float> global_table() const;  // [rows, rotary_embedding]
  std::vector<float> local_table() const;   // [rows, local_rotary_dim]

  // Whether the table row of a token may differ from its position. If so, every step passes its rows.
  bool by_prompt() const { return by_prompt_; }

  // The spare rows of a step.
  struct Spare {
    std::int64_t first_row = 0;        // first row in the tables
    std::vector<float> global, local;  // [spare rows, elements of a row of the table]
  };
  // Writes the table row for every row of a step into `rows`, and the values of the spare rows that the step needs.
  // prompt_tokens: [sequences], or empty (all of class 0).
  void place(const ops::AttentionBatch& batch, std::span<const std::int32_t> prompt_tokens,
             std::vector<std::int32_t>& rows, Spare& spare) const;

 private:
  ModelConfig config_;
  std::int64_t positions_ = 0, rows_ = 0, spare_rows_ = 0;
  bool by_prompt_ = false;
  std::vector<std::uint64_t> classes_;  // the classes of the parts after the first
};

// Whether q is scaled by a factor that depends on its position.
bool has_q_scales(const ModelConfig& config);
// The factors of q, [positions]: the product of
//   log-n attention scaling (logn_length): 1 up to logn_length, then log_{logn_length}(p + 1)
//   q_scale_beta: 1 + q_scale_beta * ln(1 + floor(p / q_scale_length))
std::vector<float> q_scales(const ModelConfig& config, int positions);

// The slopes of ALiBi (https://arxiv.org/abs/2108.12409) for any number of heads. With the largest power of two m <=
// heads: 2^(-8 i / m) for i = 1 .. m, then every second slope of 2 m heads.
std::vector<float> alibi_slopes(int heads);

// Applies the user settings that change the model: rope_scaling_factor and use_logn_attn. Throws
// Error(invalid_argument), with the setting and the remedy, if they do not apply to the model.
void apply_engine_settings(ModelConfig& model, const EngineConfig& engine);

}  // namespace charonia::model
