// Rotary position embedding: frequencies by the kind of scaling, and the tables of cosines and sines.
//
// Some kinds of scaling depend on the length of a text. They are made a function of (position, length of the prompt),
// so that a request's tokens depend on it alone, however its prefill is cut:
//   dynamic    prompts longer than the trained length: the base for that length turns the whole prompt; every later
//              position p has the base for p + 1
//   longrope   the long factors turn the whole of a prompt that is longer than the original length, and every position
//              beyond that length; the short ones the rest
//   qwen       the prompt's length chooses a base for all positions of the sequence
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "charonia/config.h"
#include "ops/step.h"

namespace charonia::model {

// Inverse frequencies [rotary_embedding / 2] as Hugging Face transformers computes them, of rope_scaling_type:
//   default    theta^(-2i/d)
//   linear     divided by rope_factor
//   dynamic    theta * (factor * length / max_position_embeddings - (factor - 1))^(d/(d-2)) in theta's place
//   llama3     wavelengths above original / low_freq_factor are stretched by rope_factor, those below
//              original / high_freq_factor are kept, those between are blended linearly
//   yarn       stretched by rope_factor where a dimension turns less than beta_slow times in the original length, kept
//              where it turns more than beta_fast times, a ramp between (https://arxiv.org/abs/2309.00071)
//   longrope   divided by the short factors, or by the long ones where length > original
//   qwen       theta * alpha^(d/(d-2)), alpha = max(2^ceil(log2(length / trained) + 1) - 1, 1)
// length: tokens of the text. 0: no more than the model was trained for.
std::vector<float> inverse_frequencies(const ModelConfig& config, int length = 0);

// The same without scaling, with another base: those of the layers with a window (rope_local_theta).
std::vector<float> local_inverse_frequencies(const ModelConfig& config);

// What cosines and sines are multiplied by (yarn, longrope; otherwise 1).
float rotary_attention_factor(const ModelConfig& config);

// Which prompts turn the k of a position alike: 0 where that depends on the position alone, otherwise a number that
// differs for prompts whose KV must not be shared. prompt_tokens: the prompt's length, which a sequence keeps.
std::uint64_t rotary_class(const ModelConfig& config, int prompt_tokens);

// The tables of a decoder: rows of cosines, then sines [rotary_embedding]. Row p of the first part turns position p of
// every prompt with rotary_class 0. Behind it are, of longrope and qwen, a part of the same size for every other class;
// of dynamic, spare rows, which are filled for a step with the rows of its long prompts. Layers with another base have
// a second table with the same rows.
class RotaryTables {
 public:
  // positions: the longest sequence (session_len). step_rows: the most rows of a step (token_budget).
  RotaryTables(const ModelConfig& config, int positions, int step_rows);

  std::int64_t rows() const { return rows_; }
  bool has_local() const { return config_.rope_local_theta > 0; }
  std::size_t bytes() const;  // of all tables

  std::vector<float> global_table() const;  // [rows, rotary_embedding]
  std::vector<float> local_table() const;   // the same

  // Whether a row may be turned by another row than that of its position. If so, all steps name their rows.
  bool by_prompt() const { return by_prompt_; }

  // Spare rows of a step.
  struct Spare {
    std::int64_t first_row = 0;        // of the tables
    std::vector<float> global, local;  // [spare rows, rotary_embedding]
  };
  // The row for every row of a step into `rows`, and what must stand in the spare rows before it. prompt_tokens:
  // [sequences], or empty (all of class 0).
  void place(const ops::AttentionBatch& batch, std::span<const std::int32_t> prompt_tokens,
             std::vector<std::int32_t>& rows, Spare& spare) const;

 private:
  ModelConfig config_;
  std::int64_t positions_ = 0, rows_ = 0, spare_rows_ = 0;
  bool by_prompt_ = false;
  std::vector<std::uint64_t> classes_;  // of the parts behind the first
};

// Whether q is multiplied by a factor that depends on its position.
bool has_q_scales(const ModelConfig& config);
// The factors of q, [positions]: the product of
//   log-n attention scaling (logn_length): 1 up to logn_length, then log_{logn_length}(p + 1)
//   q_scale_beta: 1 + q_scale_beta * ln(1 + floor(p / q_scale_length))
std::vector<float> q_scales(const ModelConfig& config, int positions);

// The slopes of ALiBi (https://arxiv.org/abs/2108.12409) for any number of heads: with the largest power of two m <=
// heads, 2^(-8 i / m) for i = 1 .. m, then every other one of those for 2 m heads.
std::vector<float> alibi_slopes(int heads);

// The settings of a user that change the model: rope_scaling_factor and use_logn_attn. Throws Error(invalid_argument),
// naming the setting and what to do, where the model cannot be changed so.
void apply_engine_settings(ModelConfig& model, const EngineConfig& engine);

}  // namespace charonia::model
